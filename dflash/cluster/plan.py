"""What to serve, in our words; each engine's renderer puts it into its own.

Engines count differently. A plan holds ``block_size``, rows of one verify pass with the anchor:

    vLLM          num_speculative_tokens        draft_tokens = block_size - 1
    llama.cpp     --spec-draft-n-max            draft_tokens
    SGLang        --speculative-num-draft-tokens   block_size, for every method
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dflash.checks import at_least
from dflash.config import BlockSize
from dflash.errors import ConfigError

Method = Literal["dflash", "dflash2", "eagle3", "mtp"]


@dataclass(frozen=True, slots=True)
class Plan:
    """A pair that was looked at, and how it shall be served."""

    target: str  # folder, hub id or GGUF file
    method: Method | None = None  # None = plain decoding
    draft: str | None = None  # None with a method: the target brings the heads itself (mtp)
    block_size: int = 1  # anchor included
    mixed_attention: bool = False  # the draft has sliding and full layers
    host: str = "127.0.0.1"
    port: int = 8000
    tensor_parallel: int = 1  # devices that share one copy of the target
    data_parallel: int = 1  # copies
    window: int | None = None  # draft_sliding_window_size
    device: str | None = None
    dtype: str | None = None
    served_name: str | None = None  # of the model, in requests
    asked: BlockSize = None  # block size as it was asked for; our own engine knows "auto"
    notes: tuple[str, ...] = ()  # what is odd about the pair
    extra: tuple[str, ...] = ()  # the engine's own flags, handed on unread

    def __post_init__(self) -> None:
        """Refuse impossible values. Raises ConfigError."""
        for name in ("tensor_parallel", "data_parallel", "block_size"):
            at_least(1, name, getattr(self, name))
        if not 0 < self.port < 65536:
            raise ConfigError(f"port must be 1 to 65535, got {self.port}")
        if self.method is not None and self.block_size < 2:
            raise ConfigError(
                "a block of 1 drafts nothing: use 2 or more, or --draft none for plain decoding"
            )

    @property
    def draft_tokens(self) -> int:
        """Drafted tokens of a pass: the block without its anchor."""
        return self.block_size - 1


@dataclass(frozen=True, slots=True)
class Command:
    """How one engine is started."""

    engine: str
    argv: tuple[str, ...]
    url: str  # of the API, with /v1
    health: str  # answers 200 once requests are taken
    env: Mapping[str, str] = field(default_factory=dict)  # added to the environment
    files: Mapping[str, str] = field(default_factory=dict)  # name to text; argv names them
    notes: tuple[str, ...] = ()
    install: str = ""  # where the program comes from
    ending: str = "SIGTERM"  # the signal that it ends cleanly on
    stand_in: tuple[str, ...] = ()  # a package, and the argv that replaces a missing argv[0]

    def shell(self) -> str:
        """The command as one line for a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*variables, shlex.join(self.argv)])

    def to_json(self) -> dict[str, Any]:
        """Plain values by field name."""
        return {
            "engine": self.engine,
            "argv": list(self.argv),
            "env": dict(self.env),
            "files": dict(self.files),
            "url": self.url,
            "health": self.health,
            "notes": list(self.notes),
        }


def address(plan: Plan) -> str:
    """``http://host:port`` as a client on this machine reaches it."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(plan.host, plan.host)
    return f"http://{f'[{host}]' if ':' in host and host[0] != '[' else host}:{plan.port}"


def shared_flags(plan: Plan) -> list[str]:
    """What vLLM and SGLang spell alike."""
    found = ["--host", plan.host, "--port", str(plan.port)]
    if plan.tensor_parallel > 1:
        found += ["--tensor-parallel-size", str(plan.tensor_parallel)]
    if plan.data_parallel > 1:
        found += ["--data-parallel-size", str(plan.data_parallel)]
    if plan.dtype is not None:
        found += ["--dtype", plan.dtype]
    if plan.served_name is not None:
        found += ["--served-model-name", plan.served_name]
    return found


def no_gguf(plan: Plan, engine: str) -> None:
    """Refuse GGUF files for an engine that is given safetensors. Raises ConfigError."""
    for flag, name in (("--model", plan.target), ("--draft", plan.draft)):
        if name is not None and name.endswith(".gguf"):
            raise ConfigError(
                f"{engine} is given folders or hub ids, and {flag} {name} is a GGUF file: name "
                "the unquantised model, or use --engine llama-server"
            )


def no_window(plan: Plan, engine: str) -> None:
    """Refuse a draft window for an engine without such an option. Raises ConfigError."""
    if plan.window is not None:
        raise ConfigError(
            f"{engine} takes the draft's window from its config.json: leave "
            "--draft-sliding-window-size out, or set sliding_window there"
        )
