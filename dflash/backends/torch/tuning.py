"""A target made fast before it is handed out: layers fused, weights packed, the result compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers

from dflash.backends.torch import checked
from dflash.backends.torch.cache import make_cache
from dflash.backends.torch.dense import Facts, facts_of, fits, read_dense
from dflash.backends.torch.forward import make_forward
from dflash.backends.torch.fused import FuseReport, differs, fuse_model
from dflash.backends.torch.fused import why_not as why_not_fused
from dflash.backends.torch.memory import guard
from dflash.backends.torch.packed import PackReport, joint_report, pack_model
from dflash.backends.torch.reading import LOAD_ERRORS, FiniteCheck, explain

ROWS, MORE = 9, 3  # of the check of fused layers: a prompt, then a few rows behind it
UNFUSED = (
    "the target's fused layers give other logits with transformers {} and torch {}, so its own "
    "run, which take longer; please report this"
)

Opened: TypeAlias = tuple[Any, PackReport, FuseReport]


@dataclass(frozen=True)
class Source:
    """Where a model comes from, and what it is to become."""

    name: str  # what the user asked for
    read: Callable[[], Any]  # transformers' model, on its device
    config: Mapping[str, Any]  # what config.json holds
    dtype: torch.dtype
    device: torch.device
    weights: str | None = None  # a form of `narrow.WEIGHTS`
    folder: Path | None = None  # to build it from without transformers' class (`dense.py`)
    then: Callable[[Any], None] = lambda _: None  # told the config of what was built so

    @property
    def place(self) -> Path:
        """The file that stands for it in `checked`."""
        made = "whole" if self.folder is None else "built"
        how = (str(self.dtype), self.device.type, str(self.weights), made)
        return checked.place(self.config, how)

    def build(self, facts: Facts) -> Any:
        """The model without transformers' class of it. Raises CheckpointError, OutOfMemory."""
        assert self.folder is not None, "`fits` said that there is none"
        try:
            with guard(f"loading {self.folder}"):
                model = read_dense(self.folder, facts, self.dtype, self.device)
        except LOAD_ERRORS as error:
            raise explain(self.folder, error) from error
        self.then(model.config)
        return model

    def fits(self, facts: Facts | None) -> bool:
        """Whether it can be built from ``facts``."""
        return facts is not None and self.folder is not None and fits(self.folder, facts)


def as_it_is(source: Source) -> Opened:
    """Read and checked, otherwise untouched."""
    model = source.read()
    _check(model, FiniteCheck(source.name))
    return model, PackReport(reason="switched off"), FuseReport(reason="switched off")


def tuned(source: Source) -> Opened:
    """Fused where that changes no logit, packed where it can be."""
    noted = checked.known(source.place)
    facts: Any = noted and noted["facts"]
    if source.fits(facts):
        model = source.build(facts)
        return model, *_settle(model, source)
    model = _grouped(source)
    reason = why_not_fused(model)
    if reason:
        return model, *_settle(model, source, FuseReport(reason=reason))
    if noted:
        return model, *_settle(model, source)
    facts, before = facts_of(model), _sample_logits(model)
    if source.fits(facts):
        del model  # so that two are never there at once
        model = source.build(facts)
    packed, fused = _settle(model, source)
    if not differs(before, _sample_logits(model), source.dtype, source.weights):
        checked.remember(source.place, facts)
        return model, packed, fused
    del model  # the weights are in the fused layers now: start again from the files
    model = _grouped(source)
    reason = "fused layers give other logits with this version of transformers"
    warning = UNFUSED.format(transformers.__version__, torch.__version__)
    return model, *_settle(model, source, FuseReport(reason=reason, warning=warning))


def _grouped(source: Source) -> Any:
    from dflash.backends.torch.grouped import group_attention  # imports transformers' models

    model = source.read()
    group_attention(model)
    return model


def _sample_logits(model: Any) -> torch.Tensor:
    """Logits [ROWS + MORE, V] of some ids: without a past, then behind one."""
    size = int(model.get_input_embeddings().weight.shape[0])
    ids = [size * row // (ROWS + MORE + 1) for row in range(1, ROWS + MORE + 1)]
    forward, cache = make_forward(model), make_cache(model.config, ROWS + MORE)
    with torch.inference_mode():
        return torch.cat([forward(part, cache, 0).float() for part in (ids[:ROWS], ids[ROWS:])])


def _settle(
    model: Any, source: Source, fused: FuseReport | None = None
) -> tuple[PackReport, FuseReport]:
    """Check, fuse and pack the weights. One walk: files are mapped, read once, freed."""
    check, reports = FiniteCheck(source.name), list[PackReport]()

    def pack(part: Any) -> None:
        reports.append(pack_model(part, weights=source.weights))

    if fused is None:
        fused = fuse_model(model, pack, check.look)
    reports.append(pack_model(model, check.look, source.weights))
    _check(model, check)
    return joint_report(reports), fused


def _check(model: Any, check: FiniteCheck) -> None:
    for key, weight in model.named_parameters():
        check.look(key, weight)
    check.done()
