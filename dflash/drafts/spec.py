"""A draft's config.json, in any published shape, as one frozen `DraftSpec`.

Reads files and dicts, never weights; imports no array library. What it does not know it names and
refuses: a wrong guess here costs acceptance silently.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dflash.drafts.keys import Config, Keys, flatten_speculators, read_config
from dflash.drafts.kinds import READERS, kind_of
from dflash.drafts.layers import build_target_layer_ids, eagle_layer_ids
from dflash.drafts.methods import DFlash2, Eagle3
from dflash.drafts.rope import read_rope
from dflash.errors import CheckpointError, ConfigError

Taps = Literal["auto"] | Sequence[int] | None

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
DEFAULT_BLOCK_SIZE = 16  # what published readers assume when the config is silent


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """Everything about a draft that is not a weight. Sizes count elements, ids count from zero."""

    hidden_size: int  # H
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # independent of hidden_size / num_heads
    vocab_size: int  # of the target
    block_size: int  # anchor included; the native size and the cap
    mask_token_id: int
    taps: tuple[int, ...]  # output-of-layer ids of the target
    rope_parameters: Mapping[str, Mapping[str, Any]]  # per layer type, transformers 5 form
    layer_types: tuple[str, ...]  # full_attention or sliding_attention, one a layer
    causal: tuple[bool, ...]  # inside the block, one a layer
    target_hidden_size: int  # Ht; fc has len(taps) * Ht columns
    kind: str = "dflash"
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    attention_bias: bool = False
    max_position_embeddings: int | None = None
    num_target_layers: int | None = None
    sliding_window: int | None = None  # keys a query sees, its own included
    rope_interleaved: bool = False  # pairs (2i, 2i + 1) instead of (i, i + D/2)
    softcap: float | None = None
    output_multiplier: float = 1.0
    embedding_scale: float | None = None  # None = the config is silent, see embedding_scale_for
    logit_scale: float = 1.0
    sinks: bool = False
    value_scale: float = 1.0
    draft_vocab_size: int | None = None
    default_block_size: int | None = None
    target_name: str | None = None
    tokenizer_digest: str | None = None  # of the target, see doctor.static.name
    attention_mode: str = "gqa"
    dflash2: DFlash2 | None = None  # what only a draft of that kind has
    eagle3: Eagle3 | None = None
    raw: Config = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse shapes no module could have. Raises CheckpointError."""
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads "
                f"{self.num_kv_heads}"
            )
        if self.hidden_act not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise CheckpointError(f"hidden_act {self.hidden_act!r} is not known; {known} are")

    @property
    def window(self) -> int | None:
        """Context rows any layer can reach; None as soon as one layer sees everything."""
        full = any(kind == "full_attention" for kind in self.layer_types)
        return None if full else self.sliding_window

    def embedding_scale_for(self, target_model_type: str | None) -> float:
        """Factor on the target's raw embedding rows.

        The config's own value if it has one. Drafts of Gemma 4 were trained on embeddings scaled
        by sqrt(Ht), rounded to bfloat16 as that model does; all others on raw rows.
        """
        if self.embedding_scale is not None:
            return self.embedding_scale
        if target_model_type is not None and target_model_type.startswith("gemma4"):
            return _bfloat16(self.target_hidden_size**0.5)
        return 1.0


def read_spec(
    source: str | Path | Config, *, taps: Taps = None, num_target_layers: int | None = None
) -> DraftSpec:
    """The spec in a folder's config.json, or in a config that is already a dict.

    ``taps`` is a list that replaces the config's tap ids, or ``"auto"`` for the formula where the
    config has none; the formula needs the target's depth, from the config or
    ``num_target_layers``. Raises CheckpointError (no config, another kind of model, missing or
    wrong keys) and ConfigError (bad ``taps``).
    """
    config = source if isinstance(source, Mapping) else read_config(source)
    where = "the config" if isinstance(source, Mapping) else str(source)
    kind = kind_of(config)
    if kind == "target":
        raise CheckpointError(
            f"{where} is a target model ({', '.join(config['architectures'])}), not a draft. "
            "Give it as --model and a DFlash draft as --draft"
        )
    if kind not in READERS.names():
        raise CheckpointError(
            f"{where} is a draft of kind {kind!r}, which is not supported yet; "
            f"{', '.join(READERS.names())} are"
        )
    keys = Keys(flatten_speculators(config))
    asked = taps
    if kind == "eagle3" and (not taps or taps == "auto"):  # conventions of its own
        asked = eagle_layer_ids(keys.top, num_target_layers)
    spec: DraftSpec = READERS.load(kind)(keys, config, _taps(keys, asked, num_target_layers))
    return spec


