"""One pass of a target over the rows behind its cache: through transformers or past its outer part.

What transformers does around the layers (arguments, masks for every kind of cache, positions,
records of outputs) costs some milliseconds a pass. For a model whose layers `fused.py` replaced it
is a screen's length, and the same for every family there.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dflash.backends.torch.cache import PreallocatedCache
from dflash.backends.torch.fused import FusedLayer


class Forward(Protocol):
    """How sessions run a target."""

    device: torch.device

    def __call__(self, rows: Sequence[int] | Tensor, cache: PreallocatedCache, keep: int) -> Tensor:
        """Logits ``[n, V]`` of the last ``keep`` of ``rows`` (0 = all); the cache grows by all."""


def make_forward(model: Any) -> Forward:
    """The shortest way through ``model``."""
    layers = getattr(model.get_decoder(), "layers", None) if hasattr(model, "get_decoder") else None
    if layers is not None and all(isinstance(layer, FusedLayer) for layer in layers):
        return FusedForward(model)
    return ModelForward(model)


class ModelForward:
    """Through transformers; argument names differ between its versions."""

    def __init__(self, model: Any) -> None:
        """Look at the signature once."""
        names = inspect.signature(model.forward).parameters
        self._model = model
        spellings = ("cache", "cache_params", "past_key_values")
        self._cache = next((name for name in spellings if name in names), "past_key_values")
        self._keep = "logits_to_keep" in names
        text = model.config.get_text_config(decoder=True)
        self._shares = bool(getattr(text, "num_kv_shared_layers", 0))
        self.device = model.get_input_embeddings().weight.device

    def __call__(self, rows: Sequence[int] | Tensor, cache: PreallocatedCache, keep: int) -> Tensor:
        """Logits ``[n, V]`` of the last ``keep`` rows (0 = all)."""
        ids = torch.as_tensor(rows, device=self.device)[None]
        options: dict[str, Any] = {self._cache: cache, "use_cache": True}
        if self._keep:
            options["logits_to_keep"] = keep
        if self._keep and keep and self._shares:
            # layers that share keys (Gemma 4) leave rows out for a number, but not for places,
            # and a draft may tap any row of them
            options["logits_to_keep"] = torch.arange(ids.shape[1], device=self.device)[-keep:]
        logits: Tensor = self._model(input_ids=ids, **options).logits[0]
        cache.ran(ids.shape[1])
        return logits[-keep:] if keep else logits


class FusedForward:
    """Embedding, fused layers, norm and head of a dense family, called directly."""

    def __init__(self, model: Any) -> None:
        """``model`` has `FusedLayer` layers only."""
        decoder = model.get_decoder()
        self._embed, self._layers = decoder.embed_tokens, list(decoder.layers)
        self._turns, self._norm, self._head = decoder.rotary_emb, decoder.norm, model.lm_head
        self.device = self._embed.weight.device

    def __call__(self, rows: Sequence[int] | Tensor, cache: PreallocatedCache, keep: int) -> Tensor:
        """Logits ``[n, V]`` of the last ``keep`` rows (0 = all)."""
        ids, start = torch.as_tensor(rows, device=self.device)[None], cache.length
        x, end = self._embed(ids), start + ids.shape[1]
        turns = self._turns(x, torch.arange(start, end, device=self.device)[None])
        mask = causal_bias(start, end, x)
        for layer in self._layers:
            x = layer(x, mask, turns, cache=cache)
        cache.ran(end - start)
        logits: Tensor = self._head(self._norm(x[:, -keep:] if keep else x))[0]
        return logits


def causal_bias(start: int, end: int, like: Tensor) -> Tensor | None:
    """What is added to scores of rows start .. end - 1 over keys 0 .. end - 1: [1, 1, n, end].

    None where attention functions know by themselves: one row sees everything, and rows without a
    past are causal.
    """
    rows = end - start
    if rows == 1 or start == 0:
        return None
    bias = like.new_zeros(rows, end)
    bias[:, start:] = like.new_full((rows, rows), -torch.inf).triu_(1)
    return bias[None, None]
