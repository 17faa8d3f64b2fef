"""Flags that shape a text: what they do, and what they refuse before anything is loaded."""

from __future__ import annotations

import json

import pytest

from dflash.cli.text_options import shape
from dflash.engine import load
from dflash.errors import ConfigError
from tests.cli.running import run

TOY = ("--model", "toy", "--draft", "toy:script:1,3,0", "--max-tokens", "24")


def answer(*words):
    found = run("generate", "hello", *TOY, *words, "--json")
    assert found.code == 0, found.err
    return json.loads(found.out)


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        (("--repetition-penalty", "9"), {"repetition_penalty": 9.0}),
        (("--presence-penalty", "9"), {"presence_penalty": 9.0}),
        (("--frequency-penalty", "6"), {"frequency_penalty": 6.0}),
        (("--no-repeat-ngram", "1"), {"no_repeat_ngram": 1}),
        (("--logit-bias", "65=50", "--logit-bias", "66=51"), {"logit_bias": {65: 50, 66: 51}}),
        (("--temperature", "9", "--seed", "3", "--min-p", "0.5"), {"temperature": 9, "min_p": 0.5}),
        (("--logit-bias", "256=60", "--min-tokens", "6"), None),
    ],
)
def test_a_flag_is_the_option_of_its_name(flags, options):
    found = answer(*flags)
    with load("toy") as engine:
        assert found["text"] != engine.generate("hello", max_tokens=24).text
        if options is None:
            assert len(found["token_ids"]) == 7
            return
        expected = engine.generate("hello", max_tokens=24, seed=3, **options)
    assert found["token_ids"] == list(expected.token_ids)


def test_logprobs_are_part_of_the_json_object_and_lines_without_it():
    found = answer("--logprobs", "2")
    assert list(found)[-1] == "logprobs"
    assert len(found["logprobs"]) == len(found["token_ids"])
    first = found["logprobs"][0]
    assert list(first) == ["token_id", "text", "logprob", "top"]
    assert first["token_id"] == found["token_ids"][0]
    assert first["logprob"] <= first["top"][0]["logprob"] <= 0
    assert [len(entry["top"]) for entry in found["logprobs"]] == [2] * 24
    aloud = run("generate", "hello", *TOY, "--logprobs", "1")
    assert aloud.out == found["text"] + "\n"
    assert f"{first['logprob']:.3f}" in aloud.err


def test_several_answers_are_choices_in_json_and_follow_each_other_aloud():
    flags = ("--n", "3", "--temperature", "1", "--seed", "5")
    found = answer(*flags)
    assert len(found["choices"]) == 3
    first = {name: found[name] for name in ("text", "token_ids", "finish_reason")}
    assert first.items() <= found["choices"][0].items()
    assert len({choice["text"] for choice in found["choices"]}) == 3
    aloud = run("generate", "hello", *TOY, *flags)
    one, two, three = (choice["text"] for choice in found["choices"])
    assert aloud.out == f"{one}\nanswer 2:\n{two}\nanswer 3:\n{three}\n"


def test_compare_runs_with_every_shape():
    found = answer("--compare", "--min-tokens", "20", "--n", "2", "--repetition-penalty", "1.2")
    assert found["identical"] is True


def test_forms_come_as_text_or_from_a_file(tmp_path):
    schema = '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}'
    place = tmp_path / "schema.json"
    place.write_text(schema)
    texts = {answer("--max-tokens", "90", "--json-schema", s)["text"] for s in (schema, place)}
    assert len(texts) == 1 and json.loads(texts.pop())["a"] in (True, False)
    ebnf = tmp_path / "list.ebnf"
    ebnf.write_text('root ::= "[" [xy]{3} "]"')
    assert len(answer("--grammar", ebnf)["text"]) == len("[xxx]")
    assert answer("--regex", "[0-9]{4}")["text"].isdecimal()


def test_a_conversation_has_a_shape_too():
    found = run("chat", *TOY, "--regex", "[0-9]{4}", typed="Hi\n/exit\n")
    assert found.code == 0, found.err
    assert len(found.out.strip()) == 4 and found.out.strip().isdecimal()


def test_an_audit_takes_the_same_flags(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    flags = ("--repetition-penalty", "1.3", "--no-repeat-ngram", "2", "--logit-bias", "65=2")
    found = run("verify", *TOY, "--prompts", prompts, *flags, "--json")
    assert found.code == 0, found.err
    assert json.loads(found.out)["identical"] == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--logit-bias", "65"), "--logit-bias is a token id, = and a number"),
        (("--logit-bias", "a=1"), "--logit-bias is a token id"),
        (("--json-schema", "nowhere.json"), "neither a text with '{' in it nor a file"),
        (("--grammar", "nowhere"), "neither a text with '::=' in it nor a file"),
        (("--json-schema", "{"), "--json-schema is not JSON"),
        (("--regex", "a", "--grammar", "root ::= a"), "held to one of them"),
        (("--min-tokens", "99"), "must not be more"),
        (("--min-p", "2"), "--min-p must be between 0 and 1"),
        (("--n", "0"), "n must be a whole number of 1 or more"),
        (("--regex", "a", "--ignore-eos"), "leave out --ignore-eos"),
        (("--regex", "(a"), "this regex cannot be used"),
    ],
)
def test_a_flag_that_cannot_be_meant_is_one_clear_error(flags, words):
    found = run("generate", "hello", *TOY, *flags)
    assert found.code == 2
    assert found.out == "" and found.err.count("error:") == 1
    assert words in found.err


def test_what_is_not_given_is_not_asked_for():
    assert shape({"logit_bias": None, "json_schema": None, "grammar": None}) == {}
    with pytest.raises(ConfigError):
        shape({"grammar": "\0"})
