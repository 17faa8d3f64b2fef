"""Passes of a fixed shape over memory at fixed addresses: recorded once, replayed in every round.

A round of a few rows is hundreds of small kernels, and launching them one by one takes longer than
most of them run. A CUDA graph launches them all at once, but runs just what it has seen: the same
kernels on the same memory. So a pass is made for each number of rows and each stretch of the cache
(powers of two; a mask hides what is not there yet); where its rows stand is told by the device, and
nothing that differs from round to round is a number of the host.

The memory of a cache keeps the passes recorded over it. When its session is closed, both go to the
next session of the same size, so that a text of its own costs no new recording.

What records is exchangeable: CUDA here, a tape in the tests. Each recording is compared with the
same pass run directly before it is believed; a device that will not record, or records something
else, loses all graphs with one warning, and everything runs as it does without them.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from dflash.backends.torch.fused import differs

SHORTEST = 256  # cached rows of the shortest pass
MOST_PASSES = 24  # over one memory; the one unused for longest makes room
MOST_SPARE = 2  # memories that wait for a session of their size
ROWS_AXIS = 3  # of memory: [.., .., .., rows, D]

Function: TypeAlias = Callable[..., tuple[Tensor, ...]]
Body: TypeAlias = Callable[[Sequence[Tensor], Tensor | None, Sequence[Any]], tuple[Tensor, ...]]
"""What a pass computes from values between the attentions, a bias and a slot for each of these."""
Form: TypeAlias = tuple[
    tuple[tuple[int, ...], torch.dtype], ...
]  # shape and dtype, tensor by tensor


class Recorder(Protocol):
    """Makes a body repeatable."""

    def __call__(self, body: Callable[[], None]) -> Callable[[], Any]:
        """``body`` reads and writes tensors that stay; the result does the same anew each time."""


class Compiler(Protocol):
    """Makes the body of a pass faster."""

    off: str  # why it compiles nothing any more
    on_trial: bool

    def __call__(self, key: Hashable, body: Body, layers: Sequence[Any]) -> Body:
        """The same numbers; ``layers`` know their attention. Compiled once for each ``key``."""

    def forget(self) -> None:
        """Let go what was compiled."""


class Recipe(NamedTuple):
    """How to make a pass."""

    function: Function  # of the inputs; reads nothing else that changes
    inputs: tuple[Tensor, ...]  # written before each run, never replaced


class Pass:
    """A function on inputs of its own, recorded, and its outputs: overwritten by the next run."""

    def __init__(self, recipe: Recipe, recorder: Recorder, values: Sequence[Tensor]) -> None:
        """Runs with ``values`` and compares. Raises RuntimeError where the recording differs."""
        self._function, self._inputs = recipe
        self._fill(values)
        direct = self._function(*self._inputs)
        self.outputs = tuple(torch.empty_like(found) for found in direct)
        self._replay = recorder(self._body)
        for kept in self.outputs:
            kept.zero_()
        self._replay()
        for kept, found in zip(self.outputs, direct, strict=True):
            if not same(found, kept):
                raise RuntimeError("a recorded pass computes something else than the pass itself")

    def __call__(self, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs for ``values``, one an input and perhaps shorter than it."""
        self._fill(values)
        self._replay()
        return self.outputs

    def _fill(self, values: Sequence[Tensor]) -> None:
        for kept, value in zip(self._inputs, values, strict=True):
            kept[: value.shape[0]].copy_(value, non_blocking=True)

    def _body(self) -> None:
        for kept, found in zip(self.outputs, self._function(*self._inputs), strict=True):
            kept.copy_(found)


class Memory:
    """Keys and values at fixed addresses, and the passes recorded over them."""

    def __init__(self, tensors: Sequence[Tensor], held: int) -> None:
        """``tensors`` [.., .., .., rows, D], of which the first ``held`` rows were written."""
        self.tensors = tuple(tensors)
        self.capacity = self.tensors[0].shape[ROWS_AXIS]
        self.passes: OrderedDict[Hashable, Pass] = OrderedDict()
        self._written = self.capacity
        self.clean(held)

    @property
    def form(self) -> Form:
        """Of its tensors."""
        return form_of(self.tensors)

    def under(self, tensors: Sequence[Tensor]) -> bool:
        """Whether it is the memory of ``tensors``."""
        return len(tensors) == len(self.tensors) and all(map(_is, tensors, self.tensors))

    def wrote(self, end: int) -> None:
        """Rows before ``end`` may have been written by others."""
        self._written = max(self._written, end)

    def clean(self, end: int) -> None:
        """Nothing is left behind row ``end``, which is about to be the last one written.

        A mask takes what lies there out of the scores, but zero times NaN is NaN.
        """
        if self._written > end:
            for tensor in self.tensors:
                tensor[:, :, :, end : self._written].zero_()
        self._written = end


