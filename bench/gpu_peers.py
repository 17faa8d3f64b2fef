"""transformers on a target that counts (`bench.gpu`): plainly, and with its own DFlash.

Both return (tokens a round, median milliseconds a round). The DFlash draft is the one module that
transformers has for such drafts, with random weights in the shape of ours; it runs in full, and its
final states are replaced by those of the tokens that the script wants.
"""

from __future__ import annotations

from argparse import Namespace
from itertools import pairwise
from statistics import median
from typing import Any

from dflash.bench.peers.worker import Ticks

WARM = 3  # rounds before they count


def plain_rounds(model: Any, flags: Namespace) -> tuple[float, float]:
    """One token after the other."""
    return _rounds(model, 1, flags)


def dflash_rounds(
    model: Any, spec: Any, script: tuple[int, int], flags: Namespace
) -> tuple[float, float]:
    """transformers' DFlash; ``spec`` is our draft's, ``script`` its block size and how many drafts
    of a block are right."""
    block, right = script
    draft = _scripted(model, _draft(model, spec, block), block, right)
    return _rounds(model, right + 1, flags, assistant_model=draft, speculation_type="dflash")


def _draft(model: Any, spec: Any, block: int) -> Any:
    import torch
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    config = MuseGlimmerAssistantConfig(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.rms_norm_eps,
        max_position_embeddings=model.config.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        layer_types=["full_attention"] * spec.num_layers,
        block_size=block,
        mask_token_id=spec.mask_token_id,
        target_layer_ids=list(spec.taps),
    )
    draft: Any = MuseGlimmerAssistantModel(config)
    draft = draft.to(device=model.device, dtype=model.dtype).eval()
    with torch.no_grad():
        for weight in draft.parameters():
            weight.normal_(0.0, weight.shape[-1] ** -0.5) if weight.dim() > 1 else weight.fill_(1.0)
    return draft


def _scripted(model: Any, draft: Any, block: int, right: int) -> Any:
    """``draft`` with states of the tokens that are wanted: at position p stands token p."""
    import torch

    head = model.get_output_embeddings().weight
    place = torch.arange(block, device=model.device)
    moved = place + (place > right).long()

    def correct(_: Any, __: Any, given: Any, out: Any) -> Any:
        wanted = given["position_ids"][0, -block] + moved
        out.last_hidden_state = head[wanted % head.shape[0]][None]
        return out

    draft.register_forward_hook(correct, with_kwargs=True)
    return draft


def _rounds(model: Any, committed: int, flags: Namespace, **more: Any) -> tuple[float, float]:
    import torch

    vocabulary = model.config.vocab_size
    prompt = [place % vocabulary for place in range(flags.context)]
    ids, clock = torch.tensor([prompt], device=model.device), Ticks()
    tokens = 1 + (flags.rounds + WARM + 1) * committed  # the last round may be cut short
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=None if more else tokens,  # a processor would go through every draft
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            streamer=clock,
            **more,
        )
    spent = [1e3 * (after - before) for before, after in pairwise(clock.times[1:])]
    sizes = clock.sizes[2:]
    counted = slice(WARM, WARM + flags.rounds)
    return sum(sizes[counted]) / len(sizes[counted]), median(spent[counted])
