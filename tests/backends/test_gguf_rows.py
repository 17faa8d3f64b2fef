"""What is said where llama.cpp may round one row otherwise than several, or fails at one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("xllamacpp")

from dflash.backends.gguf import open_pair  # noqa: E402 - after the checks
from dflash.backends.gguf.library import library  # noqa: E402
from dflash.cli.verify import _explain  # noqa: E402
from dflash.config import GgufOptions, LoadConfig  # noqa: E402
from dflash.engine import Engine  # noqa: E402
from dflash.errors import OutOfMemory  # noqa: E402

from .tiny import tiny_target, tiny_tokenizer  # noqa: E402
from .tiny_gguf import write_gguf  # noqa: E402


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    file = tmp_path_factory.mktemp("rows") / "target.gguf"
    return write_gguf(file, tiny_target("llama"), tiny_tokenizer())


def opened(target: Path, threads: int, **options: Any) -> Any:
    return open_pair(LoadConfig(str(target), threads=threads, gguf=GgufOptions(**options)))


@pytest.mark.parametrize(
    ("threads", "options", "says"),
    [
        (2, {}, "in 2 parts, one a thread"),
        (2, {"type_v": "f32"}, "--cache-type-v bf16 or --threads 1"),
        (2, {"type_k": "q8_0", "type_v": "q8_0"}, ""),
        (2, {"type_v": "bf16"}, ""),
        (1, {}, ""),
        (1, {"flash_attn": "off"}, "without flash attention"),
    ],
)
def test_doctor_and_verify_say_what_may_part_texts(
    target: Path,
    threads: int,
    options: dict[str, Any],
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Engine(opened(target, threads, **options)) as engine:
        assert says in engine.pair.why_rows_differ  # type: ignore[attr-defined]
        _explain(engine)
    said = capsys.readouterr().err
    assert bool(said) == bool(says) and says in said


def test_a_single_row_that_fails_is_blamed_on_its_own_line_only(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = library()
    decode = shared.llama_decode

    def failing(context: Any, batch: Any) -> int:
        if batch.n_tokens > 1:  # the prompt
            return int(decode(context, batch))
        shared.errors.append("no room")
        return 2

    monkeypatch.setattr(shared, "llama_decode", failing)
    with Engine(opened(target, 1)) as engine:
        stream = engine.stream("Once upon", max_tokens=4)
        next(stream)
        shared.errors.append("of an earlier call")
        with pytest.raises(OutOfMemory, match=r"failed with status 2: no room$"):
            list(stream)
