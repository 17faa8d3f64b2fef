"""An MLX pair under examination: logits of one row, and its draft under a changed spec.

Nothing here is on the way of a generation. The weights are shared, never copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from dflash.backends.mlx.cache import Caches
from dflash.backends.mlx.draft_load import LoadedDraft, quantise, target_facts
from dflash.backends.mlx.kinds import KINDS
from dflash.backends.mlx.pair import MlxPair
from dflash.backends.mlx.sampling import to_numpy
from dflash.doctor.static import Choice, Finding, check_pair
from dflash.drafts.spec import DraftSpec


class MlxProbe:
    """The Probe protocol over an MlxPair."""

    def __init__(self, pair: MlxPair) -> None:
        """``pair`` stays as it is, and open."""
        self._pair = pair

    @property
    def dtype(self) -> str:
        """Number format of the target's logits."""
        return str(self._pair.target.dtype).rpartition(".")[2]

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
        """The target's base frequency; None where its config names none."""
        config = self._pair.target.config
        theta = (config.get("rope_parameters") or config).get("rope_theta")
        return None if theta is None else float(theta)

    def logits(self, prefix: Sequence[int]) -> NDArray[Any]:
        """Logits [V], float32, after ``prefix``; its last token is run alone."""
        model = self._pair.target.model
        caches = Caches(model).layers
        if len(prefix) > 1:
            model(mx.array([list(prefix[:-1])]), cache=caches)
        return to_numpy(model(mx.array([list(prefix[-1:])]), cache=caches)[0, -1])

    def findings(self) -> list[Finding]:
        """All static findings; those of level error would have stopped the load."""
        if self._pair.draft is None:
            return []
        draft = self._pair.draft
        facts = target_facts(self._pair.target, digest=draft.spec.tokenizer_digest is not None)
        dtype = str(draft.model.dtype).rpartition(".")[2]
        return check_pair(draft.spec, facts, Choice(draft.name, dtype, draft.window))

    def variant(self, **changes: Any) -> MlxPair:
        """The same weights under ``replace(spec, **changes)``."""
        draft = self._draft()
        twin = KINDS.load(draft.spec.kind).module(replace(draft.spec, **changes))
        quantise(twin, draft.bits)
        twin.load_weights(tree_flatten(draft.model.parameters()))
        return MlxPair(self._pair.target, replace(draft, model=twin))

    def norms(self) -> Mapping[str, float]:
        """Mean weight of each norm, by the module's name; {} without a model draft."""
        if self._pair.draft is None:
            return {}
        modules = self._draft().model.named_modules()
        return {
            name: float(to_numpy(module.weight).mean())
            for name, module in modules
            if isinstance(module, nn.RMSNorm)
        }

    def _draft(self) -> LoadedDraft:
        assert self._pair.draft is not None, "only a pair with a draft is taken apart"
        return self._pair.draft
