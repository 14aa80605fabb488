"""Options of auto mode, and which methods it may choose from."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from d3d.errors import D3DError, InvalidRequest
from d3d.methods.async_.config import AsyncConfig, OnMiss, Outcomes, Where
from d3d.methods.base import Built, DraftLength, Facts, Lookup, MethodConfig, Parts
from d3d.methods.fused.config import FusedConfig, FusedRows
from d3d.methods.serial.config import DenoiseSteps, DraftConfidence, LeastKept, SerialConfig

_CONFIGS: dict[str, type[MethodConfig]] = {
    "serial": SerialConfig,
    "fused": FusedConfig,
    "async": AsyncConfig,
}


class AutoConfig(MethodConfig):
    """Each round through the method that is fastest so far."""

    summary: ClassVar[str] = "each round through the method that is fastest so far"
    method: Literal["auto"] = "auto"
    draft_length: DraftLength = None
    num_denoise_steps: DenoiseSteps = None
    draft_confidence: DraftConfidence = None
    lookup: Lookup = None
    least_kept: LeastKept = None
    rows: FusedRows = None
    outcomes: Outcomes = None
    miss_policy: OnMiss = None
    placement: Where = None

    def candidates(self, facts: Facts) -> tuple[dict[str, MethodConfig], dict[str, str]]:
        """Methods to try, in order, and the reasons why others can't be. Raises InvalidRequest for
        options that only excluded methods use."""
        from d3d.methods.async_.placement import available_cores, room_for_worker

        if facts.drafter is None:
            left_out = dict.fromkeys(_CONFIGS, "there is no drafter")
            self._refuse_options_of(left_out)
            return {}, left_out
        found: dict[str, MethodConfig] = {"serial": self._config("serial").resolve(facts)}
        left_out = {}
        room = room_for_worker(facts.device, len(available_cores()), is_stored=facts.is_stored)
        for method in ("fused", "async"):
            config = self._config(method)
            if isinstance(config, AsyncConfig) and config.placement is None:
                if room.placement is None:
                    left_out[method] = room.reason
                    continue
                config = config.model_copy(update={"placement": room.placement})
            try:
                found[method] = config.resolve(facts)
            except InvalidRequest as error:
                if method == "async" and self.placement is not None:
                    raise
                left_out[method] = str(error).removeprefix("method: ")
        self._refuse_options_of(left_out)
        return found, left_out

    def _config(self, method: str) -> MethodConfig:
        """This config's options that the method has."""
        config = _CONFIGS[method]
        names = config.model_fields.keys() - {"method"}
        return config(**{name: getattr(self, name) for name in names})

    def _refuse_options_of(self, left_out: dict[str, str]) -> None:
        going = _CONFIGS.keys() - left_out.keys()
        for name in type(self).model_fields.keys() - {"method"}:
            owners = [method for method, config in _CONFIGS.items() if name in config.model_fields]
            if getattr(self, name) and not going & set(owners):
                raise InvalidRequest(
                    f"{name}: auto leaves {owners[0]} out here: {left_out[owners[0]]}"
                )

    def resolve(self, facts: Facts) -> AutoConfig:
        self.candidates(facts)
        return self

    def describe(self, facts: Facts) -> dict[str, Any]:
        found, left_out = self.candidates(facts)
        methods: dict[str, dict[str, Any]] = {"plain": {}} | {
            name: config.describe(facts) for name, config in found.items()
        }
        return {"modes": methods, "left_out": left_out}

    def build(self, parts: Parts) -> Built:
        """Build all candidates. The target is fused mode's, if that is among them."""
        from d3d.methods.auto.drafter import AutoDrafter

        found, left_out = self.candidates(parts.facts)
        required = {"serial"} if self.placement is None else {"serial", "async"}
        built: dict[str, Built] = {}
        for method, config in found.items():
            try:
                built[method] = config.build(parts)
            except D3DError as error:
                if method in required:
                    raise
                left_out[method] = str(error)
        target = built["fused"].target if "fused" in built else parts.target
        drafters = {name: each.drafter for name, each in built.items() if each.drafter is not None}
        return Built(target, AutoDrafter(drafters, left_out, required=required))
