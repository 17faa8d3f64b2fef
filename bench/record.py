"""The flags of the measurements, beside the arithmetic that `dflash bench` shares with them."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

from dflash.bench.guards import in_circles
from dflash.bench.record import bootstrap, conditions, write

__all__ = ["bootstrap", "conditions", "in_circles", "parser", "write"]


def parser(doc: str | None, tokens: int, prompts: int) -> ArgumentParser:
    """The flags that all measurements take; help is the module's docstring."""
    flags = ArgumentParser(description=(doc or "").partition("\n")[0])
    flags.add_argument("--target", default="demo", help="folder, hub id, .gguf file or demo")
    flags.add_argument("--draft", default=None, help="draft folder; left out: the target's own")
    flags.add_argument("--tokens", type=int, default=tokens, help="new tokens a prompt at most")
    flags.add_argument("--prompts-per-set", type=int, default=prompts)
    flags.add_argument("--threads", type=int, default=2)
    flags.add_argument("--out", type=Path, default=None, help="where to write the JSON")
    return flags
