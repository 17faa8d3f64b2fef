"""Open a draft beside its target: config, checks of the pair, weights, borrowed tables.

The draft runs in float32 or bfloat16, never float16. What is wrong with the pair is one PairError
that lists everything; what is merely odd comes back as ``LoadedDraft.warnings``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash.backends.torch import narrow
from dflash.backends.torch.bridge import Bridge, make_bridge
from dflash.backends.torch.dflash import DFlashDraftModel
from dflash.backends.torch.dflash_session import DFlashSession
from dflash.backends.torch.draft_fused import fuse_draft, sample_states
from dflash.backends.torch.draft_fused import why_not as why_not_fused
from dflash.backends.torch.draft_weights import load_weights
from dflash.backends.torch.fused import differs
from dflash.backends.torch.graphs import Graphs
from dflash.backends.torch.kinds import KINDS
from dflash.backends.torch.load import LoadedTarget
from dflash.backends.torch.packed import PackReport, pack_model, why_not_narrow
from dflash.backends.torch.tables import Tables
from dflash.doctor.static import Choice
from dflash.draft_parts import check_borrowed, check_head, draft_format, reduced_ids
from dflash.drafts.spec import DraftSpec, Taps, read_spec
from dflash.model_folders import draft_folder
from dflash.target_facts import settle

UNFUSED = (
    "the draft's fused layers give other states with torch {}, so its own run, which takes longer; "
    "please report this"
)


@dataclass(frozen=True)
class LoadedDraft:
    """A draft ready to run beside its target."""

    model: DFlashDraftModel
    tables: Tables
    name: str  # what the user asked for
    window: int | None = None
    warnings: tuple[str, ...] = ()
    packed: PackReport = field(default_factory=PackReport)

    @property
    def spec(self) -> DraftSpec:
        """The draft's config."""
        return self.model.spec

    def open(self, capacity: int, graphs: Graphs | None = None) -> DFlashSession:
        """A session with room for ``capacity`` context rows; its blocks replayed by ``graphs``."""
        make = KINDS.load(self.spec.kind).session
        session: DFlashSession = make(self.model, self.tables, capacity, window=self.window)
        return session.replay(graphs)

    @property
    def replayable(self) -> bool:
        """Whether its blocks can be replayed: they are of one pass, and see the whole context."""
        whole = self.window is None and "sliding_attention" not in self.spec.layer_types
        return whole and self.spec.eagle3 is None

    def why_no_trees(self) -> str:
        """Why its drafts are chains only; empty where they are not."""
        bounded = self.window is not None or self.spec.sliding_window is not None
        if self.spec.eagle3 is not None and bounded:
            return f"{self.name} runs again for each level of a tree, and its window does not"
        return ""

    def bytes(self) -> int:
        """Bytes of the weights; the target's tables are the target's."""
        size = sum(p.numel() * p.element_size() for p in self.model.parameters())
        return size + self.packed.bytes


def load_draft(  # noqa: PLR0913 - what LoadConfig says of the draft
    path: str,
    target: LoadedTarget,
    dtype: str | None = None,
    *,
    window: int | None = None,
    taps: Taps = None,
    pack: bool = True,
    force: bool = False,
) -> LoadedDraft:
    """Open the draft at ``path`` (a folder or a hub id) for ``target``.

    ``dtype`` None follows the target, bfloat16 where that is float16. ``window`` bounds the
    draft's history; None leaves it. ``taps`` as in `read_spec`. ``pack`` lets prepacked copies
    replace its linear layers on a CPU, see also `draft_form`. ``force`` takes a draft of another
    width, see `bridge`.
    Raises CheckpointError, WeightsError, PairError, ConfigError, DownloadError.
    """
    kind = draft_dtype(dtype, target.dtype)
    folder = draft_folder(path)
    spec = read_spec(folder, taps=taps, num_target_layers=target.num_layers)
    choice = Choice(path, dtype=str(kind).removeprefix("torch."), window=window, force=force)
    warnings = settle(spec, target, choice)

    def read() -> tuple[DFlashDraftModel, dict[str, Tensor]]:
        return load_weights(folder, spec, device=target.device, dtype=kind)

    model, own = read()
    bridge = None
    if force and spec.target_hidden_size != target.hidden_size:
        bridge = make_bridge(folder, spec, target.hidden_size, target.device)
    form = draft_form(dtype, target) if pack else None
    tables = make_tables(spec, target, own, bridge, form)
    report = PackReport(reason="switched off")
    if pack:
        model, report, notes = _tuned(model, lambda: read()[0], form)
        warnings += notes
    return LoadedDraft(model, tables, path, window, warnings, report)


def _tuned(
    model: DFlashDraftModel, again: Callable[[], DFlashDraftModel], form: str | None
) -> tuple[DFlashDraftModel, PackReport, tuple[str, ...]]:
    """``model`` packed where it can be, and fused where that changes no state; if not, a note."""
    if why_not_fused(model):
        return model, pack_model(model, weights=form), ()
    before = sample_states(model)
    fuse_draft(model)
    report = pack_model(model, weights=form)
    if differs(before, sample_states(model), model.norm.weight.dtype, form):
        model = again()  # its weights are in the fused layers now
        return model, pack_model(model, weights=form), (UNFUSED.format(torch.__version__),)
    return model, report, ()


