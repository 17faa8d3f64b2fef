"""``dflash bench`` and ``dflash sweep``: how much faster, and at which block size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash.cli import engine_flags as e
from dflash.cli import options as o
from dflash.cli.output import emit_json, note, status
from dflash.config import parse_block_size
from dflash.errors import ConfigError

if TYPE_CHECKING:
    from dflash.bench.advice import Advice
    from dflash.bench.prompts import Conversation
    from dflash.bench.session import Settings

PROMPTS, RUN, SERVER = "Prompts", "Run", "Server"
QUICK = {"max_samples": 3, "max_tokens": 48, "repeats": 2}


def _option(panel: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, **more)


Dataset = Annotated[
    list[str] | None,
    _option(
        PROMPTS,
        "--dataset",
        metavar="NAME",
        help="gsm8k, math500, humaneval, mbpp, mt-bench, alpaca, or any set in --data-dir; a comma "
        "or a second --dataset adds one. Left out, with --prompts too: a small mixed set.",
    ),
]
DataDir = Annotated[
    Path | None,
    _option(
        PROMPTS, "--data-dir", metavar="DIR", help="Folder with NAME.jsonl instead of the hub."
    ),
]
Prompts = Annotated[
    list[Path] | None,
    _option(
        PROMPTS, "--prompts", metavar="FILE", help="JSONL with 'prompt' or 'turns'; repeatable."
    ),
]
MaxSamples = Annotated[
    int | None,
    _option(PROMPTS, "--max-samples", min=1, metavar="N", help="Prompts of each set at most."),
]
Thinking = Annotated[
    bool | None,
    _option(
        PROMPTS,
        "--enable-thinking/--disable-thinking",
        help="Tell the chat template; left out: its own default.",
    ),
]
BlockSizes = Annotated[
    str | None,
    _option(RUN, "--block-sizes", metavar="1,4,8,auto", help="Default: the common sizes and auto."),
]
Repeats = Annotated[
    int, _option(RUN, "--repeats", min=1, metavar="N", help="Times each text runs.")
]
Warmup = Annotated[
    int, _option(RUN, "--warmup", min=0, metavar="N", help="Answers of each arm that do not count.")
]
Against = Annotated[
    str | None,
    _option(
        RUN,
        "--against",
        metavar="A,B",
        help="Other programs on the same prompts: ngram, transformers, transformers-dflash, "
        "prompt-lookup, reference-wheel, llama.cpp.",
    ),
]
Quick = Annotated[
    bool, _option(RUN, "--quick", help="3 prompts a set, 48 tokens, 2 repeats: about two minutes.")
]
Resume = Annotated[bool, _option(RUN, "--resume", help="Go on with what --out already holds.")]
NoCosts = Annotated[
    bool, _option(RUN, "--no-costs", help="Leave out the cost curve and the machine's limits.")
]
Out = Annotated[
    Path | None,
    _option(o.OUT, "--out", metavar="DIR", help="Gets report.html, report.json and records.jsonl."),
]
WriteConfig = Annotated[
    bool,
    _option(
        o.OUT, "--write-config", help="Make the recommended block the draft's default_block_size."
    ),
]
BaseUrl = Annotated[
    str | None,
    _option(SERVER, "--base-url", metavar="URL", help="Measure this OpenAI-compatible server."),
]
BaselineUrl = Annotated[
    str | None,
    _option(SERVER, "--baseline-url", metavar="URL", help="The same model served without a draft."),
]
ApiKey = Annotated[str | None, _option(SERVER, "--api-key", metavar="KEY", help="Bearer token.")]
Concurrency = Annotated[
    int, _option(RUN, "--concurrency", min=1, metavar="N", help="Requests at a time.")
]


@e.with_engine_flags
def bench(
    model: o.Model = None,
    draft: o.Draft = None,
    backend: o.Backend = "auto",
    device: o.Device = None,
    dtype: o.Dtype = None,
    draft_sliding_window_size: o.Window = None,
    taps: o.Taps = None,
    threads: o.Threads = None,
    trust_remote_code: o.TrustRemoteCode = False,
    engine_flags: e.Given = None,
    dataset: Dataset = None,
    data_dir: DataDir = None,
    prompts: Prompts = None,
    max_samples: MaxSamples = None,
    system: o.System = None,
    no_chat_template: o.NoChatTemplate = False,
    enable_thinking: Thinking = None,
    max_tokens: o.MaxTokens = 128,
    temperature: o.Temperature = 0.0,
    top_k: o.TopK = 0,
    top_p: o.TopP = 1.0,
    ignore_eos: o.IgnoreEos = False,
    block_sizes: BlockSizes = None,
    repeats: Repeats = 3,
    warmup: Warmup = 1,
    against: Against = None,
    quick: Quick = False,
    resume: Resume = False,
    no_costs: NoCosts = False,
    base_url: BaseUrl = None,
    baseline_url: BaselineUrl = None,
    api_key: ApiKey = None,
    concurrency: Concurrency = 1,
    out: Out = None,
    write_config: WriteConfig = False,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Measure speed and acceptance against plain decoding, and say which block size to use."""
    given = locals()
    if quick:
        given |= {n: v for n, v in QUICK.items() if given[n] in (None, _default(n))}
    settings, conversations = _settings(given), _conversations(given)
    if out is not None:
        from dflash.bench import charts

        charts.need()  # before minutes of measuring, not after
    if base_url is not None:
        found, advice = _remote(given, settings, conversations)
    else:
        found, advice = _local(given, settings, conversations)
    _show(found, json)
    if out is not None:
        status(f"report: {out / 'report.html'}")
    if write_config:
        _lock(found["pair"].get("draft"), advice)


