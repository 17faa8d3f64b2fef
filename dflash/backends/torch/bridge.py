"""A draft of another width beside this target: features, embedding and head through projections.

Only where the user insists (``force_dflash``). Without a projection of its own a vector is cut to
the draft's width, or filled up with zeros. What comes out is a bad draft, never another text.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from dflash.drafts.spec import DraftSpec
from dflash.errors import WeightsError

FILE = "projection.safetensors"
"""In the draft's folder: ``features`` [the width that the draft reads, Ht], ``embedding`` [H, Ht],
``head`` [Ht, H], each optional, with Ht of the target at hand."""


@dataclass(frozen=True, slots=True)
class Bridge:
    """Three linear maps; None cuts or fills up."""

    spec: DraftSpec
    width: int  # Ht, of the target at hand
    maps: dict[str, Tensor]

    def features(self, x: Tensor) -> Tensor:
        """Tapped states [.., M*Ht] as wide as the draft reads them."""
        taps = x.unflatten(-1, (len(self.spec.taps), self.width))  # type: ignore[no-untyped-call]
        return self._fit("features", taps, self.spec.target_hidden_size).flatten(-2)

    def embedding(self, rows: Tensor) -> Tensor:
        """Embedding rows [V, Ht] to [V, H]."""
        return self._fit("embedding", rows, self.spec.hidden_size)

    def hidden(self, states: Tensor) -> Tensor:
        """The draft's states [n, H] as wide as the target's head reads them."""
        return self._fit("head", states, self.width)

    def _fit(self, name: str, x: Tensor, width: int) -> Tensor:
        if name in self.maps:
            return F.linear(x, self.maps[name].to(x))
        return F.pad(x, (0, width - x.shape[-1]))  # negative padding cuts


def make_bridge(folder: Path, spec: DraftSpec, width: int, device: torch.device) -> Bridge:
    """The bridge from a target of ``width``. Raises WeightsError for maps of other sizes."""
    file = folder / FILE
    maps = load_file(file) if file.is_file() else {}
    wanted = {
        "features": (spec.target_hidden_size, width),
        "embedding": (spec.hidden_size, width),
        "head": (width, spec.hidden_size),
    }
    for name, tensor in maps.items():
        if name not in wanted or tuple(tensor.shape) != wanted[name]:
            shapes = ", ".join(f"{key} {list(shape)}" for key, shape in wanted.items())
            raise WeightsError(f"{file} has {name} {list(tensor.shape)}; it may have {shapes}")
    return Bridge(spec, width, {name: tensor.to(device) for name, tensor in maps.items()})
