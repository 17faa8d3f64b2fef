"""``dflash serve``: the pair over HTTP, in the words of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import logging
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash import env
from dflash.checks import within
from dflash.cli import engine_flags as e
from dflash.cli import engines as other
from dflash.cli import options as o
from dflash.cli.given import open_engine
from dflash.cli.groups import Given, flat, with_groups
from dflash.cli.output import note, status
from dflash.config import NO_DRAFT, BlockSize, parse_block_size, parse_draft_tree
from dflash.errors import CheckpointError, ConfigError, DFlashError, MissingBackend, PairError

if TYPE_CHECKING:
    from dflash.engine import Engine

LISTEN, LIMITS = "Listen", "Limits"


def _listen(*names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=LISTEN, **more)


def _limit(*names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=LIMITS, **more)


@with_groups
def serve(
    ctx: typer.Context,
    pair: Given = o.PAIR_FLAGS,
    engine_flags: Given = e.FLAGS,
    no_profile: o.NoProfile = False,
    no_mtp: o.NoMtp = False,
    allow_fallback: Annotated[
        bool,
        o.pair_option(
            "--allow-fallback", help="Decode plainly where the draft cannot be loaded, and say so."
        ),
    ] = False,
    block_size: Annotated[
        str | None,
        o.pair_option(
            "--block-size",
            metavar="N|auto",
            help="Of requests that do not say; anchor included. Before DFLASH_BLOCK_SIZE.",
        ),
    ] = None,
    draft_tokens: Annotated[
        int | None,
        o.pair_option("--draft-tokens", metavar="K", help="The same without the anchor."),
    ] = None,
    draft_tree: Annotated[
        str,
        o.pair_option(
            "--draft-tree",
            metavar="N|auto",
            help="Judge N candidates a pass as a tree, as deep as the block; 0 = chains. auto: "
            "where the block is, too.",
        ),
    ] = "0",
    host: Annotated[
        str, _listen("--host", help="Address; 0.0.0.0 = every machine that can reach this one.")
    ] = "127.0.0.1",
    port: Annotated[int, _listen("--port", help="Port; 0 = any free one.")] = 8000,
    served_model_name: Annotated[
        str | None, _listen("--served-model-name", help="The name clients send.")
    ] = None,
    api_key_file: Annotated[
        Path | None,
        _listen(
            "--api-key-file", help="A file of keys, one a line. DFLASH_API_KEY holds one, too."
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        _listen("--cors-origin", help="Web origin that may call; may be repeated."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        _listen("--allowed-host", help="Name in Host headers, beside localhost; may be repeated."),
    ] = None,
    log_prompts: Annotated[
        bool, _listen("--log-prompts", help="Write prompts and answers to the log.")
    ] = False,
    max_running: Annotated[
        int, _limit("--max-running", metavar="N", help="Requests that take turns.")
    ] = 8,
    max_waiting: Annotated[
        int, _limit("--max-waiting", metavar="N", help="Requests that wait; one more gets 429.")
    ] = 64,
    max_tokens: Annotated[
        int | None, _limit("--max-tokens", metavar="N", help="Most a request may ask for.")
    ] = None,
    max_seconds: Annotated[
        float, _limit("--max-seconds", help="Deadline of a request, waiting included.")
    ] = 600.0,
    max_body_mb: Annotated[float, _limit("--max-body-mb", help="Size of a request.")] = 8.0,
    cache_mb: Annotated[
        int,
        _limit("--cache-mb", metavar="N", help="Keys and values, of prompts that go on, too."),
    ] = 1024,
    drain_seconds: Annotated[
        float, _limit("--drain-seconds", help="For running requests after the signal to stop.")
    ] = 30.0,
    engine_name: other.EngineName = None,
    print_only: other.PrintOnly = False,
    tensor_parallel_size: other.TensorParallel = 1,
    data_parallel_size: other.DataParallel = 1,
    replica: other.Replica = "dflash",
    engine_arg: other.EngineArg = None,
    engine_env: other.EngineEnv = None,
    ready_timeout: other.ReadyTimeout = 1800.0,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Serve a pair over HTTP: OpenAI's chat, completions and responses, Anthropic's messages."""
    given = flat(locals())
    other.check_flags(ctx, engine_name)
    size = _block_size(block_size, draft_tokens)
    if engine_name is not None:
        return other.serve_with(given, size)
    package = _package()
    config = package.ServeConfig(
        host=host,
        port=port,
        name=served_model_name,
        block_size=size,
        draft_tree=parse_draft_tree(draft_tree),
        api_keys=_keys(api_key_file),
        origins=tuple(cors_origin or ()),
        hosts=tuple(allowed_host or ()),
        most_running=max_running,
        most_waiting=max_waiting,
        most_body=_bytes("--max-body-mb", max_body_mb),
        most_tokens=max_tokens,
        most_seconds=max_seconds,
        cache_bytes=_bytes("--cache-mb", cache_mb),
        drain_seconds=drain_seconds,
        log_prompts=log_prompts,
    )
    package.check_address(config)
    if not config.only_here and not config.api_keys:
        note("reachable from other machines, and no key is asked for: --api-key-file names some")
    _log_requests()
    engine, why = package.apart(lambda: _open(given))
    with engine:
        if no_mtp and "mtp" in str(engine.pair.draft_name).lower():
            raise ConfigError(
                "--no-mtp, and the draft is made of MTP heads: name another (--draft)"
            )
        package.serve(engine, config, why, say=status)


