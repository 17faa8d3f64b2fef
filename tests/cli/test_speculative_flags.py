"""--min-acceptance-rate, --strict, --profile: what they become, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash.cli.given import settings_of as settings
from dflash.engine import load
from tests.cli.running import run

TOY = ("hello", "--model", "toy", "--draft", "toy:script:0", "--max-tokens", "80")
NOTHING = {
    "block_size": None,
    "draft_tokens": None,
    "min_acceptance_rate": None,
    "strict_mode": False,
    "preset": None,
    "no_chat_template": False,
    "system": None,
}


def asked(**given: Any) -> dict[str, Any]:
    found = settings({**NOTHING, **given})
    names = ("block_size", "draft_tokens", "min_acceptance_rate", "strict_mode")
    return {name: found[name] for name in names}


def test_a_profile_sets_what_no_flag_says() -> None:
    conservative = {
        "block_size": None,
        "draft_tokens": 2,
        "min_acceptance_rate": 0.5,
        "strict_mode": True,
    }
    assert asked(preset="conservative") == conservative
    assert asked(preset="conservative", min_acceptance_rate=0.1) == {
        **conservative,
        "min_acceptance_rate": 0.1,
    }
    assert asked(preset="conservative", draft_tokens=6) == {**conservative, "draft_tokens": 6}
    assert asked(preset="aggressive", block_size="3", strict_mode=True) == {
        "block_size": 3,
        "draft_tokens": None,
        "min_acceptance_rate": 0.15,
        "strict_mode": True,
    }


def test_the_environment_comes_after_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_BLOCK_SIZE", "auto")
    assert asked()["block_size"] == "auto"
    assert asked(min_acceptance_rate=0.3)["block_size"] is None
    assert asked(preset="aggressive")["block_size"] is None
    monkeypatch.setenv("DFLASH_BLOCK_SIZE", "3")
    assert asked(min_acceptance_rate=0.3)["block_size"] == 3


@pytest.mark.parametrize(
    "flags", [("--min-acceptance-rate", "0.3"), ("--profile", "aggressive"), ("--strict",)]
)
def test_no_flag_changes_the_text(flags: tuple[str, ...]) -> None:
    with load("toy") as engine:
        plain = engine.generate("hello", max_tokens=80).text
    assert run("generate", *TOY, *flags).out.rstrip("\n") == plain
    said = run("chat", *TOY[1:], *flags, typed="hello\n/exit\n")
    assert (said.code, said.out.rstrip("\n")) == (0, plain)


def test_a_tree_changes_no_text_of_a_chat() -> None:
    with load("toy") as engine:
        plain = engine.generate("hello", max_tokens=80).text
    said = run("chat", *TOY[1:], "--draft-tree", "12", typed="hello\n/exit\n")
    assert (said.code, said.out.rstrip("\n")) == (0, plain)


def test_a_useless_draft_is_given_up_under_the_rate() -> None:
    kept = json.loads(run("generate", *TOY, "--draft-tokens", "4", "--json").out)["stats"]
    words = ("--draft-tokens", "4", "--min-acceptance-rate", "0.3", "--json")
    given_up = json.loads(run("generate", *TOY, *words).out)["stats"]
    assert given_up["drafted"] < kept["drafted"] / 3


def test_compare_measures_against_plain_decoding_under_a_profile_too() -> None:
    found = json.loads(run("generate", *TOY, "--profile", "aggressive", "--compare", "--json").out)
    assert found["identical"] is True


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--profile", "reckless"), "Known: aggressive, conservative"),
        (("--min-acceptance-rate", "2"), "between 0 and 1"),
        (("--min-acceptance-rate", "0.3", "--block-size", "auto"), "fixed block"),
    ],
)
def test_what_cannot_be_meant_is_refused(flags: tuple[str, ...], words: str) -> None:
    found = run("generate", *TOY, *flags)
    assert found.code != 0
    assert words in found.err


def test_the_flags_of_a_decoder_with_states_run_a_pair_of_files(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("xllamacpp")
    from tests.backends.gguf_files import save_sidecar
    from tests.backends.tiny import tiny_target, tiny_tokenizer
    from tests.backends.tiny_gguf import write_gguf

    target = write_gguf(tmp_path / "target.gguf", tiny_target("llama"), tiny_tokenizer())
    draft = save_sidecar(tmp_path / "draft.gguf", target)
    words = ("generate", "Once", "--model", target, "--max-tokens", 12, "--threads", 1, "--json")
    found, plain = (
        run(*words, "--draft-model", name, "--draft-tokens", 3, "--force-dflash", "--no-mtp")
        for name in (draft, "none")
    )
    assert (found.code, plain.code) == (0, 0), found.err
    assert json.loads(found.out)["text"] == json.loads(plain.out)["text"]
    assert json.loads(found.out)["stats"]["drafted"]
