"""Mask id: with another token's embedding in the masked places the draft sees noise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dflash.doctor.measured.patient import Patient
from dflash.doctor.measured.rivals import Rival

MOST = 16  # candidates


def other_masks(patient: Patient) -> Iterator[Rival]:
    """Tokens that drafts are trained with as mask, the likeliest first."""
    pair, current = patient.engine.pair, patient.spec.mask_token_id
    if current < 0:  # a kind without masks
        return
    likely = dict.fromkeys(_candidates(pair.tokenizer))
    usable = [i for i in likely if 0 <= i < pair.vocab_size and i not in pair.eos_ids]
    for token in [i for i in usable if i != current][:MOST]:
        yield Rival(
            "mask",
            {"mask_token_id": token},
            f"with mask token {token}{_text(pair.tokenizer, token)} than with {current}",
            f"Set dflash_config.mask_token_id to {token}",
        )


def _candidates(tokenizer: Any) -> Iterator[int]:
    """The mask token, whatever is called mask, the first row past the tokenizer, other specials."""
    special = [int(i) for i in getattr(tokenizer, "all_special_ids", ())]
    added: Any = getattr(tokenizer, "added_tokens_decoder", {})
    special += [int(i) for i, token in added.items() if getattr(token, "special", False)]
    if getattr(tokenizer, "mask_token_id", None) is not None:
        yield int(tokenizer.mask_token_id)
    for name, number in getattr(tokenizer, "get_added_vocab", dict)().items():
        if "mask" in name.lower():
            yield int(number)
    if hasattr(tokenizer, "__len__"):
        yield len(tokenizer)
    for name in ("unk_token_id", "pad_token_id", "bos_token_id"):
        if getattr(tokenizer, name, None) is not None:
            yield int(getattr(tokenizer, name))
    yield from special


def _text(tokenizer: Any, token: int) -> str:
    convert = getattr(tokenizer, "convert_ids_to_tokens", None)
    name = convert(token) if convert is not None and token < len(tokenizer) else None
    return f" ({name})" if name else ""
