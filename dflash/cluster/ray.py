"""A plan as a Ray Serve application: replicas of our own engine, or of vLLM through Ray Serve LLM.

Ray takes its config as YAML, of which JSON is a part.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from dflash.cluster import vllm
from dflash.cluster.plan import Command, Plan, address
from dflash.config import NO_DRAFT
from dflash.errors import ConfigError

CONFIG = "ray-serve.json"
Replica = Literal["dflash", "vllm"]


def render(plan: Plan, replica: Replica = "dflash") -> Command:
    """The command and its config file. Raises ConfigError for what the replicas cannot do."""
    if plan.extra:
        raise ConfigError("Ray takes no further flags here: --print its config and add to that")
    application = _ours(plan) if replica == "dflash" else _vllm(plan)
    config = {
        "http_options": {"host": plan.host, "port": plan.port},
        "applications": [{"name": "dflash", "route_prefix": "/", **application}],
    }
    base = address(plan)
    return Command(
        engine="ray",
        argv=("serve", "run", CONFIG),
        url=f"{base}/v1",
        health=f"{base}/{'health' if replica == 'dflash' else 'v1/models'}",
        ending="SIGINT",
        files={CONFIG: json.dumps(config, indent=2) + "\n"},
        notes=_notes(plan, replica),
        install="pip install 'ray[serve]'" + (" 'ray[llm]'" if replica == "vllm" else ""),
    )


def _notes(plan: Plan, replica: Replica) -> tuple[str, ...]:
    if replica == "dflash" and plan.device is None:
        return ("replicas run on the CPU unless --device says otherwise",)
    return ()


def _ours(plan: Plan) -> dict[str, Any]:
    if plan.tensor_parallel > 1:
        raise ConfigError(
            "our own engine runs a copy on one device: leave --tensor-parallel-size out, or let "
            "vLLM run the replicas (--replica vllm)"
        )
    asked = {
        "model": plan.target,
        "draft": (plan.draft or plan.method) if plan.method else NO_DRAFT,
        "block_size": plan.asked,
        "draft_sliding_window_size": plan.window,
        "device": plan.device,
        "dtype": plan.dtype,
        "served_name": plan.served_name,
        "replicas": plan.data_parallel,
    }
    given = {name: value for name, value in asked.items() if value is not None}
    return {"import_path": "dflash.cluster.ray_app:build", "args": given}


def _vllm(plan: Plan) -> dict[str, Any]:
    engine: dict[str, Any] = {"tensor_parallel_size": plan.tensor_parallel}
    speculative = vllm.speculative_config(plan)
    if speculative is not None:
        engine["speculative_config"] = speculative
    if plan.dtype is not None:
        engine["dtype"] = plan.dtype
    model: dict[str, Any] = {
        "model_loading_config": {
            "model_id": plan.served_name or plan.target,
            "model_source": plan.target,
        },
        "engine_kwargs": engine,
        "deployment_config": {"num_replicas": plan.data_parallel},
    }
    variables = vllm.variables(plan)
    if variables:
        model["runtime_env"] = {"env_vars": variables}
    return {"import_path": "ray.serve.llm:build_openai_app", "args": {"llm_configs": [model]}}
