"""Open a draft beside its target: config, checks of the pair, weights, borrowed tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from dflash.backends.mlx.dflash_session import Tables
from dflash.backends.mlx.draft_weights import load_weights
from dflash.backends.mlx.kinds import KINDS
from dflash.backends.mlx.load import LoadedTarget, pick_dtype, resolve
from dflash.doctor.static import Choice, TargetFacts, check_pair, insist
from dflash.doctor.static.name import tokenizer_digest
from dflash.doctor.static.template import template_digest
from dflash.drafts.spec import DraftSpec, Taps, read_spec
from dflash.errors import ConfigError, PairError, WeightsError

GROUP = 32  # weights that share a scale


@dataclass(frozen=True)
class LoadedDraft:
    """A draft ready to run beside its target."""

    model: Any
    tables: Tables
    name: str  # what the user asked for
    window: int | None = None
    warnings: tuple[str, ...] = ()
    bits: int | None = None  # of its quantised linear layers; None = as they were stored

    @property
    def spec(self) -> DraftSpec:
        """The draft's config."""
        spec: DraftSpec = self.model.spec
        return spec

    def open(self) -> Any:
        """A fresh session."""
        return KINDS.load(self.spec.kind).session(self.model, self.tables, window=self.window)

    def bytes(self) -> int:
        """Bytes of the weights; the target's tables are the target's."""
        return sum(int(array.nbytes) for _, array in tree_flatten(self.model.parameters()))


def load_draft(
    path: str,
    target: LoadedTarget,
    dtype: str | None = None,
    *,
    window: int | None = None,
    taps: Taps = None,
    bits: int | None = None,
) -> LoadedDraft:
    """Open the draft at ``path`` (a folder or a hub id) for ``target``.

    ``dtype`` None follows the target; ``bits`` quantises its linear layers. Raises CheckpointError,
    WeightsError, PairError, ConfigError, DownloadError.
    """
    kind = pick_dtype(dtype, target.dtype)
    folder = resolve(path)
    spec = read_spec(folder, taps=taps, num_target_layers=target.num_layers)
    warnings = settle(spec, target, Choice(path, str(kind).rpartition(".")[2], window))
    model, own = load_weights(folder, spec, kind)
    quantise(model, bits)
    return LoadedDraft(model, make_tables(spec, target, own), path, window, warnings, bits)


def quantise(model: Any, bits: int | None) -> None:
    """Linear layers to ``bits`` a weight, in place; None leaves them. Raises ConfigError.

    Norms, tables and a selector's codebooks stay as they are.
    """
    if bits is None:
        return
    linear = [m for _, m in model.named_modules() if isinstance(m, nn.Linear)]
    if odd := [m.weight.shape[-1] for m in linear if m.weight.shape[-1] % GROUP]:
        raise ConfigError(
            f"draft_bits works on {GROUP} weights at a time, and this draft has rows of {odd[0]}: "
            "leave it out"
        )
    nn.quantize(model, GROUP, bits, class_predicate=lambda _, part: isinstance(part, nn.Linear))
    mx.eval(model.parameters())


def settle(spec: DraftSpec, target: LoadedTarget, choice: Choice) -> tuple[str, ...]:
    """What is odd about the pair, in sentences. Raises PairError with all that is wrong."""
    facts = target_facts(target, digest=spec.tokenizer_digest is not None)
    return insist(check_pair(spec, facts, choice), facts, choice)


def target_facts(target: LoadedTarget, *, digest: bool = False) -> TargetFacts:
    """What the static checks need to know of a loaded target."""
    tokenizer = target.tokenizer
    known = digest and tokenizer is not None
    return TargetFacts(
        name=target.name,
        hidden_size=target.hidden_size,
        num_layers=target.num_layers,
        embedding_rows=target.vocab_size,
        tokenizer_size=None if tokenizer is None else len(tokenizer),
        eos_ids=target.eos_ids,
        pad_id=getattr(tokenizer, "pad_token_id", None),
        tokenizer_digest=tokenizer_digest(tokenizer.get_vocab()) if known else None,
        template_digest=template_digest(getattr(tokenizer, "chat_template", None)),
    )


def make_tables(spec: DraftSpec, target: LoadedTarget, own: dict[str, Any]) -> Tables:
    """Embedding and head from the target, or from ``own`` where the draft brought them.

    Raises PairError if borrowed tables are of another width, WeightsError if the draft's own do not
    fit its config.
    """
    embed, head = own.get("embed_tokens.weight"), own.get("lm_head.weight")
    if target.hidden_size != spec.hidden_size and (embed is None or head is None):
        raise PairError(
            f"the draft is {spec.hidden_size} wide and borrows the embedding and head of a target "
            f"that is {target.hidden_size} wide; it would need its own"
        )
    rows = target.vocab_size
    ids = _target_ids(own.get("d2t"), rows)
    if head is not None and head.shape != (rows if ids is None else ids.size, spec.hidden_size):
        raise WeightsError(f"the draft's lm_head.weight is {list(head.shape)}, which fits nothing")
    return Tables(
        embed=target.embed if embed is None else lambda ids: embed[ids],
        head=_head(target, head, ids),
        rows=rows,
        scale=spec.embedding_scale_for(str(target.config.get("model_type", ""))),
        target_ids=ids,
        mask_row=own.get("mask_embedding"),
    )


def _target_ids(delta: Any, rows: int) -> Any:
    """Target id of each row of a reduced head; the file stores the distance to the row's own."""
    if delta is None:
        return None
    ids = delta.astype(mx.int32) + mx.arange(delta.size)
    known: list[int] = ids.tolist()
    if min(known) < 0 or max(known) >= rows or len(set(known)) < len(known):
        raise WeightsError(
            f"d2t does not map the draft's vocabulary to distinct target ids below {rows}; it must "
            "hold target id minus draft id"
        )
    return ids


def _head(target: LoadedTarget, own: Any, ids: Any) -> Any:
    """Hidden states [n, H] to logits of the head's rows."""
    if own is not None:
        return lambda hidden: hidden.astype(own.dtype) @ own.T
    borrowed, dtype = target.head, target.dtype
    if ids is None:
        return lambda hidden: borrowed(hidden.astype(dtype))
    return lambda hidden: borrowed(hidden.astype(dtype))[..., ids]
