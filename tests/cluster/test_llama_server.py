"""llama.cpp's own server, started as ``dflash serve --engine llama-server`` starts it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import dflash
from dflash.cluster import llama_server
from dflash.cluster.pair import make_plan
from tests.backends.tiny import tiny_target, tiny_tokenizer
from tests.backends.tiny_gguf import write_gguf
from tests.cluster.serving import free_port, post, serve

pytestmark = pytest.mark.torch
PROMPT = "the cat sat on the mat and the"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    return write_gguf(folder / "target.gguf", tiny_target("llama"), tiny_tokenizer())


def test_it_serves_a_target_and_says_what_our_engine_says(target: Path) -> None:
    plan = make_plan(str(target), None, None, port=free_port(), extra=("--ctx-size", "256"))
    answers: list[str] = []

    def use(url: str) -> None:
        asked = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
        answers.append(post(f"{url}/completions", asked)["choices"][0]["text"])

    lines = serve(llama_server.render(plan), use)
    if shutil.which("llama-server") is None:
        assert "no llama-server here, so the one in xllamacpp" in lines
    with dflash.load(str(target), draft="none", profile=False) as engine:
        expected = engine.generate(PROMPT, chat_template=False, max_tokens=12).text
    assert answers == [expected]


def test_a_flag_that_the_wheels_server_does_not_know_is_its_error(target: Path) -> None:
    plan = replace(make_plan(str(target), None, None, port=free_port()), extra=("--no-such-flag",))
    with pytest.raises(dflash.errors.LaunchError, match="no-such-flag"):
        serve(llama_server.render(plan), lambda url: None)