def read_dflash(keys: Keys, raw: Config, taps: tuple[int, ...]) -> DraftSpec:
    """The spec of a DFlash v1 draft; siblings add to it. Raises CheckpointError."""
    layers = keys.count("num_hidden_layers")
    heads = keys.count("num_attention_heads")
    hidden = keys.count("hidden_size")
    layer_types, window = _layer_types(keys, layers)
    softcap = keys.get("final_logit_softcapping")
    mode = keys.get("attention_mode", "gqa")
    if mode not in ("gqa", "mha"):
        raise CheckpointError(f"attention_mode {mode!r} is not supported yet; gqa and mha are")
    scale = keys.get("input_embedding_scale")
    neox = keys.get("is_neox_style", keys.get("rope_is_neox_style", True))
    return DraftSpec(
        hidden_size=hidden,
        intermediate_size=keys.count("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=keys.count("num_key_value_heads", heads),
        head_dim=keys.count("head_dim", hidden // heads),
        vocab_size=keys.count("vocab_size"),
        block_size=keys.count("block_size", DEFAULT_BLOCK_SIZE, least=2),
        mask_token_id=_mask_token_id(keys),
        taps=taps,
        rope_parameters=read_rope(keys.top, layer_types),
        layer_types=layer_types,
        causal=_causal(keys, layer_types),
        target_hidden_size=keys.count("target_hidden_size", hidden),
        rms_norm_eps=keys.factor("rms_norm_eps", 1e-6),
        hidden_act=str(keys.get("hidden_act", "silu")),
        attention_bias=bool(keys.get("attention_bias", False)),
        max_position_embeddings=keys.maybe("max_position_embeddings"),
        num_target_layers=keys.maybe("num_target_layers"),
        sliding_window=window,
        rope_interleaved=not neox,
        softcap=None if not softcap else keys.factor("final_logit_softcapping"),
        output_multiplier=keys.factor("output_multiplier"),
        embedding_scale=None if scale is None else keys.factor("input_embedding_scale"),
        logit_scale=keys.factor("logit_scale"),
        sinks=bool(keys.get("attention_sink_bias", False)),
        value_scale=keys.factor("attention_value_scale"),
        draft_vocab_size=keys.maybe("draft_vocab_size"),
        default_block_size=keys.maybe("default_block_size"),
        target_name=keys.get("target_name"),
        tokenizer_digest=keys.get("target_tokenizer_sha256"),
        attention_mode=mode,
        raw=raw,
    )


def _mask_token_id(keys: Keys) -> int:
    if keys.get("mask_token_id") is None:
        raise CheckpointError(
            "the draft's config.json has no mask_token_id, and it is never guessed: another id "
            "would only lower acceptance. Add dflash_config.mask_token_id, the id it was trained "
            "with (its model card or trainer's config names it)"
        )
    return keys.count("mask_token_id", least=0)


def _taps(keys: Keys, asked: Taps, target_layers: int | None) -> tuple[int, ...]:
    ids = list(asked) if asked and asked != "auto" else _configured_taps(keys)
    if not ids:
        depth = keys.maybe("num_target_layers") or target_layers
        formula = depth and build_target_layer_ids(depth, keys.count("num_hidden_layers"))
        if asked != "auto":
            raise CheckpointError(
                "the draft's config.json has no target_layer_ids. If it was trained on the "
                f"default layers{f', here {formula},' if formula else ''} accept them with "
                "--taps auto; else name the layers it was trained on, for instance --taps 1,8,15"
            )
        if not formula:
            raise ConfigError("taps='auto' needs num_target_layers in the draft's config.json")
        ids = formula
    whole = all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    if not whole or min(ids) < 0 or len(set(ids)) < len(ids):
        raise CheckpointError(f"target_layer_ids must be distinct layer numbers from 0, got {ids}")
    return tuple(ids)


def _configured_taps(keys: Keys) -> list[int]:
    """``target_layer_ids``, or one of its input-of-layer spellings (ids one higher)."""
    own = keys.get("target_layer_ids")
    eagle = keys.top.get("eagle_config")
    shifted = (
        keys.top.get("eagle_aux_hidden_state_layer_ids")
        or keys.get("aux_hidden_state_layer_ids")
        or (None if own else keys.nested.get("layer_ids"))
        or (eagle.get("layer_ids") if isinstance(eagle, Mapping) and not own else None)
    )
    from_input = [i - 1 for i in shifted] if shifted else None
    if own and from_input and list(own) != from_input:
        raise CheckpointError(
            f"target_layer_ids {own} and the auxiliary layer ids {shifted} name different layers "
            "(the latter should be one higher); remove the wrong ones from config.json"
        )
    return list(own) if own else from_input or []


def _layer_types(keys: Keys, layers: int) -> tuple[tuple[str, ...], int | None]:
    """Attention kind of each layer, and the window of the sliding ones."""
    window = keys.maybe("sliding_window")
    names = list(keys.get("layer_types") or _implied_layer_types(keys, layers, window))
    unknown = set(names) - {"full_attention", "sliding_attention"}
    if len(names) != layers or unknown:
        raise CheckpointError(
            f"layer_types must be {layers} entries of full_attention or sliding_attention, "
            f"got {names}"
        )
    if "sliding_attention" not in names:
        if not keys.get("use_swa") or keys.maybe("swa_window_size") is None:
            return tuple(names), None
        names, window = ["sliding_attention"] * layers, keys.maybe("swa_window_size")
    if window is None:
        raise CheckpointError("layer_types has sliding_attention but sliding_window is missing")
    return tuple(names), window


def _implied_layer_types(keys: Keys, layers: int, window: int | None) -> list[str]:
    """What transformers' Qwen3 config derives when ``layer_types`` is absent."""
    if keys.top.get("model_type") == "muse_glimmer_assistant":
        return ["sliding_attention"] * layers
    slides = bool(keys.get("use_sliding_window", False)) and window is not None
    first = keys.get("max_window_layers", 28) if slides else layers
    return ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]


def _causal(keys: Keys, layer_types: Sequence[str]) -> tuple[bool, ...]:
    """An explicit key speaks for all layers; silence means causal on the sliding ones only."""
    if keys.top.get("model_type") == "muse_glimmer_assistant":
        return (False,) * len(layer_types)
    for given in (
        keys.top.get("is_causal"),
        keys.nested.get("causal"),
        keys.nested.get("is_causal"),
    ):
        if given is not None:
            if not isinstance(given, bool):
                raise CheckpointError(f"is_causal must be true or false, got {given!r}")
            return (given,) * len(layer_types)
    return tuple(kind == "sliding_attention" for kind in layer_types)


def _bfloat16(value: float) -> float:
    """Nearest bfloat16, ties to even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    bits += 0x7FFF + (bits >> 16 & 1)
    (rounded,) = struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))
    return float(rounded)
