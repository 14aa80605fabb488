"""The one acceptance rule: a drafted token stands while it is what the target itself would have
chosen there.

The choice is the argmax in greedy decoding and the sample with the position's own noise otherwise.
Exact for any drafter, since every committed token is the target's own choice
(`d3d.acceptance.sampling`); it needs no draft probabilities."""

from __future__ import annotations

from collections.abc import Sequence as ListLike

from torch import Tensor

from d3d.acceptance.sampling import choose
from d3d.core.sequence import Sequence
from d3d.core.types import Verdict


def sample_match(
    logits: Tensor, draft_tokens: ListLike[int], sequence: Sequence, eos_token_ids: frozenset[int]
) -> Verdict:
    """Accept the longest prefix of the draft that equals the target's choices; the next choice is
    the bonus token.

    An `AcceptanceRule`. `logits`: float32 [len(draft_tokens) + 1, vocab_size]. The verdict is not
    cut by stops. Since noise belongs to positions, a bonus token that a stop takes away again has
    used up nothing."""
    choices = choose(logits, draft_tokens, sequence, eos_token_ids)
    num_accepted = 0
    while (
        num_accepted < len(draft_tokens)
        and draft_tokens[num_accepted] == choices.token_ids[num_accepted]
    ):
        num_accepted += 1
    return Verdict(
        tuple(draft_tokens[:num_accepted]),
        choices.token_ids[num_accepted],
        choices.logprobs[: num_accepted + 1],
    )
