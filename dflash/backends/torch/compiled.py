"""Passes of a few rows through torch's compiler, ahead of what records them (`graphs.py`).

What is compiled is all that lies between the attentions: products, norms, rotations, gates.
Attention and the cache stay outside, behind one operator that finds both at the time of the call:
so a pass is compiled once for each number of rows, whatever the length of a text, the room in a
cache, or the session. As in a recording, a number of the host is the one of the first time.

Each compiled pass is compared with the pass itself before it is believed. Where one cannot be
compiled, or computes something else, nothing is compiled any more, with one warning.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from dflash.backends.torch.decoder import DecoderLayer
from dflash.backends.torch.graphs import Body, Function, same
from dflash.backends.torch.slots import FixedSlot, OuterSlot


class Around(NamedTuple):
    """What a compiled pass finds outside."""

    layers: Sequence[DecoderLayer]
    bias: Tensor | None
    slots: Sequence[FixedSlot]


class _Now(threading.local):
    """What is around the pass that a thread runs."""

    around: Around


_now = _Now()


def attend(heads: Tensor, layer: int, width: int) -> Tensor:  # noqa: ARG001 - the operator's arguments
    """Attention of a layer's rows [n, heads * D] to [n, width], in the cache that is around.

    It writes keys and values; no compiled pass reads them but through this, layer after layer.
    """
    around = _now.around
    return around.layers[layer].attend(heads, around.bias, around.slots[layer])


_operator = torch.library.custom_op("dflash::attend", attend, mutates_args=())


@_operator.register_fake
def _(heads: Tensor, layer: int, width: int) -> Tensor:  # noqa: ARG001 - as `attend`
    return heads.new_empty(heads.shape[0], width)


class TorchCompiler:
    """The compiled passes of one pair (`graphs.Compiler`)."""

    def __init__(self, backend: Any = "inductor") -> None:
        """``backend`` is one of ``torch.compile``. Nothing is compiled before it is used."""
        self._backend = backend
        self._made: dict[Hashable, Function] = {}
        self.on_trial = False
        self.off = ""

    def __call__(self, key: Hashable, body: Body, layers: Sequence[DecoderLayer]) -> Body:
        """``body``, compiled at its first call, with what was compiled as ``key`` before."""

        def run(
            values: Sequence[Tensor], bias: Tensor | None, slots: Sequence[FixedSlot]
        ) -> tuple[Tensor, ...]:
            if not self.off:
                try:
                    with _inside(Around(layers, bias, slots)):
                        return self._found(key, body, values)(*_real(values))
                except RuntimeError as problem:
                    self.give_up(_said(problem))
            return body(values, bias, slots)

        return run

    def give_up(self, why: str) -> None:
        """Compile nothing from now on, and say so once."""
        if not self.off and not self.on_trial:
            warnings.warn(notice(why), UserWarning, stacklevel=3)
        self.off = why
        self.forget()

    def forget(self) -> None:
        """Let go what was compiled, and with it the weights."""
        self._made = {}

    def _found(self, key: Hashable, body: Body, values: Sequence[Tensor]) -> Function:
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = self._compiled(body, values)
        return found

    def _compiled(self, body: Body, values: Sequence[Tensor]) -> Function:
        """Raises RuntimeError where that fails, or computes something else."""
        around = _now.around
        outer = [
            OuterSlot(slot.rows, partial(_attended, index, layer))
            for index, (layer, slot) in enumerate(zip(around.layers, around.slots, strict=True))
        ]

        def traced(*inputs: Tensor) -> tuple[Tensor, ...]:
            return body(inputs, None, outer)

        # Operator by operator, so that a model's Python is none of the compiler's business.
        graph: Any = make_fx(traced)(*_real(values))
        made: Function = torch.compile(graph, backend=self._backend, fullgraph=True, dynamic=False)
        direct = body(values, around.bias, around.slots)
        for one, other in zip(direct, made(*_real(values)), strict=True):
            if not same(one, other):
                raise RuntimeError("a compiled pass computes something else than the pass itself")
        return made


@contextmanager
def _inside(around: Around) -> Iterator[None]:
    before = getattr(_now, "around", around)
    _now.around = around
    try:
        yield
    finally:
        _now.around = before


def _attended(index: int, layer: DecoderLayer, heads: Tensor) -> Tensor:
    width = layer.queries * layer.head_dim
    mixed: Tensor = torch.ops.dflash.attend(heads, index, width)
    return mixed


def _real(values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Complex numbers as pairs of real ones: the compiler makes no code for complex ones."""
    return tuple(torch.view_as_real(x) if x.is_complex() else x for x in values)


def notice(why: str) -> str:
    """The one line for the user."""
    return f"nothing is compiled any more: {why}. Everything runs as it does without --compile"


def _said(problem: RuntimeError) -> str:
    """The line of ``problem`` that says what it is; the compiler's first one may announce it."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    announced = len(lines) > 1 and lines[0].endswith(":")
    return " ".join(lines[: 1 + announced]) or type(problem).__name__
