"""The backends under test, and scripted drafts over any of them.

To add a backend, write one function that returns a ``Backend`` and put it into ``MAKERS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from dflash.backends.toy import ScriptedDraft, ToyModel, ToyPair
from dflash.core.accept import choose
from dflash.core.logits import process
from dflash.core.protocols import Pair
from dflash.core.types import Finish, Request

BLOCK = 16  # native block of the scripted drafts
Logits = Callable[[Sequence[int]], Any]  # tokens -> logits [V] of the next place

NEVER: tuple[int, ...] = (0,)
SOMETIMES = (1, 3, 0, 7)
ALWAYS = None
SCRIPTS = {"never right": NEVER, "sometimes right": SOMETIMES, "always right": ALWAYS}


@dataclass
class Plain:
    """Plain decoding written a second time: no cache, no loop, one token after the other."""

    logits: Logits

    def __post_init__(self) -> None:
        self._known: dict[Any, list[int]] = {}

    def ahead(self, request: Request, output: Sequence[int], count: int) -> list[int]:
        """The ``count`` tokens after ``output``; none if ``output`` is not what plain says."""
        key = (tuple(request.prompt), request.sampling, request.stop_ids)
        known = self._known.setdefault(key, [])
        while len(known) < len(output) + count:
            row = process(self.logits([*request.prompt, *known]), request, known)
            known.append(choose(row, request.sampling, len(known)))
        return known[len(output) :][:count] if known[: len(output)] == list(output) else []

    def run(self, request: Request) -> tuple[list[int], Finish]:
        """Tokens and finish of a whole generation."""
        tokens = self.ahead(request, [], request.max_tokens)
        ends = [place for place, token in enumerate(tokens, 1) if token in request.stop_ids]
        return (tokens[: ends[0]], Finish.STOP) if ends else (tokens, Finish.LENGTH)


@dataclass(frozen=True)
class Backend:
    """A target of one backend, without a draft, and what it says when decoded plainly."""

    name: str
    pair: Pair
    plain: Plain
    own: Callable[[], Pair]  # a fresh pair of the same target with a draft of the backend's own
    objects: Mapping[str, Any] = field(default_factory=dict)  # what its façade takes


class Scripted:
    """The pair of ``backend`` with a scripted draft. Closing it leaves the backend's pair open."""

    scripted = True

    def __init__(
        self,
        backend: Backend,
        script: Sequence[int] | None = ALWAYS,
        eos_ids: frozenset[int] = frozenset(),
        **changes: Any,
    ) -> None:
        self._backend, self._script, self._changes = backend, script, changes
        self.eos_ids = eos_ids
        self.draft_name, self.draft_block_size, self.default_block_size = "scripted", BLOCK, 8
        self.drafts: list[ScriptedDraft] = []

    @property
    def objects(self) -> Mapping[str, Any]:
        return self._backend.objects

    def __getattr__(self, name: str) -> Any:
        if name in self._changes:
            return self._changes[name]
        return getattr(self._backend.pair, name)

    def open_drafts(self, capacity: int) -> list[ScriptedDraft]:
        plain = self._backend.plain
        self.drafts.append(
            ScriptedDraft(plain.ahead, self._backend.pair.vocab_size, self._script, BLOCK - 1)
        )
        return self.drafts[-1:]

    def close(self) -> None:
        pass


class Own(Scripted):
    """The pair of ``backend`` with the draft that the backend brings itself."""

    scripted = False

    def __init__(self, backend: Backend, **changes: Any) -> None:
        super().__init__(replace(backend, pair=backend.own()), **changes)
        self.draft_block_size = self._backend.pair.draft_block_size or 1

    def open_drafts(self, capacity: int) -> list[Any]:
        return self._backend.pair.open_drafts(capacity)


def toy(folder: Path, ties: bool) -> Backend:
    """The strict fake, any token after any other."""
    model = ToyModel(eos_ids=frozenset(), words=False, ties=ties)
    return Backend(
        "toy",
        ToyPair(model),
        Plain(lambda tokens: model.logits(model.run(tokens))),
        own=lambda: ToyPair(model, draft_name="toy:script", script=SOMETIMES),
    )


def torch(folder: Path, ties: bool) -> Backend:
    """A tiny random Llama with a tiny random draft."""
    pytest.importorskip("torch")
    from tests.conformance.torch_backend import make

    return make(folder, ties)


def torch_int8(folder: Path, ties: bool) -> Backend:
    """The same Llama with its weights rounded to int8."""
    pytest.importorskip("torch")
    from tests.conformance.torch_backend import make_rounded

    return make_rounded(folder, ties)


def torch_graphs(folder: Path, ties: bool) -> Backend:
    """The same Llama with the passes of its rounds replayed."""
    pytest.importorskip("torch")
    from tests.conformance.torch_backend import make_replayed

    return make_replayed(folder, ties)


def torch_compiled(folder: Path, ties: bool) -> Backend:
    """The same Llama with the passes of its rounds compiled, then replayed."""
    pytest.importorskip("torch")
    from tests.conformance.torch_backend import make_compiled

    return make_compiled(folder, ties)


def mlx(folder: Path, ties: bool) -> Backend:
    """The same Llama in MLX."""
    pytest.importorskip("mlx_lm")
    from tests.conformance.mlx_backend import make

    return make(folder, ties)


def gguf(folder: Path, ties: bool) -> Backend:
    """The same tiny Llama and draft as GGUF files on llama.cpp."""
    pytest.importorskip("xllamacpp")
    pytest.importorskip("torch")
    from tests.conformance.gguf_backend import make

    return make(folder, ties)


MAKERS: dict[str, Callable[[Path, bool], Backend]] = {
    "gguf": gguf,
    "toy": toy,
    "torch": torch,
    "torch-compiled": torch_compiled,
    "torch-graphs": torch_graphs,
    "torch-int8": torch_int8,
    "mlx": mlx,
}


def request(ids: Sequence[int], max_tokens: int = 40, **more: Any) -> Request:
    """A request over ids, with room for the whole alphabet of cases."""
    return replace(Request(list(ids), max_tokens), **more)
