"""A way to generate text that is not in the conformance suite fails here."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

import dflash
from dflash.engine import load
from dflash.serve import create_app
from tests.conformance.entries import ENTRIES

LIKELY = re.compile(r"generat|stream|chat|complet|answer|decode|respond|\brun\b|__call__")
FACADES = ("dflash.model", "dflash.model_mlx", "dflash.speculative", "dflash.llama", "dflash.serve")

NOT_ENTRIES = {
    "dflash.model.GenerationStats": "a result",
    "dflash.model_mlx.GenerationResponse": "a result",
    "dflash.Generation": "a result",
    "dflash.speculative.SpeculativeDecoder": "a class; its methods are listed",
    "dflash.GenerateConfig": "a config",
}
"""Public names that sound like one and generate nothing."""

NO_ANSWERS = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")
"""Routes that count or translate."""

DRIVERS = {
    "dflash/engine.py": "dflash.Engine.stream",
    "dflash/model_run.py": "dflash.model.dflash_generate",
}
"""The only files that run the loop for a text, and an entry of the suite that goes through each."""

MEASURING = "dflash/doctor/measured/"
"""Times rounds of a pair; nobody reads the text."""


def public_names() -> set[str]:
    """Exported functions, exported classes' own methods, and commands, that sound like one."""
    found: set[str] = set()
    modules = ["dflash", *(name for name in FACADES if _exists(name))]
    for module in modules:
        loaded = import_module(module)
        for name in loaded.__all__:
            thing = getattr(loaded, name)
            if LIKELY.search(name.lower()):
                found.add(_once(module, name))
            if inspect.isclass(thing):
                methods = [m for m, f in vars(thing).items() if inspect.isfunction(f)]
                likely = [m for m in methods if not m.startswith("_") and LIKELY.search(m)]
                found |= {f"{_once(module, name)}.{method}" for method in likely}
    from dflash.cli import app

    commands = [
        str(c.name or (c.callback and c.callback.__name__)) for c in app.registered_commands
    ]
    return found | {f"dflash {name}" for name in commands if LIKELY.search(name)} | routes()


def routes() -> set[str]:
    """The server's routes that something is posted to."""
    document = create_app(load("toy")).openapi()
    urls = [url for url, methods in document["paths"].items() if "post" in methods]
    return {f"POST {url}" for url in urls if url not in NO_ANSWERS}


def _exists(module: str) -> bool:
    path = Path(dflash.__file__).parent / module.removeprefix("dflash.")
    return path.with_suffix(".py").exists() or path.is_dir()


def _once(module: str, name: str) -> str:
    """One name for what two modules export."""
    return f"dflash.{name}" if name in dflash.__all__ else f"{module}.{name}"


def test_every_entry_point_is_listed() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("mlx_lm")
    listed = {entry.name for entry in ENTRIES}
    missing = public_names() - listed - set(NOT_ENTRIES)
    assert not missing, f"add these to tests/conformance/entries.py: {sorted(missing)}"
    assert listed <= public_names(), "an entry that nobody can call any more"


def test_only_known_files_run_the_loop_and_an_entry_goes_through_each() -> None:
    package = Path(dflash.__file__).parent
    running = set()
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "dflash.core.decode":
                running.add(str(file.relative_to(package.parent)))
    running = {file for file in running if not file.startswith(MEASURING)}
    assert running == set(DRIVERS), "a new driver of the loop needs an entry"
    assert set(DRIVERS.values()) <= {entry.name for entry in ENTRIES}
