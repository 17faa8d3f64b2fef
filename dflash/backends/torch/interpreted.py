"""All layers of a pass in one call, run by torch's own interpreter, operator after operator.

A layer of few rows is some twenty operators. Called from Python, each waits 4 to 5 us before it
begins, as the products beside it have driven Python and torch's bindings out of the caches; called
by TorchScript's interpreter, 2. So `run_layers` is Python that TorchScript can read: the layers of
`decoder.DecoderLayer.rows` with weights that oneDNN has packed. It calls the same operators on the
same numbers, so that the bits are the same; which is tried with the first layer of a model before
any is run so. `reason` says why Python goes on running others.

TorchScript is no longer developed. Where a torch lacks it, or reads something else out of this
file, everything runs as it does without.
"""

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash.backends.torch.attention import LONG, by_heads, by_stacked_heads, stacked_mask, stacks
from dflash.backends.torch.features import Tap
from dflash.backends.torch.packed import least_rows
from dflash.backends.torch.slots import Span

TRIED = ((8, 0), (3, 40), (1, 40), (8, LONG))  # rows, and rows before them

NOTE = (
    "layers run operator by operator from Python, which takes longer: {} (torch {}). "
    "Please report this"
)


class Reason(NamedTuple):
    """Why Python runs the layers of a model."""

    why: str = ""  # empty: it does not
    failed: bool = False  # for the user to know

    @property
    def note(self) -> str:
        """The line for the user, if there is one."""
        return NOTE.format(self.why, torch.__version__) if self.failed else ""


class Weights(NamedTuple):
    """What a layer multiplies with; matrices as oneDNN has packed them."""

    norm: Tensor  # [H]
    qkv: Tensor
    bias: Tensor | None  # of queries, keys and values
    heads: Tensor | None  # [heads that are turned, D], what these are normed with
    out: Tensor
    after: Tensor  # [H], the norm behind attention
    gate: list[Tensor]  # gate and other half, or both as one
    down: Tensor


class Form(NamedTuple):
    """What all layers have in common."""

    queries: int  # heads
    scaling: float
    causal: bool
    half: bool  # products in bfloat16
    eps: Tensor  # [1]
    norm: Tensor  # [H], behind the last layer


class Place(NamedTuple):
    """Where the rows of a pass stand."""

    turns: Tensor  # [n, heads * D/2] complex, for rows that are there for speed alone as well
    bias: Tensor | None
    whole: Tensor  # [L, 2, nkv, capacity, D], contiguous
    first: int  # the oldest row that is seen
    start: int  # the first new row
    rows: int  # how many are new
    stacked: bool  # query heads are rows of their key head
    taps: list[int]  # layers whose states are wanted


