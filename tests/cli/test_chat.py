"""``dflash chat``: several turns, commands, and the end of the context."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import dflash
from dflash.backends.toy import ToyPair, ToyTarget
from dflash.engine import Engine, load
from tests.cli.running import run

TOY = ("--model", "toy", "--draft", "toy:oracle", "--max-tokens", "12")


def test_every_turn_knows_the_ones_before():
    found = run("chat", *TOY, typed="hello\nand more?\n")
    with load("toy") as engine:
        turns = [{"role": "user", "content": "hello"}]
        first = engine.generate(turns, max_tokens=12).text
        turns += [
            {"role": "assistant", "content": first},
            {"role": "user", "content": "and more?"},
        ]
        second = engine.generate(turns, max_tokens=12).text
    assert found.code == 0
    assert found.out == f"{first}\n{second}\n"


def test_the_conversations_beginning_is_run_once(monkeypatch):
    rows = []
    whole = ToyTarget.prefill

    def counted(self, request, reuse):
        rows.append((len(request.prompt), reuse))
        return whole(self, request, reuse)

    monkeypatch.setattr(ToyTarget, "prefill", counted)
    run("chat", *TOY, typed="hello\nand more?\nand then?\n")
    assert rows[0][1] == 0
    for (before, _), (_, reuse) in pairwise(rows):
        assert reuse >= before


def test_commands():
    typed = "/stats\nhello\n/stats\n/reset\n/what\n/help\n\n/exit\nnever read\n"
    found = run("chat", *TOY, typed=typed)
    assert found.code == 0
    for words in ("nothing generated yet", "1 answer ·", "forgotten", "/exit", "/quit", "Ctrl-C"):
        assert words in found.err
    assert found.err.count("no such command") == 1
    assert len(found.out.splitlines()) == 1
    assert "of 4096 tokens" in found.err


def test_a_reset_forgets():
    once = run("chat", *TOY, typed="hello\n").out
    assert run("chat", *TOY, typed="hello\n/reset\nhello\n").out == once * 2


def test_figures_go_on_over_a_reset_and_it_says_so():
    found = run("chat", *TOY, typed="hello\n/reset\n/stats\nhello\n/stats\n/help\n")
    assert "forgotten; /stats goes on counting" in found.err
    assert "1 answer ·" in found.err and "2 answers ·" in found.err
    assert found.err.count("/stats shows figures of all answers") == 2


def test_a_system_message_counts():
    assert run("chat", *TOY, "--system", "be brief", typed="hi\n").out != (
        run("chat", *TOY, typed="hi\n").out
    )


@pytest.fixture
def small(monkeypatch):
    pair = ToyPair(draft_name="toy:oracle", context_length=160)
    monkeypatch.setattr("dflash.engine.open_pair", lambda config: pair)


@pytest.mark.usefixtures("small")
def test_old_turns_make_room_and_it_is_said():
    found = run("chat", *TOY, typed="\n".join(["hello there"] * 8) + "\n")
    assert found.code == 0
    assert "the context is full: dropped the oldest" in found.err
    assert len([line for line in found.out.splitlines() if line]) >= 8


@pytest.mark.usefixtures("small")
def test_a_message_longer_than_the_context_is_refused_and_the_chat_goes_on():
    found = run("chat", *TOY, typed="x" * 500 + "\nhello\n")
    assert found.code == 0
    assert "this message alone has" in found.err
    assert found.out.strip()


def test_accepted_drafts_can_be_shown():
    assert "⟦" in run("chat", *TOY, "--show-drafts", typed="hello\n").out


def test_a_line_that_is_no_text_is_refused_and_the_chat_goes_on():
    found = run("chat", *TOY, typed=b"caf\xe9\nhello\n")
    assert found.code == 0
    assert "not UTF-8" in found.err
    assert found.out == run("chat", *TOY, typed="hello\n").out


def test_a_seed_gives_every_turn_noise_of_its_own(monkeypatch):
    seeds = []
    whole = Engine.stream

    def noted(self, prompt, **options):
        seeds.append(options["seed"])
        return whole(self, prompt, **options)

    monkeypatch.setattr(Engine, "stream", noted)
    run("chat", *TOY, "--seed", "4", typed="hello\nhello\nhello\n/reset\nhello\n")
    assert seeds[0] == 4 == seeds[3]
    assert len(set(seeds)) == 3
    run("chat", *TOY, "--seed", "4", typed="hello\nhello\n")
    assert seeds[4:] == seeds[:2]
    run("chat", *TOY, typed="hello\n")
    assert seeds[-1] is None


def test_ctrl_d_leaves_a_chat_in_a_terminal():
    ours, theirs = pty.openpty()
    home = str(Path(dflash.__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, "-m", "dflash", "chat", "--model", "toy"],
        **dict.fromkeys(("stdin", "stdout", "stderr"), theirs),
        env={**os.environ, "NO_COLOR": "1", "PYTHONPATH": home},
    )
    os.close(theirs)
    try:
        shown = b""
        while b"> " not in shown:  # the prompt: from here on the line is being edited
            shown += os.read(ours, 4096)
        os.write(ours, b"\x04")
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
