"""What an import pulls in. Each case runs in an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {
    *("torch", "transformers", "tokenizers", "safetensors", "gguf", "huggingface_hub", "datasets"),
    *("mlx", "mlx_lm", "llama_cpp", "xllamacpp", "vllm", "sglang", "ray"),
    *("starlette", "fastapi", "uvicorn", "pydantic", "httpx", "jinja2", "xgrammar"),
}
ARRAYS = {*HEAVY, "numpy"}
TERMINAL = {*ARRAYS, "typer", "rich", "click"}


def loaded_after(code: str) -> set[str]:
    """Top-level modules that are loaded once ``code`` has run, site packages of pip aside."""
    script = f"import sys\nbefore = set(sys.modules)\n{code}\n"
    script += "print(' '.join({m.split('.')[0] for m in set(sys.modules) - before}))"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    return set(found.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "code, banned",
    [
        ("import dflash", TERMINAL),
        ("import dflash; dir(dflash); dflash.__all__", TERMINAL),
        ("import dflash.errors, dflash.config, dflash.env, dflash.registry", TERMINAL),
        ("import dflash.drafts.spec, dflash.doctor.static", TERMINAL),
        ("import dflash.core.decode, dflash.core.policy, dflash.core.stats", TERMINAL),
        ("import dflash; dflash.load, dflash.Engine", HEAVY),
        ("import dflash; dflash.load('toy', 'toy:oracle').generate('hi')", HEAVY),
        ("import dflash.backends.torch", ARRAYS),
        ("import dflash.cli", ARRAYS),
    ],
)
def test_an_import_pulls_in_nothing_it_does_not_need(code: str, banned: set[str]) -> None:
    assert not loaded_after(code) & banned


def test_importing_the_package_loads_few_modules() -> None:
    """A tenth of a second is the promise; counting modules holds on a busy machine too."""
    script = "import sys; n = len(sys.modules); import dflash; print(len(sys.modules) - n)"
    found = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, ''); {script}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert int(found.stdout) < 60
