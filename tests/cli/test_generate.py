"""``dflash generate``: what a person and a script see."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

import dflash
from dflash.backends.toy import ToyTokenizer
from dflash.core.stats import Stats
from dflash.engine import load
from tests.cli.running import run

TOY = ("--model", "toy", "--draft", "toy:script:1,3,0", "--max-tokens", "30")


def test_the_text_goes_to_standard_output_and_nothing_else_does():
    found = run("generate", "hello", *TOY)
    with load("toy") as engine:
        assert found.out == engine.generate("hello", max_tokens=30).text + "\n"
    assert found.code == 0
    for words in ("30 tokens", "tok/s", "committed per pass", "% of drafts", "block 8"):
        assert words in found.err


def test_json_is_one_object_with_exactly_the_promised_keys():
    found = run("generate", "hello", *TOY, "--json")
    answer = json.loads(found.out)
    assert list(answer) == ["text", "token_ids", "finish_reason", "stats"]
    assert list(answer["stats"]) == list(Stats.__dataclass_fields__)
    assert len(answer["token_ids"]) == answer["stats"]["completion_tokens"] == 30
    assert answer["finish_reason"] == "length"
    assert found.out.count("\n") == 1
    assert found.err == ""


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_compare_measures_plain_decoding_beside(temperature):
    found = run("generate", "hello", *TOY, "--compare", "--json", "--temperature", temperature)
    answer = json.loads(found.out)
    assert list(answer)[4:] == ["plain", "identical", "speedup"]
    assert list(answer["plain"]) == ["token_ids", "tokens_per_second"]
    assert answer["identical"] is True
    assert answer["plain"]["token_ids"] == answer["token_ids"]
    ratio = answer["stats"]["tokens_per_second"] / answer["plain"]["tokens_per_second"]
    assert answer["speedup"] == pytest.approx(ratio)
    found = run("generate", "hello", *TOY, "--compare", "--temperature", temperature)
    assert "x plain decoding" in found.err
    assert "ids identical" in found.err


def test_compare_says_where_ids_differ(monkeypatch):
    from dflash.cli import output

    with load("toy", "toy:oracle") as engine:
        one = engine.generate("hello", max_tokens=20)
        other = engine.generate("hallo", max_tokens=20)
    line = output.comparison_line(one, other)
    pairs = zip(one.token_ids, other.token_ids, strict=True)
    assert f"DIFFER from token {[a == b for a, b in pairs].index(False)}: dflash verify" in line


def test_compare_says_when_it_compared_plain_decoding_with_itself():
    found = run("generate", "hello", *TOY, "--compare", "--block-size", "1")
    assert "ids identical, but nothing was drafted" in found.err


def test_a_closed_output_is_named():
    command = [sys.executable, "-m", "dflash", "generate", "hello", *TOY]
    shell = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    found = subprocess.run(shell, stderr=subprocess.PIPE, text=True, check=False)
    assert found.returncode == 1
    assert "standard output is closed" in found.stderr


@pytest.mark.parametrize("words", [["generate", "-"], ["chat"]])
def test_a_closed_input_is_named(words):
    command = [sys.executable, "-m", "dflash", *words, *TOY]
    shell = ["sh", "-c", 'exec "$@" <&-', "sh", *command]
    found = subprocess.run(shell, capture_output=True, text=True, check=False, env=environment())
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith("error: standard input is closed")
    assert found.stderr.count("\n") == 1


def test_accepted_drafts_are_marked_where_there_is_no_colour():
    found = run("generate", "hello", *TOY, "--show-drafts")
    assert "⟦" in found.out
    plain = run("generate", "hello", *TOY)
    assert found.out.replace("⟦", "").replace("⟧", "") == plain.out
    assert "accepted drafts" in found.err


def test_accepted_drafts_are_green_in_a_terminal(monkeypatch):
    monkeypatch.setattr("dflash.cli.output.has_colour", lambda stream: True)
    found = run("generate", "hello", *TOY, "--show-drafts")
    assert "\x1b[32m" in found.out
    assert "⟦" not in found.out


def test_the_prompt_comes_from_the_argument_a_pipe_or_a_file(tmp_path):
    (tmp_path / "prompt.txt").write_text("hello\n", encoding="utf-8")
    expected = run("generate", "hello", *TOY).out
    assert run("generate", "-", *TOY, typed="hello\n").out == expected
    assert run("generate", "--prompt-file", tmp_path / "prompt.txt", *TOY).out == expected


def test_the_template_is_applied_unless_told_otherwise():
    def prompt_tokens(*words):
        return json.loads(run("generate", "hello", *TOY, "--json", *words).out)["stats"][
            "prompt_tokens"
        ]

    assert prompt_tokens("--no-chat-template") == len("hello")
    assert prompt_tokens() > len("hello")
    assert prompt_tokens("--system", "be brief") > prompt_tokens()


@pytest.mark.parametrize(
    ("words", "size"),
    [
        (["--block-size", "4"], 4),
        (["--draft-tokens", "4"], 5),
        (["--block-size", "1"], 1),
        (["--draft", "none"], 1),
        ([], 8),
    ],
)
def test_block_sizes_of_every_flag(words, size):
    found = run("generate", "hello", *TOY, *words, "--json")
    assert json.loads(found.out)["stats"]["block_size"] == size


def test_the_environment_comes_after_the_flags(monkeypatch):
    def size(*words):
        return json.loads(run("generate", "hello", *TOY, "--json", *words).out)["stats"][
            "block_size"
        ]

    monkeypatch.setenv("DFLASH_BLOCK_SIZE", "3")
    assert size() == 3
    assert size("--block-size", "5") == 5
    assert size("--draft-tokens", "5") == 6


def test_auto_is_a_block_size():
    found = run("generate", "hello", *TOY, "--block-size", "auto", "--json")
    assert found.code == 0


def test_a_clamped_block_is_one_visible_line_and_a_field():
    found = run("generate", "hello", *TOY, "--block-size", "99", "--json", "--compare")
    assert found.err.count("note: block size 99") == 1
    assert json.loads(found.out)["stats"]["clamped_from"] == 99


def test_no_draft_means_plain_decoding_said_aloud():
    found = run("generate", "hello", "--model", "toy", "--max-tokens", 9)
    assert "note: no draft" in found.err
    assert "plain decoding" in found.err
    found = run("generate", "hello", "--model", "toy", "--draft", "none", "--max-tokens", 9)
    assert "note:" not in found.err


def test_names_have_their_aliases():
    expected = run("generate", "hello", *TOY).out
    words = ("--target", "toy", "--draft-model", "toy:oracle", "-n", "30")
    assert run("generate", "hello", *words).out == expected


def test_a_seed_repeats_and_stops_are_kept():
    words = (*TOY, "--temperature", "1", "--seed", "5")
    assert run("generate", "hello", *words).out == run("generate", "hello", *words).out
    whole = run("generate", "hello", *TOY).out
    found = run("generate", "hello", *TOY, "--stop", whole[9:12], "--stop", "never said")
    assert found.out.rstrip("\n") == whole[: whole.index(whole[9:12])].rstrip("\n")


def test_version_and_help():
    assert run("--version").out.startswith("dflash ")
    found = run("generate", "--help")
    assert found.code == 0
    assert "bool" not in found.out, "a switch takes no value"
    for flag in ("--model", "--draft", "--block-size", "--show-drafts", "--compare", "--json"):
        assert flag in found.out


def test_text_that_is_no_utf8_is_one_error():
    for words, typed in ((["caf\udce9"], None), (["-"], b"caf\xe9")):
        found = run("generate", *words, *TOY, typed=typed)
        assert (found.code, found.out) == (2, "")
        assert "not UTF-8" in found.err
    found = run("generate", "hello", *TOY, "--system", "caf\udce9")
    assert (found.code, "not UTF-8" in found.err) == (2, True)


def test_json_can_be_printed_wherever_it_goes(monkeypatch):
    monkeypatch.setattr(ToyTokenizer, "decode", lambda *_: "h\u00e9 \U0001f600")
    found = run("generate", "hello", *TOY, "--json", charset="ascii")
    assert found.code == 0
    assert "\U0001f600" in json.loads(found.out)["text"]
    assert "\u00e9" in run("generate", "hello", *TOY, "--json").out


def test_drafts_are_marked_with_what_the_output_can_show():
    found = run("generate", "hello", *TOY, "--show-drafts", charset="ascii")
    assert found.out.count("[") > 2
    assert "?" not in found.out


def test_the_closing_line_says_why_a_text_ends_and_why_nothing_was_drafted():
    assert "cut off by --max-tokens" in run("generate", "hello", *TOY).err
    assert "cut off" not in run("generate", "hello", *TOY, "--regex", "[ab]{3}").err
    found = run("generate", "hello", "--model", "toy", "--draft", "ngram", "-n", "2")
    assert "plain decoding (auto: the text was too short" in found.err
    found = run("generate", "hello", "--model", "toy", "--draft", "ngram", "-n", "6")
    assert "plain decoding (auto: no draft had anything to propose)" in found.err
    found = run("generate", "hello", *TOY, "--block-size", "auto", "-n", "4")
    assert "plain decoding (auto: the text was too short" in found.err
    found = run("generate", "hello", *TOY, "--block-size", "1")
    assert "plain decoding ·" in found.err


def test_output_that_cannot_be_written_is_one_line(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("dflash.cli._forget_output", lambda: None)  # the runner needs it still
    for words, place in (([], "TextWriter.write"), (["--json"], "emit_json")):
        name = "generate" if place == "emit_json" else "output"
        monkeypatch.setattr(f"dflash.cli.{name}.{place}", full)
        found = run("generate", "hello", *TOY, *words)
        assert found.code == 1
        assert "No space left on device" in found.err
        assert "fault of ours" not in found.err


# --- as a process --------------------------------------------------------------------------------


def environment():
    home = str(Path(dflash.__file__).parents[1])  # a checkout that is not installed works too
    return {**os.environ, "NO_COLOR": "1", "PYTHONPATH": home}


def finished(*words):
    return subprocess.run(
        [sys.executable, "-m", "dflash", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment(),
    )


def test_the_process_has_the_exit_codes():
    assert finished("generate", "hello", *TOY).returncode == 0
    found = finished("generate", "hello", "--model", "/nowhere")
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith("error: ")
    assert "Traceback" not in found.stderr


def test_help_imports_no_array_library():
    code = (
        "import sys; from dflash.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'mlx', 'numpy') if m in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=environment(),
    )
    assert found.stdout.endswith("[]\n")


SLOW = """
import sys, time
from dflash.backends.toy import ToyTarget
whole = ToyTarget.verify
def slow(self, proposal):
    time.sleep(0.05)
    return whole(self, proposal)
