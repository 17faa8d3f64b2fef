"""``python -m dflash.benchmark``: upstream's flags and upstream's figures.

    python -m dflash.benchmark --draft-model path/to/draft --dataset gsm8k --max-samples 32

Baseline and DFlash throughput, speed-up, average acceptance length and histogram, as upstream
defines them (docs/how-to/bench.md). Under torchrun each process takes its share of the prompts and
the first one prints. ``dflash bench`` has more: several block sizes, repeats, reports, guards.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash import env
from dflash.bench import local, prompts, protocols, serving
from dflash.bench.arms import PLAIN
from dflash.bench.local import Template
from dflash.bench.remote import connect
from dflash.bench.session import Settings
from dflash.bench.trial import Course, Journal, Outcome
from dflash.engine import load
from dflash.errors import ConfigError, DFlashError

LOCAL = {"transformers": "torch", "mlx": "mlx"}
SERVERS = ("vllm", "sglang", "openai")
LINE = "=" * 50


def parser() -> argparse.ArgumentParser:
    """Upstream's flags, and the folder and file that stand in for its downloads."""
    flags = argparse.ArgumentParser(prog="python -m dflash.benchmark", description=__doc__)
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument("--backend", choices=(*LOCAL, *SERVERS), default="transformers")
    flags.add_argument("--model", help="target; left out: the one that the draft's config names")
    flags.add_argument("--draft-model", "--draft", dest="draft", help="folder or hub id")
    flags.add_argument("--dataset", required=True, help="gsm8k, math500, ..., or a .jsonl file")
    flags.add_argument("--data-dir", type=Path, help="folder with DATASET.jsonl, not the hub")
    flags.add_argument("--block-size", type=int, help="left out: the draft's native one")
    flags.add_argument("--draft-sliding-window-size", type=int)
    flags.add_argument("--max-samples", type=int, help="prompts at most, local backends")
    flags.add_argument("--max-new-tokens", type=int, default=2048)
    flags.add_argument("--temperature", type=float, default=0.0)
    flags.add_argument("--top-p", type=float, default=1.0)
    flags.add_argument("--top-k", type=int, default=0)
    flags.add_argument("--num-prompts", type=int, default=1024, help="requests to a server")
    flags.add_argument("--concurrency", type=int, default=1, help="requests at a time, servers")
    flags.add_argument("--base-url", default="http://127.0.0.1:30000")
    flags.add_argument("--timeout-s", type=int, default=3600)
    flags.add_argument("--enable-thinking", action="store_true")
    flags.add_argument("--threads", type=int, help="CPU threads")
    return flags


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; the exit status, 2 for what the user can mend."""
    given = parser().parse_args(arguments)
    try:
        lines = _remote(given) if given.backend in SERVERS else _local(given)
    except DFlashError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    for line in lines:
        print(line)
    return 0


def _local(given: argparse.Namespace) -> list[str]:
    """What upstream prints for a pair in this process; nothing but in the first of several."""
    if given.draft is None:
        raise ConfigError("there is no draft to measure: name one (--draft-model)")
    rank, processes = env.shard()
    conversations = _rows(given, given.max_samples)[rank::processes]
    sampling = {name: getattr(given, name) for name in ("temperature", "top_p", "top_k")}
    template = Template(thinking=given.enable_thinking)
    options: Any = {
        "backend": LOCAL[given.backend],
        "draft_sliding_window_size": given.draft_sliding_window_size,
        "threads": given.threads,
        "device": _device(processes),
        "profile": False,
    }
    if given.model == "toy":
        options["backend"] = "auto"
    with load(given.model, given.draft, **options) as engine:
        native = engine.pair.draft_block_size or 1
        size = min(given.block_size or native, native)
        if size != (given.block_size or size):
            print(f"note: block size {given.block_size} clamped to {size}", file=sys.stderr)
        arms = local.contestants(engine, {PLAIN: 1, "dflash": size}, sampling)
        course = Course(
            contestants=arms,
            tokens=given.max_new_tokens,
            repeats=1,
            encode=lambda messages: template.encode(engine, messages),
            says=local.says(engine),
            context=engine.pair.context_length,
        )
        with Journal(None, {}) as journal:
            if conversations:
                course.warm_up(conversations[0], 1)
            fitted = list(course.run(conversations, journal))
        records = _gathered([(r.key.arm, r.outcome) for r in journal.records.values()], processes)
    if rank:
        return []
    slow, fast = ([one for arm, one in records if arm == name] for name in (PLAIN, "dflash"))
    if not slow:
        raise ConfigError(
            f"none of {len(fitted)} prompts fits the context with --max-new-tokens "
            f"{given.max_new_tokens}: ask for fewer"
        )
    return protocols.upstream(slow, fast, size).lines()


def _device(processes: int) -> str | None:
    """The GPU of this process, where there are several; None = as usual."""
    if processes == 1:
        return None
    from torch import cuda

    return f"cuda:{env.local_rank() % cuda.device_count()}" if cuda.is_available() else None


def _gathered(mine: list[tuple[str, Outcome]], processes: int) -> list[tuple[str, Outcome]]:
    """The records of all processes."""
    if processes == 1:
        return mine
    import torch.distributed as dist

    dist.init_process_group("gloo")
    every: list[Any] = [None] * processes
    dist.all_gather_object(every, mine)
    dist.destroy_process_group()
    return [record for part in every for record in part]


def _remote(given: argparse.Namespace) -> list[str]:
    """What upstream prints for a server: first turns, at some concurrency, by the wall clock."""
    rows = _rows(given, None)
    chosen = [
        replace(rows[i % len(rows)], id=f"{i}", turns=rows[i % len(rows)].turns[:1])
        for i in range(given.num_prompts)
    ]
    body = {"temperature": given.temperature, "top_p": given.top_p}
    body |= {"top_k": given.top_k} if given.top_k else {}
    body["chat_template_kwargs"] = {"enable_thinking": given.enable_thinking}
    server = connect(given.base_url, given.model, timeout=given.timeout_s, body=body)
    settings = Settings(
        tokens=given.max_new_tokens, repeats=1, sampling=body, concurrency=given.concurrency
    )
    found, _ = serving.run({serving.SERVER: server}, chosen, settings, lambda _: None)
    load_, totals = found["servers"][serving.SERVER], found["rows"][0]["totals"]
    lines = [
        *(LINE, f"Backend:          {given.backend}", f"Dataset:          {given.dataset}"),
        f"Num prompts:      {given.num_prompts}",
        f"Concurrency:      {given.concurrency}",
        f"Latency:          {load_['seconds']:.1f}s",
        f"Output tokens:    {load_['tokens']}",
        f"Throughput:       {load_['throughput']:,.2f} tok/s",
    ]
    if totals["rounds"]:
        lines += [
            f"Accept length:    {totals['macro']:.3f}",
            f"Spec verify ct:   {totals['rounds']}",
        ]
    elif load_["counters"] is not None:
        counted = load_["counters"]
        lines += [f"Accept length:    {counted['acceptance_length']:.3f} (server counters)"]
    return [*lines, LINE]


def _rows(given: argparse.Namespace, most: int | None) -> list[prompts.Conversation]:
    place = Path(given.dataset).expanduser()
    if place.suffix == ".jsonl":
        return prompts.load(files=[place], most=most)
    return prompts.load([given.dataset], given.data_dir, most=most)


if __name__ == "__main__":
    raise SystemExit(main())
