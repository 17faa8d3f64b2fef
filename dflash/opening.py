"""From names to an open pair: which target and draft are meant, which backend runs them.

Nothing here loads weights itself; a backend does, found by name.
"""

from __future__ import annotations

import platform
import warnings
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from dflash.config import DEMO, MTP, NO_DRAFT, GgufOptions, LoadConfig, join_draft, split_draft
from dflash.core.protocols import Pair
from dflash.drafts.keys import Keys
from dflash.drafts.spec import read_spec
from dflash.errors import CheckpointError, ConfigError, missing
from dflash.gguf_file import insist_on_gguf, is_gguf, kept_config, read_header
from dflash.hub import hub_config, is_hub_id
from dflash.ngram_pair import NgramPair
from dflash.registry import BACKENDS


def pair_names(target: str | None, draft: str | None) -> tuple[str, str | None]:
    """The pair that is meant when one or both are left out, or called "demo".

    Nothing given: the demo pair. A draft alone: the target that its config names; "none" and
    "ngram" alone: the demo target. Raises ConfigError when the draft does not say, DownloadError
    when the demo target cannot be fetched.
    """
    model, ngram = (None, False) if draft is None else split_draft(draft)
    if target is None and model not in (None, NO_DRAFT, DEMO, MTP):
        target = _target_of(model)
    if target is None or target == DEMO:
        from dflash import demo

        target = str(demo.demo_target())
        model = DEMO if model is None else model
    if model == DEMO:
        from dflash import demo

        model = str(demo.demo_draft())
    return target, join_draft(model, True) if ngram and model is not None else model


def _target_of(draft: str) -> str:
    """The target in the draft's config; that of a hub id is fetched to see it."""
    if _homes(draft) == ["toy"]:
        raise ConfigError(f"draft {draft} is of the built-in fake: name its target, target='toy'")
    place = Path(draft).expanduser()
    if not place.exists() and not is_hub_id(draft):
        raise CheckpointError(f"no such draft folder: {draft} (a hub id is written owner/name)")
    sidecar = is_gguf(draft)
    if place.is_file() and not sidecar:
        raise CheckpointError(f"{draft} is one file, not a draft folder; give a folder")
    name = _named_by_sidecar(place) if sidecar else _named_by_folder(draft, place)
    if name is None:
        raise ConfigError(
            f"draft {draft} does not say which target it is for: name it (target=NAME)"
        )
    from dflash.demo import HUB_ID

    if name == HUB_ID and not Path(name).exists():
        return DEMO
    if sidecar and not is_gguf(name):
        raise ConfigError(
            f"draft {draft} was made for {name}: name that model's .gguf file (target=FILE)"
        )
    return name


def _named_by_folder(draft: str, place: Path) -> str | None:
    return read_spec(place if place.exists() else hub_config(draft)).target_name


def _named_by_sidecar(file: Path) -> str | None:
    """What a file that we converted keeps of the draft's config; None in files of others."""
    name = Keys(kept_config(read_header(file))).get("target_name")
    return name if isinstance(name, str) and name else None


def backend_of(config: LoadConfig) -> str:
    """The backend a pair runs on. Raises ConfigError when target and draft are of two, and
    CheckpointError for a file that the gguf backend is to open and that is of another kind.

    Asked for nothing, a GGUF target runs on llama.cpp, with a GGUF draft, a look-up or none; a
    draft folder takes it to torch or MLX, which read its weights out of the file, and so do
    settings that only torch has, and a missing llama.cpp. What torch would run goes to MLX on
    Apple Silicon.
    """
    if config.backend == "gguf" and (place := Path(config.target).expanduser()).is_file():
        insist_on_gguf(place)
    target, model = _homes(config.target), _model_of(config)
    alone = model in (None, MTP)  # heads inside the target are at home where it is
    both = target if alone else [name for name in target if name in _homes(str(model), True)]
    if not both:
        raise ConfigError(
            f"target {config.target} is for the {' or '.join(target)} backend and draft {model} "
            f"for the {' or '.join(_homes(str(model), True))} backend: both must be of one"
        )
    if config.backend == "auto":
        first = "torch" if "torch" in both and _asks_for_torch(config) else both[0]
        return "mlx" if first == "torch" and _prefers_mlx(config) else first
    if config.backend in BACKENDS.names() and config.backend not in both:
        named = config.target if config.backend not in target else model
        hint = "Leave backend out"
        if config.backend == "gguf" and named == model:
            hint = f"Convert it ({_conversion(str(named))}), or use draft='ngram', or draft='none'"
        raise ConfigError(
            f"{named} is for the {' or '.join(both)} backend, not for {config.backend}. {hint}"
        )
    return config.backend