def run_layers(
    x: Tensor, weights: list[Weights], form: Form, place: Place
) -> tuple[Tensor, list[Tensor]]:
    """Rows [n, H] to normed states of the last layer, and the states behind the tapped ones."""
    queries, scaling, causal, half, eps, last = form
    turns, bias, whole, first, start, rows, stacked, taps = place
    _, _, keys, _, width = whole.shape
    layer, side, head, row, _ = whole.stride()
    count, part, size = x.shape[0], 1 / x.shape[1], (queries + 2 * keys) * width
    in_heads, in_whole = [0, width, size, 1], [side, head, row, 1]
    pairs, asking = [count, size // 2, 2], [1, queries, rows, width]
    fresh, seen = [1, 2 * keys, rows, width], [1, keys, start + rows - first, width]
    begin = whole.storage_offset()
    tapped: list[Tensor] = []
    for index, one in enumerate(weights):
        norm, qkv, qkv_bias, heads_norm, out, after, gate, down = one
        heads = product(normed(x, norm, eps, part), qkv, half)
        if qkv_bias is not None:
            heads.add_(qkv_bias)
        if heads_norm is not None:
            both = heads.view([count, -1, width]).narrow(1, 0, heads_norm.shape[0])
            both.copy_(normed(both, heads_norm, eps, 1 / width))
        torch.view_as_complex(heads.view(pairs)).mul_(turns)
        at = begin + index * layer
        new = heads.as_strided(fresh, in_heads, queries * width)
        whole.as_strided(fresh, in_whole, at + start * row).copy_(new)
        query = heads.as_strided(asking, in_heads, 0)
        key = whole.as_strided(seen, in_whole, at + first * row)
        value = whole.as_strided(seen, in_whole, at + first * row + side)
        if stacked:
            mixed = by_stacked_heads(query, key, value, bias, scaling)
        else:
            mixed = by_heads(query, key, value, bias, scaling, causal)
        if rows < count:
            mixed = F.pad(mixed, [0, 0, 0, count - rows])
        x = plus(mixed, x, out, half)
        x = plus(gated(normed(x, after, eps, part), gate, half), x, down, half)
        if index in taps:
            tapped.append(x)
    return normed(x, last, eps, part), tapped


def normed(x: Tensor, weight: Tensor, eps: Tensor, part: float) -> Tensor:
    """``weight * x / sqrt(part * sum(x^2) + eps)`` over the last axis, in float32."""
    length = torch.linalg.vector_norm(x, 2, [-1], True)  # one kernel; mean() is two
    return (x * torch.addcmul(eps, length, length, value=part).rsqrt_()).mul_(weight)


def product(x: Tensor, packed: Tensor, half: bool) -> Tensor:
    """``W x``."""
    rows = x.to(torch.bfloat16) if half else x
    y: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")
    return y.to(torch.float32) if half else y


def plus(x: Tensor, other: Tensor, packed: Tensor, half: bool) -> Tensor:
    """``W x + other``."""
    if half:
        return product(x, packed, half).add_(other)
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, other, packed, None, "add")
    return y


def gated(x: Tensor, packed: list[Tensor], half: bool) -> Tensor:
    """``silu(gate x) * (up x)``."""
    if len(packed) == 1:
        both = product(x, packed[0], half)
        size = both.shape[1] // 2
        return F.silu(both.narrow(-1, 0, size)).mul_(both.narrow(-1, size, size))
    gate = torch.ops.mkldnn._linear_pointwise(x, packed[0], None, "swish", [], "")
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, gate, packed[1], None, "mul")
    return y


