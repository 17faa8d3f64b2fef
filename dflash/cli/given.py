"""From a command's parameters to the engine and the configs that they name."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from dflash import env
from dflash.cli.engine_flags import idle_layers, load_options
from dflash.cli.output import note
from dflash.cli.text_options import shape
from dflash.config import (
    GenerateConfig,
    GenerateOptions,
    LoadOptions,
    from_options,
    parse_block_size,
    parse_draft_tree,
)
from dflash.errors import ConfigError, PromptError
from dflash.prompt import insist_on_text

if TYPE_CHECKING:
    from dflash.engine import Engine


def settings_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of ``Engine.stream`` from a command's parameters, checked. Raises ConfigError.

    The flags come before DFLASH_BLOCK_SIZE, which comes before the draft's own default.
    """
    given = _with_preset(given)
    names = [name for name in GenerateOptions.__annotations__ if name in given]
    options = {name: given[name] for name in names} | shape(given)
    size = given["block_size"]
    options["block_size"] = None if size is None else parse_block_size(size)
    from_environment = size is None and given["draft_tokens"] is None
    if from_environment:
        options["block_size"] = _from_environment(given)
    if "draft_tree" in given:
        options["draft_tree"] = parse_draft_tree(given["draft_tree"])
    insist_on_text(given["system"] or "", "the system message")
    _check(options, from_environment)
    return {**options, "chat_template": not given["no_chat_template"], "system": given["system"]}


def _check(options: Mapping[str, Any], from_environment: bool) -> None:
    """Before a minute of loading, not after. Raises ConfigError that names a variable at fault."""
    try:
        from_options(GenerateConfig, options)
    except ConfigError as problem:
        size = options["block_size"]
        if not from_environment or size is None:
            raise
        from_options(GenerateConfig, {**options, "block_size": None})  # what else may be wrong
        raise blamed(problem, size) from None


def blamed(problem: ConfigError, size: int | str) -> ConfigError:
    """``problem`` with the environment variable that it comes from."""
    return ConfigError(
        f"{problem} (the block size comes from DFLASH_BLOCK_SIZE={size}: unset it, or overrule it "
        "with --block-size)"
    )


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
    options["cuda_graphs"] = not given.get("no_cuda_graphs", False)
    if given.get("no_mtp", False):
        options["mtp"] = False
    engine = load(given["model"], given["draft"], **options)
    for line in idle_layers(options.get("gguf") or {}, engine.pair.runs_on()):
        note(line)
    if engine.pair.draft_name is None and given["draft"] is None:
        note("no draft for this target, so plain decoding: --draft names one")
    return engine


def insist_on_block(engine: Engine, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError, before anything is said, where ``settings`` ask for too large blocks."""
    from dflash.blocks import insist_on_room

    options = {name: settings[name] for name in GenerateOptions.__annotations__ if name in settings}
    insist_on_room(from_options(GenerateConfig, options).block, engine.pair)


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
        text = standard_input().read().removesuffix("\n") if prompt == "-" else prompt
    insist_on_text(text)
    if not text.strip():
        raise PromptError("the prompt is empty: give some text")
    return text


def standard_input() -> TextIO:
    """What is piped or typed, as the shell hands arguments over: no byte is lost, none an error.

    Raises ConfigError where it is closed.
    """
    if sys.stdin is None:  # Python's way of saying so
        raise ConfigError("standard input is closed, so there is nothing to read: leave out <&-")
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")
    return sys.stdin


def _read_file(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as problem:
        raise ConfigError(f"cannot read --prompt-file {file}: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--prompt-file {file} is not UTF-8 text") from None
