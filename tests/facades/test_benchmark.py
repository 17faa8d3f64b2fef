"""``python -m dflash.benchmark`` as people call it, with tiny pairs in place of the named ones."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dflash import benchmark
from tests.bench import servers
from tests.bench.servers import TOKENS, served
from tests.cluster.serving import free_port

TOY = ("--model", "toy", "--draft-model", "toy:script:1,3,0", "--max-new-tokens", "24")


@pytest.fixture
def data(tmp_path: Path) -> tuple[str, ...]:
    rows = [{"turns": [f"What is {i} + {i}?", "And twice that?"]} for i in range(5)]
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ("--dataset", "gsm8k", "--data-dir", str(folder))


def out(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code = benchmark.main(words)
    found = capsys.readouterr()
    assert code == 0, found.err
    return found.out


def figure(text: str, name: str) -> float:
    found = re.search(rf"^{name}: +([\d.,]+)", text, re.M)
    assert found is not None, text
    return float(found[1].replace(",", ""))


def test_it_prints_upstreams_five_lines(
    data: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    text = out(capsys, *TOY, *data, "--block-size", "8", "--max-samples", "2")
    names = [line.partition(":")[0] for line in text.splitlines()]
    assert names == [
        *("Baseline throughput", "DFlash throughput", "Decoding speedup"),
        *("Average Acceptance length", "Acceptance length histogram"),
    ]
    assert 1.5 < figure(text, "Average Acceptance length") < 3
    shares = re.findall(r"'([\d.]+)%'", text)
    assert len(shares) == 9, "0 to the block size, the bonus counted"
    assert sum(map(float, shares)) == pytest.approx(100, abs=0.5)


@pytest.mark.parametrize("size", ["4", "8", "12", "16"])
def test_the_shell_loop_over_block_sizes_runs(
    size: str, data: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--draft-sliding-window-size", "4096", "--enable-thinking", "--max-samples", "1")
    text = out(capsys, *TOY, *data, *flags, "--block-size", size)
    assert figure(text, "DFlash throughput") > 0


def test_more_than_the_native_block_is_clamped_with_one_line(
    data: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmark.main([*TOY, *data, "--block-size", "99", "--max-samples", "1"]) == 0
    found = capsys.readouterr()
    assert found.err == "note: block size 99 clamped to 16\n"
    assert len(re.findall(r"%'", found.out)) == 17


def test_processes_of_torchrun_share_the_prompts(
    data: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[list[object]] = []
    monkeypatch.setattr(benchmark, "_gathered", lambda mine, _: parts.append(mine) or mine)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        printed = out(capsys, *TOY, *data, "--max-new-tokens", "12")
        assert bool(printed) is (rank == "0"), "the first one prints"
    assert [len(part) for part in parts] == [3 * 2 * 2, 2 * 2 * 2], "prompts x turns x arms"


@pytest.mark.torch
def test_two_processes_find_what_one_finds(
    data: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Real ones, with the variables that torchrun sets; counts are added up over gloo."""
    pytest.importorskip("torch")
    alone = out(capsys, *TOY, *data).splitlines()
    command = [sys.executable, "-m", "dflash.benchmark", *TOY, *data]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [
        subprocess.Popen(
            command, env={**os.environ, **shared, "RANK": rank}, stdout=subprocess.PIPE, text=True
        )
        for rank in ("0", "1")
    ]
    printed = [process.communicate(timeout=120)[0].splitlines() for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert [line for line in printed[1] if line] == [], "the first one prints"
    assert printed[0][-2:] == alone[-2:], "acceptance length and histogram"
    assert len(printed[0]) == len(alone)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("gpus", "processes", "device"),
    [(2, 2, "cuda:1"), (1, 2, "cuda:0"), (0, 2, None), (2, 1, None)],
)
def test_each_process_has_a_gpu_of_its_own_as_far_as_there_are(
    gpus: int, processes: int, device: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert benchmark._device(processes) == device


def test_a_process_without_a_prompt_still_gives_its_share(
    data: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "9")
    monkeypatch.setenv("RANK", "8")
    monkeypatch.setattr(benchmark, "_gathered", lambda mine, _: mine)
    assert out(capsys, *TOY, *data) == ""


@pytest.mark.torch
def test_the_target_is_the_one_that_the_draft_names(
    data: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    from tests.backends.tiny import save_target, tiny_target, tiny_tokenizer
    from tests.facades.drafts import save_draft

    target = save_target(tiny_target(), tiny_tokenizer(), tmp_path / "target")
    named = save_draft(tmp_path / "draft", target_name=str(target))
    flags = ("--backend", "transformers", "--max-samples", "1", "--max-new-tokens", "8")
    text = out(capsys, "--draft-model", str(named), *data, *flags)
    assert figure(text, "Average Acceptance length") >= 1
    nameless = save_draft(tmp_path / "nameless")
    assert benchmark.main(["--draft-model", str(nameless), *data, *flags]) == 2
    assert "does not say which target" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--dataset", "gsm8k"), "no draft to measure"),
        ((*TOY, "--dataset", "nothing"), "no file, folder or prompt set"),
        ((*TOY, "--dataset", "nothing.jsonl"), "no file, folder or prompt set"),
        (
            ("--backend", "vllm", "--base-url", "http://127.0.0.1:9", "--dataset", "DATA"),
            "Is the server running",
        ),
    ],
)
def test_mistakes_are_one_line(
    words: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "Why?"}\n')
    assert benchmark.main([str(file) if word == "DATA" else word for word in words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["vllm", "sglang", "openai"])
def test_a_server_is_measured_by_the_wall_clock(
    backend: str, data: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    fake = {"vllm": servers.vllm, "sglang": servers.sglang, "openai": servers.ours}[backend]()
    with served(fake) as url:
        flags = ("--backend", backend, "--base-url", url, "--model", "m", "--concurrency", "2")
        text = out(capsys, *flags, *data, "--num-prompts", "7", "--max-new-tokens", "30")
    assert figure(text, "Num prompts") == 7 and figure(text, "Output tokens") == 7 * TOKENS
    assert figure(text, "Accept length") == pytest.approx(2.0)
    assert {len(body["messages"]) for body in fake.asked} == {1}, "first turns only, as upstream"
    assert fake.asked[-1]["chat_template_kwargs"] == {"enable_thinking": False}
