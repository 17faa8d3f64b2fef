"""Other programs as arms: what their workers answer, and what is said when one fails."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import dflash
from dflash.bench.peers import environment, open_peers, process
from dflash.bench.peers.process import Peer
from dflash.bench.trial import Ask
from dflash.errors import CheckpointError, DownloadError

ECHO = """
import json, sys
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["tokens"] == 99:
        raise ValueError("no such length")
    ids = asked["ids"][:asked["tokens"]]
    answer = {"ids": ids, "first": 1, "prefill": 0.1, "decode": 0.2, "histogram": [1]}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "worker.py"
    file.write_text(ECHO)
    monkeypatch.setattr(process, "WORKER", file)
    return file


def test_a_worker_answers_as_often_as_it_is_asked(echo: Path) -> None:
    with Peer("echo", Path(sys.executable), {}) as peer:
        for tokens in (3, 2):
            found = peer.answer(Ask((), (5, 6, 7, 8)), tokens)
            assert found.ids == (5, 6, 7, 8)[:tokens]
            assert (found.tokens, found.prompt_tokens, found.histogram) == (tokens, 4, (1,))


def test_a_worker_that_fails_says_why(echo: Path) -> None:
    with (
        Peer("echo", Path(sys.executable), {}) as peer,
        pytest.raises(CheckpointError, match="echo failed: ValueError: no such length"),
    ):
        peer.answer(Ask((), (5,)), 99)


def test_a_worker_that_does_not_start_says_why(echo: Path) -> None:
    echo.write_text("raise RuntimeError('no weights')")
    with pytest.raises(CheckpointError, match="echo failed: RuntimeError: no weights"):
        Peer("echo", Path(sys.executable), {})


def test_an_environment_that_cannot_be_made_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=r"cannot install \./nothing"):
        environment._install(Path(sys.executable), ["--no-index", "./nothing"][1:])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    pytest.importorskip("torch")
    from tests.backends.tiny import save_target, tiny_target, tiny_tokenizer
    from tests.facades.drafts import save_draft

    folder = tmp_path_factory.mktemp("pair")
    target = save_target(tiny_target(), tiny_tokenizer(), folder / "target")
    return target, save_draft(folder / "draft", layer_types=["full_attention"] * 2)


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["transformers", "prompt-lookup", "transformers-dflash"])
def test_transformers_ways_write_the_targets_own_text(kind: str, pair: tuple[Path, Path]) -> None:
    from dflash.bench.peers import worker

    prompt = [5, 77, 130, 9, 42, 77, 130]
    with dflash.load(str(pair[0]), str(pair[1]), profile=False) as engine:
        want = engine.generate(prompt, max_tokens=24, block_size=1, ignore_eos=True).token_ids
    told = {"target": str(pair[0]), "draft": str(pair[1]), "eos": [0], "ignore_eos": True}
    found = worker.KINDS[kind](told)(prompt, 24)
    assert tuple(found["ids"]) == want
    assert found["prefill"] > 0 and found["decode"] > 0 and found["first"] >= 1
    if kind != "transformers":
        rounds = sum(found["histogram"])
        assert rounds == found["rounds"]
        assert rounds + found["accepted"] == len(want) - found["first"]


@pytest.mark.torch
def test_the_worker_is_told_of_the_pair_that_the_engine_holds(
    pair: tuple[Path, Path], echo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, Any] = {}

    class Remembering(Peer):
        def __init__(self, name: str, python: Path, spec: dict[str, Any]) -> None:
            told[name] = spec
            super().__init__(name, python, spec)

    monkeypatch.setattr("dflash.bench.peers.Peer", Remembering)
    monkeypatch.setattr(environment, "reference", lambda: Path(sys.executable))
    names = ["transformers", "transformers-dflash", "reference-wheel"]
    with ExitStack() as stack:
        engine = stack.enter_context(dflash.load(str(pair[0]), str(pair[1]), profile=False))
        arms = open_peers(stack, names, engine, {"ignore_eos": True}, lambda _: None)
        assert list(arms) == names
        assert arms["transformers"](Ask((), (1, 2, 3)), 2).ids == (1, 2)
    assert told["reference-wheel"]["draft"] == str(pair[1].resolve())
    assert told["transformers"]["target"] == str(pair[0])
    assert all(spec["ignore_eos"] and spec["eos"] == [0] for spec in told.values())


def test_our_own_other_ways_are_arms_beside_the_pair(pair: tuple[Path, Path]) -> None:
    with ExitStack() as stack:
        engine = stack.enter_context(dflash.load(str(pair[0]), str(pair[1]), profile=False))
        arms = open_peers(stack, ["ngram", "float16"], engine, {"ignore_eos": True}, lambda _: None)
        found = {name: arm(Ask((), (1, 2, 3)), 6) for name, arm in arms.items()}
        plain = engine.generate([1, 2, 3], max_tokens=6, ignore_eos=True, block_size=1)
    assert found["ngram"].ids == plain.token_ids
    assert len(found["float16"].ids) == 6


@pytest.mark.demo
def test_llama_cpp_answers_on_the_demo_target() -> None:
    pytest.importorskip("xllamacpp")
    with ExitStack() as stack:
        engine = stack.enter_context(dflash.load(threads=1, profile=False))
        ids = engine.encode("How do rainbows form?")
        arms = open_peers(stack, ["llama.cpp"], engine, {}, lambda _: None)
        assert list(arms) == ["llama.cpp", "llama.cpp ngram", "llama.cpp dflash"]
        plain, *others = (arm(Ask((), tuple(ids)), 24) for arm in arms.values())
    assert [other.ids for other in others] == [plain.ids] * 2 and len(plain.ids) == 24
    assert plain.prefill > 0 and plain.decode > 0
    assert others[1].drafted > others[1].accepted > 0


@pytest.mark.torch
def test_llama_cpp_drafts_with_the_pairs_own_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Converted once, and again where the files have changed."""
    pytest.importorskip("xllamacpp")
    from dflash.bench.peers import worker
    from dflash.bench.peers.sidecar import sidecar_of
    from tests.backends.gguf_files import save_folder
    from tests.backends.tiny import tiny_target, tiny_tokenizer
    from tests.backends.tiny_gguf import write_gguf

    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    target = write_gguf(tmp_path / "target.gguf", tiny_target("llama"), tiny_tokenizer())
    draft = save_folder(tmp_path / "draft")
    file = sidecar_of(str(draft), target)
    assert file is not None and sidecar_of(f"{draft}+ngram", target) == file
    os.utime(draft / "model.safetensors", ns=(1, 1))
    assert sidecar_of(str(draft), target) != file
    assert sidecar_of("ngram", target) is None is sidecar_of(None, target)
    told = {"target": str(target), "threads": 1, "eos": [0], "ignore_eos": True}
    prompt = [5, 77, 130, 9, 42, 77, 130]
    plain, drafted = (
        worker.llama_cpp({**told, "drafts": drafts})(prompt, 12) for drafts in (None, str(file))
    )
    assert drafted["ids"] == plain["ids"] and len(plain["ids"]) == 12
    assert drafted["drafted"] > 0 and "drafted" not in plain
