"""One pass of a target over the rows behind its cache: through transformers or past its outer part.

What transformers does around the layers (arguments, masks for every kind of cache, positions,
records of outputs) costs some milliseconds a pass. For a model whose layers `fused.py` replaced it
is a screen's length, and the same for every family there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash.backends.torch.cache import PreallocatedCache
from dflash.backends.torch.decoder import Stack, multiply_of
from dflash.backends.torch.features import FINAL_NORM, Taps
from dflash.backends.torch.fused import FusedLayer
from dflash.backends.torch.places import Places
from dflash.backends.torch.slots import FixedSlot, OuterSlot, Slot
from dflash.backends.torch.tree import Branches, tree_bias
from dflash.backends.torch.upload import upload


class Forward(Protocol):
    """How sessions run a target."""

    device: torch.device

    def __call__(
        self,
        rows: Sequence[int] | Tensor,
        cache: PreallocatedCache,
        keep: int,
        taps: Taps | None = None,
        tree: Branches | None = None,
    ) -> Tensor:
        """Logits ``[n, V]`` of the last ``keep`` of ``rows`` (0 = all); the cache grows by all.

        ``taps`` then hold the states of all rows. The rows are a chain, or the ``tree``: for models
        that `tree_check.why_no_trees` says nothing of.
        """


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
        self.like = model.get_input_embeddings().weight
        self.device = self.like.device

    def __call__(
        self,
        rows: Sequence[int] | Tensor,
        cache: PreallocatedCache,
        keep: int,
        taps: Taps | None = None,
        tree: Branches | None = None,
    ) -> Tensor:
        """Logits ``[n, V]`` of the last ``keep`` rows (0 = all)."""
        ids = upload(rows, self.device)[None]
        options: dict[str, Any] = {self._cache: cache, "use_cache": True}
        if tree is not None:
            options["position_ids"] = (cache.length + tree.depths)[None]
            options["attention_mask"] = tree_bias(tree, cache.length, self.like)[None, None]
        if self._keep:
            options["logits_to_keep"] = keep
        if self._keep and keep and self._shares:
            # layers that share keys (Gemma 4) leave rows out for a number, but not for places,
            # and a draft may tap any row of them
            options["logits_to_keep"] = torch.arange(ids.shape[1], device=self.device)[-keep:]
        with nullcontext() if taps is None else taps.capture():
            logits: Tensor = self._model(input_ids=ids, **options).logits[0]
        cache.ran(ids.shape[1])
        return logits[-keep:] if keep else logits


class FusedForward:
    """Embedding, fused layers, norm and head of a dense family, called directly."""

    def __init__(self, model: Any) -> None:
        """``model`` has `FusedLayer` layers only."""
        decoder = model.get_decoder()
        eps = float(decoder.norm.variance_epsilon)
        self.stack = Stack(decoder.layers, decoder.norm.weight, eps)
        self._table = decoder.embed_tokens.weight
        self.logits: Callable[[Tensor], Tensor] = multiply_of(model.lm_head)
        first = self.stack.first
        self.places: Places = decoder.rotary_emb.places(first, self._table)
        self.keys, self.like = first.keys, self._table.new_empty(first.head_dim)
        self.device = self._table.device

    def __call__(
        self,
        rows: Sequence[int] | Tensor,
        cache: PreallocatedCache,
        keep: int,
        taps: Taps | None = None,
        tree: Branches | None = None,
    ) -> Tensor:
        """Logits ``[n, V]`` of the last ``keep`` rows (0 = all)."""
        ids, start = upload(rows, self.device), cache.length
        count, more = ids.shape[0], self.more(ids.shape[0])
        if tree is None:
            bias = self.places.bias(start, start + count)
            turns = self.places.turns(start, start + count + more)
        else:
            turns, bias = self.places.branching(start, tree, more)
        x = self.through(ids, turns, bias, cache.append(count, self.like, self.keys), taps)
        if not keep or keep >= count:
            return self.logits(x)[:count]
        return self.logits(x[count - keep : count])

    def more(self, count: int) -> int:
        """Rows to be added to ``count`` for speed alone."""
        return max(0, self.stack.least - count)

    def through(
        self,
        ids: Tensor,  # [n]
        turns: Tensor,  # [n + more, 1, D/2]
        bias: Tensor | None,
        slots: Iterable[Slot | FixedSlot | OuterSlot],  # one a layer
        taps: Taps | None,
    ) -> Tensor:  # [n + more, H]
        """Normed states of the last layer; `more` rows are there for speed alone."""
        count = ids.shape[0]
        more = turns.shape[0] - count
        x = F.embedding(F.pad(ids, (0, more)) if more else ids, self._table)
        tap = None if taps is None or not taps.layers else taps.tap(count)
        x = self.stack(x, turns, bias, slots, tap)
        if tap is not None:
            tap(FINAL_NORM, x)
        return x
