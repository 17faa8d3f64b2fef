"""The multi-token prediction head inside a target, which mlx-lm leaves out, as a draft in MLX.

One more decoder block behind the target: the row of position P joins the embedding of token P + 1
with the target's last state of P *after* its final norm, and says what follows token P + 1; a chain
goes on with the head's own output. Source: DeepSeek-V3 (arXiv 2412.19437, section 2.2).
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx import nn

from dflash.backends.mlx import lm
from dflash.backends.mlx.cache import Caches
from dflash.backends.mlx.dflash import DraftModule, blank
from dflash.drafts.spec import DraftSpec

EVERYTHING = 1 << 30  # rows of a window that never ends


class MtpModule(DraftModule):
    """The head; embedding and output head are the target's."""

    def __init__(self, spec: DraftSpec, block: Any, cache: type, eps: float) -> None:
        """``block`` is a decoder layer of mlx-lm's, taken over; ``cache`` is of the kind it uses.

        Weights are NaN until loaded.
        """
        super().__init__(spec)
        width = spec.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=False)
        for name in ("embed_norm", "state_norm", "norm"):
            setattr(self, name, nn.RMSNorm(width, eps=eps))
        self.block = block
        self._kind = cache
        blank(self)

    def cache(self) -> Caches:
        """Room for keys and values of the block, empty."""
        return Caches(None, [self._kind()])

    def fuse(self, features: Any) -> Any:
        """The target's last states are read as they are."""
        return features

    def rows(self, embedded: Any, state: Any, caches: Caches) -> Any:
        """[1, n, H]: rows behind those in ``caches``, of tokens one position on and states."""
        read = mx.concatenate([self.embed_norm(embedded), self.state_norm(state)], axis=-1)
        count = embedded.shape[1]
        mask = lm.causal_mask(count, caches.length, EVERYTHING)
        out = self.block(self.fc(read), mask=mask, cache=caches.layers[0])
        caches.length += count
        return self.norm(out)