class Graphs:
    """The passes of one pair: who records, and what waits to be used again."""

    def __init__(self, recorder: Recorder, compiler: Compiler | None = None) -> None:
        """Nothing is recorded before it is used, and compiled before that by ``compiler``."""
        self._recorder, self._compiler = recorder, compiler
        self._spare: list[Memory] = []
        self._lock = threading.Lock()  # a pair's sessions may run in several threads
        self._keep = True  # what closed sessions leave
        self.on_trial = False  # whoever tries it out speaks for it
        self.off = ""  # why nothing is replayed any more

    def run(
        self,
        memory: Memory,
        key: Hashable,
        recipe: Callable[[], Recipe],
        values: Sequence[Tensor],
    ) -> tuple[Tensor, ...] | None:
        """What the pass ``key`` over ``memory`` computes from ``values``; None = run it yourself.

        The outputs are the pass's own: its next run overwrites them.
        """
        if self.off:
            return None
        found = memory.passes.get(key)
        if found is not None:
            memory.passes.move_to_end(key)
            return found(values)
        try:
            with self._lock:
                made = Pass(recipe(), self._recorder, values)
        except RuntimeError as problem:
            self.give_up(str(problem).partition("\n")[0])
            return None
        memory.passes[key] = made
        if len(memory.passes) > MOST_PASSES:
            memory.passes.popitem(last=False)
        return made.outputs

    def compiled(self, key: Hashable, body: Body, layers: Sequence[Any]) -> Body:
        """``body`` as it runs in a pass."""
        return body if self._compiler is None else self._compiler(key, body, layers)

    def give_up(self, why: str) -> None:
        """Replay nothing from now on, and say so once."""
        if not self.off and not self.on_trial:
            warnings.warn(notice(why), UserWarning, stacklevel=3)
        self.off = why
        self.forget()

    def take(self, form: Form) -> Memory | None:
        """Memory that a closed session left, if some is of this form."""
        with self._lock:
            for memory in self._spare:
                if memory.form == form:
                    self._spare.remove(memory)
                    return memory
        return None

    def give_back(self, memory: Memory | None) -> None:
        """Keep ``memory`` for the next session, if anything was recorded over it."""
        if memory is not None and memory.passes and not self.off:
            with self._lock:
                self._spare = [*self._spare, memory][-MOST_SPARE:] if self._keep else []

    def forget(self) -> None:
        """Free what waits to be used again."""
        with self._lock:
            self._spare = []

    def close(self) -> None:
        """Keep nothing from now on: the pair is closed."""
        self._keep = False
        self.forget()
        if self._compiler is not None:
            self._compiler.forget()

    def bytes(self) -> int:
        """Bytes of the memories that wait."""
        return sum(tensor.nbytes for memory in self._spare for tensor in memory.tensors)


class CudaRecorder:
    """Records with CUDA graphs, all of which share one pool for what they compute on the way.

    Inputs and outputs lie outside the pool, and replays of one device follow each other.
    """

    def __init__(self, device: torch.device) -> None:
        """Nothing is allocated yet."""
        self._device = device
        self._pool: Any = None
        self._side: Any = None
        self._keeper: Any = None  # a pool that lost its last graph cannot be used again

    def __call__(self, body: Callable[[], None]) -> Callable[[], Any]:
        """One run beside the main stream, where libraries prepare themselves; then the capture."""
        cuda: Any = torch.cuda
        with cuda.device(self._device):
            if self._pool is None:
                self._pool, self._side = cuda.graph_pool_handle(), cuda.Stream()
                self._keeper = self._captured(lambda: torch.zeros(1, device=self._device))
            self._side.wait_stream(cuda.current_stream())
            with cuda.stream(self._side):
                body()
            cuda.current_stream().wait_stream(self._side)
            replay: Callable[[], Any] = self._captured(body).replay
        return replay

    def _captured(self, body: Callable[[], Any]) -> Any:
        cuda: Any = torch.cuda
        graph = cuda.CUDAGraph()
        with cuda.graph(
            graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"
        ):
            body()
        return graph


def form_of(tensors: Sequence[Tensor]) -> Form:
    """What memory must have in common to stand in for ``tensors``."""
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)


def stretch(end: int, capacity: int) -> int:
    """Cached rows that a pass looks at whose last row is ``end - 1``."""
    return min(capacity, max(SHORTEST, 1 << (end - 1).bit_length()))


def notice(why: str) -> str:
    """The one line for the user."""
    return (
        f"CUDA graphs are off: {why}. Everything runs without them, with more time between "
        "kernels; cuda_graphs=False (--no-cuda-graphs) does not try them"
    )


def _is(one: Tensor, other: Tensor) -> bool:
    return one is other


def same(direct: Tensor, replayed: Tensor) -> bool:
    """Whether the second is the first, up to rounding; infinities are where they were."""
    if not direct.is_floating_point():
        return torch.equal(direct, replayed)
    finite = direct.isfinite()
    if not torch.equal(finite, replayed.isfinite()):
        return False
    return not differs(direct[finite].float(), replayed[finite].float(), direct.dtype)