ToyTarget.verify = slow
from dflash.cli import main
sys.argv = ["dflash", *sys.argv[1:]]
main()
"""


@pytest.fixture
def slow(tmp_path):
    """The command on a pair so slow that one can interrupt it."""
    file = tmp_path / "slow.py"
    file.write_text(SLOW)

    def start(*words):
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        argv = [sys.executable, str(file), *words]
        # a test run started in the background hands on an ignored SIGINT, which Python keeps
        heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        return subprocess.Popen(argv, env=environment(), text=True, preexec_fn=heed, **pipes)

    return start


def test_interrupted_text_stays_and_the_code_is_130(slow):
    process = slow("generate", "hello", *TOY, "--max-tokens", "3000")
    first = process.stdout.read(10)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert len(first) == 10
    assert (first + rest).endswith("\n")
    assert "Traceback" not in err


INTERRUPTED = """
import atexit, os, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job is born deaf to it
awaited = sys.argv.pop(1)

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

class Finder:
    def find_spec(self, name, *_):
        if name == awaited:
            interrupt()

sys.meta_path.insert(0, Finder())
atexit.register(interrupt)  # the second one
from dflash.__main__ import main
main()
"""


def ends_quietly(script: str, *words: str) -> None:
    """``script`` with ``words`` exits as an interrupted command does, and says nothing."""
    found = subprocess.run(
        [sys.executable, "-c", script, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment(),
    )
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "")


@pytest.mark.parametrize("module", ["dflash.cli", "typer", "dflash.engine"])
def test_interrupted_imports_are_as_quiet_and_a_second_interrupt_too(module):
    ends_quietly(INTERRUPTED, module, "generate", "hello", *TOY)


TWICE = """
import os, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job is born deaf to it
import typer
from dflash import cli, engine
from dflash.__main__ import main

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

