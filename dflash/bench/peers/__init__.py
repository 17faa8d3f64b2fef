"""Other programs as arms: each in a process of its own, on the same target, prompts and clock."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dflash.bench.arms import engine_arm
from dflash.bench.peers import environment
from dflash.bench.peers.process import Peer
from dflash.bench.peers.sidecar import sidecar_of
from dflash.bench.trial import Contestant, on_ids
from dflash.config import NGRAM, split_draft
from dflash.engine import Engine, load
from dflash.errors import ConfigError, MissingBackend

Spec = dict[str, Any]  # what a worker is told
FLOAT16 = "float16"
NAMES = (
    NGRAM,
    FLOAT16,
    "transformers",
    "transformers-dflash",
    "prompt-lookup",
    "reference-wheel",
    "llama.cpp",
)
WITH_DRAFT = ("transformers-dflash", "reference-wheel")


def open_peers(
    stack: ExitStack,
    names: Sequence[str],
    engine: Engine,
    sampling: Mapping[str, Any],
    say: Callable[[str], None],
) -> dict[str, Contestant]:
    """Arms for ``names``, closed with ``stack``.

    Raises ConfigError (unknown name, sampling, a pair the program cannot run), MissingBackend and
    DownloadError (its environment), and CheckpointError (it did not start).
    """
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise ConfigError(f"--against {unknown[0]} is not known; {', '.join(NAMES)} are")
    if sampling.get("temperature"):
        raise ConfigError("other programs are compared at temperature 0: leave out --temperature")
    found: dict[str, Contestant] = {}
    for name in names:
        say(f"starting {name} ...")
        if name == NGRAM:
            found[name] = _ours(stack, engine, sampling, draft=NGRAM)
            continue
        if name == FLOAT16:
            draft = engine.pair.draft_name or "none"
            found[name] = _ours(stack, engine, sampling, draft=draft, weights=FLOAT16)
            continue
        for arm, python, told in _workers(name, engine):
            told |= {"ignore_eos": bool(sampling.get("ignore_eos"))}
            found[arm] = stack.enter_context(Peer(arm, python, told)).answer
    return found


def _ours(
    stack: ExitStack, engine: Engine, sampling: Mapping[str, Any], draft: str, **more: Any
) -> Contestant:
    """Our own auto with another draft or other weights, on the same target loaded once more."""
    options: Any = {"profile": False, "draft": draft, **more}
    if "dtype" in engine.pair.runs_on():
        options["dtype"] = engine.pair.runs_on()["dtype"]
    other = stack.enter_context(load(engine.pair.target_name, **options))
    return on_ids(engine_arm(other, "auto", **sampling))


def _workers(name: str, engine: Engine) -> list[tuple[str, Path, Spec]]:
    """(arm, interpreter, what the worker is told) of one program."""
    told: Spec = {"kind": name, "eos": sorted(engine.pair.eos_ids), "threads": _threads(engine)}
    here = Path(sys.executable)
    if name == "llama.cpp":
        return _llama(engine, told, here)
    told |= {"target": _folder(engine)}
    if name in WITH_DRAFT:
        model = split_draft(engine.pair.draft_name or "none")[0]
        if not Path(model).is_dir():
            raise ConfigError(f"{name} needs a DFlash draft in a local folder, and this is {model}")
        told |= {"draft": str(Path(model).resolve())}
    python = environment.reference() if name == "reference-wheel" else here
    return [(name, python, told)]


def _llama(engine: Engine, told: Spec, python: Path) -> list[tuple[str, Path, Spec]]:
    target = Path(engine.pair.target_name)
    if target.suffix != ".gguf":
        raise ConfigError(f"llama.cpp needs a .gguf file as target, and this is {target}")
    if importlib.util.find_spec("xllamacpp") is None:
        raise MissingBackend("llama.cpp as an arm needs one more package: pip install xllamacpp")
    told |= {"target": str(target.resolve())}
    drafts: dict[str, Spec] = {"llama.cpp": {}, "llama.cpp ngram": {"drafts": "ngram"}}
    file = sidecar_of(engine.pair.draft_name, target)
    if file is not None:
        drafts["llama.cpp dflash"] = {"drafts": str(file)}
    return [(arm, python, {**told, **more}) for arm, more in drafts.items()]


def _folder(engine: Engine) -> str:
    """The target as transformers loads it; a .gguf file in the form that our backend made of it."""
    name = engine.pair.target_name
    if not name.endswith(".gguf"):
        return name
    from dflash.backends.torch.gguf import convert

    return str(convert(Path(name)))


def _threads(engine: Engine) -> int | None:
    found = engine.pair.runs_on().get("threads")
    return int(found.split(" ")[0]) if found else None