@e.with_engine_flags
def sweep(
    model: o.Model = None,
    draft: o.Draft = None,
    backend: o.Backend = "auto",
    device: o.Device = None,
    dtype: o.Dtype = None,
    draft_sliding_window_size: o.Window = None,
    taps: o.Taps = None,
    threads: o.Threads = None,
    trust_remote_code: o.TrustRemoteCode = False,
    engine_flags: e.Given = None,
    dataset: Dataset = None,
    data_dir: DataDir = None,
    prompts: Prompts = None,
    max_samples: MaxSamples = None,
    max_tokens: o.MaxTokens = 64,
    block_sizes: BlockSizes = None,
    seconds: Annotated[
        float, _option(RUN, "--seconds", metavar="S", help="Time it may take, loading apart.")
    ] = 100.0,
    write_config: WriteConfig = False,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Find the fastest block size of a pair here, quickly: the slower half drops out each time."""
    given = {**locals(), "system": None, "no_chat_template": False, "enable_thinking": None}
    from dflash.bench import sweep as halving
    from dflash.bench.arms import engine_arm

    conversations = _conversations(given)
    with o.open_engine({**given, "no_profile": True}) as engine:
        native = engine.pair.draft_block_size
        if native is None:
            raise ConfigError("there is no draft to sweep: name one (--draft)")
        asked = _blocks(block_sizes) or halving.candidates(native)
        sizes = sorted({1, *(size for size in asked if isinstance(size, int) and size <= native)})
        arms = {size: engine_arm(engine, size) for size in sizes}
        asks = [engine.encode(c.turns[0]) for c in conversations]
        status(f"block sizes {', '.join(map(str, sizes))}, up to {seconds:.0f} s ...")
        for arm in arms.values():
            arm(asks[0], min(16, max_tokens))
        found = halving.sweep(arms, asks, max_tokens, seconds)
        name = engine.pair.draft_name
    if json:
        emit_json(found.to_json())
    else:
        for heat in found.heats:
            gains = "  ".join(f"{arm} {gain:.2f}x" for arm, gain in heat.speedup.items())
            typer.echo(f"{heat.prompts} prompts: {gains}")
        gain = "" if found.speedup is None else f": {found.speedup}x plain decoding"
        typer.echo(f"block {found.block_size}{gain} ({found.seconds:.0f} s, {found.stopped})")
    if write_config:
        _write(name, found.block_size)


def _default(name: str) -> Any:
    return {"max_samples": None, "max_tokens": 128, "repeats": 3}[name]


def _settings(given: dict[str, Any]) -> Settings:
    from dflash.bench.local import Template
    from dflash.bench.session import Settings

    names = ("temperature", "top_k", "top_p", "ignore_eos")
    if given["resume"] and given["out"] is None:
        raise ConfigError("--resume needs the --out of the run to go on with")
    return Settings(
        tokens=given["max_tokens"],
        blocks=_blocks(given["block_sizes"]),
        repeats=given["repeats"],
        warmup=given["warmup"],
        sampling={name: given[name] for name in names},
        template=Template(not given["no_chat_template"], given["system"], given["enable_thinking"]),
        threads=given["threads"],
        out=given["out"],
        resume=given["resume"],
        costs=not given["no_costs"],
        concurrency=given["concurrency"],
    )


def _blocks(text: str | None) -> list[int | str] | None:
    if text is None:
        return None
    return [parse_block_size(part.strip(), "--block-sizes") for part in text.split(",")]


def _conversations(given: dict[str, Any]) -> list[Conversation]:
    from dflash.bench.prompts import load

    names = [part for text in given["dataset"] or () for part in text.split(",") if part]
    return load(names, given["data_dir"], given["prompts"] or (), given["max_samples"])


def _local(
    given: dict[str, Any], settings: Settings, conversations: Sequence[Conversation]
) -> tuple[dict[str, Any], Advice]:
    from dflash.bench import session

    with ExitStack() as stack:
        engine = stack.enter_context(o.open_engine({**given, "no_profile": True}))
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
    from rich.console import Console

    from dflash.bench.table import arms_table

    Console().print(arms_table(found))
    for line in _lines(found):
        typer.echo(line)


def _lines(found: dict[str, Any]) -> Iterator[str]:
    for row in found["rows"]:
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
    _write(draft, advice.block_size)


def _write(draft: str | None, block_size: int) -> None:
    from dflash.bench.lock import lock

    note(f"default_block_size {block_size} written to {lock(draft, block_size)}")
