"""Flags of single backends: in every command that opens a pair, taken to it or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from dflash.cli import app
from dflash.cli.engine_flags import FLAGS
from dflash.gguf_options import GgufOptions
from tests.cli.running import run

COMMANDS = ("generate", "chat", "serve", "bench", "sweep", "verify", "doctor")
SETTINGS: dict[str, Any] = {
    "--n-batch": 64,
    "--n-ubatch": 32,
    "--threads-batch": 1,
    "--n-gpu-layers": 0,
    "--draft-n-gpu-layers": "auto",
    "--cache-type-k": "f32",
    "--cache-type-v": "f32",
    "--flash-attn": "on",
    "--draft-n-min": 1,
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_that_opens_a_pair_has_them(name: str) -> None:
    group: Any = get_command(app)
    assert set(FLAGS) <= {param.name for param in group.commands[name].params}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--n-ctx", 64), "settings of llama.cpp are for the gguf backend"),
        (("--draft-bits", 4), "--draft-bits is for the mlx backend"),
        (("--draft-bits", 5), "--draft-bits must be 4 or 8, got 5"),
        (("--n-gpu-layers", "some"), '--n-gpu-layers must be a number of layers, "auto" or "all"'),
        (("--cache-type-k", "f17"), "--cache-type-k must be one of f32"),
        (("--flash-attn", "perhaps"), "--flash-attn must be auto, on or off"),
        (
            ("--cache-type-v", "q8_0", "--flash-attn", "off"),
            "--cache-type-v q8_0 needs flash attention, and --flash-attn is off: leave "
            "--flash-attn out, or take --cache-type-v f16",
        ),
    ],
)
def test_what_would_be_ignored_is_refused(flags: tuple[Any, ...], words: str) -> None:
    found = run("generate", "hi", "--model", "toy", "--draft", "toy:oracle", *flags)
    assert found.code == 2
    assert words in found.err


@pytest.mark.torch
def test_llama_cpp_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xllamacpp")
    from dflash.backends.gguf.library import library
    from dflash.backends.gguf.settings import Settings
    from tests.backends.tiny import tiny_target, tiny_tokenizer
    from tests.backends.tiny_gguf import write_gguf

    ours = library()
    ours.llama_log_set(type(ours._log)(), None)  # as servers of the wheel do in the same process
    target = write_gguf(tmp_path / "target.gguf", tiny_target("llama"), tiny_tokenizer())
    odd = run("generate", "hi", "--model", target, "--backend", "gguf", "--cache-type-v", "q8_0")
    assert odd.code == 2 and "does not divide" in odd.err
    monkeypatch.setattr(GgufOptions, "__post_init__", lambda _: None)  # as if it did not know
    odd = run(
        *("generate", "hi", "--model", target, "--backend", "gguf"),
        *("--cache-type-v", "q8_0", "--flash-attn", "off"),
    )
    assert odd.code == 2 and "fewer layers" not in odd.err
    monkeypatch.undo()
    for layers in ("all", 3):
        words = ("generate", "hi", "--model", target, "--draft", "ngram", "--no-chat-template")
        asked = run(*words, "--max-tokens", 2, "--threads", 1, "--n-gpu-layers", layers)
        line = f"--n-gpu-layers {layers}: this build of llama.cpp has no GPU, so they run on the"
        assert asked.code == 0 and asked.err.count(line) == (not ours.llama_supports_gpu_offload())
    told: list[Any] = []
    params = Settings.params

    def keep(self: Settings, tokens: int) -> Any:
        told.append(params(self, tokens))
        return told[-1]

    monkeypatch.setattr(Settings, "params", keep)
    found = run(
        *("generate", "hi", "--model", target, "--draft", "ngram", "--backend", "gguf"),
        *("--no-chat-template", "--max-tokens", 100, "--n-ctx", 40, "--threads", 1, "--json"),
        *(part for pair in SETTINGS.items() for part in pair),
    )
    assert found.code == 0, found.err
    stats = json.loads(found.out)["stats"]
    assert stats["prompt_tokens"] + stats["completion_tokens"] <= 40
    last = told[-1]
    assert (last.n_batch, last.n_ubatch, last.n_threads_batch) == (64, 32, 1)
    assert (last.type_k, last.type_v, last.flash_attn_type) == (0, 0, 1)
