"""The flags of each engine, as the engines' own documentation and sources have them.

What is expected here was read from vLLM 0.33.0 (`config/speculative.py`), SGLang 0.5.23
(`arg_groups/fields/spec.py`), llama.cpp b11549 (`common/arg.cpp`) and Ray 2.60, and written down
before there was a renderer.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from dflash.cluster import llama_server, ray, sglang, vllm
from dflash.cluster.plan import Plan
from dflash.errors import ConfigError

QWEN = "Qwen/Qwen3-8B"


def plan(method: str | None, block_size: int = 1, draft: str | None = None, **more: Any) -> Plan:
    return Plan(more.pop("target", QWEN), method, draft, block_size, **more)  # type: ignore[arg-type]


def flags(argv: tuple[str, ...]) -> dict[str, str | None]:
    """``--name value`` pairs."""
    words = list(argv)
    return {
        word: words[i + 1] if i + 1 < len(words) and not words[i + 1].startswith("--") else None
        for i, word in enumerate(words)
        if word.startswith("--")
    }


# --- vLLM: num_speculative_tokens leaves the anchor out ------------------------------------------

VLLM = [
    (
        plan("dflash", 16, "z-lab/Qwen3-8B-DFlash-b16"),
        {"method": "dflash", "model": "z-lab/Qwen3-8B-DFlash-b16", "num_speculative_tokens": 15},
    ),
    (
        plan("dflash2", 8, "z-lab/Qwen3.8-27B-DFlash2", target="Qwen/Qwen3.8-27B"),
        {"method": "dflash", "model": "z-lab/Qwen3.8-27B-DFlash2", "num_speculative_tokens": 7},
    ),
    (
        plan("eagle3", 4, "owner/eagle"),
        {"method": "eagle3", "model": "owner/eagle", "num_speculative_tokens": 3},
    ),
    (plan("mtp", 2), {"method": "mtp", "num_speculative_tokens": 1}),
]


@pytest.mark.parametrize(("asked", "expected"), VLLM, ids=["dflash", "dflash2", "eagle3", "mtp"])
def test_vllm_gets_its_json(asked: Plan, expected: dict[str, Any]) -> None:
    command = vllm.render(asked)
    assert command.argv[:3] == ("vllm", "serve", asked.target)
    assert json.loads(str(flags(command.argv)["--speculative-config"])) == expected


def test_vllm_gets_sizes_host_port_and_name() -> None:
    asked = plan(
        "dflash",
        16,
        "d/d",
        tensor_parallel=2,
        data_parallel=4,
        host="0.0.0.0",
        port=9000,
        served_name="m",
        dtype="bfloat16",
        extra=("--max-model-len=4096",),
    )
    command = vllm.render(asked)
    given = flags(command.argv)
    assert given["--tensor-parallel-size"] == "2"
    assert given["--data-parallel-size"] == "4"
    assert (given["--host"], given["--port"]) == ("0.0.0.0", "9000")
    assert given["--served-model-name"] == "m"
    assert given["--dtype"] == "bfloat16"
    assert command.argv[-1] == "--max-model-len=4096"
    assert command.health == "http://127.0.0.1:9000/health"
    assert command.url == "http://127.0.0.1:9000/v1"


def test_a_target_alone_is_served_plainly_by_every_engine() -> None:
    for command in (vllm.render(plan(None)), sglang.render(plan(None))):
        assert not [word for word in command.argv if "spec" in word]
    command = llama_server.render(plan(None, target="m.gguf"))
    assert not [word for word in command.argv if "spec" in word]


@pytest.mark.parametrize(
    ("asked", "newer"),
    [
        (plan("dflash2", 8, "d/d"), True),
        (plan("dflash", 8, "d/d", mixed_attention=True), True),
        (plan("dflash", 8, "d/d"), False),
        (plan("eagle3", 4, "d/d"), False),
    ],
)
def test_vllm_needs_its_newer_runner_for_dflash2_and_mixed_layers(asked: Plan, newer: bool) -> None:
    expected = {"VLLM_USE_V2_MODEL_RUNNER": "1"} if newer else {}
    assert vllm.render(asked).env == expected


def test_a_shell_line_carries_the_variables_and_quotes_the_json() -> None:
    line = vllm.render(plan("dflash2", 8, "d/d")).shell()
    assert line.startswith("VLLM_USE_V2_MODEL_RUNNER=1 vllm serve Qwen/Qwen3-8B ")
    assert """'{"method":"dflash","model":"d/d","num_speculative_tokens":7}'""" in line


# --- SGLang: num-draft-tokens is the block, anchor included --------------------------------------

SGLANG = [
    (
        plan("dflash", 16, "z-lab/Qwen3-8B-DFlash-b16"),
        {
            "--speculative-algorithm": "DFLASH",
            "--speculative-draft-model-path": "z-lab/Qwen3-8B-DFlash-b16",
            "--speculative-num-draft-tokens": "16",
        },
    ),
    (
        plan("dflash2", 8, "d/d"),
        {
            "--speculative-algorithm": "DFLASH",
            "--speculative-draft-model-path": "d/d",
            "--speculative-num-draft-tokens": "8",
        },
    ),
    (
        plan("eagle3", 4, "d/d"),
        {
            "--speculative-algorithm": "EAGLE3",
            "--speculative-draft-model-path": "d/d",
            "--speculative-num-steps": "3",
            "--speculative-eagle-topk": "1",
            "--speculative-num-draft-tokens": "4",
        },
    ),
    (
        plan("mtp", 2),
        {
            "--speculative-algorithm": "NEXTN",
            "--speculative-num-steps": "1",
            "--speculative-eagle-topk": "1",
            "--speculative-num-draft-tokens": "2",
        },
    ),
]


@pytest.mark.parametrize(("asked", "expected"), SGLANG, ids=["dflash", "dflash2", "eagle3", "mtp"])
def test_sglang_gets_its_flags(asked: Plan, expected: dict[str, str]) -> None:
    command = sglang.render(asked)
    assert command.argv[:3] == ("python", "-m", "sglang.launch_server")
    given = flags(command.argv)
    assert {name: value for name, value in given.items() if "spec" in name} == expected
    assert given["--model-path"] == QWEN


def test_sglang_gets_sizes_and_a_draft_window() -> None:
    command = sglang.render(
        plan("dflash", 8, "d/d", tensor_parallel=2, data_parallel=2, window=1024)
    )
    given = flags(command.argv)
    assert given["--tensor-parallel-size"] == "2"
    assert given["--data-parallel-size"] == "2"
    assert given["--speculative-draft-window-size"] == "1024"


# --- llama-server: n-max leaves the anchor out ---------------------------------------------------


@pytest.mark.parametrize(
    ("method", "block", "kind", "n_max"),
    [
        ("dflash", 8, "draft-dflash", "7"),
        ("dflash2", 8, "draft-dflash", "7"),
        ("eagle3", 4, "draft-eagle3", "3"),
    ],
)
def test_llama_server_gets_its_flags(method: str, block: int, kind: str, n_max: str) -> None:
    command = llama_server.render(plan(method, block, "d.gguf", target="t.gguf"))
    given = flags(command.argv)
    assert command.argv[0] == "llama-server"
    assert given["--model"] == "t.gguf"
    assert given["--spec-type"] == kind
    assert given["--spec-draft-model"] == "d.gguf"
    assert given["--spec-draft-n-max"] == n_max


def test_drafting_in_a_loop_that_is_not_ours_is_said() -> None:
    drafting = llama_server.render(plan("dflash", 8, "d.gguf", target="t.gguf"))
    assert [note for note in drafting.notes if "llama.cpp's own loop" in note]
    assert llama_server.render(plan(None, target="t.gguf")).notes == ()


def test_llama_server_drafts_with_heads_of_the_target() -> None:
    given = flags(llama_server.render(plan("mtp", 3, target="t.gguf")).argv)
    assert given["--spec-type"] == "draft-mtp"
    assert given["--spec-draft-n-max"] == "2"
    assert "--spec-draft-model" not in given


# --- Ray -----------------------------------------------------------------------------------------


def config_of(command: Any) -> dict[str, Any]:
    name = command.argv[-1]
    assert command.argv == ("serve", "run", name)
    config: dict[str, Any] = json.loads(command.files[name])
    return config


def test_ray_gets_an_application_of_our_own_engine() -> None:
    asked = plan("dflash", 16, "d/d", data_parallel=2, port=9000, asked="auto")
    config = config_of(ray.render(asked))
    assert config["http_options"] == {"host": "127.0.0.1", "port": 9000}
    (application,) = config["applications"]
    assert application["route_prefix"] == "/"
    assert application["import_path"] == "dflash.cluster.ray_app:build"
    assert application["args"] == {
        "model": QWEN,
        "draft": "d/d",
        "block_size": "auto",
        "replicas": 2,
    }


def test_ray_gets_vllm_replicas_with_the_speculative_config_of_vllm() -> None:
    asked = plan("dflash2", 8, "d/d", tensor_parallel=4, data_parallel=2, served_name="m")
    (application,) = config_of(ray.render(asked, "vllm"))["applications"]
    assert application["import_path"] == "ray.serve.llm:build_openai_app"
    (model,) = application["args"]["llm_configs"]
    assert model["model_loading_config"] == {"model_id": "m", "model_source": QWEN}
    assert model["engine_kwargs"] == {
        "tensor_parallel_size": 4,
        "speculative_config": {"method": "dflash", "model": "d/d", "num_speculative_tokens": 7},
    }
    assert model["deployment_config"] == {"num_replicas": 2}
    assert model["runtime_env"] == {"env_vars": {"VLLM_USE_V2_MODEL_RUNNER": "1"}}


# --- what an engine cannot do is said, not dropped -----------------------------------------------


@pytest.mark.parametrize(
    ("render", "asked", "says"),
    [
        (vllm.render, plan("dflash", 8, "d/d", target="t.gguf"), "--engine llama-server"),
        (vllm.render, plan("dflash", 8, "d/d", window=64), "sliding_window"),
        (sglang.render, plan("dflash", 8, "d.gguf"), "--draft d.gguf"),
        (sglang.render, plan("dflash", 8, "d/d", device="cpu"), "--device cpu"),
        (sglang.render, plan("dflash", 8, "d/d", window=4), "at least the block size"),
        (
            llama_server.render,
            plan("dflash", 8, "d/d", target="t.gguf"),
            "dflash convert d/d --to gguf --target t.gguf",
        ),
        (llama_server.render, plan(None), f"--model {QWEN} is none"),
        (llama_server.render, plan(None, target="t.gguf", tensor_parallel=2), "by itself"),
        (llama_server.render, plan(None, target="t.gguf", dtype="float16"), "--dtype"),
        (ray.render, plan("dflash", 8, "d/d", tensor_parallel=2), "--replica vllm"),
        (ray.render, plan(None, extra=("--x",)), "--print"),
    ],
)
def test_what_an_engine_cannot_do_is_one_error_with_the_way_out(
    render: Any, asked: Plan, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        render(asked)


@pytest.mark.parametrize(
    "wrong", [{"tensor_parallel": 0}, {"data_parallel": 0}, {"port": 0}, {"port": 70000}]
)
def test_impossible_sizes_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        plan(None, **wrong)


def test_a_block_of_one_is_not_called_speculative() -> None:
    with pytest.raises(ConfigError, match="--draft none"):
        plan("dflash", 1, "d/d")


@pytest.mark.parametrize(
    ("host", "expected"),
    [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("localhost", "localhost")],
)
def test_the_address_is_one_that_a_client_can_reach(host: str, expected: str) -> None:
    assert vllm.render(plan(None, host=host)).url == f"http://{expected}:8000/v1"
