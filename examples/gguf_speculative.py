"""Ordinary against speculative decoding of one GGUF pair, as a script to read and change.

    python examples/gguf_speculative.py target.gguf draft.gguf --draft-tokens 7

`dflash compare` does the same with more figures. Both arms share weights, prompt, seed and stopping
rules; the ids must be the same.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from dflash.errors import DFlashError
from dflash.llama import Llama, SpecConfig, SpeculativeType

PROMPT = "How do rainbows form?"


def run(llama: Llama, prompt: str, tokens: int, runs: int) -> tuple[str, float]:
    """The text, and the best run's seconds."""
    messages = [{"role": "user", "content": prompt}]
    llama.create_chat_completion(messages, max_tokens=8)  # warm up
    seconds = []
    for _ in range(max(runs, 1)):
        start = time.perf_counter()
        answer = llama.create_chat_completion(messages, temperature=0.0, max_tokens=tokens)
        seconds.append(time.perf_counter() - start)
    return answer["choices"][0]["message"]["content"], min(seconds)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the flags; a file or a number that will not do is one sentence."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("draft", help="a DFlash sidecar's .gguf, or ngram")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--draft-tokens", type=int, default=7)
    parser.add_argument("--runs", type=int, default=3)
    flags = parser.parse_args(arguments)
    try:
        compare(flags)
    except (DFlashError, ValueError) as problem:
        parser.exit(2, f"error: {problem}\n")


def compare(flags: argparse.Namespace) -> None:
    """Load twice, run, print, and fail when the texts differ."""
    with Llama(flags.model, n_ctx=0) as llama:
        plain, before = run(llama, flags.prompt, flags.max_tokens, flags.runs)

    if flags.draft == "ngram":
        spec = SpecConfig(SpeculativeType.NGRAM_SIMPLE, flags.draft_tokens)
    else:
        spec = SpecConfig(
            SpeculativeType.DRAFT_DFLASH, flags.draft_tokens, draft_model_path=flags.draft
        )
    with Llama(flags.model, n_ctx=0, speculative=spec) as llama:
        text, after = run(llama, flags.prompt, flags.max_tokens, flags.runs)
        stats = llama.last_speculative_stats

    print(text)
    print(f"\nordinary {before:.2f} s, speculative {after:.2f} s: {before / after:.2f} x")
    print(f"accepted {stats['accepted']} of {stats['drafted']} drafts", end=", ")
    print(f"{stats['mean_accepted_length']:.2f} tokens a verification")
    if text != plain:
        raise SystemExit(f"the texts differ:\n{plain}")
    print("the texts are the same")


if __name__ == "__main__":
    main()
