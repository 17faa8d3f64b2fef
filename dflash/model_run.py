"""One generation of the PyTorch façade: the caller's target, its draft, the core's loop."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dflash.backends.torch.dflash_session import DFlashSession
from dflash.backends.torch.draft_load import draft_dtype, make_tables
from dflash.backends.torch.kinds import KINDS
from dflash.backends.torch.load import LoadedTarget
from dflash.backends.torch.target import TorchTargetSession
from dflash.backends.torch.wrap import settle, window_of
from dflash.checks import LARGEST, within
from dflash.config import GenerateConfig, LoadConfig, token_ids
from dflash.core.decode import decode
from dflash.core.policy import Fixed, Off
from dflash.core.types import Request, Sampling, Step
from dflash.drafts.spec import DraftSpec
from dflash.errors import ConfigError, PromptError

if TYPE_CHECKING:
    from dflash.model import DFlashDraftModel


@dataclass(frozen=True)
class GenerationStats:
    """What ``return_stats=True`` returns; upstream's fields."""

    output_ids: Tensor  # [1, T], the prompt included
    num_input_tokens: int
    num_output_tokens: int
    time_to_first_token: float  # seconds
    time_per_output_token: float  # seconds; prefill left out
    acceptance_lengths: list[int]  # tokens committed per round, the bonus counted


_TURNS: WeakKeyDictionary[nn.Module, Lock] = WeakKeyDictionary()


def _turn(target: nn.Module) -> Lock:
    """One generation at a time on one target: tapping hooks belong to the module they hang on."""
    return _TURNS.setdefault(target, Lock())


@dataclass
class Run:
    """One generation of a draft beside the caller's target."""

    model: DFlashDraftModel
    target: LoadedTarget
    mask_token_id: int | None

    def __post_init__(self) -> None:
        """Move the draft to its target and check that the two belong together."""
        if self.mask_token_id is not None:
            self.model = copy.copy(self.model)  # the weights are shared, the spec is not
            self.model.mask_token_id = self.mask_token_id
        for message in settle(self.model, self.target, self.model.name, self.window):
            warnings.warn(message, UserWarning, stacklevel=2)

    @property
    def window(self) -> int | None:
        """Context rows the draft keeps; None where that is no bound in this target's context."""
        return window_of(self.model, self.target)

    def clamp(self, block_size: int) -> int:
        """``block_size``, at most the native one, with a warning where it was more."""
        native = self.model.spec.block_size
        if block_size > native:
            warnings.warn(
                f"block size {block_size} is more than this draft can do: running with its native "
                f"{native}",
                UserWarning,
                stacklevel=2,
            )
        return min(block_size, native)

    def steps(self, request: Request, block_size: int) -> list[Step]:
        """The whole generation, a step a round."""
        room = len(request.prompt) + request.max_tokens + block_size
        target = TorchTargetSession(self.target.model, self.model.spec.taps, room)
        drafts = [self._draft(room)] if block_size > 1 else []
        policy = Fixed(block_size) if drafts else Off()
        try:
            with _turn(self.target.model):
                return list(decode(request, target, drafts, policy, time.perf_counter_ns))
        finally:
            for draft in drafts:
                draft.close()
            target.close()

    def _draft(self, room: int) -> DFlashSession:
        tables = make_tables(self.model.spec, self.target, self.model.own_tables)
        make = KINDS.load(self.model.spec.kind).session
        session: DFlashSession = make(self.model, tables, room, window=self.window)
        return session


def make_request(
    prompt: list[int], asked: GenerateConfig, target: LoadedTarget, seed: int
) -> Request:
    """The request behind a call. Raises PromptError for a prompt that does not fit."""
    room = target.context_length - len(prompt)
    if room <= 0:
        raise PromptError(
            f"the prompt has {len(prompt)} tokens and the context holds {target.context_length}, "
            "the answer included: shorten the prompt"
        )
    if max(prompt) >= target.vocab_size:
        raise PromptError(
            f"token id {max(prompt)} is outside the target's vocabulary of {target.vocab_size}"
        )
    return Request(
        prompt=prompt,
        max_tokens=min(asked.max_tokens, room),
        stop_ids=frozenset(asked.stop_token_ids),
        sampling=Sampling(
            temperature=asked.temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
            seed=seed,
        ),
    )


