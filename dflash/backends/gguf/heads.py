"""Multi-token prediction heads in a target's GGUF file: whether llama.cpp drafts with them."""

from __future__ import annotations

from dflash.errors import ConfigError
from dflash.gguf_file import Header

GRAPHS = frozenset(
    {
        *("qwen35", "qwen35moe", "qwen3next", "qwen4exp", "glm4moe", "glm-dsa", "hy_v3"),
        *("cohere2moe", "bailingmoe3", "deepseek2", "deepseek32", "nemotron_h_moe", "mimo2"),
        *("step35",),
    }
)
"""``general.architecture`` of files whose heads llama.cpp has a graph for, on a state as wide as
the model. Others' heads it loads and never runs, or aborts at."""


def count_heads(target: Header) -> int:
    """Heads that the file has."""
    return int(target.own("nextn_predict_layers", 0) or 0)


def why_no_heads(target: Header) -> str:
    """Why there are no drafts from heads in ``target``; empty where there are."""
    count, file = count_heads(target), target.path.name
    if not count:
        return f"{file} has no multi-token prediction heads ({target.architecture})"
    if f"blk.{target.layers}.nextn.eh_proj.weight" not in target.tensors:
        return f"{file} counts {count} multi-token prediction heads, and its tensors lack them"
    if target.architecture not in GRAPHS:
        return (
            f"llama.cpp has no graph for the multi-token prediction heads of a "
            f"{target.architecture} target"
        )
    if count > 1:
        return (
            f"{file} has {count} multi-token prediction heads, and this loop drafts with one: "
            "several are layers of one chain in llama.cpp"
        )
    return ""


def insist_on_heads(target: Header) -> None:
    """Raise ConfigError where heads were asked for and cannot draft."""
    if why := why_no_heads(target):
        raise ConfigError(
            f"{why}. Use draft='ngram' or a sidecar, llama.cpp's own server (dflash serve --engine "
            "llama-server), or the unquantised target (backend='torch')"
        )