def _bytes(flag: str, megabytes: float) -> int:
    """Bytes for a flag. Raises ConfigError."""
    within(flag, megabytes, lambda value: value >= 1 / (1 << 20), "above 0")
    return int(megabytes * (1 << 20))


def _log_requests() -> None:
    """A line for each request on standard error, without any of its text."""
    log = logging.getLogger("dflash.serve")
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        log.addHandler(handler)
    log.setLevel(logging.INFO)


def _package() -> Any:
    try:
        import_module("dflash.serve.run")  # all that it needs, before a model is loaded
        return import_module("dflash.serve")
    except ModuleNotFoundError as problem:
        if problem.name is None or problem.name.split(".")[0] == "dflash":
            raise
        raise MissingBackend(
            f"dflash serve needs {problem.name}: pip install 'dflash-engine[serve]'"
        ) from problem


def _block_size(block_size: str | None, draft_tokens: int | None) -> BlockSize:
    """What the flags say, else DFLASH_BLOCK_SIZE. Raises ConfigError for what is none."""
    if block_size is not None and draft_tokens is not None:
        raise ConfigError("--block-size and --draft-tokens say the same thing: give one of the two")
    if block_size is not None:
        return parse_block_size(block_size)
    if draft_tokens is not None:
        return parse_block_size(str(draft_tokens + 1), "--draft-tokens + 1")
    return env.block_size()


def _keys(file: Path | None) -> tuple[str, ...]:
    """Keys from the file and from DFLASH_API_KEY. Raises ConfigError for a file without any."""
    found = [] if (key := env.api_key()) is None else [key]
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as problem:
            raise ConfigError(f"cannot read --api-key-file {file}: {problem}") from None
        keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not keys:
            raise ConfigError(f"--api-key-file {file} holds no key: write one a line")
        found += keys
    return tuple(found)


def _open(given: dict[str, Any]) -> tuple[Engine, str | None]:
    """The engine, and why it has no draft where one was asked for and could not be loaded."""
    try:
        return open_engine(given), None
    except (CheckpointError, PairError, ConfigError) as problem:
        if not given["allow_fallback"] or given["draft"] in (None, NO_DRAFT):
            raise
        return _without_draft(given, problem), f"the draft could not be loaded: {problem}"


def _without_draft(given: dict[str, Any], problem: DFlashError) -> Engine:
    engine = open_engine({**given, "draft": NO_DRAFT})
    note(f"draft: off, because it could not be loaded: {problem}")
    return engine
