"""Linear layers whose weights are packed once, so that a few rows cost little more than one.

On a CPU a verify pass of 2 to 16 rows is bound by how often the weights are read; the unpacked
product re-arranges them every time. Packing happens at load, the packed copy replaces the
original, and results stay within rounding (1e-5 relative in float32, checked at load).

With ``weights`` they are packed in a form of fewer bytes (`narrow.py`).

Uses private operators of torch, the ones its compiler uses with frozen weights. They may move: if
one is missing or computes something else, the plain layers stay and ``PackReport.reason`` says so.
Source of the idea: torch._inductor's mkldnn fusion passes.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash.backends.torch import narrow, products
from dflash.backends.torch.gated import GatedLinear, gate, is_silu
from dflash.backends.torch.narrow import Multiply
from dflash.backends.torch.products import FEW, ROWS_HINT, Plus
from dflash.errors import ConfigError

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
PADDED_TO, MOST_PADDING = 512, 1.25  # of MKL's packed outputs; more would cost memory for nothing
CHECKED = (80, 512)  # outputs of the layers compared at load: one for each choice of library
OPERATORS = {
    "mkl": ("mkl", "_mkl_reorder_linear_weight", "_mkl_linear"),
    "onednn": ("mkldnn", "_reorder_linear_weight", "_linear_pointwise"),
}

CPU = torch.device("cpu")
MKL, ONEDNN = "mkl", "onednn"
PLAIN = (nn.Linear, GatedLinear)  # layers that are packed; subclasses of them are left alone
Look = Callable[[str, Tensor], None]


@dataclass(frozen=True, slots=True)
class PackReport:
    """What was packed, or why nothing was."""

    layers: int = 0
    bytes: int = 0  # of the packed copies
    reason: str = ""  # empty when layers were packed


class PackedLinear(nn.Module):
    """``y = x W^T + b`` with a packed W; has no ``weight`` attribute and cannot be trained."""

    def __init__(self, linear: nn.Linear, weights: str | None = None) -> None:
        """Pack ``linear``'s weight; the layer keeps no reference to the original.

        ``weights`` is one of `narrow.WEIGHTS`; None = as wide as it is.
        """
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        weight = linear.weight.detach()
        self.kind = weights or choose_kind(weight.dtype, weight.shape[0])
        self.multiply, self.plus = _products(linear, weight, self.kind)
        self.parts = narrow.parts_of(self.multiply)  # of a product that is not Python's alone
        self.bytes = weight.numel() * narrow.BYTES.get(self.kind, weight.element_size())

    def forward(self, x: Tensor) -> Tensor:
        """``[.., in] -> [.., out]``."""
        return self.multiply(x)

    def extra_repr(self) -> str:
        """Shapes, as nn.Linear prints them."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


def _products(linear: nn.Linear, weight: Tensor, kind: str) -> tuple[Multiply, Plus]:
    """``x -> linear(x)`` and ``x, y -> linear(x) + y``."""
    joins = kind == ONEDNN and weight.dtype == torch.float32 and linear.bias is None
    if not isinstance(linear, GatedLinear):
        if joins:
            return products.onednn(weight)
        multiply = _with_bias(_pack(weight, kind), linear.bias)
    elif joins and is_silu(linear.act):
        multiply = products.onednn_gate(weight)
    else:
        multiply = _gated(_with_bias(_pack(weight, kind), linear.bias), linear.act)
    return multiply, lambda x, y: multiply(x).add_(y)


def _with_bias(multiply: Multiply, bias: Tensor | None) -> Multiply:
    if bias is None:
        return multiply
    return narrow.holding(lambda x: multiply(x).add_(bias), *narrow.parts_of(multiply))


def _gated(multiply: Multiply, act: Multiply) -> Multiply:
    parts = narrow.parts_of(multiply) if is_silu(act) else ()
    return narrow.holding(lambda x: gate(multiply(x), act), *parts)


def least_rows(layer: nn.Module) -> int:
    """Rows below which a product with ``layer`` is not cheaper."""
    return FEW if isinstance(layer, PackedLinear) and layer.kind == ONEDNN else 1


def _pack(weight: Tensor, kind: str) -> Multiply:
    """The product with a copy of ``weight`` [out, in] packed for ``kind``."""
    if kind in narrow.WEIGHTS:
        return narrow.narrow(weight, kind)
    return products.mkl(weight) if kind == MKL else products.onednn(weight)[0]


