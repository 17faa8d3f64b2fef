"""``dflash train``: from a target and a text file to a draft folder that can be served.

Composition only: opens the target, prepares materials, drives `trainer.Trainer`, evaluates, writes
checkpoints, the log (`log.jsonl`) and the folder (config.json, weights, README.md).
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dflash.backends.torch.dflash import DFlashDraftModel
from dflash.backends.torch.dflash2 import DFlash2DraftModel
from dflash.backends.torch.kinds import KINDS
from dflash.backends.torch.load import LoadedTarget, load_target
from dflash.drafts.spec import DraftSpec, read_spec
from dflash.errors import ConfigError
from dflash.train import evaluate, losses
from dflash.train.batches import Materials
from dflash.train.card import write_card
from dflash.train.checkpoint import export, saved_run, vocabulary_maps
from dflash.train.config import TrainConfig
from dflash.train.data import Corpus, check_files, load_corpus
from dflash.train.features import FeatureStore
from dflash.train.place import made
from dflash.train.selector import start_dflash2
from dflash.train.shape import choose_mask_token, draft_config, tokenizer_keys
from dflash.train.trainer import Trainer, wants_bfloat16
from dflash.train.warmstart import random_start, start_from, warm_start

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

    @property
    def shipped(self) -> list[str]:
        """Names of the files that make the draft."""
        kinds = ("config.json", "model*.safetensors*", "README.md")
        return sorted(file.name for kind in kinds for file in self.out.glob(kind))


def train(config: TrainConfig, report: Report = lambda _: None) -> Outcome:
    """Run (or resume) a training. ``report`` gets one mapping a step and one an evaluation.

    Ctrl-C saves a checkpoint and the draft as it is, and returns with ``interrupted``.
    Raises ConfigError, DataError, CheckpointError, OutOfMemory.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    with made(config.out):
        _check(config)
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


def _check(config: TrainConfig) -> None:
    """Raise ConfigError for data that is not there, and for a run that is or is finished."""
    if (config.out / "state.safetensors").exists() and not config.resume:
        raise ConfigError(
            f"{config.out} holds a run already: continue it with --resume, or choose another --out"
        )
    check_files(config.data)
    if config.resume:
        _refuse_finished(config)


def _refuse_finished(config: TrainConfig) -> None:
    """Raise ConfigError for a run that has all its steps and its card."""
    step, _ = saved_run(config.out)
    if step >= config.schedule.steps and (config.out / "README.md").is_file():
        raise ConfigError(
            f"the run in {config.out} is already finished, {step} steps: go on with --steps "
            f"{2 * step}, say, or choose another --out"
        )


@dataclass(slots=True)
class Session:
    """A prepared run."""

    config: TrainConfig
    target: LoadedTarget
    corpus: Corpus
    trainer: Trainer
    draft_config: dict[str, Any]
    head: torch.Tensor  # [n, H] the target's head rows that the draft chooses among
    said: torch.Tensor | None  # [n] their tokens; None: all
    started: float

    def export(self, card: str | None = None) -> None:
        """Write the draft as it is now into its folder."""
        size = self.trainer.model.spec.vocab_size
        maps = None if self.said is None else vocabulary_maps(self.said, size)
        export(self.config.out, self.trainer.model, self.draft_config, card, maps)

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
    model, started = start_model(config, read_spec(plain), target, corpus)
    tokens, said = vocabularies(corpus, model.spec, config.objective.head_vocab)
    if said is not None:
        covered = corpus.covered(set(said.tolist()))
        plain["dflash_config"]["draft_vocab_coverage"] = round(covered, 4)
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
        Trainer(model, materials, config, started),
        plain,
        (weight if said is None else weight[said.to(where)]).to(compute),
        said,
        time.time(),
    )


def vocabularies(
    corpus: Corpus, spec: DraftSpec, head_vocab: int
) -> tuple[losses.FrequentTokens, torch.Tensor | None]:
    """The tokens that the loss is computed on, and those that the draft can say (None: all)."""
    tokens = losses.FrequentTokens.count(corpus.answers(), spec.vocab_size, head_vocab)
    if spec.draft_vocab_size is None:
        return tokens, None
    said = losses.FrequentTokens.count(corpus.answers(), spec.vocab_size, spec.draft_vocab_size)
    return (tokens if len(tokens.kept) <= len(said.kept) else said), said.kept


def start_model(
    config: TrainConfig, spec: DraftSpec, target: LoadedTarget, corpus: Corpus
) -> tuple[DFlashDraftModel, set[str]]:
    """The draft in float32 with the weights it begins with: those of ``config.start``, or of the
    target's last layers; and the names of those that ``config.start`` had. Raises ConfigError for
    a start of another shape."""
    where = target.device
    made: DFlashDraftModel = KINDS.load(spec.kind).module(spec)
    model = made.float().to(device=where)
    generator = torch.Generator(device=where).manual_seed(config.schedule.seed)
    random_start(model, generator)
    if isinstance(model, DFlash2DraftModel):
        start_dflash2(model, target.embedding, generator)
    if config.start is None:
        warm_start(model, target.model, [c.ids for c in corpus.train[:WARM_SAMPLES]])
        return model, set()
    new = start_from(model, config.start)
    return model, {name for name, _ in model.named_parameters()}.difference(new)


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
                log.write(line(record))
                if trainer.step % config.checkpoint_every == 0:
                    log.flush()
                    trainer.save()
                if trainer.step % config.eval_every == 0 and trainer.step < config.schedule.steps:
                    score(session, report)
        finally:
            log.flush()


def line(record: Mapping[str, float]) -> str:
    """One line of the log; what is not finite is null, since JSON has no word for it."""
    plain = {k: round(v, 5) if math.isfinite(v) else None for k, v in record.items()}
    return json.dumps(plain) + "\n"


def score(session: Session, report: Report) -> tuple[evaluate.Score, evaluate.Score | None]:
    """Evaluate the draft as it is now, by walk and by real generation; note both."""
    trainer, config = session.trainer, session.config
    trainer.model.eval()
    held_out = list(enumerate(session.corpus.valid[:VALID_WALKS], len(session.corpus.train)))
    walked = evaluate.walk(
        trainer.model, session.materials, held_out,
        evaluate.Head(session.head, session.said), autocast=trainer.autocast,
    )  # fmt: skip
    generated = None
    prompts = held_out_prompts(session)
    if prompts:
        session.export()
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
    # what the doctor holds later targets and texts against
    if generated is not None and generated.rounds:
        kept = [round(share, 4) for share in generated.by_position]
        session.draft_config["dflash_config"]["acceptance_by_position"] = kept
    card = write_card(config, session.draft_config, trainer, session.corpus, walked, generated)
    session.export(card)
    if not interrupted:
        for file in config.out.glob("features.*"):
            file.unlink()
    return Outcome(config.out, trainer.step, interrupted, walked, generated, trainer.history)
