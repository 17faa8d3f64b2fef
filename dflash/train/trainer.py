"""The training loop: features, anchored blocks, loss, AdamW; logged, checkpointed, resumable.

Only the draft learns; the target, its embedding and its head are frozen. The parts are plain
functions in this folder; this file orders them.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash.backends.torch.dflash import DFlashDraftModel
from dflash.backends.torch.dflash2 import DFlash2DraftModel
from dflash.train import blocks, losses
from dflash.train.batches import Materials, predicting_states, prepare
from dflash.train.checkpoint import load_state, save_state
from dflash.train.config import TrainConfig
from dflash.train.interrupt import interrupts_held
from dflash.train.selector import selector_term

WINDOW_BATCHES = 32  # sequences of like length are batched within windows of this many batches


def order(lengths: Sequence[int], batch: int, seed: int) -> Iterator[list[int]]:
    """Batches of sequence indices, endless; a function of ``seed`` alone.

    Each epoch is shuffled, then sorted by length inside windows, so that little is padding.
    """
    epoch = 0
    while True:
        shuffled = torch.randperm(
            len(lengths), generator=torch.Generator().manual_seed(seed * 100_003 + epoch)
        ).tolist()
        window = batch * WINDOW_BATCHES
        batches = []
        for start in range(0, len(shuffled), window):
            part = sorted(shuffled[start : start + window], key=lambda index: lengths[index])
            batches += [part[at : at + batch] for at in range(0, len(part), batch)]
        mixed = torch.randperm(
            len(batches), generator=torch.Generator().manual_seed(seed * 7_919 + epoch)
        )
        yield from (batches[index] for index in mixed.tolist())
        epoch += 1


def learning_rate(step: int, config: TrainConfig, first: int = 0) -> float:
    """Linear warm-up, then cosine from the peak to ``final`` x the peak.

    What begins to learn at a later step, ``first``, warms up there and is on the same curve then.
    """
    schedule = config.schedule
    warm = max(1, round(schedule.steps * schedule.warmup))
    risen = min(1.0, (step - first + 1) / warm)
    done = max(0, step - warm) / max(1, schedule.steps - warm)
    floor = schedule.final
    curve = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))
    return schedule.learning_rate * risen * curve


def draft_states(
    model: DFlashDraftModel,
    features: Tensor,  # [b, T, M*Ht]
    block: blocks.Blocks,
    noise: Tensor,  # [b, N*B, H]
) -> Tensor:  # [b, N, B, H]
    """Final hidden states of all blocks: the training form of one drafting pass."""
    spec, size = model.spec, block.size
    context = model.context_kv(
        model.fuse(features), torch.arange(features.shape[1], device=noise.device)
    )
    cache: dict[tuple[bool, int | None], Tensor] = {}
    masks: list[Tensor | None] = []
    for kind, causal in zip(spec.layer_types, spec.causal, strict=True):
        window = spec.sliding_window if kind == "sliding_attention" else None
        if (causal, window) not in cache:
            cache[causal, window] = blocks.attention_mask(
                block.anchors.to(noise.device), features.shape[1], size,
                causal=causal, window=window,
            )  # fmt: skip
        masks.append(cache[causal, window])
    states = model.block(noise, block.positions.to(noise.device), context, masks, size)
    return states.reshape(len(states), -1, size, states.shape[-1])


class Trainer:
    """One run. ``run`` yields after every step, so a caller can stop, watch or evaluate."""

    def __init__(
        self,
        model: DFlashDraftModel,
        materials: Materials,
        config: TrainConfig,
        started: Collection[str] = (),
    ) -> None:
        """The model's parameters must be float32: they are the master weights.

        ``started`` are the names of those that another draft brought.
        """
        self.model, self.materials, self.config = model, materials, config
        self.device = next(model.parameters()).device
        self.optimizer = torch.optim.AdamW(
            parameter_groups(model, config, started),
            lr=config.schedule.learning_rate,
            betas=(0.9, 0.95),
            fused=True,
        )
        self.step = 0
        self.skipped_steps = 0
        self.history: dict[str, Any] = {"loss": [], "evaluations": []}
        self.autocast = wants_bfloat16(config, self.device)
        decay = config.decay
        rows = config.shape.block_size - 1
        self.weights = (
            None
            if decay == "prefix"
            else losses.decay_weights(rows, None if decay == "uniform" else float(decay)).to(
                self.device
            )
        )
        self.row_weights = losses.decay_weights(rows, rows / 2).to(self.device)

    def identity(self) -> dict[str, Any]:
        """The settings a continuation must share."""
        return json.loads(json.dumps(self.config.identity()))  # type: ignore[no-any-return]

    def save(self) -> None:
        """Write the checkpoint of this moment."""
        save_state(
            self.config.out, self.model, self.optimizer, self.step, self.identity(),
            self.history | {"skipped_steps": self.skipped_steps},
        )  # fmt: skip

    def restore(self) -> None:
        """Continue the run in ``config.out``."""
        self.step, self.history = load_state(
            self.config.out, self.model, self.optimizer, self.identity()
        )
        self.skipped_steps = self.history.pop("skipped_steps", 0)  # older checkpoints lack it

    def run(self) -> Iterator[dict[str, float]]:
        """Train from the current step to the last; one record a step."""
        lengths = [len(sequence.ids) for sequence in self.materials.sequences]
        batches = order(lengths, self.config.schedule.sequences, self.config.schedule.seed)
        for _ in range(self.step):
            next(batches)
        self.model.train()
        while self.step < self.config.schedule.steps:
            started = time.perf_counter()
            record = self.train_step(next(batches))
            yield record | {"step": self.step, "seconds": time.perf_counter() - started}

    def train_step(self, indices: list[int]) -> dict[str, float]:
        """One step: an update, skipped (and counted) if loss or gradient is not finite."""
        rate = learning_rate(self.step, self.config)
        for group in self.optimizer.param_groups:
            first = group["first"]
            group["lr"] = learning_rate(self.step, self.config, first) * group["share"]
            for parameter in group["params"]:  # what does not learn yet costs no backward pass
                parameter.requires_grad_(self.step >= first and group["share"] > 0)
        self.optimizer.zero_grad(set_to_none=True)
        parts = self.loss(indices)
        if parts is None:  # no anchor in any of these sequences: nothing to learn, not an error
            self.step += 1
            return {"loss": float("nan"), "rate": rate, "positions": 0.0}
        loss, record = parts
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.schedule.clip)
        good = math.isfinite(record["loss"]) and math.isfinite(norm.item())
        with interrupts_held():  # weights, moments and step number change together
            if good:
                self.optimizer.step()
            else:
                self.skipped_steps += 1
            self.step += 1
        return record | {"rate": rate, "grad_norm": norm.item()}

    def loss(self, indices: list[int]) -> tuple[Tensor, dict[str, float]] | None:
        """Loss of the sequences at ``indices`` with the anchors of the current step."""
        batch = prepare(self.materials, indices, self.config, self.step)
        if batch is None:
            return None
        block, features, final = batch
        device = self.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self.autocast):
            noise = self.materials.embedding[block.inputs.to(device)]
            states = draft_states(self.model, features.to(device), block, noise)[:, :, 1:].flatten(
                0, 1
            )
            logits = F.linear(states, self.materials.head)
        valid = block.valid.flatten(0, 1).to(device)
        labels = self.materials.tokens.index[block.labels.flatten(0, 1)].to(device)
        weights = None if self.weights is None else self.weights[: block.size - 1]
        total, record = torch.zeros((), device=device), dict[str, float]()
        if states.requires_grad:  # not while the selector learns alone
            wanted = predicting_states(final.to(device), block)
            total, record = self.rows_term(states, logits, labels, valid, wanted)
        hits = (logits.argmax(-1) == labels) & valid
        record["first"] = share(hits, valid, 1)
        if isinstance(self.model, DFlash2DraftModel):
            with torch.autocast(device.type, torch.bfloat16, enabled=self.autocast):
                chosen = selector_term(
                    self.model, states, logits, block, self.materials.tokens, weights
                )
            total = total + self.config.objective.selector_weight * chosen.loss
            record |= {
                "selector": chosen.loss.item(),
                "recall_1": share(hits, valid),
                "candidate_recall": share(chosen.recalled, valid),
                "path": share(chosen.hits, valid),
            }
            hits = chosen.hits
        run, alive = hits.cumprod(-1).sum(-1).float(), valid[:, 0]
        prefix = (run * alive).sum().item() / max(alive.sum().item(), 1)
        counted = {"prefix": prefix, "positions": float(valid.sum().item())}
        return total, {"loss": total.item()} | record | counted

    def rows_term(
        self,
        states: Tensor,  # [n, K, H]
        logits: Tensor,  # [n, K, kept]
        labels: Tensor,  # [n, K]
        valid: Tensor,  # [n, K]
        wanted: Tensor,  # [n, K, Ht]
    ) -> tuple[Tensor, dict[str, float]]:
        """The rows' own term, each by itself: the label's entropy, the pull on hidden states."""
        objective, head, rows = self.config.objective, self.materials.head, states.shape[1]
        weights = None if self.weights is None else self.weights[:rows]
        soft = None
        if objective.soft_mix > 0:
            with torch.no_grad():
                soft = F.linear(wanted.to(head.dtype), head).float().softmax(-1)
        entropy = losses.block_loss(logits, labels, valid, weights, soft, objective.soft_mix)
        pull = losses.hidden_loss(states, wanted, valid, self.row_weights[:rows])
        record = {"entropy": entropy.item(), "hidden": pull.item()}
        return entropy + objective.hidden_weight * pull, record


def parameter_groups(
    model: DFlashDraftModel, config: TrainConfig, started: Collection[str]
) -> list[dict[str, Any]]:
    """AdamW's groups: matrices before vectors (which do not decay), each in the model's order.

    So a parameter's place does not depend on how groups are cut, and checkpoints go by place.
    ``share`` and ``first`` are a group's part of the learning rate and the step it begins at.
    """
    schedule = config.schedule

    def traits(item: tuple[str, Tensor]) -> tuple[float, float, int]:
        name, parameter = item
        alone = name.startswith("candidate_selector.")
        return (
            schedule.weight_decay if parameter.ndim > 1 else 0.0,
            schedule.start_rate if name in started else 1.0,
            0 if alone else schedule.selector_first,
        )

    ordered = sorted(model.named_parameters(), key=lambda item: item[1].ndim == 1)
    return [
        {"params": [p for _, p in part], "weight_decay": decay, "share": rate, "first": first}
        for (decay, rate, first), part in groupby(ordered, key=traits)
    ]


def share(hits: Tensor, valid: Tensor, rows: int | None = None) -> float:
    """Hits among the valid, of the first ``rows`` of each block; 0 where nothing is valid."""
    return hits[:, :rows].sum().item() / max(valid[:, :rows].sum().item(), 1)


def wants_bfloat16(config: TrainConfig, device: torch.device) -> bool:
    """Matrix products in bfloat16 where the hardware multiplies it natively; sums stay float32."""
    if config.precision != "auto":
        return config.precision == "bfloat16"
    if device.type == "cpu":
        check: Callable[[], bool] = torch.ops.mkldnn._is_mkldnn_bf16_supported
        return "avx512_bf16" in cpu_flags() and bool(check())
    return device.type == "cuda"


def cpu_flags() -> str:
    """The processor's feature words on Linux; empty elsewhere."""
    file = Path("/proc/cpuinfo")
    return file.read_text(encoding="utf-8") if file.exists() else ""
