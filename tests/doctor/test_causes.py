"""The doctor names what is wrong with a pair, and finds nothing on one that is right."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch

from dflash.doctor.measured import Report
from dflash.doctor.static.template import template_digest
from tests.backends.tiny import EOS, save_target, tiny_target
from tests.backends.tiny_gguf import write_gguf
from tests.doctor.rig import TEXTS, Fitted, fit, rendered, tokenizer
from tests.train.rig import MASK

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    return fit(tmp_path_factory.mktemp("fitted"))


@pytest.fixture
def pair(clean: Fitted, tmp_path: Path) -> Fitted:
    return clean.copy(tmp_path)


def causes(report: Report) -> set[str]:
    return {finding.check for finding in report.findings}


def message(report: Report, check: str) -> str:
    return next(finding.message for finding in report.findings if finding.check == check)


def test_a_clean_pair_has_no_findings(clean: Fitted) -> None:
    report = clean.examine()
    assert report.findings == ()
    assert report.verdict == "ok"
    assert report.acceptance is not None and report.acceptance.mean_committed > 3.5
    assert report.cost is not None and [b.block_size for b in report.cost.blocks] == [1, 2, 4]


def test_taps_shifted_by_one_are_named_with_the_right_ones(pair: Fitted) -> None:
    pair.configure(target_layer_ids=[1, 3])
    report = pair.examine()
    assert causes(report) == {"taps"}
    assert "[0, 2]" in message(report, "taps")
    assert "--taps 0,2" in message(report, "taps")
    assert report.verdict == "broken"


def test_a_wrong_mask_is_named_with_the_right_one(pair: Fitted) -> None:
    pair.configure(mask_token_id=300)
    report = pair.examine()
    assert causes(report) == {"mask"}
    assert f"mask_token_id to {MASK}" in message(report, "mask")


def test_a_mask_written_as_the_end_of_text_is_refused_by_name(pair: Fitted) -> None:
    pair.configure(mask_token_id=EOS)
    report = pair.examine()
    assert causes(report) == {"mask"}
    assert report.acceptance is None and report.verdict == "broken"


def test_a_swapped_vocabulary_is_named(pair: Fitted) -> None:
    file = pair.target / "tokenizer.json"
    stored = json.loads(file.read_text())
    words = stored["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    file.write_text(json.dumps(stored))
    report = pair.examine()
    assert causes(report) == {"name"}
    assert "another tokenizer" in message(report, "name")
    assert "cannot run (name)" in report.sentence


def test_another_chat_template_is_named(pair: Fitted) -> None:
    words = tokenizer()
    words.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    words.save_pretrained(pair.target)
    report = pair.examine()
    assert "template" in causes(report)
    assert "chat template" in message(report, "template")
    assert report.verdict != "ok"


def test_a_quantised_target_is_named_and_is_no_fault(
    pair: Fitted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "tiny.Q8_0.gguf"
    quant = gguf.GGMLQuantizationType.Q8_0
    write_gguf(file, tiny_target("llama", eos=None), tokenizer(), quant=quant)
    report = Fitted(file, pair.draft).examine()
    (found,) = [finding for finding in report.findings if finding.check == "quantised"]
    assert found.level == "note"
    assert "Q8_0" in found.message and "exactly that of this file" in found.message
    assert causes(report) <= {"quantised", "acceptance"}


def test_a_fine_tuned_target_loses_acceptance_and_is_not_refused(pair: Fitted) -> None:
    pair.configure(acceptance_by_position=[1.0, 0.97, 0.95])
    tuned = tiny_target("llama", eos=None)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for layer in tuned.model.layers:  # a low-rank step on every down projection
            weight = layer.mlp.down_proj.weight
            left, right = (torch.randn(size, 2, generator=generator) for size in weight.shape)
            weight += 0.1 * left @ right.T
    save_target(tuned, tokenizer(), pair.target)
    report = pair.examine()
    assert causes(report) == {"acceptance"}
    assert "promises 3.92" in message(report, "acceptance")
    assert report.promised == pytest.approx(3.92)


def test_a_card_says_what_the_draft_promises(pair: Fitted) -> None:
    line = "| held-out generation | 9.500 committed per verify pass (80 passes) |"
    (pair.draft / "README.md").write_text(f"# A draft\n\n{line}\n")
    report = pair.examine()
    assert report.promised == 9.5
    assert causes(report) == {"acceptance"}
    assert report.verdict == "weak"


def test_another_base_frequency_is_named(pair: Fitted) -> None:
    pair.configure(rope_theta=3.0)
    report = pair.examine()
    assert causes(report) == {"rope"}
    assert "10000" in message(report, "rope")


def test_a_reading_that_makes_no_difference_is_no_finding(pair: Fitted) -> None:
    pair.configure(is_causal=True)  # this draft learned each place by itself
    assert pair.examine().findings == ()


def test_norms_stored_around_zero_are_named(pair: Fitted) -> None:
    pair.reweigh(lambda name, tensor: tensor - 1 if "norm" in name else tensor)
    report = pair.examine()
    assert "norms" in causes(report)
    assert report.verdict == "broken"


def test_weights_that_are_not_finite_are_named(pair: Fitted) -> None:
    pair.reweigh(lambda name, tensor: tensor * torch.nan if name == "fc.weight" else tensor)
    report = pair.examine()
    assert causes(report) == {"weights"}
    assert report.sentence.startswith("broken: the pair cannot run (weights)")


def test_a_draft_that_knows_nothing_is_broken_without_a_cause(pair: Fitted) -> None:
    generator = torch.Generator().manual_seed(0)
    pair.reweigh(
        lambda name, tensor: (
            torch.randn(tensor.shape, generator=generator).to(tensor) / 8
            if tensor.dim() == 2
            else tensor
        )
    )
    report = pair.examine()
    assert causes(report) == set()
    assert report.verdict == "broken"
    assert "almost nothing is accepted" in report.sentence


SWITCHED = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"
)


def test_thinking_the_other_way_is_named(pair: Fitted) -> None:
    words = tokenizer()
    words.chat_template = SWITCHED
    turns = [{"role": "user", "content": TEXTS[0]}]
    off = words.apply_chat_template(
        turns, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert off == rendered(tokenizer(), TEXTS[0]), "off is what the draft was trained on"
    words.save_pretrained(pair.target)
    pair.configure(chat_template_sha256=template_digest(SWITCHED))
    report = pair.examine()
    assert causes(report) == {"thinking"}
    assert "enable_thinking=False" in message(report, "thinking")


def test_of_a_model_with_ngrams_the_model_is_examined(clean: Fitted) -> None:
    report = Fitted(clean.target, Path(f"{clean.draft}+ngram")).examine()
    assert report.findings == ()
    assert report.cost is not None and report.cost.blocks[-1].block_size == 4
