"""A tiny target with text of its own, and trainers over it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash.backends.torch.dflash import DFlashDraftModel
from dflash.backends.torch.dflash2 import DFlash2DraftModel
from dflash.backends.torch.draft_load import load_draft
from dflash.backends.torch.kinds import KINDS
from dflash.backends.torch.load import wrap_target
from dflash.backends.torch.target import TorchTargetSession
from dflash.core.decode import decode
from dflash.core.policy import Fixed
from dflash.core.types import Request
from dflash.drafts.spec import read_spec
from dflash.train import evaluate, losses
from dflash.train.batches import Materials
from dflash.train.config import DraftShape, Objective, Schedule, TrainConfig
from dflash.train.data import Conversation
from dflash.train.features import FeatureStore
from dflash.train.selector import start_dflash2
from dflash.train.shape import draft_config
from dflash.train.trainer import Trainer
from dflash.train.warmstart import random_start, warm_start
from tests.backends.tiny import reference_generate, tiny_target

MASK = 5


@dataclass
class Rig:
    """Everything a training test touches."""

    target: Any
    conversations: list[Conversation]
    model: DFlashDraftModel
    materials: Materials
    config: TrainConfig
    draft: dict[str, Any]

    def trainer(self) -> Trainer:
        return Trainer(self.model, self.materials, self.config)


def written_by(target: Any, count: int, length: int = 40) -> list[Conversation]:
    """Short prompts continued greedily by the target itself."""
    generator = torch.Generator().manual_seed(1)
    out = []
    for _ in range(count):
        prompt = torch.randint(2, 200, (4,), generator=generator).tolist()
        ids = prompt + reference_generate(target, prompt, length)
        out.append(Conversation(tuple(ids), (False,) * 4 + (True,) * length))
    return out


def make_rig(
    out: Path,
    *,
    shape: DraftShape | None = None,
    objective: Objective | None = None,
    schedule: Schedule | None = None,
    conversations: list[Conversation] | None = None,
    warm: bool = True,
    file: Path | None = None,
) -> Rig:
    """A trainer's materials over the tiny Llama target."""
    torch.set_num_threads(1)
    target = tiny_target("llama", eos=None)
    shape = shape or DraftShape(layers=2, block_size=4, taps=(0, 2), mask_token_id=MASK)
    config = TrainConfig(
        target="tiny",
        data=(Path("unused.jsonl"),),
        out=out,
        shape=shape,
        objective=objective or Objective(decay="prefix", head_vocab=0),
        schedule=schedule or Schedule(steps=6, sequences=2, anchors=6, learning_rate=1e-3),
        precision="float32",
    )
    conversations = conversations or written_by(target, 4)
    draft = draft_config(target.config, shape, mask_token_id=MASK, target_name="tiny")
    spec = read_spec(draft)
    model: DFlashDraftModel = KINDS.load(spec.kind).module(spec).float()
    random_start(model, torch.Generator().manual_seed(0))
    if isinstance(model, DFlash2DraftModel):
        embedding = target.get_input_embeddings().weight
        start_dflash2(model, embedding, torch.Generator().manual_seed(0))
    if warm:
        assert warm_start(model, target, [c.ids for c in conversations[:2]])
    vocab = target.config.vocab_size
    tokens = losses.FrequentTokens.count(
        (token for c in conversations for token in c.ids), vocab, config.objective.head_vocab
    )
    materials = Materials(
        sequences=conversations,
        features=FeatureStore(target, [c.ids for c in conversations], model.spec.taps, file),
        embedding=target.get_input_embeddings().weight.detach(),
        head=target.get_output_embeddings().weight.detach()[tokens.kept],
        tokens=tokens,
        mask_id=MASK,
    )
    return Rig(target, conversations, model, materials, config, draft)


def serve(rig: Rig, draft: Path) -> float:
    """Mean committed tokens when the exported draft is run; the texts must be the target's."""
    loaded = load_draft(str(draft), wrap_target(rig.target))
    committed = rounds = 0
    for conversation in rig.conversations:
        session = TorchTargetSession(rig.target, loaded.spec.taps, 64)
        request = Request(list(conversation.ids[:4]), max_tokens=33)
        steps = list(decode(request, session, [loaded.open(64)], Fixed(4), time.perf_counter_ns))
        assert [t for s in steps for t in s.tokens] == list(conversation.ids[4:37])
        committed += sum(len(step.tokens) for step in steps[1:])
        rounds += len(steps) - 1
    return committed / rounds


def walk(rig: Rig) -> evaluate.Score:
    """What the draft as it is now accepts of the texts it learned from."""
    rig.model.eval()
    head = evaluate.Head(rig.target.get_output_embeddings().weight.detach())
    return evaluate.walk(rig.model, rig.materials, list(enumerate(rig.conversations)), head)
