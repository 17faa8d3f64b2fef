"""Flags for what single backends can be told, the same in every command that opens a pair.

One that was not given is not in the configuration, so that a pair on another backend is refused for
those that were, instead of ignoring them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from dflash.cli.groups import Flag, Group
from dflash.errors import ConfigError

LLAMA = "llama.cpp (gguf)"


def _llama(name: str, help_: str, **more: Any) -> Any:
    return typer.Option(f"--{name.replace('_', '-')}", rich_help_panel=LLAMA, help=help_, **more)


_ANNOTATIONS: Mapping[str, Any] = {
    "draft_bits": Annotated[
        int | None,
        typer.Option(
            "--draft-bits", metavar="4|8", rich_help_panel="Pair", help="Quantise the draft (mlx)."
        ),
    ],
    "n_ctx": Annotated[int | None, _llama("n_ctx", "Tokens of a context; default: as trained.")],
    "n_batch": Annotated[int | None, _llama("n_batch", "Rows of a decode call; default 512.")],
    "n_ubatch": Annotated[int | None, _llama("n_ubatch", "Rows computed at once; default 512.")],
    "threads_batch": Annotated[
        int | None,
        _llama("threads_batch", "CPU threads for prompts and blocks; else --threads."),
    ],
    "n_gpu_layers": Annotated[
        str | None, _llama("n_gpu_layers", "Layers on a GPU; default auto.", metavar="N|auto|all")
    ],
    "draft_n_gpu_layers": Annotated[
        str | None, _llama("draft_n_gpu_layers", "The same for the draft.", metavar="N|auto|all")
    ],
    "type_k": Annotated[
        str | None, _llama("cache_type_k", "Format of cached keys; default f16.", metavar="TYPE")
    ],
    "type_v": Annotated[
        str | None, _llama("cache_type_v", "Format of cached values; default f16.", metavar="TYPE")
    ],
    "flash_attn": Annotated[
        str | None, _llama("flash_attn", "Flash attention; default auto.", metavar="on|off|auto")
    ],
    "draft_n_min": Annotated[int | None, _llama("draft_n_min", "Throw shorter drafts away.")],
}
"""Parameter to its annotation; but for ``draft_bits`` they are fields of `GgufOptions`."""


def load_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of ``dflash.load`` for the flags that were given."""
    gguf = {name: value for name, value in given.items() if name != "draft_bits"}
    bits = {"draft_bits": given["draft_bits"]} if "draft_bits" in given else {}
    return {**bits, **({"gguf": gguf} if gguf else {})}


def idle_layers(gguf: Mapping[str, Any], runs_on: Mapping[str, str]) -> Iterator[str]:
    """What to say of layers that were to run on a GPU where there is none."""
    for name in ("n_gpu_layers", "draft_n_gpu_layers"):
        if gguf.get(name, "auto") not in (0, "auto") and runs_on["device"].startswith("cpu"):
            flag = f"--{name.replace('_', '-')} {gguf[name]}"
            yield f"{flag}: this build of llama.cpp has no GPU, so they run on the CPU"


def _settled(values: dict[str, Any]) -> dict[str, Any]:
    """Those that were given, numbers of layers as numbers. Raises ConfigError for what is none."""
    given = {name: value for name, value in values.items() if value is not None}
    for name in ("n_gpu_layers", "draft_n_gpu_layers"):
        value = given.get(name)
        if value is None or value in ("auto", "all"):
            continue
        if not value.removeprefix("-").isdecimal():
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f'{flag} must be a number of layers, "auto" or "all", got {value!r}')
        given[name] = int(value)
    return given


FLAGS = Group({name: Flag(annotation) for name, annotation in _ANNOTATIONS.items()}, _settled)
