"""Servers over the toy pair, spoken to in process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from queue import Queue
from threading import Thread
from typing import Any

import pytest
from fastapi.testclient import TestClient

from dflash.backends.toy import ToyModel, ToyPair, ToyTokenizer
from dflash.backends.toy.model import EOS
from dflash.engine import Engine
from dflash.serve import ServeConfig, create_app
from dflash.serve.run import Runner
from dflash.serve.server import Server

Serving = Callable[..., TestClient]


@pytest.fixture
def serving() -> Iterator[Serving]:
    """Makes clients of servers; ``pair``: one to serve; other keywords: fields of ServeConfig."""
    with ExitStack() as stack:

        def make(pair: Any = None, **config: Any) -> TestClient:
            engine = stack.enter_context(Engine(pair or toy_pair()))
            app = create_app(engine, ServeConfig(**config))
            return stack.enter_context(TestClient(app, base_url="http://localhost"))

        yield make


@pytest.fixture
def client(serving: Serving) -> TestClient:
    """A client of a server as it is without further flags."""
    return serving()


def toy_pair(
    script: tuple[int, ...] | None = (1, 3, 0), *, ends: bool = False, **changes: Any
) -> ToyPair:
    """The toy with words, whose text ``ends`` or does not, and a draft that is right by script."""
    model = ToyModel() if ends else ToyModel(eos_ids=frozenset())
    return ToyPair(model, draft_name="toy:script", script=script, **changes)


def chat(text: str = "hello", **fields: Any) -> dict[str, Any]:
    """The body of a chat request at temperature 0."""
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "temperature": 0, "max_tokens": 24, **fields}


class Saying(ToyModel):
    """A toy that answers every chat with the same text, and ends."""

    text = ""

    def _next_word(self, chain: int) -> tuple[int, ...]:
        return (*self.text.encode(), EOS)


def saying(text: str, template: str = "role: content") -> ToyPair:
    """A pair that answers every chat with ``text``; its template contains ``template``."""
    model = Saying()
    object.__setattr__(model, "text", text)
    tokenizer = ToyTokenizer()
    tokenizer.chat_template = template
    pair = ToyPair(model, draft_name="toy:script", script=(2, 0, 5))
    object.__setattr__(pair, "tokenizer", tokenizer)
    return pair


@contextmanager
def listening(pair: Any, **config: Any) -> Iterator[str]:
    """The address of a real server on a free port, in a thread."""
    heard: Queue[str] = Queue()
    with Engine(pair) as engine:
        runner = Runner(Server(engine, ServeConfig(port=0, name="toy", **config)), heard.put)
        thread = Thread(target=runner.run)
        thread.start()
        try:
            yield heard.get(timeout=60).split(" at ")[1]
        finally:
            runner.should_exit = True
            thread.join()
