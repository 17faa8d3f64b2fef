"""Weights of a linear layer in fewer bytes than the numbers that they are multiplied with.

A pass of few rows takes as long as its weights take to be read, so half the bytes are close to half
the time. Activations stay what they are, and no row sees another one: a number shared by the rows
of a block (as activations quantised by tensor would have) would make a token depend on the draft.

float16   rounded to 11 bits, multiplied and summed in float32 (FBGEMM, x86); exact enough that the
          text of a float32 model seldom changes; slow to pack, and refuses numbers past 65504
bfloat16  8 bits, activations and results too (oneDNN); the cheapest one from 8 rows on
int8      8 bits and one scale an output, products in bfloat16 (torch's own kernel): the smallest

All are torch's own operators; each is compared with a plain product before it is used. Source: the
operators' registrations in ATen, `native/quantized/cpu` and `native/LinearAlgebra`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dflash.errors import WeightsError

Multiply = Callable[[Tensor], Tensor]

LARGEST = 65504.0  # of float16
TOLERANCE = {"float16": 1e-3, "bfloat16": 2e-2, "int8": 5e-2}
BYTES = {"float16": 2, "bfloat16": 2, "int8": 1}
WEIGHTS = tuple(BYTES)


def narrow(weight: Tensor, form: str) -> Multiply:
    """The product with a copy of ``weight`` [out, in] in ``form``, of `WEIGHTS`.

    Raises WeightsError for a weight that the form cannot hold.
    """
    return _MAKERS[form](weight)


def direct(operator: Any) -> Callable[..., Tensor]:
    """``operator`` without the frame in which torch calls it, and packs its arguments once more."""
    found: Callable[..., Tensor] = getattr(operator, "_op", operator)
    return found


def holding(multiply: Multiply, *parts: Tensor) -> Multiply:
    """``multiply``, noted to be a product with ``parts``, which oneDNN has packed."""
    vars(multiply)["parts"] = parts
    return multiply


def parts_of(multiply: Multiply) -> tuple[Tensor, ...]:
    """What `holding` has noted; () for other products."""
    found: tuple[Tensor, ...] = getattr(multiply, "parts", ())
    return found


def fast_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 by itself."""
    tests = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in tests)


def _float16(weight: Tensor) -> Multiply:
    if not bool(weight.abs().max() <= LARGEST):
        raise WeightsError(
            "the model has weights that float16 cannot hold; take --weights bfloat16 or int8"
        )
    packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), None)
    product = direct(torch.ops.quantized.linear_dynamic_fp16.default)

    def multiply(x: Tensor) -> Tensor:
        y: Tensor = product(x.float(), packed)
        return y.to(x.dtype)

    return multiply


def _bfloat16(weight: Tensor) -> Multiply:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16(), 8)
    product = direct(torch.ops.mkldnn._linear_pointwise.default)

    def multiply(x: Tensor) -> Tensor:
        y: Tensor = product(x.bfloat16(), packed, None, "none", [], "")
        return y.to(x.dtype)

    return holding(multiply, packed)


def _int8(weight: Tensor) -> Multiply:
    largest = weight.abs().amax(dim=-1).float().clamp_(min=1e-12)
    scale = (largest / 126).bfloat16()  # 126: rounding the scale down must not cut the largest
    whole = (weight.float() / scale.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    product = direct(torch.ops.aten._weight_int8pack_mm.default)

    def multiply(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).bfloat16()
        y: Tensor = product(rows, whole, scale)
        return y.to(x.dtype).view(*x.shape[:-1], -1)

    return multiply


_MAKERS = {"float16": _float16, "bfloat16": _bfloat16, "int8": _int8}