def stream(*_, **__):
    interrupt()
    yield

class Exit(typer.Exit):
    def __init__(self, code=0):
        if sys.argv[-1] == "door":
            interrupt()  # the second one, inside the door's own except
        super().__init__(code)

def left(code):
    if sys.argv[-1] == "behind":
        interrupt()  # the second one, while the code is on its way out
    raise SystemExit(code)

engine.Engine.stream = stream
cli.typer.Exit = Exit
typer.core.sys.exit = left
where = sys.argv.pop()
sys.argv.append(where)
main()
"""


@pytest.mark.parametrize("where", ["door", "behind", "nowhere"])
def test_a_second_interrupt_on_the_way_out_ends_it_with_the_same_code(where):
    ends_quietly(TWICE, "generate", *TOY, where)


def test_a_reader_that_leaves_causes_no_noise(slow):
    process = slow("generate", "hello", *TOY, "--max-tokens", "3000")
    process.stdout.read(5)
    process.stdout.close()
    start = time.monotonic()
    process.wait(timeout=30)
    assert time.monotonic() - start < 20
    err = process.stderr.read()
    process.stderr.close()
    process.stdin.close()
    assert process.returncode == 141
    assert "Traceback" not in err
    assert "Exception ignored" not in err


@pytest.mark.parametrize("words", ["--help", "--version", "serve --help", "inspect toy"])
@pytest.mark.parametrize("both", [False, True], ids=["output", "errors, too"])
def test_a_reader_that_was_never_there_causes_no_noise(words, both):
    read, write = os.pipe()
    os.close(read)
    errors = write if both else subprocess.PIPE
    command = [sys.executable, "-m", "dflash", *words.split()]
    found = subprocess.run(command, stdout=write, stderr=errors, env=environment(), timeout=60)
    os.close(write)
    assert found.returncode == 141
    assert not found.stderr


def test_an_interrupted_answer_leaves_the_chat_open(slow):
    process = slow("chat", "--model", "toy", "--draft", "toy:random", "--max-tokens", "3000")
    process.stdin.write("hello\n")
    process.stdin.flush()
    process.stdout.read(5)
    process.send_signal(signal.SIGINT)
    process.stdin.write("/stats\n/exit\n")
    process.stdin.flush()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "stopped" in err
    assert "nothing generated yet" in err or "answers" in err


def test_ngram_drafts_show_and_the_closing_line_says_who_drafted():
    prompt = "one two three one two three one two"
    both = ("--model", "toy", "--draft", "toy:oracle+ngram", "--max-tokens", "40")
    found = run("generate", prompt, *both, "--block-size", "8", "--show-drafts")
    with load("toy") as engine:
        plain = engine.generate(prompt, max_tokens=40).text
    assert found.out.replace("⟦", "").replace("⟧", "").rstrip("\n") == plain
    assert re.search(r"\(ngram \d+ of \d+, toy:oracle \d+ of \d+\)", found.err)
    answer = json.loads(run("generate", prompt, *both, "--block-size", "8", "--json").out)
    assert [share["draft"] for share in answer["stats"]["by_draft"]] == ["ngram", "toy:oracle"]
    assert sum(share["drafted"] for share in answer["stats"]["by_draft"]) > 0


def test_ngram_alone_needs_no_draft_of_the_target():
    found = run("generate", "hello hello hello", "--model", "toy", "--draft", "ngram", "-n", "20")
    assert found.code == 0
    assert "no draft for this target" not in found.err
