"""A torch pair under examination: logits of one row, and its draft under a changed spec.

Nothing here is on the way of a generation. The weights are shared, never copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dflash.backends.torch.cache import make_cache
from dflash.backends.torch.dflash import DFlashDraftModel, RMSNorm, make_rotary
from dflash.backends.torch.draft_load import LoadedDraft, target_facts
from dflash.backends.torch.forward import make_forward
from dflash.backends.torch.pair import TorchPair
from dflash.doctor.static import Choice, Finding, check_pair
from dflash.drafts.spec import DraftSpec


class TorchProbe:
    """The Probe protocol over a TorchPair."""

    def __init__(self, pair: TorchPair) -> None:
        """``pair`` stays as it is, and open."""
        self._pair = pair

    @property
    def dtype(self) -> str:
        """Number format that the target's activations are rounded to."""
        if self._pair.target.weights in ("bfloat16", "int8"):  # float16 leaves them in float32
            return "bfloat16"
        return str(self._pair.target.dtype).removeprefix("torch.")

    @property
    def spec(self) -> DraftSpec | None:
        """Config of the draft; None without one."""
        return None if self._pair.draft is None else self._pair.draft.spec

    @property
    def layers(self) -> int:
        """Decoder layers of the target."""
        return self._pair.target.num_layers

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
        """All static findings; those of level error would have stopped the load."""
        if self._pair.draft is None:
            return []
        draft = self._draft()
        facts = target_facts(self._pair.target, digest=draft.spec.tokenizer_digest is not None)
        dtype = str(draft.model.norm.weight.dtype).removeprefix("torch.")
        return check_pair(draft.spec, facts, Choice(draft.name, dtype, draft.window))

    def variant(self, **changes: Any) -> TorchPair:
        """The same weights under ``replace(spec, **changes)``."""
        draft = self._draft()
        spec = replace(draft.spec, **changes)
        return TorchPair(self._pair.target, replace(draft, model=_under(draft.model, spec)))

    def norms(self) -> Mapping[str, float]:
        """Mean weight of each norm, by the module's name; {} without a model draft."""
        if self._pair.draft is None:
            return {}
        modules = self._draft().model.named_modules()
        return {
            name: float(module.weight.mean())
            for name, module in modules
            if isinstance(module, RMSNorm)
        }

    def _draft(self) -> LoadedDraft:
        assert self._pair.draft is not None, "only a pair with a draft is taken apart"
        return self._pair.draft


def _under(model: DFlashDraftModel, spec: DraftSpec) -> DFlashDraftModel:
    """A second view of ``model``: its parameters, another spec, rotary tables of its own."""
    twin = copy(model)
    twin._modules = dict(model._modules)
    twin.spec = spec
    twin.rotary = make_rotary(spec).to(model.norm.weight.device)
    return twin
