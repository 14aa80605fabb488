"""Where numbers stopped being finite: for the message about a pass that has failed. Passes that
succeed never come here."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def bad_weight(model: nn.Module) -> str | None:
    """Name of the first weight that holds NaN or infinity; None if there is none."""
    weights = model.named_parameters()
    return next((name for name, weight in weights if not _is_finite(weight.detach())), None)


def cause_of(model: nn.Module, run: Callable[[], object]) -> str:
    """Why a pass of `model` gives numbers that are not finite, and what to do. run: repeats the
    pass."""
    name = bad_weight(model)
    if name is not None:
        return f"the model's weights hold such numbers ({name}); fetch or convert the model again"
    name = _first_module(model, run)
    if name is None:
        return "another pass over the same tokens was finite; check the machine's memory"
    dtype = next(model.parameters()).dtype
    advice = (
        "the weights may be damaged; fetch or convert the model again"
        if dtype is torch.float32
        else f"they are too large for {str(dtype).removeprefix('torch.')}; use --dtype float32"
    )
    return f"the weights are finite, and {name} is the first to give such numbers: {advice}"


def _first_module(model: nn.Module, run: Callable[[], object]) -> str | None:
    """Name of the first module whose output is not finite."""
    found: list[str] = []

    def look(name: str) -> Callable[..., None]:
        def after(_module: nn.Module, _inputs: object, output: object) -> None:
            if isinstance(output, Tensor) and not found and not _is_finite(output):
                found.append(name)

        return after

    hooks = [
        module.register_forward_hook(look(name)) for name, module in model.named_modules() if name
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


def _is_finite(tensor: Tensor) -> bool:
    dense = tensor.to_dense() if tensor.is_mkldnn else tensor
    return not dense.is_floating_point() or bool(dense.isfinite().all())
