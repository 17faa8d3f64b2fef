"""Multi-token prediction heads inside a target (MTP, nextn) as a draft of its own.

One more decoder block behind the target: the row of position P joins the embedding of token P + 1
with the target's last state of P *after* its final norm, and says what follows token P + 1. Of
several heads each reads the output of the one before it and the token one further on: head k, from
0, joins row P with token P + 1 + k. Behind the last head a chain goes on with that head's own
output. Sources: DeepSeek-V3 (arXiv 2412.19437, section 2.2), transformers' ``use_mtp``, which this
reads the weights with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dflash.backends.torch.cache import PreallocatedCache, make_cache
from dflash.backends.torch.load import LoadedTarget
from dflash.backends.torch.memory import guard
from dflash.backends.torch.reading import LOAD_ERRORS, quiet
from dflash.backends.torch.upload import upload
from dflash.checkpoint import tensor_names
from dflash.drafts.mtp import count_heads, holds_heads, mtp_spec
from dflash.drafts.spec import DraftSpec
from dflash.errors import CheckpointError


def has_mtp(target: LoadedTarget) -> bool:
    """Whether the target's config speaks of heads and its checkpoint brings their tensors."""
    folder = Path(str(getattr(target.model.config, "name_or_path", "") or target.name))
    if not _count(target.config) or not folder.is_dir():
        return False
    return holds_heads(tensor_names(folder), target.num_layers)


class MtpDraft(nn.Module):
    """The head with the interface of a draft; embedding and head are the target's."""

    def __init__(self, heads: Any, spec: DraftSpec) -> None:
        """``heads`` is transformers' MtpModel, tied to the target."""
        super().__init__()
        self.spec = spec
        self.heads = heads
        self.norm = heads.layers[0].enorm  # for device and dtype

    @property
    def count(self) -> int:
        """Heads there are."""
        return len(self.heads.layers)

    def cache(self, capacity: int) -> HeadRows:
        """Keys and values of the blocks, one a head."""
        return HeadRows(make_cache(self.heads.config, capacity).layers[: self.count])

    def bytes(self) -> int:
        """Bytes of the weights that are not the target's."""
        return sum(int(weight.nbytes) for weight in self.heads.layers.parameters())

    def embed(self, ids: Tensor) -> Tensor:
        """[n] to [1, n, H]."""
        rows: Tensor = self.heads.embed_tokens(ids[None])
        return rows

    def forward(
        self, head: int, tokens: Tensor | Sequence[int], state: Tensor, cache: HeadRows
    ) -> Tensor:
        """[1, n, H]: the next rows of ``head``, with the tokens [n] that they read, into
        ``cache``."""
        ids = upload(tokens, state.device).long()
        places = cache.held(head) + 1 + head + torch.arange(ids.shape[0], device=state.device)
        out: Tensor = self.heads.forward_layer(
            head, state, places[None], cache, inputs_embeds=self.embed(ids).to(state)
        )
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, H] to [n, V], as the target's own head does it."""
        rows: Tensor = self.heads._project_to_logits(hidden)
        softcap = getattr(self.heads.config, "final_logit_softcapping", None)
        return rows if softcap is None else (rows / softcap).tanh() * softcap


class HeadRows(PreallocatedCache):
    """Keys and values of heads, of which each holds one row less than the one before it."""

    layers: Any

    def held(self, head: int) -> int:
        """Rows of one head."""
        return int(self.layers[head].length)

    def get_seq_length(self, layer_idx: int = 0, *_args: Any, **_options: Any) -> int:
        """Rows of one head, by the name that masks ask for."""
        return self.held(layer_idx)

    def rollback(self, length: int) -> None:
        """Keep the rows that have read none but the first ``length + 1`` tokens."""
        for head, layer in enumerate(self.layers):
            layer.length = min(layer.length, max(0, length - head))

    def copy(self) -> HeadRows:
        """An independent cache with the same rows."""
        with torch.inference_mode():
            return HeadRows([layer.copy() for layer in self.layers])


def read_mtp(target: LoadedTarget) -> MtpDraft:
    """The heads of ``target``. Raises CheckpointError where transformers cannot read them."""
    if not has_mtp(target):
        raise CheckpointError(
            f"{target.name} has no multi-token prediction heads (its config names none, or its "
            "files lack their tensors); leave out --draft mtp"
        )
    try:
        from transformers.modeling_layers import MtpModel

        with quiet(), _as_transformers_names(target.model.config), guard("loading MTP heads"):
            heads: Any = MtpModel.from_pretrained(target.model, device_map={"": target.device})
    except LOAD_ERRORS as error:
        raise CheckpointError(
            f"the multi-token prediction heads of {target.name} cannot be read by this version of "
            f"transformers ({type(error).__name__}: {error}). Use --no-mtp"
        ) from error
    return MtpDraft(heads.eval().requires_grad_(False), spec_of(target))


def spec_of(target: LoadedTarget) -> DraftSpec:
    """What the rest of the package wants to know of a draft; the stack is the target's."""
    config, heads = target.config, int(target.config.num_attention_heads)
    return mtp_spec(
        hidden_size=target.hidden_size,
        intermediate_size=int(getattr(config, "intermediate_size", 0) or 0),
        num_heads=heads,
        head_dim=int(getattr(config, "head_dim", None) or target.hidden_size // heads),
        vocab_size=target.vocab_size,
        num_layers=target.num_layers,
    )


def _count(config: Any) -> int:
    return count_heads(lambda name: getattr(config, name, None))


@contextmanager
def _as_transformers_names(config: Any) -> Iterator[None]:
    """Say what transformers' reader asks for, where a family's config has other words for it."""
    text = config.get_text_config(decoder=True)
    said = {"num_mtp_layers": _count(text), "mtp_layer_types": ["full_attention"] * _count(text)}
    missing = {name: value for name, value in said.items() if getattr(text, name, None) is None}
    for name, value in missing.items():
        setattr(text, name, value)
    try:
        yield
    finally:
        for name in missing:
            delattr(text, name)
