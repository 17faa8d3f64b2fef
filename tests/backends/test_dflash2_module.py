"""Convolutions and the selector of DFlash2, each against its definition."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash.backends.torch.dflash2 import DFlash2DraftModel, GroupedConv, best_path
from dflash.drafts.methods import DFlash2
from tests.backends.drafts import tiny_draft, tiny_draft2

pytestmark = pytest.mark.torch

WIDTH = 12


def conv(taps: int = 2, group: int = 4) -> GroupedConv:
    made = GroupedConv(WIDTH, DFlash2(taps, group, 1, 1))
    generator = torch.Generator().manual_seed(3)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    return made.requires_grad_(False)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_hand(made: GroupedConv, x: Tensor, y: Tensor, side: int) -> Tensor:
    """The formula, number by number: rows x [R, H] make the coefficients, y [R, H] is convolved."""
    _, taps, groups = made.shape
    out = torch.zeros_like(y)
    for row, tap, channel in product(range(len(y)), range(taps), range(WIDTH)):
        if row >= tap:
            delta = (made.kernel_projection.weight @ x[row]).reshape(2, taps, groups)
            group = channel // (WIDTH // groups)
            weight = made.base_kernel[side, tap, channel] + delta[side, tap, group]
            out[row, channel] += weight * y[row - tap, channel]
    return out


@pytest.mark.parametrize(("taps", "group"), [(1, 4), (2, 4), (3, 12), (5, 1)])
def test_both_sides_are_the_formula(taps: int, group: int) -> None:
    made, x, y = conv(taps, group), noise(1, 5, WIDTH), noise(1, 5, WIDTH, seed=1)
    before, behind = made(x, 5)
    torch.testing.assert_close(before[0], by_hand(made, x[0], x[0], 0))
    torch.testing.assert_close(behind(y)[0], by_hand(made, x[0], y[0], 1))


def test_packed_blocks_are_blocks_apart() -> None:
    made, x, y = conv(3), noise(2, 12, WIDTH), noise(2, 12, WIDTH, seed=1)
    before, behind = made(x, 4)
    after = behind(y)
    for batch, block in product(range(2), range(3)):
        rows = slice(4 * block, 4 * block + 4)
        alone, finish = made(x[batch : batch + 1, rows], 4)
        torch.testing.assert_close(before[batch, rows], alone[0])
        torch.testing.assert_close(after[batch, rows], finish(y[batch : batch + 1, rows])[0])


def test_a_shorter_block_is_the_beginning_of_a_longer_one() -> None:
    made, x = conv(3), noise(1, 8, WIDTH)
    for size in range(1, 8):
        torch.testing.assert_close(made(x[:, :size], size)[0], made(x, 8)[0][:, :size])


def test_channels_of_a_group_share_their_dynamic_part() -> None:
    """Swapping two channels of a group swaps their outputs, where base kernels are alike."""
    made, x, y = conv(2, 4), noise(1, 6, WIDTH), noise(1, 6, WIDTH, seed=1)
    made.base_kernel.fill_(0.5)
    swapped = torch.tensor([1, 0, *range(2, WIDTH)])
    across = torch.tensor([4, 1, 2, 3, 0, *range(5, WIDTH)])
    behind = made(x, 6)[1]
    assert torch.equal(behind(y[..., swapped]), behind(y)[..., swapped])
    assert not torch.equal(behind(y[..., across]), behind(y)[..., across])


def neutral(seed: int = 0, **changes: Any) -> DFlash2DraftModel:
    """Convolutions that pass their input on, a selector that adds nothing."""
    model = tiny_draft2(seed, **changes)
    for name, parameter in model.named_parameters():
        if "base_kernel" in name:
            parameter.zero_()[:, 0] = 1.0
        if "kernel_projection" in name or "successor" in name:
            parameter.zero_()
    return model


def test_a_neutral_dflash2_draft_is_its_v1_draft_bit_for_bit() -> None:
    second, first = neutral(), tiny_draft(is_causal=False)
    shared = {k: v for k, v in second.state_dict().items() if k in first.state_dict()}
    first.load_state_dict(shared)
    features, block = noise(1, 9, 128), noise(1, 8, 64, seed=1)
    states = []
    for model in (first, second):
        context = model.context_kv(model.fuse(features), torch.arange(9))
        states.append(model.block(block, 9 + torch.arange(8), context))
    assert torch.equal(*states)
    selector = second.candidate_selector
    logits = noise(7, 512, seed=2)
    ids, unary = selector.candidates(logits)
    gained = selector.transitions(states[1][0, 1:], ids[:, :1], ids)
    best = ids.gather(1, (unary + gained[:, 0]).argmax(-1, keepdim=True))[:, 0]
    assert torch.equal(best, logits.argmax(-1))


def test_context_rows_are_not_convolved() -> None:
    second, first = tiny_draft2(), tiny_draft(is_causal=False)
    first.load_state_dict({k: v for k, v in second.state_dict().items() if k in first.state_dict()})
    rows = noise(1, 9, 64)
    for ours, theirs in zip(
        second.context_kv(rows, torch.arange(9)), first.context_kv(rows, torch.arange(9)),
        strict=True,
    ):  # fmt: skip
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_transition_is_the_gated_product_of_two_rows() -> None:
    selector = tiny_draft2().candidate_selector
    hidden, before, ids = noise(2, 64), torch.tensor([[5, 9], [511, 0]]), torch.tensor([[1], [2]])
    found = selector.transitions(hidden, before, ids)
    gate = hidden @ selector.hidden_projection.weight.T
    for row, place in product(range(2), range(2)):
        left = selector.predecessor_codebook[before[row, place]] * gate[row]
        wanted = left @ selector.successor_codebook[ids[row, 0]]
        torch.testing.assert_close(found[row, place, 0], wanted)


def test_candidates_are_tokens_that_the_codebooks_have() -> None:
    """A target's head may be padded; its padding is never drafted."""
    selector = tiny_draft2().candidate_selector
    logits = noise(3, 520)
    logits[:, 512:] += 100
    assert int(selector.candidates(logits)[0].max()) < 512
    gained = selector.transitions(noise(1, 64), torch.tensor([[519]]), torch.tensor([[1]]))
    assert gained.isfinite().all()


def test_the_best_path_is_the_likeliest_of_all() -> None:
    first, edges = noise(3), noise(3, 3, 3, seed=1) * 3
    steps = edges.log_softmax(-1)

    def score(path: tuple[int, ...]) -> float:
        edge = sum(float(steps[j][a, b]) for j, (a, b) in enumerate(pairwise(path)))
        return float(first.log_softmax(-1)[path[0]]) + edge

    wanted = max(product(range(3), repeat=4), key=score)
    assert tuple(best_path(first, edges).tolist()) == wanted
    assert best_path(first, edges[:0]).tolist() == [int(first.argmax())]


def test_the_host_copy_is_made_only_where_it_is_needed() -> None:
    selector = tiny_draft2().candidate_selector
    assert selector.on_host() is selector