class Interpreted:
    """`run_layers` over the layers of one model."""

    def __init__(self, layers: Sequence[Any], norm: Tensor, eps: float) -> None:
        """``layers`` are `decoder.DecoderLayer`s that `reason` says nothing of."""
        first = layers[0]
        with torch.inference_mode(False):
            number = torch.full((1,), eps)
        self._weights = [_weights(layer) for layer in layers]
        self._groups = first.queries // first.keys
        half = first.qkv.kind == "bfloat16"
        self._form = Form(first.queries, first.scaling, first.is_causal, half, number, norm)
        self._run, self._optimized = _script()

    def __call__(
        self,
        x: Tensor,  # [n, H], and perhaps rows behind them that are there for speed alone
        turns: Tensor,  # as many rows, [n, heads * D/2] complex
        bias: Tensor | None,
        span: Span,
        tap: Tap | None = None,
    ) -> Tensor:  # as x
        """Normed states of the last layer; ``tap`` sees the states that it wants."""
        heads, seen = self._form.queries, span.start + span.rows - span.first
        stacked = stacks(heads, heads // self._groups, span.rows, seen)
        if stacked and bias is not None:
            bias = stacked_mask(bias, self._groups, x.dtype)
        taps = [] if tap is None else sorted({*tap.layers} & {*range(len(self._weights))})
        place = Place(turns, bias, span.whole, span.first, span.start, span.rows, stacked, taps)
        with self._optimized(False):  # as written, and no profile first; for this thread alone
            x, states = self._run(x, self._weights, self._form, place)
        if tap is not None:
            for index, state in zip(taps, states, strict=True):
                tap(index, state)
        return x


def reason(layers: Sequence[Any]) -> Reason:
    """Why Python runs ``layers``; found out once a model."""
    first = layers[0]
    if first.by_python is None:
        why = _why_not(layers)
        failed = "" if why else _failure(first)
        first.by_python = Reason(why or failed, bool(failed))
    found: Reason = first.by_python
    return found


def _why_not(layers: Sequence[Any]) -> str:
    kind = layers[0].input_layernorm.weight.dtype
    if kind != torch.float32:
        return f"states are {kind}"
    products = [p for x in layers for p in (x.qkv, x.o_proj, x.gate_up, x.down_proj)]
    kinds = {getattr(p, "kind", "") for p in products}
    if len(kinds) > 1 or not all(getattr(p, "parts", ()) for p in products):
        return "weights are not packed by oneDNN"
    if any(p.bias is not None for x in layers for p in (x.o_proj, x.gate_up, x.down_proj)):
        return "products have a bias"
    state: Any = getattr(torch.jit, "_state", None)  # what PYTORCH_JIT=0 says, found out by torch
    enabled = getattr(getattr(state, "_enabled", None), "enabled", True)
    return "" if enabled else "PYTORCH_JIT=0 switches torch's interpreter off"


def _failure(layer: Any) -> str:
    """What goes wrong with ``layer``, the first one; empty where nothing does."""
    norm = layer.input_layernorm.weight
    try:
        interpreted = Interpreted([layer], norm, layer.eps)
        with torch.inference_mode():
            same = all(_agree(layer, interpreted, *case) for case in TRIED)
    except (AttributeError, NotImplementedError, OSError, RuntimeError, TypeError) as error:
        return f"torch's interpreter cannot: {str(error).strip().partition(chr(10))[0]}"
    return "" if same else "torch's interpreter gives other numbers"


def _agree(layer: Any, interpreted: Interpreted, rows: int, context: int) -> bool:
    """Whether both run a layer to the same bits, on made-up rows behind a made-up context."""
    generator = torch.Generator().manual_seed(0)
    count, width, first = max(rows, least_rows(layer.qkv)), layer.head_dim, min(1, context)
    seen, heads = context + rows - first, layer.queries + 2 * layer.keys
    x = torch.randn(count, layer.input_layernorm.weight.shape[0], generator=generator)
    angles = torch.randn(count, heads * width // 2, generator=generator)
    turns = torch.polar(torch.ones_like(angles), angles)
    whole = torch.randn(1, 2, layer.keys, context + rows + 1, width, generator=generator)
    bias = None
    if layer.is_causal and rows > 1:
        bias = torch.full((rows, seen), -torch.inf).triu_(seen - rows + 1)
    mine, theirs = (Span(held, first, context, rows) for held in (whole.clone(), whole))
    state = layer.rows(x, turns, bias, next(iter(mine)))
    found: dict[int, Tensor] = {}
    interpreted(x, turns, bias, theirs, Tap((0,), count, found))
    return torch.equal(state, found[0]) and torch.equal(mine.whole, theirs.whole)


def _weights(layer: Any) -> Weights:
    (qkv,), (out,), (down,) = (p.parts for p in (layer.qkv, layer.o_proj, layer.down_proj))
    before, after = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
    gate = list(layer.gate_up.parts)
    return Weights(before, qkv, layer.qkv.bias, layer.head_norm, out, after, gate, down)


@cache
def _script() -> tuple[Any, Any]:
    """`run_layers` for the interpreter, and what says whether it may change it on the way."""
    jit: Any = torch.jit
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's, of TorchScript
        made = jit.script(run_layers)
    torch._C._jit_pass_inline(made.graph)  # a call of its functions costs as much as an operator
    return made, jit.optimized_execution
