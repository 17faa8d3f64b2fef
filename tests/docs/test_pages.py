"""The documentation is true: its code runs, its commands exist, its links lead somewhere."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import dflash.errors
from dflash.config import GenerateOptions, LoadOptions
from dflash.core.stats import Stats
from dflash.results import Chunk, Generation
from docs.gen_cli import PAGE, page
from tests.cli.running import COMMAND, invoke
from tests.docs.pages import PAGES, ROOT, Block, blocks, commands, ids

PYTHON = [page for page in PAGES if blocks(page, "python")]
SHELL = [page for page in PAGES if blocks(page, "bash")]
DEMO = [p for p in PAGES if any(b.when == "demo" for b in blocks(p, "python") + blocks(p, "bash"))]


@pytest.mark.parametrize("source", PYTHON, ids=ids(PYTHON))
def test_python_blocks_run_from_top_to_bottom(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks(source, "python"):
        code = compile("\n" * (block.line - 1) + block.code, str(block.page), "exec")
        if block.when == "always":
            exec(code, names)


@pytest.mark.parametrize("source", SHELL, ids=ids(SHELL))
def test_commands_and_their_flags_exist(source: Path) -> None:
    for block in blocks(source, "bash"):
        for words in commands(block):
            check_command(words, block.place)


@pytest.mark.parametrize("source", SHELL, ids=ids(SHELL))
def test_commands_on_the_toy_pair_run(source: Path) -> None:
    for block in blocks(source, "bash"):
        for words in commands(block):
            if words[0] == "dflash" and "toy" in words:
                result = invoke(words[1:], "Why?\n")
                assert result.exit_code == 0, f"{block.place}: {result.output}"


@pytest.mark.demo
@pytest.mark.parametrize("source", DEMO, ids=ids(DEMO))
def test_blocks_on_the_demo_pair_run(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks(source, "python"):
        if block.when != "never":
            exec(compile(block.code, block.place, "exec"), names)
    for block in blocks(source, "bash"):
        if block.when == "demo":
            run_commands(block)


def run_commands(block: Block) -> None:
    for words in commands(block):
        if words[0] == "dflash":
            result = invoke(words[1:], "Why?\n")
            assert result.exit_code == 0, f"{block.place}: {result.output}"


def check_command(words: list[str], place: str) -> None:
    """A command of ours with flags it has; other programs are not looked at."""
    if words[0] == "dflash":
        _check_dflash(words[1:], place)
    elif words[0] == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        for verb in words[1:]:
            if "=" not in verb:
                assert re.search(rf"^{re.escape(verb)}:", makefile, re.M), f"{place}: make {verb}"
    elif words[:2] == ["python", "-m"]:
        assert find_spec(words[2]) is not None, f"{place}: python -m {words[2]}"


def _check_dflash(words: list[str], place: str) -> None:
    group: Any = COMMAND
    if words[0].startswith("-"):
        return
    assert words[0] in group.commands, f"{place}: there is no command dflash {words[0]}"
    known = {name for p in group.commands[words[0]].params for name in [*p.opts, *p.secondary_opts]}
    known |= {"--help", "-h"}
    for word in words[1:]:
        flag = word.partition("=")[0]
        if re.match(r"--?[a-z]", flag):
            assert flag in known, f"{place}: dflash {words[0]} has no {flag}"


def test_the_command_reference_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run make docs"


@pytest.mark.parametrize("kind", [LoadOptions, GenerateOptions, Stats, Generation, Chunk])
def test_the_library_reference_names_every_field(kind: type) -> None:
    text = (ROOT / "docs" / "reference" / "library.md").read_text(encoding="utf-8")
    assert [name for name in kind.__annotations__ if f"`{name}`" not in text] == []


def test_the_library_reference_names_every_error() -> None:
    text = (ROOT / "docs" / "reference" / "library.md").read_text(encoding="utf-8")
    errors = [value for value in vars(dflash.errors).values() if isinstance(value, type)]
    names = [e.__name__ for e in errors if issubclass(e, dflash.errors.DFlashError)]
    assert [name for name in names if name not in text] == []


@pytest.mark.parametrize("source", PAGES, ids=ids(PAGES))
def test_links_lead_to_files_and_headings_that_exist(source: Path) -> None:
    text = re.sub(r"```.*?```", "", source.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, heading = target.partition("#")
        file = source.parent / name if name else source
        assert file.exists(), f"{source.name}: {target}"
        if heading:
            slugs = {_slug(line) for line in file.read_text(encoding="utf-8").splitlines()}
            assert heading in slugs, f"{source.name}: {target}"


def _slug(line: str) -> str:
    if not line.startswith("#"):
        return ""
    words = re.sub(r"[^\w\s-]", "", line.lstrip("#").strip().lower())
    return words.replace(" ", "-")


def test_every_page_is_reached_from_the_index() -> None:
    seen: set[Path] = set()
    queue = [ROOT / "docs" / "index.md"]
    while queue:
        current = queue.pop().resolve()
        if current in seen or current.suffix != ".md" or not current.exists():
            continue
        seen.add(current)
        for target in re.findall(r"\]\(([^)\s#]+)", current.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:", target):
                queue.append(current.parent / target)
    pages = {p.resolve() for p in PAGES if (ROOT / "docs") in p.parents}
    assert pages <= seen, f"not linked: {sorted(str(p) for p in pages - seen)}"
