"""``dflash compare``: ordinary against speculative decoding, on the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash.checks import counted
from dflash.cli import options as o
from dflash.cli.given import read_prompt
from dflash.cli.output import emit_json, note, status
from dflash.config import GenerateConfig, LoadConfig
from dflash.errors import ConfigError

if TYPE_CHECKING:
    from dflash.comparison import Arm, Comparison

DIFFERENT = 1  # exit status
TEXT = "Explain in a few sentences how rainbows form, and then write a short poem about one."


def compare(
    text: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            help="One user turn; - = standard input. Left out: a question about rainbows.",
        ),
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(
            "--algorithm",
            metavar="NAME",
            help="dflash, dflash2, dspark, eagle3, mtp or ngram; left out: what the draft is.",
        ),
    ] = None,
    model: o.Model = None,
    draft: Annotated[
        str | None,
        o.pair_option(
            "--draft",
            "--draft-model",
            "-d",
            metavar="ID|FOLDER|GGUF|ngram|mtp",
            help="Draft to compare with; ngram = look-up in the text so far, X+ngram = both, mtp = "
            "heads inside the target. Left out: what --algorithm ngram or mtp says, else the demo "
            "model's draft beside the demo model.",
        ),
    ] = None,
    backend: o.Backend = "auto",
    prompt: Annotated[str | None, typer.Option("--prompt", help="The same as PROMPT.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Tokens a run.")] = 128,
    runs: Annotated[int, typer.Option("--runs", min=1, help="Runs of each arm.")] = 3,
    warmup_tokens: Annotated[
        int, typer.Option("--warmup-tokens", min=1, help="Tokens of each arm before it counts.")
    ] = 32,
    draft_tokens: Annotated[
        str, typer.Option("--draft-tokens", metavar="3,5,7", help="Drafts a round, a row each.")
    ] = "3,5,7",
    draft_n_min: Annotated[
        int, typer.Option("--draft-n-min", min=0, help="Throw shorter drafts away (gguf).")
    ] = 0,
    draft_p_min: Annotated[
        float, typer.Option("--draft-p-min", help="Least probability of a draft.")
    ] = 0.0,
    draft_tree: Annotated[
        int,
        typer.Option(
            "--draft-tree",
            min=0,
            metavar="N",
            help="Judge N candidates a pass as a tree, as deep as a row's drafts; 0 = chains "
            "(torch).",
        ),
    ] = 0,
    temperature: o.Temperature = 0.0,
    seed: o.Seed = 0,
    ignore_eos: o.IgnoreEos = False,
    n_ctx: Annotated[
        int | None, typer.Option("--n-ctx", help="Context (gguf); default: as trained.")
    ] = None,
    n_batch: Annotated[int, typer.Option("--n-batch", help="Rows a decode call (gguf).")] = 512,
    n_ubatch: Annotated[int, typer.Option("--n-ubatch", help="Rows at once (gguf).")] = 512,
    threads: o.Threads = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Everything on the CPU.")] = False,
    draft_cpu: Annotated[bool, typer.Option("--draft-cpu", help="The draft on it (gguf).")] = False,
    no_backend_sampling: Annotated[
        bool, typer.Option("--no-backend-sampling", help="Taken; drafts are chosen on the host.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Both texts, llama.cpp's lines.")] = (
        False
    ),
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Decode ordinarily and speculatively in turn; exit status 1 when the ids differ."""
    del no_backend_sampling, debug  # the first changes nothing here, the door reads the second
    from dflash.comparison import Trial, settle_algorithm
    from dflash.comparison import compare as run
    from dflash.engine import load
    from dflash.opening import backend_of, pair_names

    sizes, asked = _sizes(draft_tokens), _prompt(text, prompt)
    GenerateConfig(draft_tokens=max(sizes), draft_tree=draft_tree, draft_p_min=draft_p_min)
    look_up = draft is None and algorithm == "ngram"
    target, named = pair_names(model, "ngram" if look_up else draft)
    chosen, kind, top_k = settle_algorithm(algorithm, named)
    gguf = {
        "n_ctx": n_ctx,
        "n_batch": n_batch,
        "n_ubatch": n_ubatch,
        "verbose": verbose,
        "draft_n_min": draft_n_min,
        "draft_p_min": draft_p_min,
        "draft_n_gpu_layers": 0 if draft_cpu else None,
    }
    if backend_of(LoadConfig(target, chosen, backend=backend)) != "gguf":
        del gguf["verbose"], gguf["draft_p_min"]  # the others are refused there if they were given
    place: Any = {"device": "cpu"} if cpu else {}
    with load(target, chosen, backend=backend, threads=threads, gguf=gguf, **place) as engine:
        most = min(max(sizes), (engine.pair.draft_block_size or 1) - 1)
        if engine.pair.backend == "gguf" and n_batch < 1 + most:
            raise ConfigError(
                f"--n-batch {n_batch} cannot hold a verification batch of 1 + {most} rows; "
                "--draft-tokens must not exceed --n-batch - 1"
            )
        options = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "ignore_eos": ignore_eos,
            "draft_p_min": draft_p_min if engine.pair.backend != "gguf" else 0.0,
        }
        trial = Trial(asked, sizes, options, runs, warmup_tokens, draft_tree)
        found = run(engine, trial, (kind, top_k), status)
    if json:
        emit_json(found.to_json())
    else:
        for line in lines(found, verbose):
            typer.echo(line)
    if not found.same:
        note("the ids differ: see docs/concepts/losslessness.md on row-count invariance")
        raise typer.Exit(DIFFERENT)


