"""Noise that depends on (seed, position) alone, so that batching, devices, methods and rejected
drafts can't change it.

The finaliser is splitmix64's (Steele, Lea, Flood: "Fast splittable pseudorandom number generators",
OOPSLA 2014)."""

from __future__ import annotations

import secrets

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, position: int) -> float:
    """Number in [0, 1) with 53 random bits.

    seed: non-negative integer. position: absolute index (prompt included) of the token chosen with
    it. Raises ValueError if either is negative."""
    if seed < 0 or position < 0:
        raise ValueError(f"seed and position must not be negative, got {seed} and {position}")
    state = _mix((seed & _MASK) + _GOLDEN & _MASK)
    while seed := seed >> 64:
        state = _mix((state ^ seed & _MASK) + _GOLDEN & _MASK)
    return (_mix(state + _GOLDEN * (position + 1) & _MASK) >> 11) * 2.0**-53


def fresh_seed() -> int:
    """An unpredictable seed below 2**53, which JSON readers keep exactly."""
    return secrets.randbits(53)
