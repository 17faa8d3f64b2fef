"""A target and its draft on MLX, and the sessions they make."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any, Self

import mlx.core as mx

from dflash.backends.mlx.draft_load import LoadedDraft, load_draft
from dflash.backends.mlx.load import LoadedTarget, load_target
from dflash.backends.mlx.mtp_session import load_mtp
from dflash.backends.mlx.mtp_weights import has_mtp
from dflash.backends.mlx.target import MlxTargetSession
from dflash.config import LoadConfig
from dflash.core.protocols import DraftSession
from dflash.errors import ConfigError
from dflash.model_pair import ModelPair


class MlxPair(ModelPair[LoadedTarget, LoadedDraft]):
    """The Pair protocol over a loaded target and, perhaps, a draft."""

    backend = "mlx"

    def __init__(
        self,
        target: LoadedTarget,
        draft: LoadedDraft | None = None,
        notes: tuple[str, ...] = (),
        *,
        sampler: Callable[[Any], Any] | None = None,
    ) -> None:
        """``sampler`` takes log-probabilities [n, V] to ids [n], and then is who chooses."""
        super().__init__(target, draft, notes)
        self._sampler = sampler

    @classmethod
    def open(cls, load: LoadConfig) -> Self:
        """Load both models as ``load`` says."""
        _pick_device(load.device)
        if load.force_dflash:
            raise ConfigError("force_dflash is the torch backend's: add backend='torch'")
        if load.weights is not None:
            raise ConfigError(
                "weights is the torch backend's: MLX reads models that mlx_lm.convert quantised"
            )
        trust = load.trust_remote_code
        return cls.beside(load_target(load.target, load.dtype, trust_remote_code=trust), load)

    @classmethod
    def _load_draft(cls, name: str, target: LoadedTarget, load: LoadConfig) -> LoadedDraft:
        return load_draft(
            name,
            target,
            load.draft_dtype,
            window=load.draft_sliding_window_size,
            taps=load.taps,
            bits=load.draft_bits,
        )

    @classmethod
    def _has_heads(cls, target: LoadedTarget) -> bool:
        return has_mtp(target)

    @classmethod
    def _load_heads(cls, target: LoadedTarget, load: LoadConfig) -> LoadedDraft:
        return load_mtp(target, load.draft_bits)

    def runs_on(self) -> Mapping[str, str]:
        """Device, number formats and MLX's version."""
        facts = {
            "device": f"mlx {mx.default_device()} {platform.machine()}",
            "dtype": str(self.target.dtype),
            "bytes": str(self.target.bytes()),
            "mlx": version("mlx"),
        }
        if self._draft is not None:
            bits = self._draft.bits
            facts["draft_dtype"] = f"{bits} bit" if bits else str(self._draft.model.dtype)
        return facts

    def memory(self) -> Mapping[str, int]:
        """Bytes of the weights."""
        parts = {"target": self.target.bytes()}
        if self._draft is not None:
            parts["draft"] = self._draft.bytes()
        return parts

    def open_target(self, capacity: int) -> MlxTargetSession:  # noqa: ARG002 - caches grow
        """A fresh session."""
        taps = () if self._draft is None else self._draft.spec.taps
        return MlxTargetSession(self.target.model, taps, sampler=self._sampler)

    def open_drafts(self, capacity: int) -> list[DraftSession[Any]]:  # noqa: ARG002
        """One fresh session of the draft; [] without one."""
        return [] if self._draft is None else [self._draft.open()]

    def close(self) -> None:
        """Drop the weights; idempotent. Memory returns once the sessions are closed too."""
        super().close()
        mx.clear_cache()


def _pick_device(name: str | None) -> None:
    """MLX has one device a process. Raises ConfigError for a name it has none for."""
    if name is None:
        return
    kinds = {"cpu": mx.cpu, "gpu": mx.gpu, "mps": mx.gpu}
    if name not in kinds or (kinds[name] == mx.gpu and not mx.metal.is_available()):
        raise ConfigError(f"the mlx backend has no device {name!r} here; device='cpu' always works")
    mx.set_default_device(mx.Device(kinds[name]))
