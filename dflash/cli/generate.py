"""``dflash generate``: one prompt, one answer."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash.cli import engine_flags as e
from dflash.cli import options as o
from dflash.cli import text_options as t
from dflash.cli.given import open_engine, read_prompt, settings_of
from dflash.cli.groups import Given, flat, with_groups
from dflash.cli.output import (
    TextWriter,
    as_json,
    closing_line,
    compared,
    comparison_line,
    emit_json,
    logprob_lines,
    status,
)
from dflash.config import NO_DRAFT
from dflash.errors import ConfigError
from dflash.generate_config import PLAIN
from dflash.results import joined

if TYPE_CHECKING:
    from dflash.engine import Engine
    from dflash.results import Chunk, Generation

WARM_UP = 16  # tokens; the first rounds of a process pay for allocations and lazy loading


@with_groups
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - = standard input.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", help="A file that holds the prompt.")
    ] = None,
    pair: Given = o.PAIR_FLAGS,
    force_dflash: o.ForceDFlash = False,
    engine_flags: Given = e.FLAGS,
    no_profile: o.NoProfile = False,
    no_mtp: o.NoMtp = False,
    max_tokens: o.MaxTokens = 256,
    temperature: o.Temperature = 0.0,
    top_k: o.TopK = 0,
    top_p: o.TopP = 1.0,
    shape: Given = t.SHAPE_FLAGS,
    logprobs: t.Logprobs = None,
    n: t.Count = 1,
    seed: o.Seed = None,
    stop: o.Stop = None,
    ignore_eos: o.IgnoreEos = False,
    system: o.System = None,
    no_chat_template: o.NoChatTemplate = False,
    block_size: o.BlockSize = None,
    draft_tokens: o.DraftTokens = None,
    min_acceptance_rate: o.MinAcceptanceRate = None,
    draft_path: o.DraftPath = "walk",
    draft_p_min: o.DraftPMin = 0.0,
    draft_tree: o.DraftTree = "0",
    strict_mode: o.Strict = False,
    preset: o.Preset = None,
    show_drafts: o.ShowDrafts = False,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Decode plainly too, and measure.", rich_help_panel=o.OUT),
    ] = False,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Answer one prompt. Without a model: the demo pair."""
    given = flat(locals())
    if compare and given["draft"] == NO_DRAFT:
        raise ConfigError("--compare measures a draft against none: leave out --draft none")
    if compare and seed is None:
        given["seed"] = secrets.randbits(32)  # both arms need the same noise
    text, settings = read_prompt(prompt, prompt_file), settings_of(given)
    with open_engine(given) as engine:
        job = Job(engine, text, settings)
        if compare:
            job.warm_up()
        answer = job.quiet() if json else job.aloud(show_drafts)
        plain = job.plain() if compare else None
        _conclude(job, answer, plain, json)


def _conclude(job: Job, answer: Generation, plain: Generation | None, json: bool) -> None:
    most: int = job.settings["max_tokens"]

    def named(token: int) -> str:
        text: str = job.engine.pair.tokenizer.decode([token])
        return text

    if json:
        emit_json({**as_json(answer, named), **(compared(answer, plain) if plain else {})})
        return
    for choice in answer.choices:
        for line in logprob_lines(choice, named):
            status(line)
        status(closing_line(choice, most))
    if plain:
        status(comparison_line(answer, plain))


@dataclass(frozen=True)
class Job:
    """One prompt with its settings, to be run in different ways."""

    engine: Engine
    prompt: str
    settings: dict[str, Any]

    def quiet(self, **changes: Any) -> Generation:
        """The whole answer."""
        return self.engine.generate(self.prompt, **{**self.settings, **changes})

    def aloud(self, show_drafts: bool) -> Generation:
        """The answer, printed as it comes."""
        writer, chunks = TextWriter(show_drafts), list["Chunk"]()
        try:
            for chunk in self.engine.stream(self.prompt, **self.settings):
                if chunks and chunk.index > chunks[-1].index:
                    writer.end()
                    typer.echo(f"answer {chunk.index + 1}:")
                writer.write(chunk)
                chunks.append(chunk)
        finally:
            writer.end()  # interrupted too: the text so far stays, on lines of its own
        if show_drafts:
            status(writer.legend())
        return joined(chunks)

    def plain(self) -> Generation:
        """The same by plain decoding, in this process, from fresh sessions."""
        status("decoding the same plainly ...")
        return self.quiet(**PLAIN, reuse=False)

    def warm_up(self) -> None:
        """Both ways once, so that neither pays for first-time work."""
        few = min(WARM_UP, self.settings["max_tokens"])
        briefly = {"max_tokens": few, "min_tokens": 0, "n": 1, "reuse": False}
        self.quiet(**briefly)
        self.quiet(**briefly, **PLAIN)
