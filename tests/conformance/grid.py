"""Many prompts through every block size and way of decoding, against one token at a time.

    python -m tests.conformance.grid --prompts 500 --backends torch,toy

Runs the tiny pairs of the conformance suite with scripted drafts: right for a random number of
tokens each round. Prints every difference as it is found, with the gap of the two logits there, and
how many texts were compared; the exit status is 1 if one is wider than a tie. A few prompts are a
test.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dflash.backends.toy import ScriptedDraft
from dflash.config import GenerateConfig
from dflash.core.accept import choose
from dflash.core.logits import process
from dflash.core.types import Request
from dflash.engine import Engine
from dflash.grammar import Grammars
from dflash.requests import make_request
from tests.conformance.backends import BLOCK, MAKERS, Backend, Scripted

BLOCKS = (2, 4, 8, "auto")
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "constrained": {"regex": "([a-m]{1,4}[0-9]{1,3} ){2,9}[.!?]"},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 11, "no_repeat_ngram": 3},
}
TOKENS = 24
REPORT = 400  # texts from one line of progress to the next
TIE = 1e-5  # logits; sums of float32 in another order differ by less


def plain(backend: Backend, request: Request) -> list[int]:
    """One token at a time: no cache, no loop, the options' one definition."""
    said: list[int] = []
    while len(said) < request.max_tokens:
        row = backend.plain.logits([*request.prompt, *said])
        said.append(choose(process(row, request, said), request.sampling, len(said)))
        if request.grammar is not None:
            request.grammar.commit(said[-1:])
        if said[-1] in request.stop_ids:
            break
    return said


class Told(Scripted):
    """A scripted pair whose draft is told the text it has to say."""

    text: Sequence[int] = ()

    def open_drafts(self, capacity: int) -> list[ScriptedDraft]:
        def ahead(request: Request, output: Sequence[int], count: int) -> list[int]:
            return list(self.text[len(output) :][:count])

        size = self._backend.pair.vocab_size
        return [ScriptedDraft(ahead, size, self._script, BLOCK - 1)]


def gap(backend: Backend, request: Request, said: Sequence[int], found: Sequence[int]) -> float:
    """How much likelier, in logits, ``said`` was at the first difference; 0 = no difference.

    A length alone is no matter of rounding: infinity.
    """
    if said == found:
        return 0.0
    at = next((i for i, (a, b) in enumerate(zip(said, found, strict=False)) if a != b), None)
    if at is None or request.grammar is not None or request.sampling.temperature:
        return float("inf")  # where masks and noise are, the gap of logits decides nothing
    row = process(backend.plain.logits([*request.prompt, *said[:at]]), request, said[:at])
    return float(row[said[at]] - row[found[at]])


def compare(backend: Backend, prompts: int, seed: int = 0) -> Iterator[tuple[str, float]]:
    """(what was compared, `gap`) for every prompt, way and block size."""
    rng = random.Random(seed)
    for number in range(prompts):
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 40))]
        pair = Told(backend, [rng.randint(0, 7) for _ in range(9)], frozenset({0, 77}))
        grammars = Grammars(pair)
        for way, options in WAYS.items():
            config = GenerateConfig(max_tokens=TOKENS, **options)
            grammar = grammars.start(config.constraint)
            request = make_request(pair, prompt, config, grammar=grammar)
            expected = plain(backend, request)
            pair.text = expected
            for size in BLOCKS:
                with Engine(pair) as engine:
                    asked = {**options, "max_tokens": TOKENS, "block_size": size}
                    found = list(engine.generate(prompt, **asked).token_ids)
                what = f"{backend.name} prompt {number} {way} block {size}"
                yield what, gap(backend, request, expected, found)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, print, exit 1 on a difference."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--backends", default=",".join(sorted(MAKERS)), help="several with commas")
    flags = parser.parse_args(arguments)
    failed = 0
    for name in flags.backends.split(","):
        failed += _all(name, flags.prompts)
    sys.exit(failed > 0)


def _all(name: str, prompts: int) -> int:
    """Compare on one backend, printing as it goes. Returns the number of real differences."""
    texts = wrong = ties = 0
    with tempfile.TemporaryDirectory() as folder:
        for what, wide in compare(MAKERS[name](Path(folder), False), prompts):
            texts, wrong, ties = texts + 1, wrong + (wide > TIE), ties + (0 < wide <= TIE)
            if wide > 0:
                print(f"{what}: {'tie, ' * (wide <= TIE)}{wide:.1e}", flush=True)
            if texts % REPORT == 0:
                print(f"{name}: {texts} texts so far", flush=True)
    print(f"{name}: {texts} texts, {wrong} real differences, {ties} ties", flush=True)
    return wrong


if __name__ == "__main__":
    main()
