"""llama.cpp's own server, started as ``dflash serve --engine llama-server`` starts it."""

from __future__ import annotations

import shutil
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

import dflash
from dflash.bench import counters
from dflash.cluster import llama_server
from dflash.cluster.pair import make_plan
from dflash.convert import gguf, hf
from dflash.errors import CheckpointError, PairError, WeightsError
from dflash.gguf_file import read_header
from tests.backends.eagle_drafts import save_eagle
from tests.backends.gguf_files import DFLASH2, edited, save_sidecar
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


@pytest.mark.parametrize("changes", [{}, DFLASH2], ids=["dflash", "dflash2"])
def test_with_a_drafts_sidecar_the_text_stays_and_drafts_are_judged(
    target: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """The block's anchor is not counted there, and its own counters see the drafts."""
    draft = save_sidecar(tmp_path / "draft.gguf", target, **changes)
    options = {"port": free_port(), "extra": ("--ctx-size", "256")}
    command = llama_server.render(make_plan(str(target), str(draft), 4, **options))
    assert command.argv[command.argv.index("--spec-draft-n-max") + 1] == "3"
    seen: dict[str, Any] = {}

    def use(url: str) -> None:
        asked = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
        seen["reply"] = post(f"{url}/completions", asked)
        with urllib.request.urlopen(url.removesuffix("/v1") + "/metrics") as page:
            seen["counters"] = counters.parse(page.read().decode())

    serve(command, use)
    with dflash.load(str(target), draft="none", profile=False) as engine:
        expected = engine.generate(PROMPT, chat_template=False, max_tokens=12).text
    assert seen["reply"]["choices"][0]["text"] == expected
    told = counters.of_answer(seen["reply"], 12)
    counted = seen["counters"]
    assert told["drafted"] == counted.drafted > 0
    assert counted.drafted <= 3 * counted.rounds
    assert told["accepted"] == counted.accepted
    assert told["rounds"] >= counted.rounds  # a last pass without room for a draft is one, too


def test_files_that_llama_cpp_would_abort_at_start_nothing(target: Path, tmp_path: Path) -> None:
    """It does not look before it computes, and ends the process."""
    draft = str(save_sidecar(tmp_path / "draft.gguf", target))
    tokens = list(read_header(target).metadata["tokenizer.ggml.tokens"])
    tokens[7], tokens[8] = tokens[8], tokens[7]
    shuffled = edited(target, tmp_path / "shuffled.gguf", {"tokenizer.ggml.tokens": tokens})
    with pytest.raises(PairError, match="token 7 is"):
        make_plan(str(shuffled), draft, 4)
    gemma = tiny_target("gemma3")
    closed = write_gguf(tmp_path / "closed.gguf", gemma, tiny_tokenizer(), arch="gemma3")
    with pytest.raises(PairError, match="without --engine"):
        make_plan(str(closed), draft, 4)
    taps = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    eagle = gguf.write(
        hf.read(save_eagle(tmp_path / "eagle", **taps)), tmp_path / "eagle.gguf", target
    )
    assert make_plan(str(target), str(eagle), 4).method == "eagle3"
    for file, tensor in ((Path(draft), "blk.1.attn_q.weight"), (eagle, "blk.0.attn_q.weight")):
        bad = edited(file, tmp_path / "bad.gguf", tensors={tensor: None})
        with pytest.raises(WeightsError, match="attn_q"):
            make_plan(str(target), str(bad), 4)


def test_a_draft_that_only_llama_cpps_own_flags_know_is_sent_to_them(
    target: Path, tmp_path: Path
) -> None:
    draft = tmp_path / "assistant.gguf"
    writer = GGUFWriter(draft, "gemma4-assistant")
    writer.add_tensor("output_norm.weight", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"own assistant.*--engine-arg"):
        make_plan(str(target), str(draft), 4)


def test_a_flag_that_the_wheels_server_does_not_know_is_its_error(target: Path) -> None:
    plan = replace(make_plan(str(target), None, None, port=free_port()), extra=("--no-such-flag",))
    with pytest.raises(dflash.errors.LaunchError, match="no-such-flag"):
        serve(llama_server.render(plan), lambda url: None)
