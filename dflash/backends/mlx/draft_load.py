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
from dflash.backends.mlx.load import DTYPES, LoadedTarget
from dflash.doctor.static import Choice
from dflash.draft_parts import check_borrowed, check_head, draft_format, reduced_ids
from dflash.drafts.spec import DraftSpec, Taps, read_spec
from dflash.errors import ConfigError
from dflash.model_folders import draft_folder
from dflash.target_facts import settle

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
    kind = draft_format(dtype, str(target.dtype).rpartition(".")[2])
    folder = draft_folder(path)
    spec = read_spec(folder, taps=taps, num_target_layers=target.num_layers)
    warnings = settle(spec, target, Choice(path, kind, window))
    model, own = load_weights(folder, spec, DTYPES[kind])
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


def make_tables(spec: DraftSpec, target: LoadedTarget, own: dict[str, Any]) -> Tables:
    """Embedding and head from the target, or from ``own`` where the draft brought them.

    Raises PairError if borrowed tables are of another width, WeightsError if the draft's own do not
    fit its config.
    """
    embed, head = own.get("embed_tokens.weight"), own.get("lm_head.weight")
    if embed is None or head is None:
        check_borrowed(spec, target.hidden_size)
    rows, distances = target.vocab_size, own.get("d2t")
    ids = None if distances is None else mx.array(reduced_ids(spec, distances.tolist(), rows))
    if head is not None:
        wanted = rows if ids is None else ids.size
        check_head(spec, head.shape, wanted, reduced=ids is not None)
    return Tables(
        embed=target.embed if embed is None else lambda ids: embed[ids],
        head=_head(target, head, ids),
        rows=rows,
        scale=spec.embedding_scale_for(str(target.config.get("model_type", ""))),
        target_ids=ids,
        mask_row=own.get("mask_embedding"),
    )


def _head(target: LoadedTarget, own: Any, ids: Any) -> Any:
    """Hidden states [n, H] to logits of the head's rows."""
    if own is not None:
        return lambda hidden: hidden.astype(own.dtype) @ own.T
    borrowed, dtype = target.head, target.dtype
    if ids is None:
        return lambda hidden: borrowed(hidden.astype(dtype))
    return lambda hidden: borrowed(hidden.astype(dtype))[..., ids]
