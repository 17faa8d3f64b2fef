"""The flags that mean the same in every command."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dflash.cli.groups import Flag, Group

PAIR, TEXT, OUT = "Pair", "Text", "Output"


def _flag(name: str) -> Any:
    def remember(ctx: typer.Context, value: bool) -> bool:
        ctx.meta[f"dflash.{name}"] = value  # the door reads it when a command raises
        return value

    return remember


def pair_option(*names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=PAIR, **more)


def _text(*names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=TEXT, **more)


def _out(*names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=OUT, **more)


Model = Annotated[
    str | None,
    pair_option(
        "--model",
        "--target",
        "-m",
        metavar="ID|FOLDER|GGUF",
        help="Target whose text is kept. Left out: the demo model.",
    ),
]
Draft = Annotated[
    str | None,
    pair_option(
        "--draft",
        "--draft-model",
        "-d",
        metavar="ID|FOLDER|GGUF|ngram|none",
        help="Draft that proposes; ngram = look-up in the text so far, X+ngram = both, "
        "mtp = heads inside the target, none = plain decoding (where a command can do without). "
        "Left out: the demo draft beside the demo model, else heads inside the target, if any.",
    ),
]
Backend = Annotated[
    str, pair_option("--backend", metavar="NAME", help="auto, torch, gguf, mlx or toy.")
]
Device = Annotated[
    str | None,
    pair_option("--device", metavar="NAME", help="cpu, cuda, cuda:1, mps. Default: the best."),
]
Dtype = Annotated[
    str | None,
    pair_option("--dtype", metavar="NAME", help="float32, bfloat16 or float16 (target only)."),
]
Weights = Annotated[
    str | None,
    pair_option(
        "--weights",
        metavar="NAME",
        help="Keep weights in fewer bytes, rounded: float16, bfloat16 or int8 (torch).",
    ),
]
Window = Annotated[
    int | None,
    pair_option(
        "--draft-sliding-window-size",
        metavar="W",
        help="Bound the draft's history to W tokens.",
    ),
]
Taps = Annotated[
    str | None,
    pair_option(
        "--taps",
        metavar="auto|1,8,15",
        help="Tapped layers of the target, for a draft whose config does not say.",
    ),
]
ForceDFlash = Annotated[
    bool,
    pair_option(
        "--force-dflash",
        help="Use a draft made for a target of another width: features are cut or filled up.",
    ),
]
Threads = Annotated[
    int | None,
    pair_option(
        "--threads",
        metavar="N",
        help="CPU threads. Default: all that the process may use; with torch, what torch takes "
        "(OMP_NUM_THREADS).",
    ),
]
TrustRemoteCode = Annotated[
    bool, pair_option("--trust-remote-code", help="Run Python code that comes with the target.")
]
NoProfile = Annotated[
    bool,
    pair_option("--no-profile", help="Neither use nor keep measurements of this pair's speed."),
]
NoCudaGraphs = Annotated[
    bool,
    pair_option("--no-cuda-graphs", help="On CUDA, launch every kernel by itself (torch)."),
]
Compile = Annotated[
    bool,
    pair_option("--compile", help="On CUDA, compile passes of a few rows first: minutes (torch)."),
]
NoMtp = Annotated[
    bool,
    pair_option("--no-mtp", help="Leave multi-token prediction heads inside the target unused."),
]

MaxTokens = Annotated[int, _text("--max-tokens", "-n", help="New tokens at most.")]
Temperature = Annotated[float, _text("--temperature", "-t", help="0 = the likeliest token.")]
TopK = Annotated[int, _text("--top-k", help="Sample among the K likeliest; 0 = off.")]
TopP = Annotated[float, _text("--top-p", help="Sample among the likeliest that make up P.")]
Seed = Annotated[int | None, _text("--seed", help="Same seed, same text.")]
Stop = Annotated[
    list[str] | None, _text("--stop", help="Text that ends the answer; may be repeated.")
]
IgnoreEos = Annotated[bool, _text("--ignore-eos", help="Go on to --max-tokens whatever happens.")]
System = Annotated[str | None, _text("--system", help="System message.")]
NoChatTemplate = Annotated[
    bool, _text("--no-chat-template", help="Continue the prompt as it stands.")
]
BlockSize = Annotated[
    str | None,
    _text(
        "--block-size",
        metavar="N|auto",
        help="Rows of one verify pass: 1 anchor + drafts. 1 = plain decoding.",
    ),
]
DraftTokens = Annotated[
    int | None, _text("--draft-tokens", metavar="K", help="The same without the anchor.")
]
MinAcceptanceRate = Annotated[
    float | None,
    _text(
        "--min-acceptance-rate",
        metavar="RATE",
        help="Give a fixed block (4 drafts if none is named) up while fewer are accepted.",
    ),
]
DraftPath = Annotated[
    str, _text("--draft-path", metavar="walk|best", help="How a draft with a selector chooses.")
]
DraftPMin = Annotated[
    float, _text("--draft-p-min", metavar="P", help="Stop drafting below this probability.")
]
DraftTree = Annotated[
    str,
    _text(
        "--draft-tree",
        metavar="N|auto",
        help="Judge N candidates a pass as a tree, as deep as the block; 0 = chains.",
    ),
]
Strict = Annotated[
    bool,
    _text("--strict", help="Keep a draft only where it is the target's own sample."),
]
Preset = Annotated[
    str | None,
    _text(
        "--profile",
        metavar="conservative|aggressive",
        help="2 or 8 drafts, given up below 0.5 or 0.15 accepted; the former --strict.",
    ),
]
ShowDrafts = Annotated[bool, _out("--show-drafts", help="Show which text the draft made.")]
Json = Annotated[
    bool, _out("--json", callback=_flag("json"), is_eager=True, help="One JSON object instead.")
]
Debug = Annotated[
    bool, _out("--debug", callback=_flag("debug"), is_eager=True, help="Tracebacks on errors.")
]

PAIR_FLAGS = Group(
    {
        "model": Flag(Model),
        "draft": Flag(Draft),
        "backend": Flag(Backend, "auto"),
        "device": Flag(Device),
        "dtype": Flag(Dtype),
        "weights": Flag(Weights),
        "draft_sliding_window_size": Flag(Window),
        "taps": Flag(Taps),
        "threads": Flag(Threads),
        "trust_remote_code": Flag(TrustRemoteCode, False),
        "no_cuda_graphs": Flag(NoCudaGraphs, False),
        "compile": Flag(Compile, False),
    }
)
"""What every command that opens a pair takes."""
