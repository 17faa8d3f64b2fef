"""The flags of the measurements, beside the arithmetic that `dflash bench` shares with them."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

from dflash.bench.guards import in_circles
from dflash.bench.record import bootstrap, conditions, write

__all__ = ["bootstrap", "conditions", "in_circles", "parser", "write"]
PACKAGES = ("dflash-engine", "torch", "transformers", "xllamacpp")
GRAM, OFTEN = 4, 8  # a text that holds one 4-gram eight times runs in circles


def parser(doc: str | None, tokens: int, prompts: int) -> ArgumentParser:
    """The flags that all measurements take; help is the module's docstring."""
    flags = ArgumentParser(description=(doc or "").partition("\n")[0])
    flags.add_argument("--target", default="demo", help="folder, hub id, .gguf file or demo")
    flags.add_argument("--draft", default=None, help="draft folder; left out: the target's own")
    flags.add_argument("--tokens", type=int, default=tokens, help="new tokens a prompt at most")
    flags.add_argument("--prompts-per-set", type=int, default=prompts)
    flags.add_argument("--threads", type=int, default=2)
    flags.add_argument("--out", type=Path, default=None, help="where to write the JSON")
    return flags


def conditions(threads: int | None) -> dict[str, Any]:
    """Command, commit, versions, machine: without them a figure means nothing."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.orig_argv[1:]),
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "machine": f"{platform.system()} {platform.machine()}, {_processor()}",
        "cores": os.cpu_count(),
        "threads": threads,
        "load_before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def write(path: Path, result: dict[str, Any]) -> None:
    """The result as JSON, folders made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def in_circles(ids: Sequence[int]) -> bool:
    """Whether some 4-gram occurs eight times: such text flatters any draft."""
    grams = Counter(tuple(ids[i : i + GRAM]) for i in range(len(ids) - GRAM + 1))
    return max(grams.values(), default=0) >= OFTEN


def bootstrap(
    count: int,
    statistic: Callable[[Sequence[int]], float],
    *,
    draws: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """95 % interval of ``statistic`` over resampled indices of ``count`` paired runs."""
    rng = random.Random(seed)
    values = sorted(statistic(rng.choices(range(count), k=count)) for _ in range(draws))
    return values[int(0.025 * draws)], values[int(0.975 * draws) - 1]


def _commit() -> str:
    run = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return run.stdout.strip() or "unknown"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"
