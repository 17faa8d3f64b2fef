"""``dflash train``: from a target and a text file to a draft folder that can be served.

Composition only: opens the target, prepares materials, drives `trainer.Trainer`, evaluates, writes
checkpoints, the log (`log.jsonl`) and the folder (config.json, weights, README.md).
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dflash.backends.torch.dflash import DFlashDraftModel
from dflash.backends.torch.load import LoadedTarget, load_target
from dflash.drafts.spec import read_spec
from dflash.errors import ConfigError
from dflash.train import evaluate, losses
from dflash.train.card import write_card
from dflash.train.checkpoint import export
from dflash.train.config import TrainConfig
from dflash.train.data import Corpus, load_corpus
from dflash.train.features import FeatureStore
from dflash.train.shape import choose_mask_token, draft_config, tokenizer_keys
from dflash.train.trainer import Materials, Trainer, wants_bfloat16
from dflash.train.warmstart import random_start, warm_start

Report = Callable[[Mapping[str, Any]], None]

WARM_SAMPLES = 8  # sequences on which the warm start measures head sizes
VALID_WALKS = 64  # held-out conversations walked at each evaluation


@dataclass(slots=True)
class Outcome:
    """What a run left behind."""

    out: Path
    steps: int
    interrupted: bool
    walk: evaluate.Score
    generated: evaluate.Score | None
    history: dict[str, Any] = field(default_factory=dict)


def train(config: TrainConfig, report: Report = lambda _: None) -> Outcome:
    """Run (or resume) a training. ``report`` gets one mapping a step and one an evaluation.

    Ctrl-C saves a checkpoint and the draft as it is, and returns with ``interrupted``.
    Raises ConfigError, DataError, CheckpointError, OutOfMemory.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    config.out.mkdir(parents=True, exist_ok=True)
    if (config.out / "state.safetensors").exists() and not config.resume:
        raise ConfigError(
            f"{config.out} holds a run already: continue it with --resume, or choose another --out"
        )
    session = prepare(config)
    if config.resume:
        session.trainer.restore()
    interrupted = False
    try:
        for done in session.materials.features.fill():
            report({"event": "features", "done": done, "of": len(session.materials.features.done)})
        loop(session, report)
    except KeyboardInterrupt:
        interrupted = True
    return finish(session, interrupted, report)


@dataclass(slots=True)
class Session:
    """A prepared run."""

    config: TrainConfig
    target: LoadedTarget
    corpus: Corpus
    trainer: Trainer
    draft_config: dict[str, Any]
    head: torch.Tensor  # [V, H]
    started: float

    @property
    def materials(self) -> Materials:
        """What the trainer reads."""
        return self.trainer.materials


def prepare(config: TrainConfig) -> Session:
    """Open everything; nothing is computed yet."""
    where = torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    # features are kept in bfloat16 anyway; the target runs in it where that is fast
    kind = "bfloat16" if wants_bfloat16(config, where) else "float32"
    target = load_target(config.target, device=str(where), dtype=kind, pack=False)
    if target.tokenizer is None or not getattr(target.tokenizer, "chat_template", None):
        raise ConfigError(f"{config.target} has no chat template: conversations cannot be rendered")
    corpus = load_corpus(
        config.data, target.tokenizer, max_length=config.max_length,
        valid_every=config.valid_every, skip_malformed=config.skip_malformed,
    )  # fmt: skip
    plain = shape_draft(config, target)
    mask = plain["dflash_config"]["mask_token_id"]
    model: DFlashDraftModel = DFlashDraftModel(read_spec(plain)).float()
    model = model.to(device=where)
    seed = config.schedule.seed
    random_start(model, torch.Generator(device=where).manual_seed(seed))
    warm_start(model, target.model, [c.ids for c in corpus.train[:WARM_SAMPLES]])
    answers = (token for c in corpus.train for token, a in zip(c.ids, c.answer, strict=True) if a)
    tokens = losses.FrequentTokens.count(answers, target.vocab_size, config.objective.head_vocab)
    weight: Any = target.head.weight
    weight = weight.detach()
    compute = torch.bfloat16 if wants_bfloat16(config, where) else torch.float32
    sequences = [c.ids for c in [*corpus.train, *corpus.valid]]
    materials = Materials(
        sequences=corpus.train,
        features=FeatureStore(
            target.model, sequences, model.spec.taps, config.out / "features.bin"
        ),
        embedding=target.embedding.detach().float(),
        head=weight[tokens.kept.to(where)].to(compute),
        tokens=tokens,
        mask_id=mask,
    )
    return Session(
        config,
        target,
        corpus,
        Trainer(model, materials, config),
        plain,
        weight.to(compute),
        time.time(),
    )


