"""A torch pair under examination: logits of one row, and its draft under a changed spec."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dflash.backends.torch.cache import make_cache
from dflash.backends.torch.dflash import DFlashDraftModel, RMSNorm, make_rotary
from dflash.backends.torch.forward import make_forward
from dflash.backends.torch.pair import TorchPair
from dflash.doctor.static import Finding
from dflash.drafts.spec import DraftSpec
from dflash.model_probe import ModelProbe


class TorchProbe(ModelProbe[TorchPair]):
    """The Probe protocol over a TorchPair."""

    @property
    def dtype(self) -> str:
        """Number format that the target's activations are rounded to."""
        if self._pair.target.weights in ("bfloat16", "int8"):  # float16 leaves them in float32
            return "bfloat16"
        return str(self._pair.target.dtype).removeprefix("torch.")

    @property
    def rope_theta(self) -> float | None:
        """The target's base frequency; None where layer types have several."""
        rope = getattr(self._pair.target.config, "rope_parameters", None) or {}
        theta = rope.get("rope_theta")
        return None if theta is None else float(theta)

    def logits(self, prefix: Sequence[int]) -> NDArray[np.float32]:
        """Logits [V], float32, after ``prefix``; its last token is run alone."""
        model = self._pair.target.model
        forward, cache = make_forward(model), make_cache(model.config, len(prefix))
        with torch.inference_mode():
            if len(prefix) > 1:
                forward(prefix[:-1], cache, 1)
            row = forward(prefix[-1:], cache, 1)[-1]
        found: NDArray[np.float32] = row.float().cpu().numpy()
        return found

    def findings(self) -> list[Finding]:
        """With what is replayed and compiled, on devices that could."""
        facts = self._pair.runs_on()
        named = (("cuda graphs", "cuda_graphs"), ("compiled", "compiled"))
        said = [Finding("note", name, facts[key]) for name, key in named if key in facts]
        return [*super().findings(), *said]

    def variant(self, **changes: Any) -> TorchPair:
        """The same weights under ``replace(spec, **changes)``."""
        draft = self._draft()
        spec = replace(draft.spec, **changes)
        return TorchPair(self._pair.target, replace(draft, model=_under(draft.model, spec)))

    def _draft_dtype(self) -> str:
        return str(self._draft().model.norm.weight.dtype).removeprefix("torch.")

    def _norms(self) -> Iterator[tuple[str, float]]:
        for name, module in self._draft().model.named_modules():
            if isinstance(module, RMSNorm):
                yield name, float(module.weight.mean())


def _under(model: DFlashDraftModel, spec: DraftSpec) -> DFlashDraftModel:
    """A second view of ``model``: its parameters, another spec, rotary tables of its own."""
    twin = copy(model)
    twin._modules = dict(model._modules)
    twin.spec = spec
    twin.rotary = make_rotary(spec).to(model.norm.weight.device)
    return twin
