"""Tiny random targets with multi-token prediction heads, saved as their families publish them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, MellumConfig, MellumForCausalLM
from transformers.modeling_layers import MtpModel

from dflash.core.types import Plan, Request, Verdict

from .families import family
from .tiny import EOS, HIDDEN, LAYERS, VOCAB, tiny_tokenizer

_MELLUM: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "sliding_window": 8,
    "max_position_embeddings": 1024,
    "eos_token_id": EOS,
    "num_mtp_layers": 1,
}


_GLM: dict[str, Any] = {
    **{name: _MELLUM[name] for name in ("vocab_size", "hidden_size", "intermediate_size")},
    **{name: _MELLUM[name] for name in ("moe_intermediate_size", "head_dim", "eos_token_id")},
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 1024,
    "num_mtp_layers": 3,
}


def save_mtp_target(
    folder: Path, kind: str = "qwen3_5", *, heads: bool = True, count: int = 3
) -> Path:
    """A target folder of ``kind``; without ``heads`` only its config has them.

    qwen3_5 and mellum publish one head under ``mtp.``, and only Mellum's config has transformers'
    words for it; glm4_moe has ``count``, as layers behind its own.
    """
    torch.manual_seed(0)
    if kind == "glm4_moe":
        return _several(folder, count)
    if kind == "qwen3_5":
        model: Any = family(kind)
    else:
        model = MellumForCausalLM(MellumConfig(**_MELLUM)).eval()
        _lively(model.state_dict())
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    if kind == "qwen3_5":
        config["mtp_num_hidden_layers"] = 1
        (folder / "config.json").write_text(json.dumps(config))
    if heads:
        tensors = load_file(folder / "model.safetensors")
        tensors |= _published(_heads(model))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def check_commits(pair: Any, joined: Callable[[Any], Any]) -> None:
    """Heads say after any commits what a fresh session says; resumed, forked and grown, too.

    ``joined`` puts arrays of the pair's library behind each other.
    """
    rng = random.Random(2)
    tokens = [rng.randrange(VOCAB) for _ in range(40)]
    target = pair.open_target(64)
    rows = joined([verdict.features for verdict in target.prefill(Request(tokens, 1), 0)])

    def told(session: Any, start: int, end: int) -> None:
        count = end - 1 - start
        features = rows[start:][:count]
        session.commit(Verdict(tokens[start + 1 : end], rows=count, features=features), count)

    def proposed(session: Any) -> list[int]:
        return [int(token) for token in session.propose(Plan(0, 5, 5)).tokens]

    def fresh(end: int) -> list[int]:
        (session,) = pair.open_drafts(64)
        session.begin(Request(tokens[:1], 99), 0)
        told(session, 0, end)
        return proposed(session)

    (session,) = pair.open_drafts(8)
    session.grow(64)
    session.begin(Request(tokens[:1], 99), 0)
    known = 1
    for _ in range(12):
        more = rng.randint(1, 3)
        told(session, known - 1, known + more)
        known += more
        if rng.random() < 0.8:
            assert proposed(session) == fresh(known), known
    reuse = session.holds([*tokens[:15], 7, 8], 14)
    assert reuse
    for one in (session, session.fork()):
        one.begin(Request(tokens[:15], 99), reuse)
        one.commit(Verdict(tokens[15:16], rows=15 - reuse, features=rows[reuse:15]), 15 - reuse)
        assert proposed(one) == fresh(16)


def _several(folder: Path, count: int) -> Path:
    config = Glm4MoeConfig(**{**_GLM, "num_mtp_layers": count})
    model = Glm4MoeForCausalLM(config).eval()
    _lively(model.state_dict())
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in _heads(model, count).items():
        _, head, rest = name.split(".", 2)
        rest = rest.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        tensors |= _experts(f"model.layers.{LAYERS + int(head)}.{rest}", tensor)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _heads(model: Any, count: int = 1) -> dict[str, Tensor]:
    """Random weights of heads, by transformers' names."""
    text = model.config.get_text_config()
    if getattr(text, "num_mtp_layers", None) is None:
        text.num_mtp_layers, text.mtp_layer_types = 1, ["full_attention"]
    state = {
        name: tensor.clone()
        for name, tensor in MtpModel(model, count).state_dict().items()
        if name.startswith("layers.")
    }
    _lively(state)
    return state


def _lively(state: dict[str, Tensor]) -> None:
    generator = torch.Generator().manual_seed(7)
    for name, tensor in state.items():
        if tensor.dim() >= 2:
            scale = 1.0 if "embed" in name or "lm_head" in name else 1.5
            tensor.normal_(0.0, scale / tensor.shape[-1] ** 0.5, generator=generator)


def _published(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same under the names of the families' checkpoints."""
    names = {
        "eh_proj.": "mtp.fc.",
        "enorm.": "mtp.pre_fc_norm_embedding.",
        "hnorm.": "mtp.pre_fc_norm_hidden.",
        "post_norm.": "mtp.norm.",
        "mtp_block.": "mtp.layers.0.",
    }
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        short = name.removeprefix("layers.0.")
        ours = next(part for part in names if short.startswith(part))
        found |= _experts(names[ours] + short.removeprefix(ours), tensor)
    return found


def _experts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Fused experts as one tensor an expert."""
    head, fused, what = name.partition("experts.")
    if what == "gate_up_proj":
        parts = {"gate_proj": tensor.chunk(2, dim=1)[0], "up_proj": tensor.chunk(2, dim=1)[1]}
    elif what == "down_proj" and fused and not head.endswith("shared_"):
        parts = {"down_proj": tensor}
    else:
        return {name: tensor.contiguous()}
    return {
        f"{head}experts.{index}.{part}.weight": rows[index].contiguous()
        for part, rows in parts.items()
        for index in range(tensor.shape[0])
    }
