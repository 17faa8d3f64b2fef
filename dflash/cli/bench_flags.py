"""The flags of ``dflash bench`` and ``dflash sweep``, and what they name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash.cli import options as o
from dflash.cli.groups import Flag, Given, Group
from dflash.cli.output import note
from dflash.config import parse_block_size

if TYPE_CHECKING:
    from dflash.bench.prompts import Conversation

PROMPTS, RUN, SERVER = "Prompts", "Run", "Server"


def option(panel: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, **more)


Dataset = Annotated[
    list[str] | None,
    option(
        PROMPTS,
        "--dataset",
        metavar="NAME",
        help="gsm8k, math500, humaneval, mbpp, mt-bench, alpaca, or any set in --data-dir; a comma "
        "or a second --dataset adds one. Left out, with --prompts too: a small mixed set.",
    ),
]
DataDir = Annotated[
    Path | None,
    option(PROMPTS, "--data-dir", metavar="DIR", help="Folder with NAME.jsonl instead of the hub."),
]
Prompts = Annotated[
    list[Path] | None,
    option(
        PROMPTS, "--prompts", metavar="FILE", help="JSONL with 'prompt' or 'turns'; repeatable."
    ),
]
MaxSamples = Annotated[
    int | None,
    option(PROMPTS, "--max-samples", min=1, metavar="N", help="Prompts of each set at most."),
]
Thinking = Annotated[
    bool | None,
    option(
        PROMPTS,
        "--enable-thinking/--disable-thinking",
        help="Tell the chat template; left out: its own default.",
    ),
]
BlockSizes = Annotated[
    str | None,
    option(RUN, "--block-sizes", metavar="1,4,8,auto", help="Default: the common sizes and auto."),
]
Repeats = Annotated[int, option(RUN, "--repeats", min=1, metavar="N", help="Times each text runs.")]
Warmup = Annotated[
    int, option(RUN, "--warmup", min=0, metavar="N", help="Answers of each arm that do not count.")
]
Against = Annotated[
    str | None,
    option(
        RUN,
        "--against",
        metavar="A,B",
        help="Other ways and programs on the same prompts: ngram, float16, transformers, "
        "transformers-dflash, prompt-lookup, reference-wheel, llama.cpp.",
    ),
]
Quick = Annotated[
    bool, option(RUN, "--quick", help="3 prompts a set, 48 tokens, 2 repeats, 120 seconds at most.")
]
Seconds = Annotated[
    float | None,
    option(
        RUN,
        "--seconds",
        metavar="S",
        help="End the measuring after S seconds: prompts that are complete count.",
    ),
]
Resume = Annotated[bool, option(RUN, "--resume", help="Go on with what --out already holds.")]
NoCosts = Annotated[
    bool, option(RUN, "--no-costs", help="Leave out the cost curve and the machine's limits.")
]
Out = Annotated[
    Path | None,
    option(o.OUT, "--out", metavar="DIR", help="Gets report.html, report.json and records.jsonl."),
]
WriteConfig = Annotated[
    bool,
    option(
        o.OUT, "--write-config", help="Make the recommended block the draft's default_block_size."
    ),
]
BaseUrl = Annotated[
    str | None,
    option(SERVER, "--base-url", metavar="URL", help="Measure this OpenAI-compatible server."),
]
BaselineUrl = Annotated[
    str | None,
    option(SERVER, "--baseline-url", metavar="URL", help="The same model served without a draft."),
]
ApiKey = Annotated[str | None, option(SERVER, "--api-key", metavar="KEY", help="Bearer token.")]
Concurrency = Annotated[
    int, option(RUN, "--concurrency", min=1, metavar="N", help="Requests at a time.")
]

PROMPT_FLAGS = Group(
    {
        "dataset": Flag(Dataset),
        "data_dir": Flag(DataDir),
        "prompts": Flag(Prompts),
        "max_samples": Flag(MaxSamples),
    }
)
"""Which texts are asked for."""


def block_sizes(text: str | None) -> list[int | str] | None:
    """``--block-sizes``; None = left out. Raises ConfigError."""
    if text is None:
        return None
    return [parse_block_size(part.strip(), "--block-sizes") for part in text.split(",")]


def conversations(given: Given) -> list[Conversation]:
    """What the prompt flags name. Raises ConfigError, DownloadError."""
    from dflash.bench.prompts import load

    names = [part for text in given["dataset"] or () for part in text.split(",") if part]
    return load(names, given["data_dir"], given["prompts"] or (), given["max_samples"])


def write_default(draft: str | None, block_size: int) -> None:
    """Make ``block_size`` the default of ``draft``. Raises ConfigError."""
    from dflash.bench.lock import lock

    note(f"default_block_size {block_size} written to {lock(draft, block_size)}")
