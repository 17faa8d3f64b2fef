"""What the server adds to the library, and what a kept conversation saves.

    python -m bench.serve --repeats 5

Added latency: the same prompt at temperature 0 and one block size, decoded by the library in this
process and streamed by a server in another, in turn; the difference of the mean time between tokens
after the first. Second turn: a chat with a history of about 1,500 tokens, then a turn of at most
100 more; the time to the first token of both, at the client.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from typing import Any

import httpx

import dflash
from bench import record, sets
from bench.serving import served

CHAT = "/v1/chat/completions"
HISTORY, TURN = 1500, 100  # tokens


def through_library(engine: dflash.Engine, said: Any, tokens: int, block: int) -> tuple[float, str]:
    """Seconds a token after the first, and the text."""
    times, text, count, first = [], "", 0, 0
    for chunk in engine.stream(said, max_tokens=tokens, block_size=block, reuse=False):
        times.append(time.perf_counter())
        first = first or len(chunk.token_ids)
        count += len(chunk.token_ids)
        text += chunk.text
    return (times[-1] - times[0]) / max(1, count - first), text


def through_server(client: httpx.Client, said: Any, tokens: int, block: int) -> dict[str, Any]:
    """The same over HTTP: seconds to the first token and a token after it, the text, the usage."""
    body = {
        "messages": said,
        "max_tokens": tokens,
        "temperature": 0,
        "speculative": {"block_size": block},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    usage: dict[str, Any] = {}
    start, times, text = time.perf_counter(), list[float](), ""
    with client.stream("POST", CHAT, json=body) as reply:
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            frame = json.loads(line[6:])
            usage = frame.get("usage") or usage
            more = frame["choices"][0]["delta"].get("content") if frame["choices"] else None
            if more:
                times.append(time.perf_counter())
                text += more
    gaps = usage["completion_tokens"] - 1
    return {
        "first": times[0] - start,
        "gap": (times[-1] - times[0]) / max(1, gaps),
        "text": text,
        "usage": usage,
    }


def added(flags: Namespace, engine: dflash.Engine, client: httpx.Client) -> dict[str, Any]:
    """Both ways in turn over the prompts; medians in milliseconds a token."""
    pairs, same = [], True
    for turn in range(flags.repeats):
        for prompt in sets.load("mt_bench", flags.prompts_per_set):
            said = [{"role": "user", "content": f"{prompt} ({turn})"}]  # nothing to resume from
            own, text = through_library(engine, said, flags.tokens, flags.block_size)
            served_way = through_server(client, said, flags.tokens, flags.block_size)
            same = same and text == served_way["text"]
            pairs.append((1e3 * own, 1e3 * served_way["gap"]))
    differences = [theirs - ours for ours, theirs in pairs]
    return {
        "library_ms": statistics.median(ours for ours, _ in pairs),
        "server_ms": statistics.median(theirs for _, theirs in pairs),
        "added_ms": statistics.median(differences),
        "added_ms_quartiles": statistics.quantiles(differences, n=4),
        "texts_equal": same,
        "requests": len(pairs),
    }


def second_turn(flags: Namespace, engine: dflash.Engine, client: httpx.Client) -> dict[str, Any]:
    """The time to the first token of a first and a second turn; each repeat is a new chat."""
    rows = []
    for turn in range(flags.repeats):
        said = [{"role": "user", "content": _history(engine, turn)}]
        first = through_server(client, said, 8, flags.block_size)
        said += [
            {"role": "assistant", "content": first["text"]},
            {"role": "user", "content": "And which of those words occurs most often? " * 6},
        ]
        second = through_server(client, said, 8, flags.block_size)
        details = second["usage"]["prompt_tokens_details"]
        new = second["usage"]["prompt_tokens"] - details["cached_tokens"]
        assert new <= TURN, f"the new turn had {new} tokens to run"
        rows.append(
            {
                "history": first["usage"]["prompt_tokens"],
                "new": new,
                "first_s": first["first"],
                "second_s": second["first"],
                "share": second["first"] / first["first"],
            }
        )
    return {"share": statistics.median(row["share"] for row in rows), "chats": rows}


def _history(engine: dflash.Engine, turn: int) -> str:
    text = f"Chat {turn}. "
    while len(engine.encode(text)) < HISTORY:
        place = len(text)
        text += f"Item {place % 977} of list {place % 31} is {place * 7919 % 1009}. "
    return text


def main() -> None:
    """Measure, print, write."""
    flags = record.parser(__doc__, tokens=64, prompts=4)
    flags.add_argument("--repeats", type=int, default=3)
    flags.add_argument("--block-size", type=int, default=4)
    flags.add_argument("--only", choices=("added", "turn"), help="one of the two alone")
    given = flags.parse_args()
    words = ["--model", given.target, "--threads", str(given.threads)]
    words += [] if given.draft is None else ["--draft", given.draft]
    with (
        tempfile.TemporaryFile("w+") as log,
        served(words, log) as (_, address),
        dflash.load(given.target, given.draft, threads=given.threads) as engine,
        httpx.Client(base_url=address, timeout=300) as client,
    ):
        parts = {"turn": second_turn, "added": added}
        asked = [given.only] if given.only else list(parts)
        result: dict[str, Any] = {"conditions": record.conditions(given.threads)}
        for name in asked:
            result[name] = parts[name](given, engine, client)
    print(json.dumps(result, indent=1))
    if given.out is not None:
        record.write(given.out, result)
    sys.exit(0)


if __name__ == "__main__":
    main()
