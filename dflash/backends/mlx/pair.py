"""A target and its draft on MLX, and the sessions they make."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any, Self

import mlx.core as mx

from dflash.backends.mlx.draft_load import LoadedDraft, load_draft
from dflash.backends.mlx.load import LoadedTarget, load_target
from dflash.backends.mlx.target import MlxTargetSession
from dflash.config import MTP, LoadConfig
from dflash.core.protocols import DraftSession
from dflash.errors import ConfigError
from dflash.hf_tokenizer import ModelTokenizer


class MlxPair:
    """The Pair protocol over a loaded target and, perhaps, a draft."""

    backend = "mlx"

    def __init__(
        self,
        target: LoadedTarget,
        draft: LoadedDraft | None = None,
        sampler: Callable[[Any], Any] | None = None,
    ) -> None:
        """The pair owns both from here on.

        ``sampler`` takes log-probabilities [n, V] to ids [n], and then is who chooses.
        """
        self._sampler = sampler
        self._target: LoadedTarget | None = target
        self._draft = draft
        self.target_name = target.name
        self.draft_name = None if draft is None else draft.name
        self.tokenizer = ModelTokenizer(target.tokenizer)
        self.context_length = target.context_length
        self.vocab_size = target.vocab_size
        self.eos_ids = target.eos_ids
        self.draft_block_size = None if draft is None else draft.spec.block_size
        self.default_block_size = None if draft is None else draft.spec.default_block_size

    @classmethod
    def open(cls, load: LoadConfig) -> Self:
        """Load both models as ``load`` says."""
        _pick_device(load.device)
        if load.force_dflash:
            raise ConfigError("force_dflash is the torch backend's: add --backend torch")
        if load.draft == MTP:
            raise ConfigError(
                "mlx-lm leaves a target's multi-token prediction heads out when it loads it, so "
                "they cannot draft here: add --backend torch, or name another draft"
            )
        if load.weights is not None:
            raise ConfigError(
                "weights is the torch backend's: MLX reads models that mlx_lm.convert quantised"
            )
        trust = load.trust_remote_code
        target = load_target(load.target, load.dtype, trust_remote_code=trust)
        if load.draft is None:
            return cls(target)
        window = load.draft_sliding_window_size
        draft = load_draft(
            load.draft,
            target,
            load.draft_dtype,
            window=window,
            taps=load.taps,
            bits=load.draft_bits,
        )
        return cls(target, draft)

    @property
    def target(self) -> LoadedTarget:
        """The loaded target."""
        assert self._target is not None, "the pair is closed"
        return self._target

    @property
    def draft(self) -> LoadedDraft | None:
        """The loaded draft; None = plain decoding only."""
        return self._draft

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is odd about this pair, in sentences for the user."""
        return () if self._draft is None else self._draft.warnings

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
        self._target = self._draft = None
        mx.clear_cache()


def _pick_device(name: str | None) -> None:
    """MLX has one device a process. Raises ConfigError for a name it has none for."""
    if name is None:
        return
    kinds = {"cpu": mx.cpu, "gpu": mx.gpu, "mps": mx.gpu}
    if name not in kinds or (kinds[name] == mx.gpu and not mx.metal.is_available()):
        raise ConfigError(f"the mlx backend has no device {name!r} here; --device cpu always works")
    mx.set_default_device(mx.Device(kinds[name]))
