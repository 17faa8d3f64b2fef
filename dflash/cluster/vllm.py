"""A plan in vLLM's words: ``vllm serve MODEL --speculative-config JSON``.

DFlash and DFlash2 are one method there; vLLM tells them apart by the draft's ``architectures``.
"""

from __future__ import annotations

import json
from typing import Any

from dflash.cluster.plan import Command, Plan, address, no_gguf, no_window, shared_flags

METHODS = {"dflash": "dflash", "dflash2": "dflash", "eagle3": "eagle3", "mtp": "mtp"}


def render(plan: Plan) -> Command:
    """The command. Raises ConfigError for what vLLM cannot do."""
    no_gguf(plan, "vLLM")
    argv = ["vllm", "serve", plan.target, *shared_flags(plan)]
    speculative = speculative_config(plan)
    if speculative is not None:
        argv += ["--speculative-config", json.dumps(speculative, separators=(",", ":"))]
    base = address(plan)
    return Command(
        engine="vllm",
        argv=(*argv, *plan.extra),
        url=f"{base}/v1",
        health=f"{base}/health",
        env=variables(plan),
        notes=_notes(plan),
        install="pip install vllm, in an environment of its own: it pins another torch",
    )


def speculative_config(plan: Plan) -> dict[str, Any] | None:
    """The JSON of ``--speculative-config``; None = plain decoding. Raises ConfigError."""
    if plan.method is None:
        return None
    no_window(plan, "vLLM")
    found: dict[str, Any] = {"method": METHODS[plan.method]}
    if plan.draft is not None:
        found["model"] = plan.draft
    return {**found, "num_speculative_tokens": plan.draft_tokens}


def variables(plan: Plan) -> dict[str, str]:
    """The older model runner would run a DFlash2 draft as DFlash, and refuses mixed layers."""
    newer = plan.method == "dflash2" or plan.mixed_attention
    return {"VLLM_USE_V2_MODEL_RUNNER": "1"} if newer else {}


def _notes(plan: Plan) -> tuple[str, ...]:
    if plan.method == "mtp" and plan.draft_tokens > 1:
        return (f"vLLM repeats the target's one MTP layer for {plan.draft_tokens} drafted tokens",)
    return ()
