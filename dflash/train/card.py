"""The model card of a trained draft: what it is for, how it was made, how well it does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash.checks import counted
from dflash.train.config import TrainConfig
from dflash.train.data import Corpus

if TYPE_CHECKING:
    from dflash.train.evaluate import Score
    from dflash.train.trainer import Trainer


def write_card(
    config: TrainConfig,
    draft: Mapping[str, Any],
    trainer: Trainer,
    corpus: Corpus,
    walked: Score,
    generated: Score | None,
) -> str:
    """README.md of the draft folder, in Markdown."""
    name = _base(draft["target_name"])
    nested = draft["dflash_config"]
    parameters = sum(p.numel() for p in trainer.model.parameters())
    tail = trainer.history["loss"][-1:] or ["see log.jsonl"]
    lines = [
        "---",
        "library_name: dflash-engine",
        f"base_model: {name}",
        "tags: [speculative-decoding, dflash]",
        "---",
        "",
        f"# DFlash draft for {name}",
        "",
        f"Proposes blocks of {draft['block_size']} tokens (anchor included) for {name}; the target "
        "verifies them, so its output does not change. Not a model to run alone.",
        "",
        "```bash",
        f"dflash generate --model {name} --draft PATH_TO_THIS_FOLDER 'Why is the sky blue?'",
        "```",
        "",
        "| | |",
        "|---|---|",
        f"| layers | {draft['num_hidden_layers']} |",
        f"| parameters | {parameters:,} |",
        f"| taps (output of target layer) | {nested['target_layer_ids']} |",
        f"| mask token id | {nested['mask_token_id']} |",
        f"| training text | {len(corpus.train):,} conversations, "
        f"{corpus.answer_tokens:,} answer tokens |",
        f"| steps | {trainer.step:,} ({trainer.skipped_steps} skipped) |",
        f"| last loss | {tail[0]} |",
    ]
    lines += score_lines({"walk": walked, "generation": generated})
    lines += [
        *vocabulary_lines(draft),
        f"| made by | dflash-engine {package_version()} |",
        "\nSettings:\n",
        "```json",
        json.dumps(settings(config) | {"effective_decay": config.decay}, indent=2),
        "```",
        "",
    ]
    return "\n".join(lines)


def vocabulary_lines(draft: Mapping[str, Any]) -> list[str]:
    """What a reduced vocabulary leaves out, and who will not have it."""
    size = draft.get("draft_vocab_size")
    if size is None:
        return []
    covered = draft["dflash_config"]["draft_vocab_coverage"]
    lines = [
        f"| draft vocabulary | {size:,} of {draft['vocab_size']:,} tokens, {covered:.1%} of the "
        "held-out answers; no other token is ever accepted |"
    ]
    if "selector_rank" in draft["dflash_config"]:
        lines.append(
            "| not for | vLLM, SGLang and llama.cpp, which refuse a DFlash2 draft with a "
            "vocabulary of its own |"
        )
    return lines


def settings(config: TrainConfig) -> dict[str, Any]:
    """The config for others to read: files by name, and nothing of where they lay."""
    plain = config.to_json()
    for key in ("target", "out", "start"):
        if plain.get(key) is not None:
            plain[key] = _base(plain[key])
    return plain | {"data": [_base(path) for path in plain["data"]]}


def _base(name: str) -> str:
    """The last part of a path on this machine; a hub id as it is."""
    place = Path(name).expanduser()
    return place.name if place.exists() or place.is_absolute() else name


def score_lines(scores: Mapping[str, Score | None]) -> list[str]:
    """How well it did on held-out text, and nothing that reads as a promise where none was run."""
    told = [
        f"| held-out {name} | {score.mean_committed:.3f} committed per verify pass "
        f"({counted(score.rounds, 'pass', 'passes')}) |"
        for name, score in scores.items()
        if score is not None and score.rounds
    ]
    return told or ["| held-out text | not measured |"]


def package_version() -> str:
    """Version of the installed distribution, or ``unknown`` in a bare checkout."""
    try:
        return version("dflash-engine")
    except PackageNotFoundError:
        return "unknown"