def _conversion(draft: str) -> str:
    """The command that makes a sidecar of ``draft``; the demo draft's target is known."""
    from dflash import demo

    if Path(draft) == demo.DRAFT_FOLDER:
        return "dflash convert demo --to gguf --out draft.gguf"
    return f"dflash convert {draft} --to gguf --target TARGET.gguf --out draft.gguf"


def _insist_on_home(config: LoadConfig, backend: str) -> None:
    """Raise ConfigError for a setting that ``backend`` would not look at."""
    given = {
        "draft_bits": ("mlx", config.draft_bits is not None),
        "weights": ("torch", config.weights is not None),
        "compile": ("torch", config.compile),
        "gguf": ("gguf", config.gguf != GgufOptions()),
    }
    for name, (home, said) in given.items():
        if said and backend != home:
            what = {"gguf": "settings of llama.cpp are", "weights": "weights are"}.get(name)
            what = what or f"{name} is"
            them = "them" if what.endswith(" are") else "it"
            able = home in _homes(config.target) and home in _homes(_model_of(config) or "", True)
            raise ConfigError(
                f"{what} for the {home} backend, and this pair runs on {backend}: leave {them} out"
                + (f", or add backend={home!r}" if able else "")
            )


def _prefers_mlx(config: LoadConfig) -> bool:
    """On Apple Silicon with mlx-lm installed, unless a device says torch."""
    apple = (platform.system(), platform.machine()) == ("Darwin", "arm64")
    return apple and config.device is None and find_spec("mlx_lm") is not None


def _homes(name: str, draft: bool = False) -> list[str]:
    """Backends that open ``name``, the one to choose first."""
    if name == "toy" or name.startswith("toy:"):
        return ["toy"]
    if not is_gguf(name):
        return ["torch", "mlx"]
    if draft:
        return ["gguf"]
    readers = (
        ["mlx", "torch"] if find_spec("mlx_lm") and not find_spec("torch") else ["torch", "mlx"]
    )
    llama = find_spec("xllamacpp") or find_spec("llama_cpp")  # either runs the gguf backend
    if not llama and find_spec({"mlx": "mlx_lm"}.get(readers[0], readers[0])):
        return [readers[0], "gguf", readers[1]]
    return ["gguf", *readers]


def _asks_for_torch(config: LoadConfig) -> bool:
    """Whether a setting says so; the CPU is everybody's device."""
    settings = (config.dtype, config.draft_dtype, config.weights, config.compile or None)
    elsewhere = config.device not in (None, "cpu")
    return elsewhere or any(setting is not None for setting in settings)


def _model_of(config: LoadConfig) -> str | None:
    """The draft that is a model: what a backend opens."""
    return None if config.draft is None else join_draft(split_draft(config.draft)[0], False)


def open_pair(config: LoadConfig) -> Pair:
    """The pair behind ``config``, opened by its backend; n-gram drafting is added here, to all."""
    name = backend_of(config)
    _insist_on_home(config, name)
    try:
        opener = BACKENDS.load(name)
    except ModuleNotFoundError as problem:
        if problem.name is None or problem.name.split(".")[0] == "dflash":
            raise
        raise missing(f"backend {name!r} needs {problem.name}", name) from problem
    pair: Pair = opener(replace(config, draft=_model_of(config)))
    for message in getattr(pair, "warnings", ()):
        warnings.warn(message, UserWarning, stacklevel=2)
    ngram = config.draft is not None and split_draft(config.draft)[1]
    return cast(Pair, NgramPair(pair)) if ngram else pair
