"""``dflash serve --engine``: the pair handed to a bigger engine, its command printed or started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash import env
from dflash.cli.output import emit_json, note, status
from dflash.config import parse_block_size
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
    bool, _engine("--print", help="Print the engine's command instead of starting it.")
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


def serve_with(given: Mapping[str, Any]) -> None:
    """Run the command that a command's parameters ask for, or print it.

    Raises PairError for a pair that does not fit, ConfigError for what the engine cannot do,
    MissingBackend where it is not installed, LaunchError when it ends by itself.
    """
    command = command_for(given)
    if given["print_only"]:
        if given["json"]:
            emit_json(command.to_json())
            return
        for name, text in command.files.items():
            typer.echo(f"# {name}\n{text}")
        typer.echo(command.shell())
        return
    from dflash.cluster.launch import run

    for line in command.notes:
        note(line)
    status(command.shell())
    run(command, status, place=given["engine_env"], ready=given["ready_timeout"])


def command_for(given: Mapping[str, Any]) -> Any:
    """The `dflash.cluster.plan.Command` for the parameters."""
    engine = given["engine"]
    if engine not in ENGINES:
        raise UnknownName(f"unknown engine {engine!r}. Known: {', '.join(ENGINES)}")
    if given["replica"] not in ("dflash", "vllm"):
        raise UnknownName(f"unknown replica {given['replica']!r}. Known: dflash, vllm")
    from dflash.cluster import llama_server, ray, sglang, vllm
    from dflash.cluster.pair import make_plan
    from dflash.opening import pair_names

    target, draft = pair_names(given["model"], given["draft"])
    plan = make_plan(
        target,
        draft,
        _block(given),
        host=given["host"],
        port=given["port"],
        tensor_parallel=given["tensor_parallel_size"],
        data_parallel=given["data_parallel_size"],
        window=given["draft_sliding_window_size"],
        device=given["device"],
        dtype=given["dtype"],
        served_name=given["served_name"],
        extra=tuple(given["engine_arg"] or ()),
    )
    if engine == "ray":
        command = ray.render(plan, given["replica"])
    else:
        renderers = {"vllm": vllm, "sglang": sglang, "llama-server": llama_server}
        command = renderers[engine].render(plan)
    return replace(command, notes=(*plan.notes, *command.notes))


def _block(given: Mapping[str, Any]) -> Any:
    """--block-size or --draft-tokens, then DFLASH_BLOCK_SIZE."""
    size, drafted = given["block_size"], given["draft_tokens"]
    if size is not None and drafted is not None:
        raise ConfigError("give --block-size or --draft-tokens, not both: they say the same")
    if size is not None:
        return parse_block_size(size)
    return env.block_size() if drafted is None else drafted + 1
