"""Blocks and the rows of one pass of llama.cpp: what does not fit is refused before a token."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")  # makes the tiny files
pytest.importorskip("xllamacpp")

import dflash
from dflash.errors import ConfigError
from dflash.llama import Llama, SpecConfig, SpeculativeType
from dflash.speculative import SpeculativeConfig, SpeculativeDecoder
from tests.cli.running import run

from .gguf_files import save_sidecar
from .tiny import tiny_target, tiny_tokenizer
from .tiny_gguf import write_gguf

NATIVE = 6  # of the draft
PROMPT = [71, 103, 35, 90, 120, 33, 64, 17, 5, 71, 103, 35, 90]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("gguf")
    target = write_gguf(folder / "target.gguf", tiny_target("llama"), tiny_tokenizer())
    draft = save_sidecar(folder / "draft.gguf", target, block_size=NATIVE)
    return {"target": str(target), "draft": str(draft)}


def load(files: dict[str, str], draft: str, **gguf: Any) -> Any:
    name = files.get(draft, draft)
    return dflash.load(files["target"], name, threads=1, profile=False, gguf=gguf)


@pytest.mark.parametrize(("draft", "native"), [("draft", NATIVE), ("ngram", 16)])
@pytest.mark.parametrize("size", [None, "auto", 5, 99])
@pytest.mark.filterwarnings("ignore:block size 99")
def test_a_block_that_no_pass_holds_is_refused_at_the_call(
    draft: str, native: int, size: Any, files: dict[str, str]
) -> None:
    rows = min(size, native) if isinstance(size, int) else native
    with load(files, draft, n_batch=4) as engine:
        words = rf"n_batch 4 cannot hold a block of {rows} rows.*at least {rows}, or block_size at"
        with pytest.raises(ConfigError, match=words):
            engine.stream(PROMPT, block_size=size)
        found = engine.generate(PROMPT, block_size=4, max_tokens=12)
        assert draft == "ngram" or found.stats.drafted
    with load(files, "none") as engine:
        assert found.token_ids == engine.generate(PROMPT, max_tokens=12).token_ids


@pytest.mark.parametrize("draft", ["none", "draft", "draft+ngram"])
def test_plain_decoding_needs_one_row(draft: str, files: dict[str, str]) -> None:
    draft = draft.replace("draft", files["draft"])
    with load(files, "none") as engine:
        plain = engine.generate(PROMPT, max_tokens=12).token_ids
    with load(files, draft, n_batch=1) as engine:
        assert engine.generate(PROMPT, max_tokens=12, block_size=1).token_ids == plain
        if draft != "none":
            with pytest.raises(ConfigError, match=r"block_size at most 1 \(plain decoding\)"):
                engine.stream(PROMPT)


@pytest.mark.parametrize("n_ubatch", [1, 2, 3])
def test_a_block_may_be_computed_in_parts(n_ubatch: int, files: dict[str, str]) -> None:
    with load(files, "none") as engine:
        plain = engine.generate(PROMPT, max_tokens=24).token_ids
    with load(files, "draft", n_batch=NATIVE, n_ubatch=n_ubatch) as engine:
        found = engine.generate(PROMPT, max_tokens=24, block_size=NATIVE)
        assert found.token_ids == plain
    with load(files, "draft") as engine:
        whole = engine.generate(PROMPT, max_tokens=24, block_size=NATIVE)
    assert found.stats.histogram == whole.stats.histogram


def test_other_surfaces_say_the_same(files: dict[str, str]) -> None:
    with load(files, "draft", n_batch=2) as engine:
        decoder = SpeculativeDecoder(engine, config=SpeculativeConfig(draft_tokens_per_step=4))
        with pytest.raises(ConfigError, match="n_batch must be at least 5"):
            decoder.generate(PROMPT)
    spec = SpecConfig(SpeculativeType.DRAFT_DFLASH, 3, draft_model_path=files["draft"])
    with Llama(files["target"], n_ctx=64, n_batch=4, speculative=spec) as model:
        assert model("Once", max_tokens=4)["choices"]  # its own blocks have four rows


COMMANDS: dict[str, tuple[object, ...]] = {
    "generate": ("Once", "--no-chat-template", "--max-tokens", 4),
    "chat": (),
    "verify": ("--no-chat-template", "--max-tokens", 4),
    "bench": ("--no-chat-template", "--max-tokens", 4, "--no-costs"),
    "sweep": ("--max-tokens", 4),
    "doctor": (),
}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("draft", ["draft", "ngram"])
def test_every_command_says_so_before_anything_else(
    name: str, draft: str, files: dict[str, str]
) -> None:
    pair = ("--model", files["target"], "--draft", files.get(draft, draft), "--n-batch", 4)
    found = run(name, *COMMANDS[name], *pair, "--threads", 1, typed="hello\n")
    rows = NATIVE if draft == "draft" else 16
    assert (found.code, found.out) == (2, ""), found.err
    assert f"--n-batch 4 cannot hold a block of {rows} rows" in found.err
    assert f"--n-batch must be at least {rows}" in found.err
    sizes = {"doctor": "", "bench": "--block-sizes at most 4", "sweep": "--block-sizes at most 4"}
    assert sizes.get(name, "--block-size at most 4") in found.err
    assert "fault of ours" not in found.err and "/reset" not in found.err


def test_a_server_refuses_at_the_start_or_with_400(files: dict[str, str]) -> None:
    pytest.importorskip("fastapi")
    from fastapi.testclient import TestClient

    from dflash.serve import ServeConfig, create_app
    from dflash.serve.server import Server

    with load(files, "draft", n_batch=4) as engine:
        with pytest.raises(ConfigError, match="n_batch must be at least 6"):
            Server(engine, ServeConfig())
        app = create_app(engine, ServeConfig(block_size=4))
        with TestClient(app, base_url="http://localhost") as client:
            body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 4}
            assert client.post("/v1/completions", json=body).status_code == 200
            for size in (6, "auto"):
                asked = {**body, "speculative": {"block_size": size}}
                refused = client.post("/v1/completions", json=asked)
                assert refused.status_code == 400, refused.text
                assert "n_batch must be at least 6" in refused.text


def test_passes_are_timed_as_far_as_there_is_room(files: dict[str, str]) -> None:
    from dflash.doctor.measured import cost

    with load(files, "draft", n_batch=4) as engine:
        found = cost.measure(engine.pair, PROMPT, [0.5] * 5)
    assert [block.block_size for block in found.blocks] == [1, 2, 4]
