from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dflash.backends.torch.dflash import DFlashDraftModel, block_mask, transform_logits
from dflash.backends.torch.rope import Rotary
from dflash.drafts.rope import inverse_frequencies, read_rope
from dflash.drafts.spec import read_spec
from tests.backends.drafts import MIXED, ODDITIES, SLIDING, slow_forward, tiny_draft
from tests.drafts.configs import config

pytestmark = pytest.mark.torch


def inputs(model: DFlashDraftModel, context: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    width = len(model.spec.taps) * model.spec.target_hidden_size
    return (
        torch.randn(context, width, generator=generator),
        torch.randn(rows, model.spec.hidden_size, generator=generator),
    )


def forward(model: DFlashDraftModel, features: Tensor, noise: Tensor) -> Tensor:
    """[R, H] of the module, everything projected anew and every mask spelled out."""
    context = features.shape[0]
    keys = torch.arange(context + noise.shape[0])
    spec = model.spec
    masks = [
        block_mask(
            keys[context:],
            keys,
            causal=causal,
            window=spec.sliding_window if kind == "sliding_attention" else None,
        )
        for causal, kind in zip(spec.causal, spec.layer_types, strict=True)
    ]
    held = model.context_kv(model.fuse(features[None]), keys[:context])
    return model.block(noise[None], keys[context:], held, masks)[0]


@pytest.mark.parametrize("case", ODDITIES)
@pytest.mark.parametrize("context", [3, 30])
def test_every_variant_agrees_with_a_slow_forward(case: str, context: int) -> None:
    model = tiny_draft(**ODDITIES[case])
    features, noise = inputs(model, context, 5)
    wanted = slow_forward(model, features, noise)
    torch.testing.assert_close(forward(model, features, noise).double(), wanted, rtol=0, atol=2e-5)


def test_mixed_windows_agree_with_a_slow_forward_at_length_64() -> None:
    model = tiny_draft(**MIXED)
    features, noise = inputs(model, 64, 8)
    wanted = slow_forward(model, features, noise)
    torch.testing.assert_close(forward(model, features, noise).double(), wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_what_lies_outside_the_window_changes_nothing(causal: bool) -> None:
    model = tiny_draft(**SLIDING, is_causal=causal)
    features, noise = inputs(model, 64, 4)
    before = forward(model, features, noise)
    features[: 64 - 7] += 5.0  # the first row sees 7 rows before it and itself
    assert torch.equal(forward(model, features, noise), before)
    features[64 - 7] += 5.0
    after = forward(model, features, noise)
    assert not torch.equal(after[0], before[0])


def test_a_fresh_module_is_nan_until_loaded() -> None:
    model = DFlashDraftModel(read_spec(config()))
    assert all(bool(weight.isnan().all()) for weight in model.parameters())
    features, noise = inputs(model, 3, 4)
    assert bool(forward(model, features, noise).isnan().all())


def test_parameter_names_and_count_are_those_of_published_files() -> None:
    names = set(tiny_draft().state_dict())
    assert len(names) == 3 + 11 * 2
    assert {"fc.weight", "hidden_norm.weight", "norm.weight"} <= names
    assert "layers.1.self_attn.k_norm.weight" in names


def test_interleaved_pairs_are_rotate_half_with_rows_reordered() -> None:
    pairs = tiny_draft(is_neox_style=False)
    halves = tiny_draft()
    order = torch.cat((torch.arange(0, 16, 2), torch.arange(1, 16, 2)))
    state = dict(pairs.state_dict())
    for name, tensor in state.items():
        if "q_proj" in name or "k_proj" in name:
            state[name] = tensor.reshape(-1, 16, tensor.shape[-1])[:, order].reshape(tensor.shape)
        if "q_norm" in name or "k_norm" in name:
            state[name] = tensor[order]
    halves.load_state_dict(state)
    features, noise = inputs(pairs, 9, 4)
    torch.testing.assert_close(forward(halves, features, noise), forward(pairs, features, noise))


def independent(rope: dict[str, Any], size: int) -> tuple[Tensor, float]:
    """transformers' own formula for the same settings."""
    settings = SimpleNamespace(
        rope_parameters=rope,
        head_dim=size,
        hidden_size=size,
        num_attention_heads=1,
        max_position_embeddings=4096,
        standardize_rope_params=lambda: None,
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](settings, "cpu")
    return frequencies, scale


SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096},
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
    "yarn_attention_factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "attention_factor": 0.9,
        "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("theta", [10_000.0, 10_000_000.0])
def test_scaled_frequencies_agree_with_an_independent_formula(name: str, theta: float) -> None:
    rope = read_rope({"rope_theta": theta, "rope_scaling": SCALINGS[name]}, ["full_attention"])
    found, scale = inverse_frequencies(64, rope["full_attention"])
    wanted, wanted_scale = independent({**rope["full_attention"]}, 64)
    torch.testing.assert_close(torch.tensor(found), wanted, rtol=2e-6, atol=0)
    assert scale == pytest.approx(wanted_scale, rel=1e-12)
    cos, sin = Rotary(64, rope["full_attention"], interleaved=False)(torch.tensor([0, 5]))
    torch.testing.assert_close(cos.square() + sin.square(), torch.full((2, 64), scale**2))


def test_llama3_frequencies_without_a_range_between_are_stretched_or_kept() -> None:
    """Equal factors: the limit of a narrow range, without a division by zero."""
    narrow, none = (
        {**SCALINGS["llama3"], "low_freq_factor": low, "high_freq_factor": 4.0}
        for low in (4.0 - 1e-9, 4.0)
    )
    found = [
        inverse_frequencies(64, read_rope({"rope_theta": 1e4, "rope_scaling": s}, ["x"])["x"])[0]
        for s in (narrow, none)
    ]
    assert found[0] == found[1]


def test_no_scaling_means_plain_powers_of_the_base_the_config_says() -> None:
    rope = read_rope({"rope_theta": 10_000_000, "rope_scaling": None}, ["full_attention"])
    rotary = Rotary(128, rope["full_attention"], interleaved=False)
    wanted = torch.tensor([1e7 ** (-2 * i / 128) for i in range(64)])
    torch.testing.assert_close(rotary.inv_freq, wanted, rtol=1e-6, atol=0)
    cos, sin = rotary(torch.tensor([0, 3]))
    assert cos.shape == sin.shape == (2, 128)
    assert float(cos[1, 1]) == pytest.approx(math.cos(3 * float(wanted[1])), abs=1e-6)


def test_frequencies_stay_float32_when_the_module_becomes_bfloat16() -> None:
    model = tiny_draft(rope_theta=1e7)
    before = model.rotary["full_attention"].get_buffer("inv_freq")
    model = model.to(torch.bfloat16)
    after = model.rotary["full_attention"].get_buffer("inv_freq")
    assert after.dtype == torch.float32
    assert torch.equal(after, before)
    assert model.fc.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [1.0, 1e3, 1e6])
def test_states_stay_finite_on_taps_of_any_size(dtype: torch.dtype, norm: float) -> None:
    model = tiny_draft().to(dtype)
    features, noise = inputs(model, 12, 8)
    out = forward(model, (features * norm).to(dtype), noise.to(dtype))
    assert out.dtype == dtype
    assert bool(out.isfinite().all())


def test_logits_are_multiplied_then_capped_then_scaled() -> None:
    nested = {"output_multiplier": 0.5, "final_logit_softcapping": 2.0}
    spec = read_spec(config(nested=nested, logit_scale=3.0))
    logits = torch.tensor([-8.0, 1.0, 8.0])
    wanted = 3 * 2 * torch.tanh(0.5 * logits / 2)
    torch.testing.assert_close(transform_logits(logits, spec), wanted)
    assert transform_logits(logits, read_spec(config())) is logits
