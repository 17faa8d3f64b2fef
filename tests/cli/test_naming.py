"""An error on the command line names what was typed there, and not the library's keyword."""

from __future__ import annotations

import json
import re

import pytest

from dflash.cli.naming import in_flags
from tests.cli.running import run

FLAGS = {"max_tokens": "--max-tokens", "top_p": "--top-p", "seed": "--seed", "regex": "--regex"}
TOY = ("--model", "toy", "--draft", "toy:oracle")


@pytest.mark.parametrize(
    ("command", "words", "says"),
    [
        ("generate", ("--draft-tokens", "-1"), "--draft-tokens must be"),
        ("generate", ("--temperature", "-1"), "--temperature must be"),
        ("generate", ("--seed", "-1"), "--seed must be"),
        ("generate", ("--n", "0"), "--n must be"),
        ("generate", ("--max-tokens", "-1"), "--max-tokens must be"),
        ("generate", ("--min-tokens", "9", "--max-tokens", "4"), "--min-tokens is 9 and --max-"),
        ("generate", ("--draft-tree", "9", "--draft-path", "best"), "and --draft-path best"),
        ("generate", ("--regex", "a", "--grammar", "root ::= a"), "--regex and --grammar:"),
        ("generate", ("--regex", "a", "--ignore-eos"), "leave out --ignore-eos"),
        ("generate", ("--taps", "some"), "--taps must be"),
        ("generate", ("--dtype", "bfloat16", "--force-dflash"), "--dtype and --force-dflash:"),
        ("chat", ("--top-p", "7"), "--top-p must be"),
        ("verify", ("--top-k", "-1"), "--top-k must be"),
        ("compare", ("--draft-p-min", "2"), "--draft-p-min must be"),
        ("doctor", ("--cache-type-k", "f8"), "--cache-type-k must be"),
        ("bench", ("--max-tokens", "0"), "--max-tokens must be"),
        ("bench", ("--threads", "0"), "--threads must be"),
        ("sweep", ("--threads", "0"), "--threads must be"),
        ("serve", ("--port", "70000"), "--port must be"),
        ("serve", ("--max-running", "0"), "--max-running must be"),
        ("serve", ("--max-seconds", "0"), "--max-seconds must be"),
        ("serve", ("--drain-seconds", "-1"), "--drain-seconds must be"),
        ("serve", ("--max-body-mb", "nan"), "--max-body-mb must be"),
        ("serve", ("--cache-mb", "0"), "--cache-mb must be"),
    ],
)
def test_an_error_names_the_flag(command: str, words: tuple[str, ...], says: str) -> None:
    prompt = ("hello",) if command == "generate" else ()
    found = run(command, *prompt, *TOY, *words)
    assert found.code == 2
    assert says in found.err
    keyword = words[0].removeprefix("--").replace("-", "_")
    assert "_" not in keyword or keyword not in found.err


def test_the_object_of_json_says_the_same() -> None:
    found = run("generate", "hello", *TOY, "--top-p", "7", "--json")
    assert json.loads(found.out)["error"]["message"].startswith("--top-p must be")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("max_tokens must be 1, got 0", "--max-tokens must be 1, got 0"),
        ("give max_tokens=4, or leave out top_p.", "give --max-tokens 4, or leave out --top-p."),
        ("top_p=\"auto\" and max_tokens='x'", "--top-p auto and --max-tokens x"),
        ("seed must be below 9", "--seed must be below 9"),
        ("for torch. Leave seed out", "for torch. Leave --seed out"),
        ("leave seed out, or add top_p='auto'", "leave --seed out, or add --top-p auto"),
        ("regex and seed: one of them", "--regex and --seed: one of them"),
    ],
)
def test_keywords_become_flags(text: str, shown: str) -> None:
    assert in_flags(text, FLAGS) == shown


@pytest.mark.parametrize(
    "text",
    [
        "no file 'max_tokens'",
        'got "top_p"',
        "cannot read /data/max_tokens/top_p.json",
        "max_tokens.json is no folder",
        "min_max_tokens is another word",
        "the text held to a regex, whose seed is 3",
        "they leave seed alone",
    ],
)
def test_what_is_somebodys_own_stays(text: str) -> None:
    assert in_flags(text, FLAGS) == text


def test_no_message_has_a_keyword_beside_its_flag() -> None:
    found = run("generate", "hello", *TOY, "--block-size", "4", "--draft-tokens", "3")
    assert not re.search(r"\bblock_size|draft_tokens", found.err)
    assert "--block-size and --draft-tokens say the same thing" in found.err
