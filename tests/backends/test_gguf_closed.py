"""What was closed says so: no call hands llama.cpp a pointer that was freed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")  # makes the tiny file
pytest.importorskip("xllamacpp")

import dflash
from dflash.backends.gguf import open_pair
from dflash.backends.gguf.native import Model
from dflash.config import LoadConfig
from dflash.core.types import Request
from dflash.errors import EngineClosed
from dflash.llama import Llama
from dflash.verify.probe import probe_of

from .gguf_files import save_sidecar
from .tiny import tiny_target, tiny_tokenizer
from .tiny_gguf import write_gguf

TURN = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    return write_gguf(folder / "target.gguf", tiny_target("llama"), tiny_tokenizer())


CALLS: dict[str, Callable[[Llama], Any]] = {
    "tokenize": lambda model: model.tokenize(b"Hello"),
    "detokenize": lambda model: model.detokenize([72]),
    "call": lambda model: model("Hello", max_tokens=2),
    "completion": lambda model: model.create_completion("Hello", stream=True),
    "chat": lambda model: model.create_chat_completion(TURN, max_tokens=2),
}


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_closed_llama_refuses_every_call(name: str, used: bool, target: Path) -> None:
    model = Llama(str(target), n_ctx=64, n_threads=1)
    if used:  # what was looked up before is no way round
        for call in CALLS.values():
            call(model)
    model.close()
    with pytest.raises(EngineClosed, match="load a new one"):
        CALLS[name](model)


@pytest.mark.parametrize("used", [False, True])
def test_a_closed_engine_and_its_tokenizer_refuse_text(used: bool, target: Path) -> None:
    engine = dflash.load(str(target), "none", threads=1, profile=False)
    tokenizer = engine.pair.tokenizer
    calls: list[Callable[[], Any]] = [
        lambda: engine.encode("Hi"),
        lambda: engine.encode([1, 2]),
        lambda: engine.stream([1, 2]),
        lambda: engine.keep(1, 1),
        lambda: tokenizer.encode("Hi"),
        lambda: tokenizer.decode([72]),
        lambda: tokenizer.decode([72, 73]),
        lambda: tokenizer.apply_chat_template(TURN),
        lambda: tokenizer.vocabulary,
    ]
    for call in calls if used else ():
        call()
    engine.close()
    for call in calls:
        with pytest.raises(EngineClosed, match="load a new one"):
            call()


def test_a_closed_pair_opens_nothing(target: Path, tmp_path: Path) -> None:
    draft = save_sidecar(tmp_path / "draft.gguf", target)
    pair = open_pair(LoadConfig(str(target), str(draft), threads=1))
    probe = probe_of(pair)
    pair.close()
    pair.close()
    for call in (
        lambda: pair.open_target(16),
        lambda: pair.open_drafts(16),
        lambda: probe.logits([1, 2]),
    ):
        with pytest.raises(EngineClosed):
            call()


def test_a_closed_session_runs_nothing(target: Path) -> None:
    pair = open_pair(LoadConfig(str(target), threads=1))
    session = pair.open_target(16)
    session.close()
    session.close()
    with pytest.raises(EngineClosed):
        list(session.prefill(Request([1, 2], 4), 0))
    pair.close()


def test_nobody_frees_a_vocabulary_while_it_is_read(target: Path) -> None:
    pair = open_pair(LoadConfig(str(target), threads=1))
    model: Model = pair.model
    closing = threading.Thread(target=pair.close)
    with model.lock:  # as a tokenizer in another thread
        closing.start()
        closing.join(0.2)
        assert closing.is_alive() and pair.tokenizer.encode("Hi")
    closing.join(10)
    with pytest.raises(EngineClosed):
        pair.tokenizer.encode("Hi")
