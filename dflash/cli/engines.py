"""``dflash serve --engine``: the pair handed to a bigger engine, its command printed or started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash import env
from dflash.cli.given import blamed
from dflash.cli.groups import was_given
from dflash.cli.output import emit_json, note, status
from dflash.config import BlockSize
from dflash.errors import ConfigError, UnknownName

ENGINES = ("llama-server", "ray", "sglang", "vllm")
PANEL = "Other engines"


def _engine(*names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=PANEL, **more)


EngineName = Annotated[
    str | None,
    _engine(
        "--engine",
        metavar="vllm|sglang|llama-server|ray",
        help="Let this engine serve the pair, once the doctor's checks have passed.",
    ),
]
PrintOnly = Annotated[
    bool,
    _engine("--print", help="Print the engine's command, and start nothing: no hub is asked."),
]
TensorParallel = Annotated[
    int, _engine("--tensor-parallel-size", metavar="N", help="Devices that share one copy.")
]
DataParallel = Annotated[
    int, _engine("--data-parallel-size", metavar="N", help="Copies; with ray: replicas.")
]
Replica = Annotated[
    str, _engine("--replica", metavar="dflash|vllm", help="What a replica of ray runs.")
]
EngineArg = Annotated[
    list[str] | None,
    _engine("--engine-arg", metavar="FLAG", help="A flag of the engine's own; may be repeated."),
]
EngineEnv = Annotated[
    Path | None,
    _engine("--engine-env", metavar="FOLDER", help="Python environment with the engine in it."),
]
ReadyTimeout = Annotated[
    float, _engine("--ready-timeout", metavar="SECONDS", help="Time it may take to load.")
]


BOTH = {
    *("model", "draft", "device", "dtype", "draft_sliding_window_size", "block_size"),
    *("draft_tokens", "host", "port", "served_model_name", "debug"),
}
"""Parameters that mean something with and without ``--engine``."""
ONLY_ENGINE = {
    *("engine_name", "print_only", "tensor_parallel_size", "data_parallel_size", "replica"),
    *("engine_arg", "engine_env", "ready_timeout", "json"),
}


def check_flags(ctx: typer.Context, engine: str | None) -> None:
    """Refuse flags that would be ignored. Raises ConfigError."""
    flags = {p.name: p.opts[0] for p in ctx.command.params if p.name is not None}
    given = {name for name in flags if was_given(ctx, name)}
    idle = sorted(flags[name] for name in given - BOTH if (name in ONLY_ENGINE) == (engine is None))
    if idle and engine is None:
        raise ConfigError(f"{', '.join(idle)}: only together with --engine")
    if idle:
        raise ConfigError(
            f"{', '.join(idle)}: {engine} is not told of these; give it its own flags with "
            "--engine-arg, or serve without --engine"
        )


def serve_with(given: Mapping[str, Any], size: BlockSize) -> None:
    """Run the command that a command's parameters ask for, or print it.

    Raises PairError for a pair that does not fit, ConfigError for what the engine cannot do,
    MissingBackend where it is not installed, LaunchError when it ends by itself.
    """
    command = command_for(given, size)
    if given["print_only"] and given["json"]:
        emit_json(command.to_json())
        return
    for line in command.notes:
        note(line)
    if given["print_only"]:
        for name, text in command.files.items():
            typer.echo(f"# {name}\n{text}")
        typer.echo(command.shell())
        return
    from dflash.cluster.launch import run

    status(command.shell())
    run(command, status, place=given["engine_env"], ready=given["ready_timeout"])


def command_for(given: Mapping[str, Any], size: BlockSize) -> Any:
    """The `dflash.cluster.plan.Command` for the parameters; ``size`` is the block asked for."""
    engine = given["engine_name"]
    if engine not in ENGINES:
        raise UnknownName(f"unknown engine {engine!r}. Known: {', '.join(ENGINES)}")
    if given["replica"] not in ("dflash", "vllm"):
        raise UnknownName(f"unknown replica {given['replica']!r}. Known: dflash, vllm")
    from dflash.cluster import llama_server, ray, sglang, vllm

    try:
        plan = _plan(given, size)
    except ConfigError as problem:
        if size is None or given["block_size"] is not None or given["draft_tokens"] is not None:
            raise
        _plan(given, None)  # what else may be wrong
        raise blamed(problem, size) from None
    if engine == "ray":
        command = ray.render(plan, given["replica"])
    else:
        renderers = {"vllm": vllm, "sglang": sglang, "llama-server": llama_server}
        command = renderers[engine].render(plan)
    return replace(command, notes=(*plan.notes, *command.notes, *_keys(engine, given["replica"])))


def _plan(given: Mapping[str, Any], size: BlockSize) -> Any:
    """The `dflash.cluster.plan.Plan` for the parameters. One to be printed asks no hub."""
    from dflash.cluster.pair import make_plan
    from dflash.cluster.unseen import is_away, plan_here
    from dflash.opening import pair_names

    if given["print_only"] and given["model"] is None and is_away(given["draft"] or ""):
        raise ConfigError(
            f"{given['draft']} is not here, and --print does not ask the hub which target it is "
            "for: name it (--model)"
        )
    target, draft = pair_names(given["model"], given["draft"])
    return (plan_here if given["print_only"] else make_plan)(
        target,
        draft,
        size,
        host=given["host"],
        port=given["port"],
        tensor_parallel=given["tensor_parallel_size"],
        data_parallel=given["data_parallel_size"],
        window=given["draft_sliding_window_size"],
        device=given["device"],
        dtype=given["dtype"],
        served_name=given["served_model_name"],
        extra=tuple(given["engine_arg"] or ()),
    )


def _keys(engine: str, replica: str) -> tuple[str, ...]:
    if env.api_key() is None or (engine == "ray" and replica == "dflash"):
        return ()
    return ("DFLASH_API_KEY is not handed on: give the engine its own key with --engine-arg",)
