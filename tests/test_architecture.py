"""One direction: a file imports only from lower layers, or from its own folder.

The table is the picture in docs; a new file finds its place in it before it is written.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "dflash").rglob("*.py"))

LAYERS = {
    "dflash.errors": 0,
    "dflash.env": 0,
    "dflash.registry": 0,
    "dflash.whole": 0,
    "dflash.checks": 1,
    "dflash.closing": 1,
    "dflash.gguf_file": 1,
    "dflash.gguf_target": 4,
    "dflash.gguf_options": 1,
    "dflash.config": 1,
    "dflash.generate_config": 1,
    "dflash.core": 1,  # the package file: nothing in it
    "dflash.core.types": 1,
    "dflash.core.noise": 1,
    "dflash.drafts": 1,  # integers and names; the spec is above them
    "dflash.core.protocols": 2,
    "dflash.core.accept": 2,
    "dflash.core.policy": 2,
    "dflash.core.books": 2,
    "dflash.core.floor": 2,
    "dflash.core.stats": 2,
    "dflash.core.host": 2,
    "dflash.core.text": 2,
    "dflash.results": 2,
    "dflash.drafts.ngram": 2,
    "dflash.core.decode": 3,
    "dflash.drafts.spec": 3,
    "dflash.drafts.dflash2": 3,
    "dflash.drafts.eagle3": 3,
    "dflash.drafts.mtp": 3,
    "dflash.doctor": 4,
    "dflash.blocks": 4,
    "dflash.datasets": 4,
    "dflash.demo": 4,
    "dflash.llama_config": 4,
    "dflash.llama_lines": 5,
    "dflash.llama_options": 4,
    "dflash.llama_parts": 5,
    "dflash.llama_stats": 4,
    "dflash.ngram_pair": 4,
    "dflash.checkpoint": 4,
    "dflash.hf_tokenizer": 4,
    "dflash.tensor_files": 3,
    "dflash.profiles": 4,
    "dflash.grammar": 4,
    "dflash.thinking": 4,
    "dflash.hub": 4,
    "dflash.model_folders": 4,
    "dflash.draft_parts": 4,
    "dflash.target_facts": 4,
    "dflash.model_pair": 4,
    "dflash.model_probe": 4,
    "dflash.prompt": 4,
    "dflash.requests": 4,
    "dflash.reader": 4,
    "dflash.sessions": 4,
    "dflash.spelling": 4,
    "dflash.backends": 5,
    "dflash.convert": 5,
    "dflash.opening": 5,
    "dflash.engine": 6,
    "dflash.inspection": 6,
    "dflash.comparison": 7,
    "dflash.llama": 7,
    "dflash.speculative": 7,
    "dflash.train": 7,
    "dflash.verify": 7,
    "dflash.cluster": 8,
    "dflash.cluster.ray_app": 9,  # an application of its own
    "dflash.doctor.measured": 8,
    "dflash.serve.config": 7,
    "dflash.serve.page": 7,
    "dflash.serve.errors": 7,
    "dflash.serve.schema": 7,
    "dflash.serve": 8,
    "dflash.bench": 9,
    "dflash.bench.guards": 7,  # arithmetic alone; the doctor needs it, too
    "dflash.cli": 10,
    "dflash": 11,
    "dflash.__main__": 11,
    "dflash.benchmark": 11,
    "dflash.model": 11,
    "dflash.model_mlx": 11,
    "dflash.model_run": 11,
    "dflash.train.demo": 11,  # a command of its own
}

THIRD_PARTY = {
    "dflash": set(),
    "dflash.core": {"numpy"},
    "dflash.backends.toy": {"numpy"},
    "dflash.backends.torch": {
        *("torch", "transformers", "safetensors", "huggingface_hub", "numpy"),
    },
    "dflash.bench": {"numpy", "matplotlib", "jinja2", "rich"},
    "dflash.bench.peers": {"torch", "transformers", "safetensors", "xllamacpp"},
    "dflash.bench.roofline": {"numpy", "torch"},
    "dflash.benchmark": {"torch"},
    "dflash.backends.mlx": {"mlx", "mlx_lm", "numpy"},
    "dflash.backends.gguf": {"numpy", "jinja2"},
    "dflash.cli": {"typer", "rich"},
    "dflash.cluster": set(),
    "dflash.cluster.ray_app": {"ray"},
    "dflash.cluster.llama_wheel": {"xllamacpp"},
    "dflash.checkpoint": {"huggingface_hub"},
    "dflash.convert": {"numpy", "torch"},  # torch only for a .pt sidecar
    "dflash.convert.gguf": {"numpy", "gguf"},
    "dflash.datasets": {"datasets"},
    "dflash.demo": {"huggingface_hub"},
    "dflash.grammar": {"numpy", "xgrammar"},
    "dflash.gguf_target": {"numpy", "gguf", "transformers", "tokenizers", "rich"},
    "dflash.thinking": {"numpy"},
    "dflash.hub": {"huggingface_hub"},
    "dflash.inspection": {"huggingface_hub"},
    "dflash.model": {"torch"},
    "dflash.model_mlx": {"mlx"},
    "dflash.model_run": {"torch"},
    "dflash.prompt": {"jinja2"},
    "dflash.serve": {
        *("fastapi", "starlette", "uvicorn", "h11", "pydantic", "sse_starlette"),
        "prometheus_client",
    },
    "dflash.verify": {"numpy"},
    "dflash.train": {"torch", "transformers", "safetensors", "numpy", "typer", "rich"},
}

MAY_NAME_A_BACKEND = (
    *("dflash.backends", "dflash.train", "dflash.model", "dflash.cli.pull"),
    "dflash.bench.peers",  # other programs get the weights in the form they read
    "dflash.cluster.sidecar",  # llama.cpp's server runs what our gguf backend runs
)
"""Everybody else asks the registry, so that naming a backend never imports it."""

FRONT_DOOR = {("dflash.train.evaluate", "dflash")}
"""Real generation is evaluated through the front door, as a user would have it."""

FACADES = ("dflash", "dflash.benchmark", "dflash.model", "dflash.model_mlx", "dflash.model_run")
WAITS = {"item", "tolist", "cpu", "numpy", "synchronize"}
"""Each makes the host wait for the device. In a backend, only where the one wait of a round is."""
MAY_WAIT = ("target", "sampling")
LOADING = ("load", "draft_load", "draft_run", "probe")
LOADING += ("draft_weights", "mtp_weights", "dense")
"""Runs before the first round or apart from any, where nobody is kept waiting by a wait."""


def name_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


NAMES = {name_of(file): file for file in FILES}


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def found_in(table: Mapping[str, object], name: str) -> str:
    """The longest entry of ``table`` that ``name`` is, or is inside of."""
    while name not in table:
        name = name.rpartition(".")[0]
    return name


def layer_of(name: str) -> int:
    exact = found_in(LAYERS, name)
    # a new file at the top of the package has to be put into the table by hand
    assert exact != "dflash" or name == "dflash", (
        f"{name} has no layer in tests/test_architecture.py"
    )
    return LAYERS[exact]


def imports(file: Path, everywhere: bool = True) -> Iterator[str]:
    """Modules that ``file`` imports when it runs; those for type checkers only are left out."""
    skipped = {
        id(inner)
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    nodes = ast.walk(tree_of(file)) if everywhere else iter(tree_of(file).body)
    for node in nodes:
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            module = node.module or ""
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                yield inner if inner in NAMES else module


def ours(file: Path, everywhere: bool = True) -> set[str]:
    return {m for m in imports(file, everywhere) if m.split(".")[0] == "dflash"}


def may_import(name: str, other: str) -> bool:
    if layer_of(other) != layer_of(name):
        return layer_of(other) < layer_of(name)
    mine, its = NAMES[name].parent, NAMES[other].parent
    return mine == its or mine in its.parents or its in mine.parents


def test_a_file_imports_only_from_below_or_from_its_own_folder() -> None:
    edges = {(name, other) for name, file in NAMES.items() for other in ours(file) - {name}}
    upwards = {edge for edge in edges if not may_import(*edge)} - FRONT_DOOR
    assert not upwards, "these point upwards: " + ", ".join(map(" -> ".join, sorted(upwards)))


def test_third_party_packages_stay_where_they_belong() -> None:
    astray = []
    for name, file in NAMES.items():
        used = {module.split(".")[0] for module in imports(file)}
        foreign = used - set(sys.stdlib_module_names) - {"dflash"}
        astray += [
            (name, package) for package in foreign - THIRD_PARTY[found_in(THIRD_PARTY, name)]
        ]
    assert not astray


def test_no_two_files_import_each_other() -> None:
    graph = {name: ours(file, everywhere=False) - {name} for name, file in NAMES.items()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"a circle: {' -> '.join((*path, name))}"
        if name not in done:
            for other in graph.get(name, ()):
                visit(other, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_backends_are_named_through_the_registry() -> None:
    for name, file in NAMES.items():
        named = {module for module in ours(file) if module.startswith("dflash.backends.")}
        if name.startswith("dflash.backends."):
            own = ".".join(name.split(".")[:3])
            assert all(module.startswith(own) for module in named), f"{name} imports a sibling"
        elif not name.startswith(MAY_NAME_A_BACKEND):
            assert not named, f"{name} names a backend"


def attributes(file: Path) -> set[str]:
    return {node.attr for node in ast.walk(tree_of(file)) if isinstance(node, ast.Attribute)}


def test_there_is_one_loop() -> None:
    """Only core/decode.py asks a draft to propose and a target to verify."""
    callers = {name for name, file in NAMES.items() if attributes(file) & {"propose", "verify"}}
    assert callers == {"dflash.core.decode"}


def test_a_facade_holds_no_loop_of_its_own() -> None:
    for name in FACADES:
        assert not [node for node in ast.walk(tree_of(NAMES[name])) if isinstance(node, ast.While)]


def test_the_host_waits_for_the_device_only_where_it_may() -> None:
    waiting = set()
    for name, file in NAMES.items():
        short = name.rpartition(".")[2]
        if not name.startswith("dflash.backends.") or short in MAY_WAIT + LOADING:
            continue
        calls = [node.func for node in ast.walk(tree_of(file)) if isinstance(node, ast.Call)]
        methods = [call for call in calls if isinstance(call, ast.Attribute)]
        waiting |= {(name, call.attr) for call in methods if call.attr in WAITS}
        waiting |= {(name, "eval") for call in methods if ast.unparse(call) == "mx.eval"}
    assert not waiting


def test_only_env_reads_the_environment() -> None:
    readers = {
        n for n, file in NAMES.items() if attributes(file) & {"environ", "getenv", "environb"}
    }
    assert readers == {"dflash.env"}


def test_everything_is_caught_only_at_the_doors() -> None:
    broad = set()
    for name, file in NAMES.items():
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.ExceptHandler):
                kinds = ast.dump(node.type) if node.type else "Exception"
                if "'Exception'" in kinds or "BaseException" in kinds or node.type is None:
                    broad.add(name)
    assert broad == {"dflash.cli", "dflash.serve.worker"}


def test_the_loop_fits_on_a_screen() -> None:
    body = (ROOT / "dflash/core/decode.py").read_text(encoding="utf-8")
    loop = next(
        node
        for node in tree_of(ROOT / "dflash/core/decode.py").body
        if isinstance(node, ast.FunctionDef) and node.name == "decode"
    )
    first = loop.body[1].lineno  # after the docstring
    lines = body.splitlines()[first - 1 : loop.end_lineno]
    assert len(lines) <= 24


def test_files_and_functions_stay_readable() -> None:
    too_long = []
    for name, file in NAMES.items():
        lines = len(file.read_text(encoding="utf-8").splitlines())
        too_long += [(name, lines)] if lines > 350 else []
        # a command's parameters, and a façade's, are its documentation: they count for nothing
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.FunctionDef):
                size = (node.end_lineno or 0) - node.body[0].lineno + 1
                too_long += [(f"{name}.{node.name}", size)] if size > 50 else []
    assert not too_long
