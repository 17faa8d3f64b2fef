"""``dflash bench``: how much faster, and at which block size."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dflash.cli import bench_flags as f
from dflash.cli import engine_flags as e
from dflash.cli import options as o
from dflash.cli.given import open_engine
from dflash.cli.groups import Given, flat, with_groups
from dflash.cli.output import emit_json, status
from dflash.config import parse_draft_tree
from dflash.errors import ConfigError

if TYPE_CHECKING:
    from dflash.bench.advice import Advice
    from dflash.bench.prompts import Conversation
    from dflash.bench.session import Settings

QUICK = {"max_samples": 3, "max_tokens": 48, "repeats": 2, "seconds": 120.0}


@with_groups
def bench(
    pair: Given = o.PAIR_FLAGS,
    engine_flags: Given = e.FLAGS,
    texts: Given = f.PROMPT_FLAGS,
    system: o.System = None,
    no_chat_template: o.NoChatTemplate = False,
    enable_thinking: f.Thinking = None,
    max_tokens: o.MaxTokens = 128,
    temperature: o.Temperature = 0.0,
    top_k: o.TopK = 0,
    top_p: o.TopP = 1.0,
    ignore_eos: o.IgnoreEos = False,
    block_sizes: f.BlockSizes = None,
    draft_tree: o.DraftTree = "0",
    repeats: f.Repeats = 3,
    warmup: f.Warmup = 1,
    against: f.Against = None,
    quick: f.Quick = False,
    seconds: f.Seconds = None,
    resume: f.Resume = False,
    no_costs: f.NoCosts = False,
    base_url: f.BaseUrl = None,
    baseline_url: f.BaselineUrl = None,
    api_key: f.ApiKey = None,
    concurrency: f.Concurrency = 1,
    out: f.Out = None,
    write_config: f.WriteConfig = False,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Measure speed and acceptance against plain decoding, and say which block size to use."""
    given = flat(locals())
    if quick:
        given |= {n: v for n, v in QUICK.items() if given[n] in (None, _default(n))}
        given["seconds"] = seconds if concurrency > 1 else given["seconds"]
    settings, conversations = _settings(given), f.conversations(given)
    if out is not None:
        from dflash.bench import charts

        charts.need()  # before minutes of measuring, not after
        _insist_on_folder(out)
    if base_url is not None:
        found, advice = _remote(given, settings, conversations)
    else:
        found, advice = _local(given, settings, conversations)
    _show(found, json)
    if out is not None:
        status(f"report: {out / 'report.html'}")
    if write_config:
        _lock(found["pair"].get("draft"), advice)


def _insist_on_folder(out: Path) -> None:
    """Make ``out``, before it is needed. Raises ConfigError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as problem:
        raise ConfigError(f"--out {out} cannot be written: {problem.strerror}") from problem


def _default(name: str) -> Any:
    return {"max_tokens": 128, "repeats": 3}.get(name)


def _settings(given: dict[str, Any]) -> Settings:
    from dflash.bench.local import Template
    from dflash.bench.session import Settings

    names = ("temperature", "top_k", "top_p", "ignore_eos")
    if given["resume"] and given["out"] is None:
        raise ConfigError("--resume needs the --out of the run to go on with")
    return Settings(
        tokens=given["max_tokens"],
        blocks=f.block_sizes(given["block_sizes"]),
        tree=parse_draft_tree(given["draft_tree"]),
        repeats=given["repeats"],
        warmup=given["warmup"],
        sampling={name: given[name] for name in names},
        template=Template(not given["no_chat_template"], given["system"], given["enable_thinking"]),
        threads=given["threads"],
        out=given["out"],
        resume=given["resume"],
        costs=not given["no_costs"],
        concurrency=given["concurrency"],
        seconds=given["seconds"],
    )


def _local(
    given: dict[str, Any], settings: Settings, conversations: Sequence[Conversation]
) -> tuple[dict[str, Any], Advice]:
    from dflash.bench import session

    with ExitStack() as stack:
        engine = stack.enter_context(open_engine({**given, "no_profile": True}))
        others = {}
        if given["against"]:
            from dflash.bench.peers import open_peers

            names = [name.strip() for name in given["against"].split(",") if name.strip()]
            others = open_peers(stack, names, engine, settings.sampling, status)
        return session.run(engine, conversations, settings, status, others)


def _remote(
    given: dict[str, Any], settings: Settings, conversations: Sequence[Conversation]
) -> tuple[dict[str, Any], Advice]:
    from dflash.bench import serving
    from dflash.bench.remote import connect

    if given["against"]:
        raise ConfigError("--against is for local pairs; another server is --baseline-url")
    if settings.tree:
        raise ConfigError("--draft-tree is for local pairs: a server has it from its own settings")
    body = {"temperature": given["temperature"], "top_p": given["top_p"]}
    body |= {"top_k": given["top_k"]} if given["top_k"] else {}
    body |= {"ignore_eos": True} if given["ignore_eos"] else {}
    if given["enable_thinking"] is not None:
        body["chat_template_kwargs"] = {"enable_thinking": given["enable_thinking"]}
    urls = {serving.BASELINE: given["baseline_url"], serving.SERVER: given["base_url"]}
    servers = {
        arm: connect(url, given["model"], key=given["api_key"], body=body)
        for arm, url in urls.items()
        if url is not None
    }
    return serving.run(servers, conversations, settings, status)


def _show(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        emit_json(found)
        return
    measured = any(row["totals"]["requests"] for row in found["rows"])
    if measured:
        from rich.console import Console

        from dflash.bench.table import arms_table

        Console().print(arms_table(found))
    for line in _lines(found, found["rows"] if measured else ()):
        typer.echo(line)


def _lines(found: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Notes on ``rows``, those of the table above, if there is one; then on the run."""
    if rows:
        yield "committed: tokens a round, over all rounds; macro: the mean of each text's own"
    for row in rows:
        if row["refused"]:
            yield f"{row['arm']}: no speed-up shown: {row['refused']}"
        elif row["left_out"]:
            why = ", ".join(f"{count} {reason}" for reason, count in row["left_out"].items())
            yield f"{row['arm']}: texts left out of its speed-up: {why}"
    yield from found["notes"]
    if found["verdict"] is not None:
        yield found["verdict"]["sentence"]
    yield found["advice"]["sentence"]


def _lock(draft: str | None, advice: Advice) -> None:
    if advice.speedup is None:
        raise ConfigError("nothing to write: this run could not compare block sizes")
    f.write_default(draft, advice.block_size)