def draft_form(asked: str | None, target: LoadedTarget) -> str | None:
    """The form of a draft's weights; None = as its dtype says.

    bfloat16 beside a float32 target on processors that multiply it, unless a dtype was ``asked``
    for: what a draft proposes is never the text, and its weights are stored in 16 bits anyway.
    """
    ours = asked is None and target.packed.layers and target.dtype == torch.float32
    fits = ours and narrow.fast_bfloat16() and not why_not_narrow("bfloat16")
    return "bfloat16" if fits else None


def draft_dtype(asked: str | None, target: torch.dtype) -> torch.dtype:
    """float32 or bfloat16. Raises ConfigError for float16 and for names that are none."""
    kind: torch.dtype = getattr(torch, draft_format(asked, str(target).removeprefix("torch.")))
    return kind


def make_tables(
    spec: DraftSpec,
    target: LoadedTarget,
    own: dict[str, Tensor],
    bridge: Bridge | None = None,
    form: str | None = None,
) -> Tables:
    """Embedding and head from the target, or from ``own`` where the draft brought them.

    Through ``bridge`` what is the target's gets the draft's width. ``form`` as in `draft_form`.
    Raises PairError if borrowed tables are of another width, WeightsError if the draft's own do
    not fit its config.
    """
    embed = own.get("embed_tokens.weight")
    ids = _target_ids(spec, target, own)
    borrows = embed is None or "lm_head.weight" not in own
    if borrows and bridge is None:
        check_borrowed(spec, target.hidden_size)
    mask_row, head = own.get("mask_embedding"), _head(spec, target, own, ids, (bridge, form))
    if embed is None:
        embed = target.embedding if bridge is None else bridge.embedding(target.embedding)
    return Tables(
        embed=embed.to(target.embedding),
        head=head,
        scale=spec.embedding_scale_for(getattr(target.config, "model_type", None)),
        target_ids=ids,
        rising=ids is not None and bool((ids[1:] > ids[:-1]).all()),
        mask_row=None if mask_row is None else mask_row.to(target.embedding),
        fit=None if bridge is None else bridge.features,
    )


def _target_ids(spec: DraftSpec, target: LoadedTarget, own: dict[str, Tensor]) -> Tensor | None:
    """Target id of each row of a reduced head; the file stores the distance to the row's own."""
    delta = own.get("d2t")
    if delta is None:
        return None
    ids = reduced_ids(spec, delta.tolist(), target.vocab_size)
    return torch.tensor(ids, device=target.device)


def _head(
    spec: DraftSpec,
    target: LoadedTarget,
    own: dict[str, Tensor],
    ids: Tensor | None,
    how: tuple[Bridge | None, str | None],
) -> Callable[[Tensor], Tensor]:
    """Hidden states to logits in the head's own dtype."""
    bridge, form = how
    rows = target.vocab_size if ids is None else ids.numel()
    weight = own.get("lm_head.weight")
    if weight is None and bridge is not None:
        whole = _as_callable(target.head, target.dtype)
        picked = slice(None) if ids is None else ids
        return lambda hidden: whole(bridge.hidden(hidden))[:, picked]
    if weight is None and ids is None:
        if form is None or getattr(target.head, "kind", "") in narrow.WEIGHTS or not _tied(target):
            return _as_callable(target.head, target.dtype)
        weight = target.embedding
    if weight is None:
        borrowed = _borrowed_rows(target)
        if borrowed is None:  # packed: the whole head runs, and its rows are picked
            packed = _as_callable(target.head, target.dtype)
            return lambda hidden: packed(hidden)[:, ids]
        weight = borrowed[ids]
    check_head(spec, weight.shape, rows, reduced=ids is not None)
    head = weight.to(target.device, target.dtype)
    if form is not None:
        dtype, multiply = head.dtype, narrow.narrow(head, form)
        return lambda hidden: multiply(hidden.to(dtype))
    return lambda hidden: F.linear(hidden.to(head.dtype), head)


def _tied(target: LoadedTarget) -> bool:
    return bool(getattr(target.config, "tie_word_embeddings", False))


def _borrowed_rows(target: LoadedTarget) -> Tensor | None:
    """The target head's matrix; None where it was packed, the embedding where the two are tied."""
    weight: Any = getattr(target.head, "weight", None)
    weight = weight if isinstance(weight, Tensor) else None  # a method in some quantised layers
    if weight is None and _tied(target):
        weight = target.embedding
    rows: Tensor | None = weight
    return rows


def _as_callable(head: nn.Module, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    if isinstance(head, nn.Embedding):  # a tied head handed out as the table itself
        table = head.weight
        return lambda hidden: F.linear(hidden.to(dtype), table)

    def apply(hidden: Tensor) -> Tensor:
        logits: Tensor = head(hidden.to(dtype))
        return logits

    return apply
