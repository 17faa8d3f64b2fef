"""A target of the common dense families out of its files, without transformers' class of the model.

Importing that class, or its config's, takes longer than reading the weights of a small model: with
them come torch's compiler and its distributed tensors. Nothing of it runs in fused layers
(`fused.py`). So the start that compares them with transformers' own notes what the classes alone
know, the config's defaults and the frequencies of rope, and each start builds the fused layers out
of that and the checkpoint's files. Tokenizer and cache stay transformers'.

What is built has weights and names like transformers' own, and nothing to call: `forward.py` runs
it. A checkpoint that holds other tensors than noted is left to transformers, and to its errors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig

from dflash.backends.torch.decoder import linear_of
from dflash.backends.torch.dflash import ACTIVATIONS
from dflash.checkpoint import weight_files
from dflash.tensor_files import read_header

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NORMS = ("input_layernorm", "post_attention_layernorm")


class Facts(TypedDict):
    """What a fused model takes from transformers' classes of it, as JSON holds it."""

    config: dict[str, Any]  # with the defaults of its class
    shapes: dict[str, list[int]]  # of every weight, by its name in the checkpoint
    inv_freq: list[float]  # of rope; float32 goes through decimals and back unchanged
    attention_scaling: float
    head_dim: int
    scaling: float  # of attention scores
    groups: int  # query heads of a key head
    eps: float


def facts_of(model: Any) -> Facts | None:
    """Of transformers' model whose layers are to be fused; None where it has something special."""
    decoder = model.get_decoder()
    shapes = {name: list(weight.shape) for name, weight in model.named_parameters()}
    attention, rotary = decoder.layers[0].self_attn, decoder.rotary_emb
    plain = rotary.inv_freq.dtype == torch.float32 and EMBEDDING in shapes
    if not plain or model.config.hidden_act not in ACTIVATIONS:
        return None
    config = json.loads(model.config.to_json_string(use_diff=False))
    return Facts(
        config={key: value for key, value in config.items() if not key.startswith("_")},
        shapes=shapes,
        inv_freq=rotary.inv_freq.tolist(),
        attention_scaling=float(rotary.attention_scaling),
        head_dim=int(attention.head_dim),
        scaling=float(attention.scaling),
        groups=int(attention.num_key_value_groups),
        eps=float(decoder.layers[0].input_layernorm.variance_epsilon),
    )


def fits(folder: Path, facts: Facts) -> bool:
    """Whether the checkpoint holds just the tensors that ``facts`` speak of: no heads beside."""
    stored = {
        name: list(entry["shape"])
        for file in weight_files(folder)
        for name, entry in read_header(file).entries.items()
    }
    return stored == facts["shapes"]


class DenseModel(nn.Module):
    """Weights and facts under transformers' names; its layers are there to be fused."""

    def __init__(self, config: Any, facts: Facts, weights: Mapping[str, Tensor]) -> None:
        """``config`` is one of transformers; ``weights`` are in one dtype, on one device."""
        super().__init__()
        self.config = config
        self.generation_config: Any = None
        taken = {name: _frozen(weight) for name, weight in weights.items()}
        self.dtype = taken[EMBEDDING].dtype
        layers = (_layer(config, facts, taken, i) for i in range(config.num_hidden_layers))
        frequencies = torch.tensor(facts["inv_freq"], device=taken[EMBEDDING].device)
        self.model = _part(
            embed_tokens=_part(weight=taken[EMBEDDING]),
            layers=nn.ModuleList(layers),
            norm=_norm(taken, "model.norm", facts),
            rotary_emb=_part(inv_freq=frequencies, attention_scaling=facts["attention_scaling"]),
        )
        self.lm_head = linear_of(taken.get(HEAD, taken[EMBEDDING]))
        if HEAD not in taken:
            self.lm_head.weight = taken[EMBEDDING]  # tied: one parameter under two names

    def get_decoder(self) -> nn.Module:
        """Embedding, layers, norm and rope."""
        return self.model

    def get_input_embeddings(self) -> Any:
        """What holds the embedding table."""
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        return self.lm_head


def read_dense(folder: Path, facts: Facts, dtype: torch.dtype, device: torch.device) -> DenseModel:
    """The model in ``folder``, which `fits`. Mapped from its files where nothing is converted."""
    weights = {}
    for file in weight_files(folder):
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                weights[name] = opened.get_tensor(name).to(device, dtype)
    config: Any = PreTrainedConfig(**facts["config"])
    config.name_or_path = str(folder)
    model = DenseModel(config, facts, weights)
    with suppress(OSError):  # not there or damaged: the config says what there is to say
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _layer(config: Any, facts: Facts, taken: Mapping[str, Tensor], index: int) -> nn.Module:
    start = f"model.layers.{index}"

    def products(part: str, *names: str) -> dict[str, nn.Module]:
        return {name: _linear(taken, f"{start}.{part}.{name}") for name in names}

    attention = _part(
        **products("self_attn", "q_proj", "k_proj", "v_proj", "o_proj"),
        config=config,
        layer_idx=index,
        head_dim=facts["head_dim"],
        scaling=facts["scaling"],
        num_key_value_groups=facts["groups"],
    )
    for name in ("q_norm", "k_norm"):
        if f"{start}.self_attn.{name}.weight" in taken:
            setattr(attention, name, _norm(taken, f"{start}.self_attn.{name}", facts))
    act: Callable[[Tensor], Tensor] = ACTIVATIONS[config.hidden_act]
    mlp = _part(**products("mlp", "gate_proj", "up_proj", "down_proj"), act_fn=act)
    norms = {name: _norm(taken, f"{start}.{name}", facts) for name in NORMS}
    return _part(self_attn=attention, mlp=mlp, **norms)


def _linear(taken: Mapping[str, Tensor], name: str) -> nn.Linear:
    return linear_of(taken[f"{name}.weight"], taken.get(f"{name}.bias"))


def _norm(taken: Mapping[str, Tensor], name: str, facts: Facts) -> nn.Module:
    return _part(weight=taken[f"{name}.weight"], variance_epsilon=facts["eps"])


def _part(**inside: Any) -> nn.Module:
    """A module of modules, weights and facts."""
    made = nn.Module()
    for name, value in inside.items():
        setattr(made, name, value)
    return made


def _frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)