def choose_kind(dtype: torch.dtype, out_features: int) -> str:
    """Which library packs a layer: a rule of processor and shape, so that results repeat.

    MKL is the faster one on Intel's processors (fewer microseconds a call), but pads the outputs to
    a multiple of 512; oneDNN is twice as fast from 4 rows on elsewhere and has bfloat16.
    """
    padded = -(-out_features // PADDED_TO) * PADDED_TO
    fits_mkl = dtype == torch.float32 and padded <= MOST_PADDING * out_features
    return MKL if fits_mkl and on_intel() else ONEDNN


@cache
def on_intel() -> bool:
    """Whether this processor is Intel's."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return "Intel" in platform.processor()


def why_not(dtype: torch.dtype, device: torch.device) -> str:
    """Why layers of this dtype and device cannot be packed here; empty when they can."""
    if device.type != "cpu":
        return f"{device.type} needs no packing"
    if dtype not in TOLERANCE:
        return f"{dtype} has no packed form"
    for kind in sorted({choose_kind(dtype, out) for out in CHECKED}):
        library, *operators = OPERATORS[kind]
        module = getattr(torch.ops, library)
        missing = [name for name in operators if not hasattr(module, name)]
        if missing:
            return f"this torch lacks {library}.{missing[0]}"
    return _wrong_result(dtype)


@cache
def _why_not(dtype: torch.dtype, device: torch.device, _with: object) -> str:
    """`why_not`, tried once a process and form of `_pack`: a model is packed layer by layer."""
    return why_not(dtype, device)


@cache
def why_not_narrow(
    form: str, dtype: torch.dtype = torch.float32, device: torch.device = CPU
) -> str:
    """Why weights cannot be held in ``form`` here; empty when they can."""
    return _wrong_result(dtype, form, device)


def _wrong_result(dtype: torch.dtype, form: str | None = None, device: torch.device = CPU) -> str:
    """Compare packed and plain products on small layers; empty when they agree."""
    generator = torch.Generator().manual_seed(0)
    most = narrow.TOLERANCE[form] if form else TOLERANCE[dtype]
    try:
        for out in CHECKED:
            plain = nn.Linear(64, out, bias=False, device=device, dtype=dtype)
            weight = torch.randn(out, 64, generator=generator).to(device, dtype)
            plain.weight = nn.Parameter(weight, requires_grad=False)
            for layer in (plain, GatedLinear(plain, F.silu)):
                multiply, plus = _products(layer, weight, form or choose_kind(dtype, out))
                for rows in (1, 3, ROWS_HINT, 40):
                    x = torch.randn(rows, 64, generator=generator).to(device, dtype)
                    y = layer(x)
                    gaps = (multiply(x) - y, plus(x, y) - 2 * y)
                    if not max(gap.abs().max() for gap in gaps) <= most * y.abs().max():
                        return "the packed product of this torch differs from the plain one"
    except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
        return f"packing fails in this torch: {str(error).partition(chr(10))[0]}"
    return ""


def pack_model(model: Any, look: Look | None = None, weights: str | None = None) -> PackReport:
    """Replace the plain linear layers of ``model``, head included, by packed ones.

    ``look(name, weight)`` sees each weight before it is packed. ``weights`` as for `PackedLinear`;
    raises ConfigError where they cannot be had.

    Embedding tables stay; a head tied to one gets its own packed copy. Changes the model: only for
    models this package loaded itself. Layers of subclasses of nn.Linear are left alone.
    """
    names = [name for name, module in model.named_modules() if type(module) in PLAIN]
    if not names:
        return PackReport(reason="the model has no plain linear layers")
    weight = model.get_submodule(names[0]).weight
    dtype, device = weight.dtype, weight.device
    reason = why_not_narrow(weights, dtype, device) if weights else _why_not(dtype, device, _pack)
    if reason and weights:
        raise ConfigError(f"weights={weights!r} cannot be had on this {device.type}: {reason}")
    if reason:
        return PackReport(reason=reason)
    del weight  # each original is freed as soon as its copy stands
    with torch.inference_mode():
        _own_memory(model, names)
        fitting = (name for name in names if _fits(model, name, dtype, device))
        packed = [_replace(model, name, look, weights) for name in fitting]
    return PackReport(len(packed), sum(layer.bytes for layer in packed))


def joint_report(parts: Sequence[PackReport]) -> PackReport:
    """One report of a model that was packed in parts; the last one is that of the whole."""
    layers, size = sum(p.layers for p in parts), sum(p.bytes for p in parts)
    return PackReport(layers, size, "" if layers else parts[-1].reason)


def _own_memory(model: Any, names: list[str]) -> None:
    """Copy the small weights out of mapped files, which could not be let go otherwise."""
    linear = {f"{name}.weight" for name in names}
    for name, weight in model.named_parameters():
        if name not in linear:
            weight.data = weight.data.clone()


def _fits(model: Any, name: str, dtype: torch.dtype, device: torch.device) -> bool:
    weight = model.get_submodule(name).weight
    return bool(weight.dtype == dtype and weight.device == device)


def _replace(model: Any, name: str, look: Look | None, weights: str | None) -> PackedLinear:
    """Put a packed layer in place of the linear layer ``name``."""
    linear = model.get_submodule(name)
    if look is not None:
        look(f"{name}.weight", linear.weight)
    parent, _, own = name.rpartition(".")
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is not None and linear is head and weights == "int8":
        rounded = head.weight.dtype, head.weight.device
        weights = weights if why_not_narrow("float16", *rounded) else "float16"  # it decides
    packed = PackedLinear(linear, weights)
    setattr(model.get_submodule(parent), own, packed)
    return packed
