"""The preallocated cache under transformers' own masks: any batch, any window, any rollback."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DeepseekV32Config, DynamicCache, MambaConfig

from dflash.backends.torch.cache import PreallocatedLayer, make_cache
from dflash.errors import CheckpointError

from .tiny import WINDOW, tiny_target


def run(model: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
    with torch.inference_mode():
        return model(input_ids=ids, attention_mask=mask, cache=cache, use_cache=True).logits


def random_ids(batch: int, rows: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 512, (batch, rows), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["llama", "swa", "gemma3"])
@pytest.mark.parametrize("batch", [1, 3])
def test_logits_are_those_of_the_growing_cache(kind: str, batch: int) -> None:
    model = tiny_target(kind, dtype=torch.float64)
    ours, theirs = make_cache(model.config, 64), DynamicCache(config=model.config)
    for seed, rows in enumerate((5, 1, 4, 1, 9, 2)):
        ids = random_ids(batch, rows, seed)
        torch.testing.assert_close(run(model, ours, ids), run(model, theirs, ids))


@pytest.mark.parametrize("kind", ["llama", "swa", "gemma3"])
def test_a_left_padded_batch_is_masked_as_by_the_growing_cache(kind: str) -> None:
    model = tiny_target(kind, dtype=torch.float64)
    ours, theirs = make_cache(model.config, 64), DynamicCache(config=model.config)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :7] = 0
    ids = random_ids(2, 12, 0)
    torch.testing.assert_close(run(model, ours, ids, mask), run(model, theirs, ids, mask))
    mask = torch.cat([mask, mask.new_ones(2, 3)], dim=-1)
    ids = random_ids(2, 3, 1)
    torch.testing.assert_close(run(model, ours, ids, mask), run(model, theirs, ids, mask))


@pytest.mark.parametrize("kind", ["llama", "swa", "gemma3"])
@pytest.mark.parametrize("back", [0, 3, WINDOW - 1, WINDOW, WINDOW + 1, 29])
def test_rollback_is_exact_before_and_after_a_window_has_filled(kind: str, back: int) -> None:
    model = tiny_target(kind, dtype=torch.float64)
    cache, fresh = make_cache(model.config, 64), make_cache(model.config, 64)
    kept, tail, more = random_ids(1, 30 - back, 1), random_ids(1, back or 1, 2), random_ids(1, 5, 3)
    run(model, cache, kept)
    run(model, cache, tail)
    cache.rollback(kept.shape[1])
    assert cache.length == cache.get_seq_length() == kept.shape[1]
    run(model, fresh, kept)
    torch.testing.assert_close(run(model, cache, more), run(model, fresh, more))


def test_nothing_is_copied_or_allocated_after_the_first_rows() -> None:
    model = tiny_target("swa")
    cache = make_cache(model.config, 64)
    run(model, cache, random_ids(1, 20, 0))
    places = [layer.keys.data_ptr() for layer in cache.layers]
    for seed in range(5):
        run(model, cache, random_ids(1, 4, seed))
        cache.rollback(cache.length - 2)
    assert places == [layer.keys.data_ptr() for layer in cache.layers]
    assert cache.bytes() == 4 * 2 * 2 * 64 * 16 * 4


def test_rows_past_the_length_are_never_read() -> None:
    model = tiny_target("swa", dtype=torch.float64)
    cache = make_cache(model.config, 64)
    run(model, cache, random_ids(1, 12, 0))
    with torch.inference_mode():
        for layer in cache.layers:
            layer.keys[:, :, 12:] = layer.values[:, :, 12:] = float("nan")
    assert run(model, cache, random_ids(1, 4, 1)).isfinite().all()


def test_a_copy_is_independent() -> None:
    model = tiny_target(dtype=torch.float64)
    cache = make_cache(model.config, 64)
    empty = cache.copy()
    run(model, cache, random_ids(1, 10, 0))
    twin = cache.copy()
    run(model, cache, random_ids(1, 3, 1))
    assert (empty.length, twin.length, cache.length) == (0, 10, 13)
    ids = random_ids(1, 2, 2)
    cache.crop(-3)
    torch.testing.assert_close(run(model, cache, ids), run(model, twin, ids))
    cache.reset()
    assert cache.length == 0


def test_writing_past_the_capacity_is_a_broken_promise() -> None:
    layer = PreallocatedLayer(4)
    rows = torch.zeros(1, 2, 5, 8)
    with pytest.raises(AssertionError, match="holds 4 tokens, 5 were written"):
        layer.update(rows, rows)


def test_layers_that_cannot_be_rolled_back_are_refused_by_name() -> None:
    config = DeepseekV32Config(num_hidden_layers=4)
    with pytest.raises(CheckpointError, match=r"'deepseek_v32' keep state in .*Layer"):
        make_cache(config, 0)


def test_a_cache_without_keys_counts_what_it_is_told() -> None:
    cache = make_cache(MambaConfig(num_hidden_layers=2), 8)
    cache.ran(5)
    assert cache.length == cache.get_seq_length() == cache.copy().length == 5
    cache.rollback(3)
    assert cache.length == 3


def test_layers_that_share_another_ones_keys_keep_none() -> None:
    from transformers import Gemma3nTextConfig

    config = Gemma3nTextConfig(num_hidden_layers=10, num_kv_shared_layers=4, sliding_window=WINDOW)
    cache = make_cache(config, 32)
    own = [layer for layer in cache.layers if isinstance(layer, PreallocatedLayer)]
    assert len(own) == 6 and cache.length == 0


@torch.inference_mode()
def test_slots_of_a_pass_are_the_layers_own_memory() -> None:
    """Of one block: through a rewind, more room and a copy, as with two writes a layer."""
    generator = torch.Generator().manual_seed(0)
    config = tiny_target().config
    ours, theirs = make_cache(config, 16), make_cache(config, 16)

    def write(count: int) -> None:
        slots = list(ours.append(count, torch.empty(16), 2))
        for layer, slot in enumerate(slots):
            rows = torch.randn(count, 2, 2, 16, generator=generator)
            slot.new.copy_(rows.flatten(1, 2).transpose(0, 1))
            shown = theirs.layers[layer].update(*rows.permute(1, 2, 0, 3)[:, None].unbind())
            assert torch.equal(slot.keys, shown[0]) and torch.equal(slot.values, shown[1])
            assert ours.layers[layer].length == ours.length == theirs.length

    for count in (5, 1, 3):
        write(count)
    for cache in (ours, theirs):
        cache.rollback(7)
        cache.grow(40)
    write(20)
    twin = ours.copy()
    held = [slot.keys.clone() for slot in twin.append(1, torch.empty(16), 2)]
    write(2)
    assert twin.length == 28 and ours.length == 29
    for layer, keys in zip(ours.layers, held, strict=True):
        assert torch.equal(layer.keys[:, :, :27], keys[:, :, :27])
    assert ours.bytes() == theirs.bytes() == twin.bytes()
