"""A plan in SGLang's words: ``python -m sglang.launch_server --speculative-...``.

``--speculative-num-draft-tokens`` counts the anchor for every method: it is the verify window.
"""

from __future__ import annotations

from dflash.cluster.plan import Command, Plan, address, no_gguf, shared_flags
from dflash.errors import ConfigError

ALGORITHMS = {"dflash": "DFLASH", "dflash2": "DFLASH", "eagle3": "EAGLE3", "mtp": "NEXTN"}
CHAINS = ("eagle3", "mtp")  # these draft step by step, and would build a tree unless told


def render(plan: Plan) -> Command:
    """The command. Raises ConfigError for what SGLang cannot do."""
    no_gguf(plan, "SGLang")
    argv = ["python", "-m", "sglang.launch_server", "--model-path", plan.target]
    argv += [*shared_flags(plan), *_speculative(plan), *plan.extra]
    base = address(plan)
    return Command(
        engine="sglang",
        argv=tuple(argv),
        url=f"{base}/v1",
        health=f"{base}/health",
        install="pip install sglang, in an environment of its own: it pins another torch",
    )


def _speculative(plan: Plan) -> list[str]:
    if plan.method is None:
        return []
    found = ["--speculative-algorithm", ALGORITHMS[plan.method]]
    if plan.draft is not None:
        found += ["--speculative-draft-model-path", plan.draft]
    if plan.method in CHAINS:
        found += [
            "--speculative-num-steps",
            str(plan.draft_tokens),
            "--speculative-eagle-topk",
            "1",
        ]
    elif plan.device is not None and plan.device.startswith("cpu"):
        raise ConfigError("SGLang runs DFlash drafts on CUDA, NPU or XPU only: not --device cpu")
    found += ["--speculative-num-draft-tokens", str(plan.block_size)]
    return found + _window(plan)


def _window(plan: Plan) -> list[str]:
    if plan.window is None:
        return []
    if plan.window < plan.block_size:
        raise ConfigError(
            f"SGLang wants a draft window of at least the block size: {plan.window} is below "
            f"{plan.block_size}; raise --draft-sliding-window-size or lower --block-size"
        )
    return ["--speculative-draft-window-size", str(plan.window)]
