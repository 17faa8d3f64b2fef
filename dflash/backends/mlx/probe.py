"""An MLX pair under examination: logits of one row, and its draft under a changed spec."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx import nn
from numpy.typing import NDArray

from dflash.backends.mlx.cache import Caches
from dflash.backends.mlx.dflash import make_rotary
from dflash.backends.mlx.pair import MlxPair
from dflash.backends.mlx.sampling import to_numpy
from dflash.model_probe import ModelProbe


class MlxProbe(ModelProbe[MlxPair]):
    """The Probe protocol over an MlxPair."""

    @property
    def dtype(self) -> str:
        """Number format of the target's logits."""
        return str(self._pair.target.dtype).rpartition(".")[2]

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

    def variant(self, **changes: Any) -> MlxPair:
        """The same weights under ``replace(spec, **changes)``."""
        draft = self._draft()
        twin = copy(draft.model)  # another module over the same parts
        twin._spec = replace(draft.spec, **changes)
        twin._rotary = make_rotary(twin.spec)
        return MlxPair(self._pair.target, replace(draft, model=twin))

    def _draft_dtype(self) -> str:
        return str(self._draft().model.dtype).rpartition(".")[2]

    def _norms(self) -> Iterator[tuple[str, float]]:
        for name, module in self._draft().model.named_modules():
            if isinstance(module, nn.RMSNorm):
                yield name, float(to_numpy(module.weight).mean())
