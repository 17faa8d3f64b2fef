"""Both laws for drafts on llama.cpp that say one token after the other, through the front door."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("xllamacpp")

from dflash.backends.gguf import chain, open_pair
from dflash.backends.gguf.probe import GgufProbe
from dflash.config import GenerateConfig, LoadConfig
from dflash.convert import gguf, hf
from dflash.core.host import propose_in_turn
from dflash.engine import Engine
from dflash.grammar import Grammars
from dflash.requests import make_request
from tests.backends.eagle_drafts import save_eagle
from tests.backends.mtp_targets import save_mtp_target
from tests.backends.tiny import tiny_target, tiny_tokenizer
from tests.backends.tiny_gguf import write_gguf
from tests.backends.tiny_qwen35 import write_qwen35
from tests.conformance.backends import Backend, Plain
from tests.conformance.gguf_backend import EXACT
from tests.conformance.grid import plain

PROMPT, TOKENS = [71, 103, 35, 90, 120, 33, 64], 25
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 11},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    "held to a form": {"regex": "([a-m]{1,4}[0-9]{1,3} ){2,9}[.!?]"},
    "least confidence": {"draft_p_min": 0.4},
}


def eagle(folder: Path) -> LoadConfig:
    target = write_gguf(folder / "target.gguf", tiny_target("llama"), tiny_tokenizer())
    taps = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    source = gguf.settled(hf.read(save_eagle(folder / "eagle", **taps)), target)
    draft = gguf.write(source, folder / "draft.gguf", target, "F32")
    return LoadConfig(str(target), str(draft), threads=1, gguf=EXACT)


def heads(folder: Path) -> LoadConfig:
    target = write_qwen35(folder / "target.gguf", save_mtp_target(folder / "source"))
    return LoadConfig(str(target), "mtp", threads=1, gguf=EXACT)


@pytest.fixture(scope="module", params=[eagle, heads], ids=["eagle3", "mtp"])
def rig(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Backend, Engine]]:
    load = request.param(tmp_path_factory.mktemp("drafts"))
    pair: Any = open_pair(load)
    logits: Callable[[Any], Any] = GgufProbe(pair).logits
    with Engine(pair) as engine:
        yield Backend("gguf", pair, Plain(logits), own=lambda: pair), engine


def expected(rig: tuple[Backend, Engine], options: dict[str, Any]) -> list[int]:
    backend, engine = rig
    config = GenerateConfig(max_tokens=TOKENS, **options)
    grammar = Grammars(engine.pair).start(config.constraint)
    return plain(backend, make_request(engine.pair, PROMPT, config, grammar=grammar))


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_the_output_never_changes(rig: tuple[Backend, Engine], options: dict[str, Any]) -> None:
    text = expected(rig, options)
    for size in (1, 2, 5, 8, "auto"):
        found = rig[1].generate(PROMPT, max_tokens=TOKENS, block_size=size, **options)
        assert list(found.token_ids) == text, size


@pytest.mark.parametrize("name", ["greedy", "seeded", "held to a form"])
@pytest.mark.parametrize("size", [2, 5, 8])
def test_a_perfect_draft_is_never_wasted(
    rig: tuple[Backend, Engine], name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = expected(rig, WAYS[name])

    def knowing(row_after: Any, request: Any, output: Any) -> Any:
        """Rows that know the text, before whatever is made of them."""

        def row(said: list[int]) -> Any:
            found = row_after(said)
            place = len(output) + len(said)
            if found is not None and place < len(text):
                found = found.copy()
                found[text[place]] = 1e4
            return found

        return propose_in_turn(row, request, output)

    monkeypatch.setattr(chain, "propose_in_turn", knowing)
    found = rig[1].generate(PROMPT, max_tokens=TOKENS, block_size=size, **WAYS[name])
    assert list(found.token_ids) == text
    assert found.stats.accepted == found.stats.drafted
    whole, rest = divmod(len(text) - 1, size)
    assert found.stats.rounds == whole + bool(rest)
