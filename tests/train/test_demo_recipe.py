from __future__ import annotations

import json
from pathlib import Path

from dflash.train.demo import cut_loop, prepare_text
from dflash.train.selfgen import closed_docstring


def test_a_loop_is_cut_where_it_repeats() -> None:
    text = "start " + "one two three four " * 9
    assert cut_loop(text).split() == text.split()[: 1 + 4 * 4]
    assert cut_loop("nothing repeats in this text") == "nothing repeats in this text"


def test_a_code_prompt_ends_with_its_docstring() -> None:
    assert (
        closed_docstring('def f():\n    """Do it."""\n    return 1')
        == 'def f():\n    """Do it."""\n'
    )
    assert closed_docstring("def f(): return 1") == ""


def test_code_is_given_weight_and_empty_answers_are_dropped(tmp_path: Path) -> None:
    def row(source: str, answer: str) -> str:
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]
        return json.dumps({"messages": messages, "source": source})

    raw = tmp_path / "raw.jsonl"
    long = "an answer that is long enough to be worth learning from"
    raw.write_text("\n".join([row("self-asked code", long), row("chat", long), row("chat", "no")]))
    lines = prepare_text(raw, tmp_path / "text.jsonl").read_text().splitlines()
    assert len(lines) == 4
