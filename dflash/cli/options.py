"""The flags that mean the same in every command, and how they become configs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dflash import env
from dflash.cli.engine_flags import load_options
from dflash.cli.output import note
from dflash.cli.text_options import shape
from dflash.config import (
    GenerateConfig,
    GenerateOptions,
    LoadOptions,
    from_options,
    parse_block_size,
)
from dflash.errors import ConfigError, PromptError
from dflash.prompt import insist_on_text

if TYPE_CHECKING:
    from dflash.engine import Engine

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
        metavar="ID|FOLDER|ngram|none",
        help="Draft that proposes; ngram = look-up in the text so far, X+ngram = both, "
        "none = plain decoding. Left out: the demo model's draft.",
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
Threads = Annotated[int | None, pair_option("--threads", metavar="N", help="CPU threads.")]
TrustRemoteCode = Annotated[
    bool, pair_option("--trust-remote-code", help="Run Python code that comes with the target.")
]
NoProfile = Annotated[
    bool,
    pair_option("--no-profile", help="Neither use nor keep measurements of this pair's speed."),
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


def settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of ``Engine.stream`` from a command's parameters, checked. Raises ConfigError.

    The flags come before DFLASH_BLOCK_SIZE, which comes before the draft's own default.
    """
    given = _with_preset(given)
    names = [name for name in GenerateOptions.__annotations__ if name in given]
    options = {name: given[name] for name in names} | shape(given)
    size = given["block_size"]
    options["block_size"] = None if size is None else parse_block_size(size)
    if size is None and given["draft_tokens"] is None:
        options["block_size"] = _from_environment(given)
    insist_on_text(given["system"] or "", "the system message")
    from_options(GenerateConfig, options)  # before a minute of loading, not after
    return {**options, "chat_template": not given["no_chat_template"], "system": given["system"]}


def _with_preset(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """What ``--profile`` says, under what the other flags say. Raises UnknownName."""
    if given.get("preset") is None:
        return given
    from dflash.speculative import SpeculativeConfig

    preset = SpeculativeConfig.profile(given["preset"])
    found = dict(given)
    if given["block_size"] is None and given["draft_tokens"] is None:
        found["draft_tokens"] = preset.draft_tokens_per_step
    if given["min_acceptance_rate"] is None:
        found["min_acceptance_rate"] = preset.min_acceptance_rate
    found["strict_mode"] = given["strict_mode"] or preset.strict_mode
    return found


def _from_environment(given: Mapping[str, Any]) -> int | Literal["auto"] | None:
    """DFLASH_BLOCK_SIZE; its "auto" gives way to a rule for fixed blocks that was asked for."""
    size = env.block_size()
    return None if size == "auto" and given.get("min_acceptance_rate") is not None else size


def open_engine(given: Mapping[str, Any]) -> Engine:
    """The engine that a command's parameters name. Raises whatever ``dflash.load`` raises."""
    from dflash.engine import load

    options: Any = {name: given[name] for name in LoadOptions.__annotations__ if name in given}
    options |= load_options(given.get("engine_flags") or {})
    options["profile"] = not given.get("no_profile", False)
    if given.get("no_mtp", False):
        options["mtp"] = False
    engine = load(given["model"], given["draft"], **options)
    if engine.pair.draft_name is None and given["draft"] is None:
        note("no draft for this target, so plain decoding: --draft names one")
    return engine


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the argument, standard input (``-``) or a file.

    One newline at the very end is the editor's or the shell's, and dropped. Raises ConfigError,
    and PromptError when there is nothing but space.
    """
    if prompt is not None and file is not None:
        raise ConfigError("give a prompt or --prompt-file, not both")
    if file is not None:
        text = _read_file(file).removesuffix("\n")
    elif prompt is None:
        raise ConfigError('give a prompt: dflash generate "...", or - to read it from a pipe')
    else:
        keep_bytes()
        text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    insist_on_text(text)
    if not text.strip():
        raise PromptError("the prompt is empty: give some text")
    return text


def keep_bytes() -> None:
    """Read standard input as the shell hands arguments over: no byte is lost, none is an error."""
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")


def _read_file(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as problem:
        raise ConfigError(f"cannot read --prompt-file {file}: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--prompt-file {file} is not UTF-8 text") from None
