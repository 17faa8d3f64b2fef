"""The PyTorch face of upstream's package: its names, its arguments, its results.

    draft = DFlashDraftModel.from_pretrained("path/or/hub-id")
    output_ids = draft.spec_generate(input_ids=ids, target=target, max_new_tokens=256)

The target is a transformers model that the caller made; it is never altered. Counting is upstream's
here: ``acceptance_lengths`` holds tokens committed per round, the bonus included. Not kept from
upstream: a cache argument of ``forward`` (all context rows come with each call), and more than one
sequence at a time, which is an error. There is no loop in this file: ``dflash.core`` has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Self

from dflash.checks import is_number
from dflash.errors import ConfigError, PromptError, missing
from dflash.prompt import encode

try:
    import torch
    from torch import Tensor
except ImportError as problem:
    raise missing("dflash.model needs torch", "torch") from problem

from dflash.backends.torch.dflash import DFlashDraftModel as Module
from dflash.backends.torch.dflash2 import DFlash2DraftModel as Module2
from dflash.backends.torch.draft_weights import load_weights
from dflash.backends.torch.load import wrap_target
from dflash.config import GenerateConfig, LoadConfig, from_options, token_ids
from dflash.datasets import load_and_process_dataset
from dflash.drafts.layers import build_target_layer_ids
from dflash.drafts.spec import DraftSpec, Taps, read_spec
from dflash.model_folders import draft_folder
from dflash.model_run import (
    GenerationStats,
    Run,
    check_sampling,
    check_tapped,
    device_of,
    dtype_of,
    make_request,
    make_stats,
    one_id,
)

__all__ = [
    "DFlash2DraftModel",
    "DFlashDraftModel",
    "GenerationStats",
    "build_target_layer_ids",
    "dflash_generate",
    "extract_context_feature",
    "load_and_process_dataset",
    "sample",
]

NAMED = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}
GREEDY_BELOW = 1e-5  # upstream's border between argmax and sampling


class DFlashDraftModel(Module):
    """A DFlash v1 draft. Parameters have the names of published checkpoints.

    Assignable, honoured by the next generation: ``block_size`` (anchor included; clamped to the
    native size), ``mask_token_id``, ``target_layer_ids``, ``sliding_window_size`` (context rows the
    draft keeps; None = as trained).
    """

    kind: ClassVar[str] = "dflash"

    def __init__(self, spec: DraftSpec) -> None:
        """Weights are NaN until loaded; use ``from_pretrained``."""
        super().__init__(spec)
        self.block_size = spec.block_size
        self.name = "draft"
        self._window: int | None = None
        self.own_tables: dict[
            str, Tensor
        ] = {}  # embedding, head, maps that the draft brought itself
        self.config = SimpleNamespace(
            **{
                **{str(key): value for key, value in spec.raw.items()},
                "block_size": spec.block_size,
                "mask_token_id": spec.mask_token_id,
                "target_layer_ids": list(spec.taps),
            }
        )

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: Any = "auto",
        torch_dtype: Any = None,
        device_map: Any = None,
        sliding_window_size: int | None = None,
        taps: Taps = None,
        trust_remote_code: bool = False,
        attn_implementation: str | None = None,
    ) -> Self:
        """The draft in a folder or behind a hub id, in eval mode.

        ``dtype`` is float32 or bfloat16, by name or as torch's; "auto" keeps the stored one
        (bfloat16 for a draft stored as float16). ``device_map`` is one device; without it the draft
        moves to its target's device on first use. ``trust_remote_code`` and
        ``attn_implementation`` are accepted and change nothing: no code of a checkpoint is run.
        Raises CheckpointError, WeightsError, ConfigError, DownloadError.
        """
        del trust_remote_code, attn_implementation
        folder = draft_folder(str(path))
        given = from_options(LoadConfig, {"target": "target", "taps": taps})
        spec = read_spec(folder, taps=given.taps)
        if spec.kind != cls.kind:
            advice = NAMED.get(spec.kind, "dflash.load")
            raise ConfigError(f"{path} is a draft of kind {spec.kind!r}: use {advice}")
        kind = dtype_of(torch_dtype if torch_dtype is not None else dtype, spec)
        loaded, tables = load_weights(folder, spec, device=device_of(device_map), dtype=kind)
        with torch.device("meta"):
            model = cls(spec)
        model.load_state_dict(loaded.state_dict(), assign=True)
        model.rotary = loaded.rotary
        model.own_tables = tables
        model.name = str(path)
        model.sliding_window_size = sliding_window_size
        return model.eval().requires_grad_(False)

    @property
    def mask_token_id(self) -> int:
        """Id that stands for a token not drafted yet."""
        return self.spec.mask_token_id

    @mask_token_id.setter
    def mask_token_id(self, value: int) -> None:
        self.spec = replace(self.spec, mask_token_id=one_id(value, "mask_token_id"))

    @property
    def target_layer_ids(self) -> list[int]:
        """Tapped layers of the target, output-of-layer ids."""
        return list(self.spec.taps)

    @target_layer_ids.setter
    def target_layer_ids(self, value: Sequence[int]) -> None:
        taps = token_ids(value)
        if len(taps) != len(self.spec.taps):
            raise ConfigError(
                f"this draft fuses {len(self.spec.taps)} tapped layers, got {len(taps)} ids"
            )
        self.spec = replace(self.spec, taps=taps)

    @property
    def sliding_window_size(self) -> int | None:
        """Context rows the draft keeps; None = as trained."""
        return self._window

    @sliding_window_size.setter
    def sliding_window_size(self, value: int | None) -> None:
        LoadConfig("target", draft_sliding_window_size=value)  # refuses what is no window
        self._window = value

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.fc.weight.dtype

    def forward(
        self,
        position_ids: Tensor,  # [1, n + R] of context and block rows
        noise_embedding: Tensor,  # [B, R, H] embedded anchor and mask tokens
        target_hidden: Tensor,  # [B, n, M*Ht] tapped hidden states of all the context
    ) -> Tensor:  # [B, R, H]
        """Final hidden states of the block over the whole context; every row sees every other.

        Layers that are causal or slide need masks: generation makes them, this plain form does not
        and raises ConfigError.
        """
        if any(self.spec.causal) or self.spec.sliding_window is not None:
            raise ConfigError("forward is for drafts of full, non-causal layers; use spec_generate")
        positions = position_ids.reshape(-1)
        rows = target_hidden.shape[1]
        context = self.context_kv(self.fuse(target_hidden), positions[:rows])
        return self.block(noise_embedding, positions[rows:], context)

    def spec_generate(
        self,
        target: Any,
        input_ids: Any,
        max_new_tokens: int = 2048,
        stop_token_ids: Any = None,
        temperature: float = 0.0,
        *,
        block_size: int | None = None,
        mask_token_id: int | None = None,
        return_stats: bool = False,
        top_p: float = 1.0,
        top_k: int = 0,
    ) -> Any:
        """Ids [1, T] of prompt and answer; GenerationStats with ``return_stats``.

        Stop ids left out are those of the target's generation config; [] stops nowhere.
        """
        if stop_token_ids is None:
            stop_token_ids = wrap_target(target).eos_ids
        return dflash_generate(
            self,
            target,
            input_ids,
            max_new_tokens,
            stop_token_ids,
            temperature,
            block_size,
            mask_token_id,
            return_stats,
            top_p,
            top_k,
        )


class DFlash2DraftModel(DFlashDraftModel, Module2):
    """A DFlash2 draft: the same, with convolutions and a selector of candidates."""

    kind: ClassVar[str] = "dflash2"


def dflash_generate(
    model: DFlashDraftModel,
    target: Any,
    input_ids: Any,  # [1, T]
    max_new_tokens: int,
    stop_token_ids: Any = None,  # an int, a list, a tuple, a tensor; None = go on
    temperature: float = 0.0,
    block_size: int | None = None,  # anchor included; None = model.block_size; 1 = plain decoding
    mask_token_id: int | None = None,
    return_stats: bool = False,
    top_p: float = 1.0,
    top_k: int = 0,
) -> Any:
    """Ids [1, T] of prompt and answer, on the device of ``input_ids``.

    Sampling (temperature above 0) draws from torch's generator, so ``torch.manual_seed`` repeats
    it. Raises PromptError (empty, longer than the context, more than one sequence), ConfigError
    and PairError (the draft does not fit this target).
    """
    if not isinstance(model, DFlashDraftModel):
        raise ConfigError(
            "dflash_generate(model, target, ...) takes the draft first, a DFlashDraftModel, and "
            f"then the target; got {type(model).__name__} and {type(target).__name__}"
        )
    size = model.block_size if block_size is None else block_size
    if isinstance(size, str):
        raise ConfigError(
            f"block_size here is a whole number, and not {size!r}: dflash.load(target, draft)"
            '.generate(prompt, block_size="auto") chooses it while running'
        )
    asked = GenerateConfig(
        max_tokens=max_new_tokens,
        temperature=0.0 if is_number(temperature) and temperature < GREEDY_BELOW else temperature,
        top_k=top_k or 0,
        top_p=1.0 if top_p is None else top_p,
        stop_token_ids=stop_token_ids,
        block_size=size,
    )
    given = input_ids.get("input_ids") if isinstance(input_ids, Mapping) else input_ids
    if isinstance(given, str):
        raise PromptError("input_ids are token ids, not a text: tokenizer(text).input_ids")
    prompt = encode(None, given)
    run = Run(model, wrap_target(target), mask_token_id)
    seed = int(torch.randint(2**62, ()))  # from torch's generator: manual_seed repeats a text
    request = make_request(prompt, asked, run.target, seed)
    steps = run.steps(request, run.clamp(int(asked.block_size or 1)))
    made = [token for step in steps for token in step.tokens]
    device = given.device if isinstance(given, Tensor) else run.target.device
    output = torch.tensor([[*prompt, *made]], device=device)
    return make_stats(output, len(prompt), steps) if return_stats else output


def extract_context_feature(hidden_states: Sequence[Tensor], layer_ids: Sequence[int]) -> Tensor:
    """Tapped states side by side: [B, T, M*Ht] from transformers' ``hidden_states``.

    ``hidden_states[0]`` is the embedding, so the output of layer ``i`` is entry ``i + 1``. Raises
    ConfigError for layers that are not there.
    """
    check_tapped(hidden_states, layer_ids)
    return torch.cat([hidden_states[i + 1] for i in layer_ids], dim=-1)


def sample(logits: Tensor, temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0) -> Tensor:
    """Ids [B, T] from logits [B, T, V]: argmax below 1e-5, else drawn from torch's generator.

    Raises ConfigError for what are no such values.
    """
    check_sampling(logits, temperature, top_p, top_k)
    if temperature < GREEDY_BELOW:
        return logits.argmax(dim=-1)
    scores = logits.float() / temperature
    if 0 < top_k < scores.shape[-1]:
        least = scores.topk(top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    p = scores.softmax(dim=-1)
    if top_p < 1.0:
        ordered, order = p.sort(dim=-1, descending=True)
        ordered = ordered.masked_fill(ordered.cumsum(dim=-1) - ordered >= top_p, 0.0)
        p = torch.zeros_like(p).scatter(-1, order, ordered)
    drawn = torch.multinomial(p.reshape(-1, p.shape[-1]), 1)
    return drawn.reshape(logits.shape[:-1])
