"""A target and its draft on torch, and the sessions they make."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any, Self

import torch

from dflash.backends.torch.cache import ROOM
from dflash.backends.torch.draft_load import LoadedDraft, load_draft
from dflash.backends.torch.graph_check import open_graphs, rerun, uncompiled, why_uncompiled
from dflash.backends.torch.graphs import Compiler, Graphs, Recorder, notice
from dflash.backends.torch.interpreted import Reason, reason
from dflash.backends.torch.load import LoadedTarget, load_target, pick_device
from dflash.backends.torch.memory import kv_bytes, require
from dflash.backends.torch.mtp import has_mtp
from dflash.backends.torch.mtp_session import load_mtp
from dflash.backends.torch.target import TorchTargetSession
from dflash.backends.torch.tree_check import why_no_trees
from dflash.config import LoadConfig
from dflash.core.protocols import DraftSession
from dflash.errors import ConfigError, OutOfMemory
from dflash.model_pair import ModelPair

OFF = "switched off"
NO_CUDA = (
    "compile (--compile) is for CUDA, and this pair runs on {}: on a CPU, weights are packed "
    "for passes of a few rows, in a form that torch's compiler cannot read. Leave it out"
)


class TorchPair(ModelPair[LoadedTarget, LoadedDraft]):
    """The Pair protocol over a loaded target and, perhaps, a draft."""

    backend = "torch"

    def __init__(
        self,
        target: LoadedTarget,
        draft: LoadedDraft | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        super().__init__(target, draft, notes)
        said = [target.fused.warning, *(found.note for found in self._by_python().values())]
        self._notes += tuple(dict.fromkeys(note for note in said if note))
        self._graphs: Graphs | None = None
        self._compiler: Compiler | None = None
        self._why_direct = ""
        self._no_trees: str | None = None
        self._kv = self._draft_kv = 0  # bytes of keys and values of the largest sessions opened

    @classmethod
    def open(cls, load: LoadConfig) -> Self:
        """Load both models as ``load`` says."""
        if load.compile and (device := pick_device(load.device)).type != "cuda":
            raise ConfigError(NO_CUDA.format(device.type))
        if load.threads is not None:
            torch.set_num_threads(load.threads)
        target = load_target(
            load.target,
            load.device,
            load.dtype,
            pack=load.pack_weights,
            weights=load.weights,
            trust_remote_code=load.trust_remote_code,
            whole=False,
        )
        pair = cls.beside(target, load)
        return (pair.compile if load.compile else pair.replay)(load.cuda_graphs)

    def replay(self, wanted: bool = True) -> Self:
        """Let passes of a few rows be replayed where the device can: tried out here, and a note
        where that fails."""
        self._compiler = None
        if not wanted:
            self._graphs, self._why_direct = None, OFF
            return self
        self._graphs, self._why_direct = open_graphs(self.target, self._draft)
        if self._why_direct:
            self._notes += (notice(self._why_direct),)
        return self

    def compile(self, replayed: bool = True, backend: Any = "inductor") -> Self:
        """`replay` what torch's compiler has made of passes; run it where nothing is ``replayed``.
        Notes say what of this does not go. ``backend`` is the compiler's."""
        found, self._why_direct = self._compiled(None, backend) if replayed else (None, OFF)
        if found is None:
            if replayed and self._why_direct:
                self._notes += (notice(self._why_direct),)
            found, _ = self._compiled(rerun, backend)
        compiler = self._compiler
        assert compiler is not None, "it was made a moment ago"
        if compiler.off and self._why_direct:
            found = None  # neither compiled nor replayed
        self._graphs = found
        self._notes += uncompiled(self.target, self._draft, compiler)
        return self

    def _compiled(self, recorder: Recorder | None, backend: Any) -> tuple[Graphs | None, str]:
        from dflash.backends.torch.compiled import TorchCompiler  # imports torch's tracing

        self._compiler = TorchCompiler(backend)
        return open_graphs(self.target, self._draft, recorder, self._compiler)

    @classmethod
    def _load_draft(cls, name: str, target: LoadedTarget, load: LoadConfig) -> LoadedDraft:
        return load_draft(
            name,
            target,
            load.draft_dtype,
            window=load.draft_sliding_window_size,
            taps=load.taps,
            pack=load.pack_weights,
            force=load.force_dflash,
        )

    @classmethod
    def _has_heads(cls, target: LoadedTarget) -> bool:
        return has_mtp(target)

    @classmethod
    def _load_heads(cls, target: LoadedTarget, load: LoadConfig) -> LoadedDraft:  # noqa: ARG003
        return load_mtp(target)

    def runs_on(self) -> Mapping[str, str]:
        """Device, number formats, threads, packed weights, fused layers and torch's version."""
        device = self.target.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
        facts = {
            "device": f"{device.type} {name}",
            "dtype": str(self.target.dtype),
            "threads": f"{torch.get_num_threads()} of {os.cpu_count()}",
            "packed": str(self.target.packed.layers),
            "weights": self.target.weights or str(self.target.dtype).removeprefix("torch."),
            "fused": str(self.target.fused.layers),
            "torch": str(torch.__version__),
        }
        if device.type == "cpu":
            facts["interpreted"] = self.interpreted()
        if device.type == "cuda" or self._graphs is not None:
            facts["cuda_graphs"] = self.replayed()
        if self._compiler is not None:
            facts["compiled"] = self.compiled()
        if self._draft is not None:
            facts["draft_dtype"] = str(self._draft.model.norm.weight.dtype)
        return facts

    def interpreted(self) -> str:
        """Which models' layers torch's interpreter runs in one call, or why none: "off: ..."."""
        found = {name: reason.why for name, reason in self._by_python().items()}
        named = [name for name, why in found.items() if not why]
        return " and ".join(named) or f"off: {found.get('target', self.target.fused.reason)}"

    def _by_python(self) -> dict[str, Reason]:
        """Why Python runs fused layers, by the model that they are of."""
        found = {}
        if self.target.fused.layers:
            found["target"] = reason(self.target.model.get_decoder().layers)
        if self._draft is not None and hasattr(self._draft.model, "fused_context"):
            found["draft"] = reason(list(self._draft.model.layers))
        return found

    def replayed(self) -> str:
        """What CUDA graphs replay, or why they replay nothing: "off: ..."."""
        if self._graphs is None or self._graphs.off or self._why_direct:
            why = self._why_direct or ("" if self._graphs is None else self._graphs.off)
            return f"off: {why or 'nothing asked for them'}"
        target = bool(self.target.fused.layers)
        draft = self._draft is not None and self._draft.replayable
        named = [name for name, is_so in (("target", target), ("draft", draft)) if is_so]
        return " and ".join(named) or f"off: {self.target.fused.reason}"

    def compiled(self) -> str:
        """What torch's compiler has seen, or why it sees nothing: "off: ..."."""
        if self._compiler is None or self._compiler.off:
            return f"off: {OFF if self._compiler is None else self._compiler.off}"
        whys = why_uncompiled(self.target, self._draft)
        named = [name for name, why in whys.items() if not why]
        return " and ".join(named) or f"off: {whys['target']}"

    def memory(self) -> Mapping[str, int]:
        """Bytes per component: weights, and keys and values of the largest session so far."""
        parts = {"target": self.target.bytes(), "target_kv": self._kv}
        if self._draft is not None:
            parts |= {"draft": self._draft.bytes(), "draft_kv": self._draft_kv}
        return parts

    def open_target(self, capacity: int) -> TorchTargetSession:
        """A session with room for ``capacity`` tokens. Raises OutOfMemory before allocating."""
        target = self.target
        size = kv_bytes(target.config, capacity + ROOM, target.dtype)
        what, graphs = f"a context of {capacity} tokens", self._graphs
        try:
            require(what, size, target.device)
        except OutOfMemory:
            if graphs is None or not graphs.bytes():
                raise
            graphs.forget()  # memory of closed sessions that waited to be used again
            require(what, size, target.device)
        self._kv = max(self._kv, size)
        taps = () if self._draft is None else self._draft.spec.taps
        return TorchTargetSession(target.model, taps, capacity + ROOM, graphs=graphs)

    def open_drafts(self, capacity: int) -> list[DraftSession[Any]]:
        """One fresh session of the draft; [] without one."""
        if self._draft is None:
            return []
        session = self._draft.open(capacity + ROOM, self._graphs)
        self._draft_kv = max(self._draft_kv, session.bytes())
        return [session]

    def why_no_trees(self) -> str:
        """Why trees cannot be judged or drafted; tried out at the first call."""
        if self._no_trees is None:
            draft = None if self._draft is None else self._draft.why_no_trees()
            self._no_trees = draft or why_no_trees(self.target.model)
        return self._no_trees

    def close(self) -> None:
        """Drop the weights and what was recorded; idempotent."""
        super().close()
        if self._graphs is not None:
            self._graphs.close()