def make_stats(output: Tensor, prompt_length: int, steps: Sequence[Step]) -> GenerationStats:
    """Upstream's figures from the steps of a finished generation."""
    first = next(i for i, step in enumerate(steps, 1) if step.verdict.tokens)  # ends the prefill
    rounds, made = steps[first:], output.shape[1] - prompt_length
    return GenerationStats(
        output_ids=output,
        num_input_tokens=prompt_length,
        num_output_tokens=made,
        time_to_first_token=sum(step.ns for step in steps[:first]) / 1e9,
        time_per_output_token=sum(step.ns for step in rounds) / 1e9 / max(made, 1),
        acceptance_lengths=[len(step.tokens) for step in rounds],
    )


def dtype_of(asked: Any, spec: DraftSpec) -> torch.dtype:
    """ "auto" = as stored; what is stored as float16 runs in bfloat16."""
    if asked is None or asked == "auto":
        stored = str(spec.raw.get("dtype") or spec.raw.get("torch_dtype") or "float32")
        wide = stored.removeprefix("torch.") == "float32"
        return torch.float32 if wide else torch.bfloat16
    return draft_dtype(LoadConfig("draft", draft_dtype=asked).draft_dtype, torch.float32)


def device_of(device_map: Any) -> torch.device:
    """The one device a draft is asked onto. Raises ConfigError for several."""
    if device_map is None or device_map == "auto":  # it follows its target on first use
        return torch.device("cpu")
    if isinstance(device_map, Mapping):
        places = set(device_map.values())
        if len(places) != 1:
            raise ConfigError(f"a draft lives on one device, device_map names {len(places)}")
        device_map = places.pop()
    try:
        return torch.device(device_map)
    except (RuntimeError, TypeError, ValueError) as problem:
        raise ConfigError(
            f"device_map must be one device, such as cpu or cuda:0, got {device_map!r}"
        ) from problem


def one_id(value: Any, name: str) -> int:
    """The one token id in ``value``, of any form. Raises ConfigError."""
    ids = token_ids(value)
    if len(ids) != 1:
        raise ConfigError(f"{name} must be one integer, got {value!r}")
    return ids[0]


def check_tapped(hidden_states: Any, layer_ids: Any) -> None:
    """Raise ConfigError unless each of ``layer_ids`` is an output among ``hidden_states``."""
    if not isinstance(hidden_states, tuple | list) or not all(
        isinstance(states, Tensor) for states in hidden_states
    ):
        raise ConfigError("hidden_states must be a tuple of tensors, as transformers returns them")
    last = len(hidden_states) - 2  # the first entry is the embedding
    try:
        ids = token_ids(layer_ids)
    except ConfigError:
        ids = ()
    if not ids or max(ids) > last:
        raise ConfigError(f"layer_ids must name layers from 0 to {last}, got {layer_ids!r}")


def check_sampling(logits: Any, temperature: Any, top_p: Any, top_k: Any) -> None:
    """Raise ConfigError for what cannot be sampled from."""
    if not isinstance(logits, Tensor) or not logits.is_floating_point() or not logits.ndim:
        raise ConfigError(f"logits must be a tensor of numbers [B, T, V], got {logits!r}")
    within("temperature", temperature, lambda x: x < LARGEST, f"a number below {LARGEST:g}")
    within("top_p", top_p, lambda x: x > 0, "above 0")
    if not isinstance(top_k, int) or isinstance(top_k, bool):
        raise ConfigError(f"top_k must be a whole number, got {top_k!r}")
