"""How long the second start takes to its first token, and what of it is ours.

    python -m bench.startup --repeats 5
    python -m bench.startup --repeats 5 --beside ../other-checkout

Every line is an interpreter of its own, run in turn with the others after one start that is not
counted (it converts, compares and fills the page cache). "ours" is the whole command less what
importing torch and the parts of transformers that it uses takes. The stages are those of one
process that does what the command does. ``--beside`` times the command of another checkout, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

from bench import record
from dflash.bench.table import markdown

TORCH = "import torch"
PARTS = (
    "from transformers import AutoTokenizer, DynamicCache, GenerationConfig, PreTrainedConfig;"
    "from transformers.models.auto import tokenization_auto"
)
CLASSES = "import transformers.models.llama.modeling_llama"
WHOLE, BESIDE, FIRST = "dflash generate", "the same, beside", "torch, transformers' parts"
STAGES = """
import json, sys, time
marks, last = {}, time.perf_counter()
def mark(name):
    global last
    now = time.perf_counter()
    marks[name], last = now - last, now
import torch
mark("import torch")
from transformers import AutoTokenizer, DynamicCache, GenerationConfig, PreTrainedConfig
mark("import transformers' parts")
import dflash, dflash.cli, dflash.engine, dflash.backends.torch.pair
mark("import dflash")
engine = dflash.load(*sys.argv[1:3], threads=int(sys.argv[3]), profile=False)
mark("open both models")
engine.generate("hi", max_tokens=1)
mark("first token")
print(json.dumps(marks))
"""


def seconds(command: Sequence[str], path: str | None = None) -> tuple[float, str]:
    """How long ``command`` of this interpreter takes, and what it prints."""
    env = dict(os.environ) if path is None else {**os.environ, "PYTHONPATH": path}
    start = perf_counter()
    done = subprocess.run(
        [sys.executable, *command], env=env, cwd=path, capture_output=True, text=True, check=True
    )
    return perf_counter() - start, done.stdout


def commands(flags: Namespace) -> dict[str, Sequence[str]]:
    """What is timed, by the name of its line."""
    pair = ["--model", flags.target] + (["--draft", flags.draft] if flags.draft else [])
    one = ["--max-tokens", "1", "--no-profile", "--threads", str(flags.threads)]
    whole = ["-m", "dflash", "generate", "hi", *pair, *one]
    found: dict[str, Sequence[str]] = {
        "python": ["-c", ""],
        "torch": ["-c", TORCH],
        FIRST: ["-c", f"{TORCH}; {PARTS}"],
        "torch, transformers' model classes": ["-c", f"{TORCH}; {CLASSES}"],
        WHOLE: whole,
    }
    if flags.beside:
        found[BESIDE] = whole
    return found


def measure(flags: Namespace) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds by line, and the medians of the stages."""
    asked, stages = commands(flags), list[Mapping[str, float]]()
    found: dict[str, list[float]] = {name: [] for name in asked}
    for turn in range(flags.repeats + 1):
        for name, command in asked.items():
            spent, _ = seconds(command, str(flags.beside) if name == BESIDE else None)
            if turn:
                found[name].append(spent)
        told = [flags.target, flags.draft or "", str(flags.threads)]
        script = STAGES if flags.draft else STAGES.replace("*sys.argv[1:3]", "sys.argv[1]")
        _, said = seconds(["-c", script, *told])
        if turn:
            stages.append(json.loads(said.splitlines()[-1]))
    return found, {name: median(one[name] for one in stages) for name in stages[0]}


def table_of(found: Mapping[str, Sequence[float]], stages: Mapping[str, float]) -> str:
    """For the terminal."""
    lines = [
        [name, f"{median(times):.2f}", f"{min(times):.2f} to {max(times):.2f}"]
        for name, times in found.items()
    ]
    ours = median(found[WHOLE]) - median(found[FIRST])
    parts = [[name, f"{spent:.2f}"] for name, spent in stages.items()]
    return (
        f"{markdown(['seconds', 'median', 'range'], lines)}\n\n"
        f"ours: {ours:.2f} s\n\n{markdown(['stage of one process', 'seconds'], parts)}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write JSON."""
    parser = record.parser(__doc__, tokens=1, prompts=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--beside", type=Path, default=None, help="another checkout")
    flags = parser.parse_args(arguments)
    before = record.conditions(flags.threads)
    found, stages = measure(flags)
    print(table_of(found, stages))
    out = flags.out or Path("runs/startup.json")
    record.write(out, {"conditions": before, "seconds": found, "stages": stages})


if __name__ == "__main__":
    main()