def shape_draft(config: TrainConfig, target: LoadedTarget) -> dict[str, Any]:
    """config.json of the draft to be. Raises ConfigError for a mask token that cannot serve."""
    mask = config.shape.mask_token_id
    if mask is None:
        mask = choose_mask_token(target.tokenizer, target.eos_ids, target.vocab_size)
    elif not 0 <= mask < target.vocab_size or mask in target.eos_ids:
        raise ConfigError(
            f"--mask-token-id {mask} must be one of the target's {target.vocab_size} embedding "
            f"rows and no end-of-sequence id ({sorted(target.eos_ids)})"
        )
    name = config.target_name or config.target
    plain = draft_config(target.config, config.shape, mask_token_id=mask, target_name=name)
    return plain | tokenizer_keys(target.tokenizer)


def loop(session: Session, report: Report) -> None:
    """Step, log, checkpoint, evaluate."""
    config, trainer = session.config, session.trainer
    with (config.out / "log.jsonl").open("a", encoding="utf-8") as log:
        start = {"event": "start", "step": trainer.step, "config": config.to_json(),
                 "decay": config.decay, "answer_tokens": session.corpus.answer_tokens,
                 "left_out": len(session.corpus.skipped)}  # fmt: skip
        log.write(json.dumps(start) + "\n")
        try:
            for record in trainer.run():
                report(record)
                log.write(json.dumps({k: round(v, 5) for k, v in record.items()}) + "\n")
                if trainer.step % config.checkpoint_every == 0:
                    log.flush()
                    trainer.save()
                if trainer.step % config.eval_every == 0 and trainer.step < config.schedule.steps:
                    score(session, report)
        finally:
            log.flush()


def score(session: Session, report: Report) -> tuple[evaluate.Score, evaluate.Score | None]:
    """Evaluate the draft as it is now, by walk and by real generation; note both."""
    trainer, config = session.trainer, session.config
    trainer.model.eval()
    held_out = list(enumerate(session.corpus.valid[:VALID_WALKS], len(session.corpus.train)))
    walked = evaluate.walk(
        trainer.model, session.materials, held_out, session.head, autocast=trainer.autocast
    )
    generated = None
    prompts = held_out_prompts(session)
    if prompts:
        export(config.out, trainer.model, session.draft_config)
        generated = evaluate.generate(
            config.target, config.out, prompts, device=str(session.target.device)
        )
    trainer.model.train()
    note = {"event": "evaluation", "step": trainer.step, "walk": walked.to_json(),
            "generated": generated.to_json() if generated else None}  # fmt: skip
    trainer.history["evaluations"].append(note)
    with (config.out / "log.jsonl").open("a", encoding="utf-8") as log:
        log.write(json.dumps(note) + "\n")
    report(note)
    return walked, generated


def held_out_prompts(session: Session) -> list[Any]:
    """Prompts of held-out conversations, as ids up to where the answer begins."""
    valid = session.corpus.valid
    count = min(session.config.eval_prompts, len(valid))
    chosen = random.Random(session.config.schedule.seed).sample(range(len(valid)), count)
    return [list(valid[i].ids[: valid[i].answer.index(True)]) for i in chosen]


def finish(session: Session, interrupted: bool, report: Report) -> Outcome:
    """Checkpoint, final evaluation, card and folder."""
    trainer, config = session.trainer, session.config
    trainer.save()
    if interrupted:
        walked, generated = evaluate.Score(0.0, 0, 0, []), None
    else:
        walked, generated = score(session, report)
    if generated is not None:  # what the doctor holds later targets and texts against
        kept = [round(share, 4) for share in generated.by_position]
        session.draft_config["dflash_config"]["acceptance_by_position"] = kept
    card = write_card(config, session.draft_config, trainer, session.corpus, walked, generated)
    export(config.out, trainer.model, session.draft_config, card)
    if not interrupted:
        for file in config.out.glob("features.*"):
            file.unlink()
    return Outcome(config.out, trainer.step, interrupted, walked, generated, trainer.history)
