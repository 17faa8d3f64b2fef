"""What the torch backend shows of a pair: one row of logits, and the draft under another spec."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dflash  # noqa: E402 - after the check for torch
from dflash.backends.torch.probe import TorchProbe  # noqa: E402
from dflash.engine import Engine  # noqa: E402
from dflash.verify.compare import Comparison, outcomes  # noqa: E402
from dflash.verify.gap import Judge  # noqa: E402
from dflash.verify.probe import Probe, probe_of  # noqa: E402
from dflash.verify.prompts import MIXED  # noqa: E402
from dflash.verify.sampling import audit, drawn_by  # noqa: E402
from tests.backends.tiny import save_target, tiny_target, tiny_tokenizer  # noqa: E402
from tests.facades.drafts import NATIVE, save_draft  # noqa: E402

pytestmark = pytest.mark.torch

PROMPT = [5, 77, 130, 9, 42]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_target("llama", eos=None)


@pytest.fixture(scope="module")
def engine(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    target = save_target(model, tiny_tokenizer(), tmp_path_factory.mktemp("target"))
    draft = save_draft(tmp_path_factory.mktemp("draft"))
    with dflash.load(target, draft, threads=1) as engine:
        yield engine


@pytest.fixture
def probe(engine: Engine) -> Probe:
    return probe_of(engine.pair)


def test_logits_are_those_of_the_last_row(probe: Probe, model: Any) -> None:
    for prefix in (PROMPT, PROMPT[:1]):
        with torch.inference_mode():
            row = model(torch.tensor([prefix])).logits[0, -1]
        assert probe.logits(prefix) == pytest.approx(row.numpy(), abs=1e-4)
    assert probe.dtype == "float32"


@pytest.mark.parametrize(
    ("weights", "dtype"), [("int8", "bfloat16"), ("bfloat16", "bfloat16"), ("float16", "float32")]
)
def test_ties_are_of_the_format_that_activations_are_rounded_to(weights: str, dtype: str) -> None:
    target = SimpleNamespace(weights=weights, dtype=torch.float32)
    pair: Any = SimpleNamespace(target=target)
    assert TorchProbe(pair).dtype == dtype


def test_a_variant_shares_the_weights_and_reads_the_config_otherwise(
    engine: Engine, probe: Probe
) -> None:
    assert probe.spec is not None and probe.layers == 4
    other: Any = probe.variant(taps=(1, 3), mask_token_id=7)
    own: Any = engine.pair
    assert other.draft.spec.taps == (1, 3)
    assert own.draft.spec.taps == probe.spec.taps == (0, 2)
    assert other.draft.model.fc is own.draft.model.fc
    same = engine.generate(PROMPT, max_tokens=12, block_size=NATIVE, reuse=False).token_ids
    with Engine(other) as running:
        found = running.generate(PROMPT, max_tokens=12, block_size=NATIVE, reuse=False)
    assert found.token_ids == same, "a draft read wrongly costs speed and never text"
    assert engine.generate(PROMPT, max_tokens=12).token_ids == same, "the pair stays open"


def test_a_variant_turns_heads_by_its_own_base_frequency(engine: Engine, probe: Probe) -> None:
    assert probe.spec is not None and probe.rope_theta == 10000.0
    ropes = {
        kind: {**rope, "rope_theta": 50.0} for kind, rope in probe.spec.rope_parameters.items()
    }
    own: Any = engine.pair
    other: Any = probe.variant(rope_parameters=ropes)
    place = torch.tensor([9])
    mine = own.draft.model.rotary["full_attention"](place)[0]
    assert not torch.equal(other.draft.model.rotary["full_attention"](place)[0], mine)
    assert torch.equal(own.draft.model.rotary["full_attention"](place)[0], mine)


def test_norms_and_static_findings_come_with_it(probe: Probe) -> None:
    assert set(probe.norms().values()) == {1.0}
    assert {"hidden_norm", "norm", "layers.0.input_layernorm"} <= set(probe.norms())
    assert probe.findings() == []


def test_without_a_model_draft_there_is_nothing_to_take_apart(engine: Engine) -> None:
    with dflash.load(engine.pair.target_name, "ngram", threads=1) as looking:
        probe = probe_of(looking.pair)
        assert (probe.spec, probe.findings(), probe.norms()) == (None, [], {})


@pytest.mark.parametrize(
    "options",
    [{}, {"repetition_penalty": 1.3, "frequency_penalty": 0.4}, {"temperature": 0.9, "seed": 2}],
    ids=["greedy", "penalties", "seeded"],
)
def test_a_tiny_pair_is_lossless(engine: Engine, options: dict[str, Any]) -> None:
    settings = {"max_tokens": 16, "block_size": NATIVE, **options}
    judge = Judge(engine, settings)
    found = Comparison(tuple(outcomes(engine, MIXED[:4], settings, judge.gap)))
    assert found.verdict == "lossless"


@pytest.mark.parametrize("seed", [0, None], ids=["match", "rejection"])
def test_samples_of_a_tiny_pair_pass(
    engine: Engine, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = iter(range(5000, 10_000))
    monkeypatch.setattr("secrets.randbits", lambda bits: next(fixed))
    settings = {"temperature": 0.5, "top_k": 6, "seed": seed, "block_size": NATIVE}
    exact = partial(Judge(engine, settings).exact, PROMPT)
    found = audit("tiny", drawn_by(engine, PROMPT, settings), exact, 200)
    assert found.passed and found.freedom > 2
