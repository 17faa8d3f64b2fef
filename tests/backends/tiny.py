"""Small random targets made on the spot: seeded, a few thousand weights, nothing downloaded.

tiny_target("llama" | "qwen3" | "gemma3" | "swa")   T-dense and its variants (tied, padded rows)
tiny_tokenizer()                                    a byte-level tokenizer with a chat template
save_target(model, tokenizer, folder)               the folder a user would name
reference_generate(model, ids, ...)                 REF: full recompute, no cache, one at a time
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

EOS = 0  # <|end|>
START = 1  # <|start|>
BYTES_FROM = 2  # id of byte 0
VOCAB = 512
HIDDEN = 64
LAYERS = 4
WINDOW = 8

CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def _common(vocab: int, layers: int, tied: bool, eos: int | list[int] | None) -> dict[str, Any]:
    """Config keys all families share."""
    return {
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": tied,
        "eos_token_id": eos,
        "bos_token_id": START,
        "pad_token_id": None,
        "use_cache": True,
    }


def tiny_target(
    kind: str = "llama",
    *,
    vocab: int = VOCAB,
    layers: int = LAYERS,
    tied: bool = False,
    pad_rows: int = 0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    eos: int | list[int] | None = EOS,
) -> Any:
    """A seeded random causal LM in eval mode.

    ``pad_rows`` embedding rows are added past ``vocab`` (T-pad: more rows than the tokenizer has
    tokens). ``swa`` is Qwen3 with an 8-token sliding window on every second layer.
    The weights are larger than transformers' default: logits spread over several units, so that
    greedy text is lively and ties do not occur by chance.
    """
    common = _common(vocab + pad_rows, layers, tied, eos)
    torch.manual_seed(seed)
    if kind == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**common))
    elif kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**common))
    elif kind == "swa":
        types = ["full_attention", "sliding_attention"] * layers
        config = Qwen3Config(
            **common,
            layer_types=types[:layers],
            use_sliding_window=True,
            sliding_window=WINDOW,
            max_window_layers=0,
        )
        model = Qwen3ForCausalLM(config)
    elif kind == "gemma3":
        types = ["sliding_attention", "full_attention"] * layers
        gemma = Gemma3TextConfig(
            **common, layer_types=types[:layers], sliding_window=WINDOW, query_pre_attn_scalar=16
        )
        model = Gemma3ForCausalLM(gemma)
    else:
        raise ValueError(f"unknown tiny target {kind!r}")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                scale = 1.0 if "embed" in name or "lm_head" in name else 2.0
                weight.normal_(0.0, scale / weight.shape[1] ** 0.5, generator=generator)
            elif kind != "gemma3":  # Gemma stores norms centred on zero; zeros are fine there
                weight.normal_(1.0, 0.1, generator=generator)
    return model.to(dtype).eval()


def tiny_tokenizer(vocab: int = VOCAB) -> Any:
    """Byte-level tokenizer: two specials, 256 bytes, then invented merges up to ``vocab``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = ["<|end|>", "<|start|>", *alphabet]
    letters = [c for c in alphabet if c.isascii() and c.isalpha()] + ["Ġ"]
    merges = [(a, b) for a in letters for b in letters][: max(0, vocab - len(entries))]
    entries += [a + b for a, b in merges]
    assert len(entries) == vocab, f"a tiny vocabulary has at least {len(alphabet) + 2} entries"
    bpe = models.BPE(vocab={token: i for i, token in enumerate(entries)}, merges=merges)
    backend = Tokenizer(bpe)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    build: Any = PreTrainedTokenizerFast
    tokenizer = build(
        tokenizer_object=backend,
        eos_token="<|end|>",
        bos_token="<|start|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_target(model: Any, tokenizer: Any, folder: Path) -> Path:
    """Write ``model`` and ``tokenizer`` as a Hugging Face folder; returns the folder."""
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def reference_generate(
    model: Any, ids: Sequence[int], max_tokens: int, eos: Collection[int] = ()
) -> list[int]:
    """REF: greedy, the whole sequence recomputed for every token, no cache, lowest id on ties.

    Returns the generated ids only, the stop id included.
    """
    tokens = list(ids)
    with torch.inference_mode():
        while len(tokens) < len(ids) + max_tokens:
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
            best = int(logits.argmax())
            tokens.append(best)
            if best in eos:
                break
    return tokens[len(ids) :]
