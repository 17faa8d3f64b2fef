"""What a request of `dflash.llama.Llama` asks for, from llama-cpp-python's words to ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash.checks import at_least, is_number, switch, whole_number
from dflash.errors import ConfigError

SAMPLING = {  # their name -> ours
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
    "logit_bias": "logit_bias",
    "logprobs": "logprobs",
    "echo": "echo",
    "ignore_eos": "ignore_eos",
}
LARGEST = 2**30  # tokens; as far as the context goes
ANY_SEED = -1


def sampling(options: Mapping[str, Any], seed: int | None) -> dict[str, Any]:
    """Our options for theirs; ``seed`` where none is given. Raises ConfigError for one that has no
    meaning here."""
    given = dict(options)
    stop = given.pop("stop", None)
    limit = given.pop("max_tokens", 16)
    unknown = sorted(set(given) - set(SAMPLING))
    if unknown:
        raise ConfigError(
            f"unknown option {unknown[0]!r}. Known: max_tokens, stop, {', '.join(SAMPLING)}; "
            "for a chat top_logprobs, too"
        )
    asked = {SAMPLING[name]: value for name, value in given.items() if value is not None}
    top_k: Any = asked.get("top_k")
    if is_number(top_k) and top_k < 0:  # off, as theirs
        asked["top_k"] = 0
    asked["seed"] = fixed_seed(asked.get("seed", seed))
    whole_number("max_tokens", limit)
    whole = limit is None or limit <= 0  # as far as the context goes
    return {"max_tokens": LARGEST if whole else limit, "stop": stop or (), **asked}


def fixed_seed(seed: Any) -> Any:
    """None, a fresh seed for each request, for their -1; any other as it is."""
    return None if is_number(seed) and seed == ANY_SEED else seed


def chat_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """A chat's: it goes on to its end, and two options say what ``logprobs`` says of a completion.

    Raises ConfigError for two that contradict each other.
    """
    given: dict[str, Any] = {"max_tokens": None, **options}
    wanted, most = given.pop("logprobs", None), given.pop("top_logprobs", None)
    switch("logprobs", False if wanted is None else wanted)
    at_least(0, "top_logprobs", most)
    if most is not None and not wanted:
        raise ConfigError("top_logprobs says how many, and nothing asks for any: add logprobs=True")
    return {**given, "logprobs": (most or 0) if wanted else None}


def message_text(content: Any) -> str:
    """The text of a message's content. Raises ConfigError naming a part that is none."""
    if isinstance(content, str) or content is None:
        return content or ""
    if not isinstance(content, Sequence) or not all(isinstance(p, Mapping) for p in content):
        raise ConfigError(f"a message's content must be text or a list of parts, got {content!r}")
    for part in content:
        if part.get("type") == "text" and not isinstance(part.get("text"), str):
            raise ConfigError(f"a part of type 'text' must have a text, got {part!r}")
        if part.get("type") != "text":
            raise ConfigError(
                f"a message has a part of type {part.get('type')!r}: speculative decoding here is "
                "for text only, so leave images and audio out"
            )
    return "".join(part["text"] for part in content)
