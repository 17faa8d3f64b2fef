"""Prompt sets as lists of turns: from a JSONL file, a folder of them, or the ``datasets`` package.

A JSONL line is an object with "turns" (a list of texts) or "prompt" (one text); what else it holds
is kept. Named sets are downloaded by ``datasets``, which is not a dependency of this package.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dflash.config import path_name
from dflash.errors import ConfigError, DataError, DownloadError, MissingBackend

Row = dict[str, Any]

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{{}}."


class Source(NamedTuple):
    """Where a named set is and how a row becomes a prompt."""

    repository: str
    config: str | None
    split: str
    template: str  # filled from the row's columns; "" = the row has turns of its own


NAMED = {
    "gsm8k": Source("openai/gsm8k", "main", "test", "{question}" + BOXED),
    "math500": Source("HuggingFaceH4/MATH-500", None, "test", "{problem}" + BOXED),
    "humaneval": Source(
        "openai/openai_humaneval",
        None,
        "test",
        "Complete this Python function. Answer with code only:\n```python\n{prompt}\n```",
    ),
    "mbpp": Source("google-research-datasets/mbpp", "sanitized", "test", "{prompt}"),
    "mt-bench": Source("HuggingFaceH4/mt_bench_prompts", None, "train", ""),
    "alpaca": Source("tatsu-lab/alpaca", None, "train", "{instruction}\n{input}"),
}


def load_and_process_dataset(name: str | Path, data_dir: str | Path | None = None) -> list[Row]:
    """Rows with "turns", in the order of the source.

    ``name`` is a .jsonl file, a folder of such files, or one of ``NAMED``; with ``data_dir`` a set
    of that name is read from that folder (``gsm8k.jsonl``) and nothing is downloaded. Raises
    DataError (malformed line, with file and number), ConfigError (unknown name, or not in the
    folder), MissingBackend (a named set without the ``datasets`` package) and DownloadError.
    """
    place = Path(path_name("name", name)).expanduser()
    if data_dir is not None:
        folder = Path(path_name("data_dir", data_dir)).expanduser()
        return list(read_jsonl(_in_folder(str(name), folder)))
    if place.is_dir():
        files = sorted(place.glob("*.jsonl"))
        if not files:
            raise DataError(f"{place} has no .jsonl file")
        return [row for file in files for row in read_jsonl(file)]
    if place.is_file():
        return list(read_jsonl(place))
    source = {_key(known): found for known, found in NAMED.items()}.get(_key(str(name)))
    if source is None:
        known = ", ".join(NAMED)
        raise ConfigError(f"no file, folder or prompt set {str(name)!r}. Known sets: {known}")
    return [_turns(row, source) for row in _download(source)]


def _in_folder(name: str, folder: Path) -> Path:
    """The file of a set: ``mt-bench`` is also ``mt_bench.jsonl``. Raises ConfigError."""
    if not folder.is_dir():
        raise ConfigError(f"no folder {folder}: give one with a .jsonl file for each prompt set")
    for file in sorted(folder.glob("*.jsonl")):
        if _key(file.stem) == _key(name):
            return file
    there = ", ".join(file.stem for file in sorted(folder.glob("*.jsonl"))) or "no .jsonl file"
    raise ConfigError(f"no prompt set {name!r} in {folder}, which has {there}")


def _key(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def read_jsonl(file: Path) -> Iterable[Row]:
    """Rows of one file, empty lines left out. Raises DataError with file and line number."""
    number = 0
    with file.open(encoding="utf-8") as lines:
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _row(line, f"{file}:{number}")
        except UnicodeDecodeError:
            raise DataError(f"{file} is not UTF-8 text (after line {number})") from None


def _row(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as problem:
        raise DataError(f"{where} is not JSON: {problem.msg}") from None
    if not isinstance(row, dict):
        raise DataError(f"{where} must be an object with 'turns' or 'prompt'")
    turns = [row["prompt"]] if "turns" not in row and "prompt" in row else row.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
        raise DataError(f"{where} must have 'turns', a list of texts, or 'prompt', one text")
    return {**row, "turns": turns}


def _turns(row: Mapping[str, Any], source: Source) -> Row:
    if not source.template:
        return {"turns": list(row["prompt"])}
    return {"turns": [source.template.format(**row).rstrip()]}


def _download(source: Source) -> Iterable[Mapping[str, Any]]:
    try:
        from datasets import load_dataset
    except ImportError as problem:
        raise MissingBackend(
            "named prompt sets need one more package: pip install datasets. Or give a .jsonl file, "
            "or a folder of them (data_dir, --data-dir)"
        ) from problem
    try:
        rows: Iterable[Mapping[str, Any]] = load_dataset(
            source.repository, source.config, split=source.split
        )
    except (OSError, ValueError) as problem:
        lines = str(problem).strip().splitlines() or [type(problem).__name__]
        raise DownloadError(
            f"cannot fetch {source.repository}: {lines[0]}. A folder with the set as a .jsonl file "
            "does without (--data-dir)"
        ) from problem
    return rows
