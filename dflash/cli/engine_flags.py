"""Flags for what single backends can be told, the same in every command that opens a pair.

A command takes them all in one parameter, ``engine_flags``; `with_engine_flags` puts the flags in
its place. One that was not given is not in the configuration, so that a pair on another backend is
refused for those that were, instead of ignoring them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from dflash.errors import ConfigError

LLAMA = "llama.cpp (gguf)"
OWN = "engine_flags"
Given = Mapping[str, Any] | None
"""Type of that parameter."""


def _llama(name: str, help_: str, **more: Any) -> Any:
    return typer.Option(f"--{name.replace('_', '-')}", rich_help_panel=LLAMA, help=help_, **more)


FLAGS: Mapping[str, Any] = {
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
        int | None, _llama("threads_batch", "CPU threads for prompts; default: --threads.")
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


def with_engine_flags(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` with these flags where it has ``engine_flags``, a mapping of those given.

    Raises ConfigError for a value that is none.
    """

    @wraps(command)
    def run(**given: Any) -> None:
        asked = {name: given.pop(name) for name in FLAGS}
        command(**given, engine_flags=_settled({k: v for k, v in asked.items() if v is not None}))

    hints = get_type_hints(command, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    taken = inspect.signature(command).parameters.values()
    own = [p.replace(annotation=hints[p.name], kind=keyword) for p in taken if p.name != OWN]
    more = [inspect.Parameter(n, keyword, default=None, annotation=a) for n, a in FLAGS.items()]
    place = next(i for i, p in enumerate(taken) if p.name == OWN)
    run.__signature__ = inspect.Signature([*own[:place], *more, *own[place:]])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in (*own, *more)}
    return run


def load_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of ``dflash.load`` for the flags that were given."""
    gguf = {name: value for name, value in given.items() if name != "draft_bits"}
    bits = {"draft_bits": given["draft_bits"]} if "draft_bits" in given else {}
    return {**bits, **({"gguf": gguf} if gguf else {})}


def _settled(given: dict[str, Any]) -> dict[str, Any]:
    """Numbers of layers as numbers."""
    for name in ("n_gpu_layers", "draft_n_gpu_layers"):
        value = given.get(name)
        if value is None or value in ("auto", "all"):
            continue
        if not value.removeprefix("-").isdecimal():
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f'{flag} must be a number of layers, "auto" or "all", got {value!r}')
        given[name] = int(value)
    return given