def _prompt(text: str | None, again: str | None) -> str:
    """The prompt from either place, or `TEXT`. Raises ConfigError, PromptError."""
    if text is not None and again is not None:
        raise ConfigError("give a prompt or --prompt, not both: they are the same")
    given = again if text is None else text
    return TEXT if given is None else read_prompt(given, None)


def _sizes(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"--draft-tokens must be numbers such as 3,5,7; got {text!r}")
    return [int(part) for part in parts]


def lines(found: Comparison, texts: bool = False) -> Iterator[str]:
    """The report as lines of text."""
    yield f"target       {found.model} ({found.backend})"
    yield f"draft        {found.draft}"
    yield f"algorithm    {found.algorithm}, block size {found.block_size}, {found.layout}"
    if found.selector_top_k:
        yield f"selector     {counted(found.selector_top_k, 'candidate')} a place"
    if found.draft_tree:
        yield f"tree         {counted(found.draft_tree, 'node')}, as deep as the drafts"
    yield f"prompt       {counted(found.prompt_tokens, 'token')}"
    if found.clamped_from:
        most, asked = (found.block_size or 1) - 1, ", ".join(map(str, found.clamped_from))
        yield f"clamped      this draft proposes {most} at most: {asked} ran as {most}"
    yield "drafts  tokens/s  speed-up  committed  accepted  rollbacks  draft s  verify s  match"
    for arm in found.arms:
        yield _row(arm)
    yield "committed: tokens a round. rollbacks: rounds that rejected a draft"
    for arm in found.arms[1:]:
        kept = " ".join(f"{rate:.2f}" for rate in arm.stats.acceptance_by_position)
        yield f"kept at draft 1, 2, ... of {arm.draft_tokens}: {kept or '-'}"
    apart = [counted(arm.draft_tokens, "draft") for arm in found.arms if not arm.deterministic]
    said = f"no: runs differ from each other with {', '.join(apart)}" if apart else "yes"
    yield f"deterministic: {said}"
    if texts:
        for arm in (found.arms[0], found.arms[-1]):
            yield f"--- {counted(arm.draft_tokens, 'draft')}\n{arm.text}"


def _row(arm: Arm) -> str:
    stats = arm.stats
    match = "yes" if arm.tokens_match else f"from {arm.first_divergence}"
    phases = [_seconds(stats.draft_seconds), _seconds(stats.verify_seconds)]
    return (
        f"{arm.draft_tokens:>6}{arm.tokens_per_second:>10.1f}{arm.speedup:>10.2f}"
        f"{stats.mean_committed:>11.2f}{stats.acceptance_rate:>10.2f}{arm.rollbacks:>11}"
        f"{phases[0]:>9}{phases[1]:>10}{match:>7}"
    )


def _seconds(value: float | None) -> str:
    return "?" if value is None else f"{value:.2f}"
