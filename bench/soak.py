"""Mixed load on one server, well and badly behaved, for as long as you like.

    python -m bench.soak --minutes 30 --model toy --draft toy:script:1,3,0
    python -m bench.soak --minutes 30 --fuzz 5 --pause 0.5  # with schemathesis' in between

Clients ask for known texts, leave in the middle of streams and of bodies, send broken JSON, fields
that do not exist and bodies that are too large. In the end the server is told to stop while it is
loaded. What must come out: no 5xx but deliberate ones, every complete answer right, resident memory
flat within 3 % after the first quarter, no request left behind, and after SIGTERM an answer or an
error for every accepted request.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench import fuzz, record
from bench.serving import served

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
DELIBERATE = {429, 503, 504}
SHARE = 0.03  # by which memory may differ after the first quarter
PATIENCE = 900  # seconds for one answer: a machine may be needed for something else meanwhile
EVERY = 5.0  # seconds between looks at memory
WORDS = ("rain", "stone", "river", "bird", "light", "morning", "road", "tree", "house", "blue")


@dataclass
class Soak:
    """One run: what was asked, what came, and what the server weighed."""

    client: httpx.AsyncClient
    rng: random.Random
    tokens: int
    pause: float = 0.0  # seconds between a client's acts, on average
    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)  # seconds, bytes
    known: dict[int, str] = field(default_factory=dict)
    stopping: bool = False
    lost: int = 0  # accepted requests without an answer or an error

    def body(self, which: int) -> dict[str, Any]:
        """The chat whose answer is known under ``which``."""
        words = random.Random(which).choices(WORDS, k=3 + which % 40)
        said = [{"role": "user", "content": " ".join(words)}]
        return {"messages": said, "temperature": 0, "max_tokens": self.tokens}

    async def learn(self, count: int) -> None:
        """Plain answers, one after the other, before the load begins."""
        for which in range(count):
            body = {**self.body(which), "speculative": {"enabled": False}}
            said = await self.client.post(CHAT, json=body)
            self.known[which] = said.json()["choices"][0]["message"]["content"]
        held = {**self.body(0), "response_format": {"type": "json_object"}}
        self.saw((await self.client.post(CHAT, json=held)).status_code, "held")  # imports much

    def check(self, which: int, text: str) -> None:
        """Remember an answer that is not the known one."""
        if text != self.known[which]:
            self.wrong.append(f"prompt {which}: {text!r} for {self.known[which]!r}")

    def saw(self, status: int, kind: str) -> None:
        """Count a reply; one that is a fault by its status is kept."""
        self.statuses[f"{kind} {status}"] += 1
        if status >= 500 and status not in DELIBERATE:
            self.wrong.append(f"{kind}: status {status}")

    async def whole(self) -> None:
        """A complete answer."""
        which = self.rng.randrange(len(self.known))
        said = await self.client.post(CHAT, json=self.body(which))
        self.saw(said.status_code, "whole")
        if said.status_code == 200:
            self.check(which, said.json()["choices"][0]["message"]["content"])

    async def stream(self, leave: bool = False) -> None:
        """A stream, read to its end or left in the middle."""
        which, text = self.rng.randrange(len(self.known)), ""
        body = {**self.body(which), "stream": True}
        async with self.client.stream("POST", CHAT, json=body) as said:
            self.saw(said.status_code, "left stream" if leave else "stream")
            left = self.rng.randrange(6) if leave else None
            if said.status_code != 200:
                return
            ended = False
            async for line in said.aiter_lines():
                if line == "data: [DONE]":
                    ended = True
                elif line.startswith("data: "):
                    frame = json.loads(line[6:])
                    if "error" in frame:
                        self.statuses[f"error event {frame['error']['code']}"] += 1
                        return
                    text += frame["choices"][0]["delta"].get("content") or ""
                if left is not None:
                    left -= 1
                    if left <= 0:
                        return
        if not ended:
            self.lost += 1
        self.check(which, text)

    async def leave(self) -> None:
        """A stream left in the middle."""
        await self.stream(leave=True)

    async def vanish(self) -> None:
        """A connection that breaks in the middle of the body, or right after it."""
        body = json.dumps(self.body(self.rng.randrange(99))).encode()
        url = self.client.base_url
        _, writer = await asyncio.open_connection(url.host, url.port)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: {url.host}\r\nContent-Type: application/json\r\n"
        writer.write(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode())
        writer.write(body[: self.rng.choice((0, 10, len(body)))])
        with suppress(ConnectionError):
            await writer.drain()
            await asyncio.sleep(self.rng.random() / 10)
        writer.close()
        self.statuses["vanished"] += 1

    async def broken(self) -> None:
        """What is no request: broken JSON, unknown fields, values out of range."""
        content = self.rng.choice(
            (
                b"{not json",
                b"[" * 100_000,
                b'{"messages": [{"role": "user", "content": "hi"}], "tempersture": 1}',
                b'{"messages": [{"role": "user", "content": "hi"}], "temperature": -1}',
                b'{"messages": [], "max_tokens": 4}',
                b'{"prompt": [999999999]}',
                b"\xff\xfe\x00",
                b"",
            )
        )
        url = self.rng.choice((CHAT, TEXT, "/v1/responses", "/v1/messages", "/tokenize"))
        headers = {"content-type": "application/json"}
        said = await self.client.post(url, content=content, headers=headers)
        self.saw(said.status_code, "broken")
        if said.status_code < 400:
            self.wrong.append(f"{content[:40]!r} was taken at {url}")

    async def large(self) -> None:
        """A body beyond the limit; the server may hang up before it is sent."""
        body = {"prompt": "x" * (9 << 20)}
        try:
            said = await self.client.post(TEXT, json=body)
            self.saw(said.status_code, "large")
        except (httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
            self.statuses["large, hung up"] += 1

    async def late(self) -> None:
        """A deadline that cannot be kept."""
        said = await self.client.post(CHAT, json={**self.body(1), "deadline": 1e-4})
        self.saw(said.status_code, "late")

    async def one(self) -> None:
        """Something, good or bad."""
        acts = (
            self.whole,
            self.stream,
            self.leave,
            self.vanish,
            self.broken,
            self.large,
            self.late,
        )
        act = self.rng.choices(acts, (30, 30, 15, 10, 12, 1, 2))[0]
        try:
            await act()
        except httpx.TransportError as problem:
            if not self.stopping:
                self.wrong.append(f"{act.__name__}: {problem!r}")
            elif not isinstance(problem, httpx.ConnectError):
                self.lost += 1

    async def load(self, until: float) -> None:
        """One client until then."""
        while time.monotonic() < until and not self.stopping:
            await self.one()
            await asyncio.sleep(self.pause * 2 * self.rng.random())

    async def weigh(self, began: float, until: float) -> None:
        """Resident memory of the server, from its own metrics."""
        while time.monotonic() < until and not self.stopping:
            self.memory.append(
                (time.monotonic() - began, await self.gauge("resident_memory_bytes"))
            )
            await asyncio.sleep(EVERY)

    async def gauge(self, name: str) -> float:
        """One figure of /metrics."""
        said = await self.client.get("/metrics")
        found = re.search(rf"^\S*{name}(?:{{[^}}]*}})? (\S+)$", said.text, re.M)
        return float(found[1]) if found else float("nan")


async def run(flags: Namespace, server: subprocess.Popen[str], address: str) -> dict[str, Any]:
    """The whole soak, SIGTERM included."""
    limits = httpx.Limits(max_connections=flags.clients + 4)
    async with httpx.AsyncClient(base_url=address, timeout=PATIENCE, limits=limits) as client:
        soak = Soak(client, random.Random(flags.seed), flags.tokens, flags.pause)
        await soak.learn(flags.known)
        began = time.monotonic()
        until = began + 60 * flags.minutes
        loads = [soak.load(until) for _ in range(flags.clients)]
        seconds = 60 * flags.minutes - 60
        extra = [fuzzed(address, seconds, flags.fuzz)] if flags.fuzz and seconds > 0 else []
        done: list[Any] = await asyncio.gather(soak.weigh(began, until), *extra, *loads)
        if extra and done[1][0]:
            soak.wrong.append(f"schemathesis found something: {done[1][1]}")
        await asyncio.sleep(2)
        left = await soak.gauge("num_requests_running") + await soak.gauge("num_requests_waiting")
        # the same load again, and the signal in the middle of it
        loads = [soak.load(time.monotonic() + 60) for _ in range(flags.clients)]
        again = asyncio.gather(*loads)
        await asyncio.sleep(2)
        soak.stopping = True
        server.send_signal(signal.SIGTERM)
        await again
    return {**judged(soak), "left_behind": left, "fuzzed": done[1][1] if extra else None}


async def fuzzed(address: str, seconds: float, rate: float) -> tuple[int, str]:
    """schemathesis over the OpenAPI document for so long: its exit status and last words."""
    process = await asyncio.create_subprocess_exec(
        *fuzz.command(address, seconds, seed=0, patience=PATIENCE),
        *("--rate-limit", f"{rate:g}/s"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    return process.returncode or 0, said.decode(errors="replace")[-2000:]


def judged(soak: Soak) -> dict[str, Any]:
    """The figures, and whether they are good."""
    cut = soak.memory[-1][0] / 4 if soak.memory else 0
    late = [size for when, size in soak.memory if when >= cut]
    half = len(late) // 2
    means = [sum(part) / max(1, len(part)) for part in (late[:half], late[half:])]
    growth = means[1] / means[0] - 1 if half else float("nan")
    return {
        "replies": dict(sorted(soak.statuses.items())),
        "requests": sum(soak.statuses.values()),
        "wrong": soak.wrong[:20],
        "wrong_count": len(soak.wrong),
        "lost": soak.lost,
        "memory_mib": [round(size / 2**20, 1) for _, size in soak.memory[:: max(1, half // 8)]],
        "memory_growth": round(growth, 4),
        "memory_flat": abs(growth) <= SHARE,
    }


def main() -> None:
    """Run, print, and exit 1 if anything is wrong."""
    flags = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("--minutes", type=float, default=30)
    flags.add_argument("--clients", type=int, default=8)
    flags.add_argument("--known", type=int, default=40, help="prompts whose answer is checked")
    flags.add_argument("--tokens", type=int, default=24)
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--pause", type=float, default=0.0, help="seconds between a client's acts")
    flags.add_argument("--fuzz", type=float, default=0.0, help="schemathesis' requests a second")
    flags.add_argument("--out", type=Path, default=None)
    given, more = flags.parse_known_args()
    with tempfile.TemporaryFile("w+") as log, served(more, log) as (server, address):
        found = asyncio.run(run(given, server, address))
        code = server.wait(90)
    result = {"conditions": record.conditions(None), "exit_code": code, **found}
    print(json.dumps(result, indent=1))
    if given.out is not None:
        record.write(given.out, result)
    good = not result["wrong_count"] and not result["lost"] and not result["left_behind"]
    sys.exit(0 if good and code == 0 and result["memory_flat"] else 1)


if __name__ == "__main__":
    main()
