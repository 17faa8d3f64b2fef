"""Drafts from one published format to another, checked by running both.

Formats: ``hf`` (z-lab's: DFlash v1 and DFlash2), ``speculators`` (vLLM), ``eagle`` (EAGLE,
SpecForge), ``mlx`` and ``gguf`` (llama.cpp's sidecars, one file). No weight is computed with:
tensors keep their bits, unless a sidecar is asked for quantised. Nothing of an input is executed.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dflash import demo
from dflash.config import DEMO, path_name
from dflash.convert import eagle, gguf, hf, mlx, speculators
from dflash.convert.check import Side, Trial, compare
from dflash.convert.draft import Draft
from dflash.convert.known import unknown_keys
from dflash.convert.target import fitted, tables_of
from dflash.drafts.keys import read_config
from dflash.errors import CheckpointError, ConfigError
from dflash.gguf_file import is_gguf

FORMATS = ("hf", "speculators", "eagle", "mlx", "gguf")
MEANT = {"safetensors": "hf", "huggingface": "hf", "vllm": "speculators", "llama.cpp": "gguf"}


@dataclass(frozen=True, slots=True)
class Conversion:
    """What was done."""

    source: str
    found: str  # format of the source
    made: str  # format of the result
    kind: str  # dflash, dflash2, eagle3
    out: str  # what to give to --draft
    tensors: int
    notes: tuple[str, ...]  # what a person should know
    trial: Trial

    def to_json(self) -> dict[str, Any]:
        """Plain values by field name."""
        return asdict(self)


def convert(
    source: str | Path,
    to: str,
    out: str | Path,
    *,
    target: str | Path | None = None,
    stored: str | None = None,
) -> Conversion:
    """Write the draft at ``source`` (a folder or a sidecar) to ``out`` (the same) as ``to``.

    A sidecar needs the .gguf file of its ``target``, whose tokenizer it carries; its matrices are
    of the type ``stored`` (`gguf.STORED`), or as they are. "demo" is the demo draft, and as
    ``target`` the demo target, which a sidecar of that draft takes by itself.
    ``target`` is the target's folder, or its .gguf file. Its embedding and head are stored too
    (``speculators``; a folder), or left out of the result where the draft has copies of them
    (``hf``, ``mlx``), and a config that does not say how deep the target is is told. Raises
    ConfigError, CheckpointError, WeightsError, PairError, MissingBackend; nothing is left at
    ``out`` then.
    """
    place, goal = _place("source", source), _place("out", out)
    if target is None and to == "gguf" and place == demo.DRAFT_FOLDER:
        target = DEMO
    pair = None if target is None else _place("target", target)
    found = format_of(place)
    _check(to, goal, pair, stored)
    before = fitted(read(place, found), to, pair)
    if to == "gguf":
        assert pair is not None, "checked"
        before = gguf.settled(before, pair)
    try:
        goal.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise ConfigError(f"{goal} cannot be written: {problem.strerror}") from problem
    with tempfile.TemporaryDirectory(prefix=f".{goal.name}-", dir=goal.parent) as spare:
        made = Path(spare) / goal.name
        _write(before, to, made, pair, stored)
        after = _narrowed(read(made, format_of(made)), before)
        trial = compare(
            Side(before, _runnable(place, found)),
            Side(after, _runnable(made, to)),
            stored,
        )
        if goal.is_dir():
            goal.rmdir()  # it is empty: _check saw to it
        shutil.move(made, goal)
    notes = _notes(before, to, trial)
    return Conversion(
        str(place), found, to, before.kind, str(goal), len(after.tensors), notes, trial
    )


def _place(role: str, name: Any) -> Path:
    """The path that ``name`` means; "demo" is the half of the demo pair that ``role`` asks for."""
    text = path_name(role, name)
    if not text:
        raise ConfigError(f"{role} is empty: give a path")
    if text == DEMO and role != "out":
        return demo.demo_target() if role == "target" else demo.demo_draft()
    return Path(text).expanduser()


def format_of(place: Path) -> str:
    """The format of what lies at ``place``. Raises CheckpointError."""
    if place.is_file() and is_gguf(place.name):
        return "gguf"
    if place.is_file():
        raise CheckpointError(f"{place} is one file, and no .gguf file; give the draft's folder")
    if not place.is_dir():
        raise CheckpointError(
            f"{place} is no draft folder (fetch a hub id first: dflash pull NAME)"
        )
    if not (place / "config.json").is_file():
        raise CheckpointError(f"{place} has no config.json")
    config = read_config(place)
    if "speculators_model_type" in config:
        return "speculators"
    return "eagle" if any("Eagle3" in str(n) for n in config.get("architectures") or ()) else "hf"


def read(place: Path, found: str) -> Draft:
    """The draft at ``place``, which is of format ``found``."""
    readers = {"speculators": speculators.read, "gguf": gguf.read}
    return readers.get(found, hf.read)(place)


def _narrowed(draft: Draft, source: Draft) -> Draft:
    """``draft`` with its numbers in the types of ``source`` where these hold them.

    A sidecar keeps numbers, not always bits: norms are F32 in it.
    """
    kinds = {name: tensor.dtype for name, tensor in source.tensors.items()}
    tensors = {name: one.narrowed(kinds.get(name, "F32")) for name, one in draft.tensors.items()}
    return replace(draft, tensors=tensors)


def _check(to: str, goal: Path, target: Path | None, stored: str | None) -> None:
    if to not in FORMATS:
        meant = f" For {to} say to={MEANT[to]!r}." if to in MEANT else ""
        raise ConfigError(f"unknown format {to!r}. Known: {', '.join(FORMATS)}.{meant}")
    if to == "gguf" and (target is None or not is_gguf(target.name)):
        raise ConfigError(
            "a GGUF sidecar carries its target's tokenizer: name the target's .gguf file "
            "(target=FILE)"
        )
    if to == "gguf" and not is_gguf(goal.name):
        raise ConfigError(f"a sidecar is one file: name it with .gguf at the end, not {goal}")
    if stored is not None and (to != "gguf" or stored not in gguf.STORED):
        raise ConfigError(
            f"stored={stored!r}: a type is for to='gguf', and one of {', '.join(gguf.STORED)}"
        )
    if goal.exists() and (not goal.is_dir() or any(goal.iterdir())):
        raise ConfigError(f"{goal} exists already: name a place that is free")


def _write(draft: Draft, to: str, out: Path, target: Path | None, stored: str | None) -> None:
    if to == "gguf":
        assert target is not None, "checked"
        gguf.write(draft, out, target, stored or draft.tensors["fc.weight"].dtype)
    elif to == "speculators":
        speculators.write(draft, out, {} if target is None else tables_of(target, draft))
    else:
        {"hf": hf, "eagle": eagle, "mlx": mlx}[to].write(draft, out)


def _runnable(place: Path, layout: str) -> Path | None:
    """The folder itself where the backends load it as it is."""
    pickled = (place / "mask_embedding.pt").exists()
    return None if layout in ("eagle", "gguf") or pickled else place


def _notes(draft: Draft, to: str, trial: Trial) -> tuple[str, ...]:
    unknown = unknown_keys(draft.config)
    notes = [*draft.notes]
    if unknown:
        notes.append(f"config keys that nothing here knows, kept as they are: {', '.join(unknown)}")
    if trial.lost:
        notes.append(f"{to} has no place for: {', '.join(trial.lost)}")
    if trial.backend is None:
        notes.append(
            f"not run: no installed backend runs {draft.kind} drafts alone; tensors and config "
            "were compared"
        )
    if to == "mlx" and (beyond := mlx.beyond_upstream(draft)):
        notes.append(beyond)
    if to == "speculators" and draft.kind == "eagle3" and draft.keys.get("target_name") is None:
        notes.append(
            "the speculators library loads it only with its target's name: add target_name"
        )
    if draft.mask_embedding is not None and to == "speculators":
        notes.append("mask_embedding.safetensors lies beside it, which other readers do not open")
    return tuple(notes)
