"""A pair that fits: a tiny target, and a draft overfitted to what it says to four prompts.

Each test spoils a copy of it in one way.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

import dflash
from dflash.doctor.measured import Report, examine
from dflash.train.checkpoint import export
from dflash.train.config import DraftShape, Schedule
from dflash.train.data import Conversation
from dflash.train.shape import draft_config, tokenizer_keys
from tests.backends.tiny import reference_generate, save_target, tiny_target, tiny_tokenizer
from tests.train.rig import MASK, make_rig

TEXTS = ("Why?", "Say it.", "And now?", "Go on")
TOKENS = 28
SHAPE = DraftShape(layers=2, block_size=4, taps=(0, 2), mask_token_id=MASK)


@dataclass(frozen=True)
class Fitted:
    """Folders of a target and its draft."""

    target: Path
    draft: Path

    def copy(self, folder: Path) -> Fitted:
        """A copy that may be spoiled."""
        shutil.copytree(self.target, folder / "target")
        shutil.copytree(self.draft, folder / "draft")
        return Fitted(folder / "target", folder / "draft")

    def configure(self, **dflash_config: Any) -> None:
        """Change keys of the draft's dflash_config; those it has on top are changed there."""
        file = self.draft / "config.json"
        config = json.loads(file.read_text())
        for key, value in dflash_config.items():
            (config if key in config else config["dflash_config"])[key] = value
        file.write_text(json.dumps(config))

    def reweigh(self, change: Callable[[str, Tensor], Tensor]) -> None:
        """Change the draft's weights by name."""
        file = self.draft / "model.safetensors"
        weights = {name: change(name, tensor) for name, tensor in load_file(file).items()}
        save_file(weights, file, metadata={"format": "pt"})

    def examine(self, texts: tuple[str, ...] = TEXTS) -> Report:
        """What the doctor says."""
        target, draft = str(self.target), str(self.draft)
        return examine(lambda: dflash.load(target, draft, threads=1), texts, TOKENS)


def tokenizer() -> Any:
    """The tiny tokenizer, with the rig's mask among its special tokens."""
    made = tiny_tokenizer()
    made.mask_token = made.convert_ids_to_tokens(MASK)
    return made


def fit(folder: Path, render: Callable[[Any, str], str] | None = None) -> Fitted:
    """Train for some seconds; ``render`` makes the prompt of a text (default: the template)."""
    target, words = tiny_target("llama", eos=None), tokenizer()
    rig = make_rig(
        folder / "run",
        schedule=Schedule(steps=200, sequences=2, anchors=30, learning_rate=3e-3),
        shape=SHAPE,
        conversations=[_conversation(target, words, (render or rendered)(words, t)) for t in TEXTS],
    )
    for _ in rig.trainer().run():
        pass
    rig.model.eval()
    config = draft_config(target.config, SHAPE, mask_token_id=MASK, target_name="tiny")
    export(folder / "draft", rig.model, {**config, **tokenizer_keys(words)})
    return Fitted(save_target(target, words, folder / "target"), folder / "draft")


def rendered(words: Any, text: str) -> str:
    """One user turn through the template."""
    turns = [{"role": "user", "content": text}]
    prompt: str = words.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return prompt


def _conversation(target: Any, words: Any, prompt: str) -> Conversation:
    ids = words.encode(prompt, add_special_tokens=False)
    answer = reference_generate(target, ids, TOKENS + SHAPE.block_size)
    return Conversation((*ids, *answer), (False,) * len(ids) + (True,) * len(answer))
