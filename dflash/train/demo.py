"""The recipe of the demo draft, from nothing: ``python -m dflash.train.demo --out DIR``.

The demo target writes its own questions and answers them, a draft is trained on that text and
scored by real generation, and DIR ends up with weights, config and card. Nothing is fetched but
the demo target itself, so a machine without network runs it once that file is in place
(``dflash pull --file``). Every stage resumes: run the same command again.

The presets differ in size alone. ``cuda`` sees about a hundred times as many blocks as ``cpu``.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash.demo import HUB_ID, demo_target
from dflash.train.config import DraftShape, Objective, Schedule, TrainConfig

LOOP = 5  # an answer is cut where one run of four words comes this often: loops teach nothing
CODE_COPIES = 3  # code is a sixteenth of what the target writes, and a third of what it is asked


@dataclass(frozen=True, slots=True)
class Preset:
    """Sizes of one recipe."""

    conversations: int
    answer_tokens: int
    generate_batch: int
    schedule: Schedule


PRESETS = {
    "cpu": Preset(
        conversations=3000,
        answer_tokens=160,
        generate_batch=96,
        schedule=Schedule(
            steps=8000, learning_rate=2e-3, sequences=2, anchors=40, block_sizes=(4, 5, 6, 8)
        ),
    ),
    "cuda": Preset(
        conversations=60_000,
        answer_tokens=256,
        generate_batch=768,
        schedule=Schedule(
            steps=24_000, learning_rate=1e-3, sequences=16, anchors=64, block_sizes=(4, 5, 6, 8)
        ),
    ),
}


def main(  # noqa: PLR0913 (options are parameters)
    out: Annotated[Path, typer.Option("--out", help="Folder of text, checkpoint and draft.")],
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    target: Annotated[str | None, typer.Option("--target", help="Default: the demo model.")] = None,
    questions: Annotated[
        list[Path] | None,
        typer.Option("--questions", help='JSONL with "turns", asked beside the target\'s own.'),
    ] = None,
    conversations: Annotated[int | None, typer.Option(help="How many to generate.")] = None,
    answer_tokens: Annotated[int | None, typer.Option(help="Longest answer.")] = None,
    steps: Annotated[int | None, typer.Option(help="Updates.")] = None,
    layers: Annotated[int, typer.Option(help="Layers of the draft.")] = 3,
) -> None:
    """Generate text with the demo target, train its draft on it, score it by real generation."""
    preset = PRESETS["cuda" if device.startswith("cuda") else "cpu"]
    if steps is not None:
        preset = replace(preset, schedule=replace(preset.schedule, steps=steps))
    preset = replace(
        preset,
        conversations=conversations or preset.conversations,
        answer_tokens=answer_tokens or preset.answer_tokens,
    )
    out.mkdir(parents=True, exist_ok=True)
    name = target or str(demo_target())
    write_text(out / "raw.jsonl", name, device, preset, questions or [])
    data = prepare_text(out / "raw.jsonl", out / "text.jsonl")
    config = TrainConfig(
        target=name,
        target_name=target or HUB_ID,
        data=(data,),
        out=out / "draft",
        shape=DraftShape(layers=layers),
        objective=Objective(decay="prefix", soft_mix=0.5),
        schedule=preset.schedule,
        max_length=320,
        device=device,
        resume=(out / "draft" / "state.safetensors").is_file(),
    )
    from dflash.cli.train import Progress
    from dflash.train.run import train

    with Progress(preset.schedule.steps, quiet=False) as progress:
        outcome = train(config, progress)
    print(f"{outcome.out}: {outcome.walk.to_json()}", file=sys.stderr)  # noqa: T201 (a command)


def write_text(raw: Path, target: str, device: str, preset: Preset, questions: list[Path]) -> None:
    """Conversations in rounds of a few hundred, until there are enough; appends to ``raw``."""
    have = sum(1 for _ in raw.open(encoding="utf-8")) if raw.is_file() else 0
    if have >= preset.conversations:
        return
    from dflash.backends.torch.load import load_target
    from dflash.train.selfgen import self_ask, write_answers

    loaded = load_target(target, device=device, dtype="bfloat16", pack=False)
    given = [("prompts", text) for path in questions for text in read_turns(path)]
    while have < preset.conversations:
        # the seed is the row count: an interrupted run goes on with other questions
        asked = self_ask(
            loaded.model, loaded.tokenizer, preset.generate_batch * 3, code_share=0.4,
            batch=preset.generate_batch, seed=have,
        )  # fmt: skip
        some = given[have // 4 : have // 4 + preset.generate_batch]
        have += write_answers(
            loaded.model, loaded.tokenizer, [*asked, *some], raw,
            max_tokens=preset.answer_tokens, batch=preset.generate_batch,
        )  # fmt: skip
        print(f"{have} of {preset.conversations} conversations", file=sys.stderr)  # noqa: T201


def read_turns(path: Path) -> list[str]:
    """First turns of a prompt file."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line)["turns"][0] for line in file if line.strip()]


def prepare_text(raw: Path, out: Path) -> Path:
    """Cut loops, give code its weight; returns ``out``."""
    rows: list[dict[str, Any]] = []
    with raw.open(encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            row["messages"][-1]["content"] = cut_loop(row["messages"][-1]["content"])
            if len(row["messages"][-1]["content"]) >= 40:
                code = "code" in row["source"] or "```" in row["messages"][-1]["content"]
                rows += [row] * (CODE_COPIES if code else 1)
    out.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    return out


def cut_loop(text: str, most: int = LOOP) -> str:
    """The text up to where a run of four words comes for the ``most``-th time."""
    words = text.split(" ")
    seen: Counter[tuple[str, ...]] = Counter()
    for place in range(len(words) - 3):
        run = tuple(words[place : place + 4])
        seen[run] += 1
        if seen[run] >= most:
            return " ".join(words[:place]).rstrip()
    return text


if __name__ == "__main__":
    typer.run(main)
