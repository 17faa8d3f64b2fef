"""``dflash convert`` as a person meets it."""

from __future__ import annotations

import json
import re

import pytest

from dflash.demo import DRAFT_FOLDER
from tests.cli.running import run
from tests.convert.drafts import config, save, v1_tensors

pytestmark = pytest.mark.torch


def test_it_prints_where_the_result_is_and_what_was_compared(tmp_path) -> None:
    source = save(tmp_path / "a", config(flavour="sweet"), v1_tensors())
    found = run("convert", source, "--to", "mlx", "--out", tmp_path / "b")
    assert found.code == 0
    assert found.out.strip() == str(tmp_path / "b")
    assert "flavour" in found.err
    assert "run both ways with torch, largest difference 0 of" in found.err


def test_a_rounded_sidecar_is_held_against_the_weights_as_they_were(tmp_path) -> None:
    from tests.backends.gguf_files import save_folder
    from tests.backends.tiny import tiny_target, tiny_tokenizer
    from tests.backends.tiny_gguf import write_gguf

    target = write_gguf(tmp_path / "t.gguf", tiny_target("llama"), tiny_tokenizer())
    words = ("--to", "gguf", "--target", target, "--stored", "Q4_0")
    source = save_folder(tmp_path / "a")
    found = run("convert", source, "--out", tmp_path / "b.gguf", *words)
    assert found.code == 0
    share = re.search(
        r"largest difference (\S+) of \S+ \((\S+)%\): what rounding to Q4_0", found.err
    )
    assert share is not None
    assert float(share[1]) > 0
    assert float(share[2]) > 1


def test_json_has_the_trial(tmp_path) -> None:
    source = save(tmp_path / "a", config(), v1_tensors())
    words = ("convert", source, "--to", "speculators", "--out", tmp_path / "b", "--json")
    found = json.loads(run(*words).out)
    assert (found["found"], found["made"], found["kind"]) == ("hf", "speculators", "dflash")
    assert found["trial"]["difference"] == 0.0


def test_a_mistake_is_one_message(tmp_path) -> None:
    found = run("convert", tmp_path / "nowhere", "--to", "hf", "--out", tmp_path / "b")
    assert (found.code, found.out) == (2, "")
    assert "is no draft folder" in found.err


@pytest.mark.parametrize(
    ("name", "hint"), [("safetensors", "--to hf"), ("vllm", "--to speculators"), ("what", "Known")]
)
def test_a_format_by_another_name_is_hinted_at(tmp_path, name: str, hint: str) -> None:
    found = run("convert", DRAFT_FOLDER, "--to", name, "--out", tmp_path / "b")
    assert found.code == 2
    assert f"unknown format {name!r}" in found.err and hint in found.err


def test_the_demo_draft_comes_back(tmp_path) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    assert run("convert", DRAFT_FOLDER, "--to", "speculators", "--out", there).code == 0
    assert run("convert", there, "--to", "hf", "--out", back).code == 0
    for file in DRAFT_FOLDER.glob("*.safetensors"):
        assert (back / file.name).stat().st_size == pytest.approx(file.stat().st_size, rel=1e-3)


def test_the_demo_draft_and_its_target_go_by_name(tmp_path, monkeypatch) -> None:
    from dflash import demo
    from dflash.opening import pair_names
    from tests.backends.gguf_files import save_folder
    from tests.backends.tiny import tiny_target, tiny_tokenizer
    from tests.backends.tiny_gguf import write_gguf

    target = write_gguf(tmp_path / "t.gguf", tiny_target("llama"), tiny_tokenizer())
    draft = save_folder(tmp_path / "a", target_name=demo.HUB_ID)
    monkeypatch.setattr(demo, "DRAFT_FOLDER", draft)
    monkeypatch.setattr(demo, "demo_target", lambda: target)
    sidecar = tmp_path / "b.gguf"
    found = run("convert", "demo", "--to", "gguf", "--out", sidecar)
    assert found.code == 0, found.err
    assert pair_names(None, str(sidecar)) == (str(target), str(sidecar))
    assert run("convert", "demo", "--to", "mlx", "--out", tmp_path / "c").code == 0


def test_a_sidecar_that_names_another_model_asks_for_that_ones_file(tmp_path) -> None:
    from dflash.errors import ConfigError
    from dflash.opening import pair_names
    from tests.backends.gguf_files import save_folder
    from tests.backends.tiny import tiny_target, tiny_tokenizer
    from tests.backends.tiny_gguf import write_gguf

    target = write_gguf(tmp_path / "t.gguf", tiny_target("llama"), tiny_tokenizer())
    for place, name in (("named", "owner/model"), ("silent", None)):
        source = save_folder(tmp_path / place, target_name=name)
        words = ("--to", "gguf", "--target", target, "--out", tmp_path / f"{place}.gguf")
        assert run("convert", source, *words).code == 0
    with pytest.raises(ConfigError, match="made for owner/model: name that model's"):
        pair_names(None, str(tmp_path / "named.gguf"))
    with pytest.raises(ConfigError, match="does not say which target"):
        pair_names(None, str(tmp_path / "silent.gguf"))
