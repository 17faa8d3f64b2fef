"""The README's table of peers: every way to continue the same prompts, measured in one run.

    python -m bench.peers
    python -m bench.peers --seconds 150     # again and again, until it writes the table
    python -m bench.peers --table-only

``dflash bench --against ...`` on the demo pair, greedy, a fixed number of tokens; it goes on from
what runs/peers already holds, so it may be interrupted. The table stands between two marks of the
README, with its conditions below it.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash.bench.rows import Row, make_rows, texts_of
from dflash.bench.session import CONDITIONS, RECORDS
from dflash.bench.table import markdown
from dflash.bench.trial import Record

ROOT = Path(__file__).parents[1]
START, END = "<!-- peers: start", "<!-- peers: end -->"
BASE = "transformers"
AGAINST = "ngram,float16,transformers,transformers-dflash,prompt-lookup,reference-wheel,llama.cpp"
NAMES = {
    "plain": "this package, plain",
    "auto": "this package, DFlash, `auto`",
    "ngram": "this package, look-up (`--draft ngram`)",
    "float16": "this package, DFlash, `auto`, `--weights float16`",
    "transformers": "transformers `generate`",
    "transformers-dflash": "transformers, its own DFlash",
    "prompt-lookup": "transformers, prompt look-up",
    "reference-wheel": "reference wheel `dflash` 0.1.0",
    "llama.cpp": "llama.cpp, Q4_1 kernels",
    "llama.cpp ngram": "llama.cpp, Q4_1, its n-gram drafts",
    "llama.cpp dflash": "llama.cpp, Q4_1, our draft as a sidecar, block 4",
}
HEAD = ("on the demo pair", "tok/s", "x transformers (95 %)", "committed", "same text")


def measure(out: Path, more: Sequence[str], seconds: float | None = None) -> bool:
    """Run what is missing in ``out``; False = after ``seconds`` there was more to do.

    Raises CalledProcessError.
    """
    command = [sys.executable, "-m", "dflash", "bench", "--data-dir", str(ROOT / "bench/prompts")]
    command += ["--dataset", "gsm8k,humaneval,mt-bench", "--against", AGAINST, "--no-costs"]
    command += ["--resume", "--out", str(out), *more]
    with subprocess.Popen(command) as running:
        try:
            status = running.wait(seconds)
        except subprocess.TimeoutExpired:
            running.send_signal(signal.SIGINT)  # the answer in work is lost, no other
            running.wait()
            return False
    if status:
        raise subprocess.CalledProcessError(status, command)
    return True


def rows_of(records: Sequence[Record], arms: Sequence[str]) -> tuple[list[Row], int]:
    """A row per arm over transformers, and how many texts all arms have in all repeats."""
    whole = [text for text in texts_of(records).values() if set(arms) <= set(text)]
    # a run that was stopped leaves some arms a repeat short, and one repeat knows no spread
    most = max((len(text[BASE]) for text in whole), default=0)
    texts = [text for text in whole if all(len(text[arm]) == most for arm in arms)]
    return make_rows(texts, arms, BASE, greedy=True, proven={}), len(texts)


def table(rows: Sequence[Row], texts: int) -> str:
    """Markdown; a ratio is over texts that are the same in both, and left out where none is."""
    lines = []
    for row in rows:
        differ = row.left_out.get("texts differ", 0)
        found = row.speedup
        over = "" if row.refused else f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"
        drafted = row.totals.accepted or row.totals.drafted
        committed = f"{row.totals.micro:.2f}" if drafted else ""
        name = NAMES.get(row.arm, f"this package, DFlash, {row.arm}")
        lines.append(
            [name, f"{row.totals.rate:.1f}", over, committed, f"{texts - differ} of {texts}"]
        )
    return markdown(HEAD, lines)


def into(page: str, made: str) -> str:
    """``page`` with ``made`` between its marks. Raises ValueError where they are missing."""
    head, mark, rest = page.partition(START)
    note, arrow, rest = rest.partition("-->\n")
    _, end, tail = rest.partition(END)
    if not (mark and arrow and end):
        raise ValueError(f"no {START} ... --> and {END} in the page")
    return f"{head}{mark}{note}{arrow}\n{made}\n\n{end}{tail}"


def conditions(sheet: Mapping[str, Any], tokens: int, rows: Sequence[Row], texts: int) -> str:
    """One line: what these figures depend on."""
    repeats = min(row.totals.requests for row in rows) // max(1, texts)
    return (
        f"{texts} texts of {tokens} tokens at temperature 0, {repeats} repeats, interleaved; no "
        "ratio where repeats of a text lay more than 10 % apart; "
        f"{sheet['machine']}, {sheet['threads']} of {sheet['cores']} cores, {sheet['date'][:10]}, "
        f"commit {sheet['commit']}. `make peers` measures it anew."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the table."""
    flags = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("--out", type=Path, default=ROOT / "runs" / "peers")
    flags.add_argument("--readme", type=Path, default=ROOT / "README.md")
    flags.add_argument("--max-samples", default="3", help="prompts of each set")
    flags.add_argument("--max-tokens", default="64")
    flags.add_argument("--repeats", default="2")
    flags.add_argument("--threads", default="2")
    flags.add_argument("--block-sizes", default="3,8,auto")
    flags.add_argument("--seconds", type=float, help="stop after that long; run again to go on")
    flags.add_argument("--table-only", action="store_true", help="from what --out holds")
    given = flags.parse_args(arguments)
    if not given.table_only:
        names = ("max_samples", "max_tokens", "repeats", "threads", "block_sizes")
        more = [w for n in names for w in (f"--{n.replace('_', '-')}", getattr(given, n))]
        if not measure(given.out, [*more, "--ignore-eos"], given.seconds):
            raise SystemExit(f"stopped after {given.seconds:g} s: run it again to go on")
    sheet = json.loads((given.out / CONDITIONS).read_text(encoding="utf-8"))
    head, *lines = (given.out / RECORDS).read_text(encoding="utf-8").splitlines()
    records = [Record.from_json(json.loads(line)) for line in lines]
    rows, texts = rows_of(records, list(dict.fromkeys(r.key.arm for r in records)))
    tokens = json.loads(head)["settings"]["tokens"]
    made = f"{table(rows, texts)}\n\n{conditions(sheet, tokens, rows, texts)}"
    page = given.readme.read_text(encoding="utf-8")
    given.readme.write_text(into(page, made), encoding="utf-8")
    print(made)


if __name__ == "__main__":
    main()
