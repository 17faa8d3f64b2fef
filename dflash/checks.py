"""The questions every config asks of its values. What is wrong raises ConfigError."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from math import inf
from numbers import Integral, Real
from operator import index
from sys import float_info
from typing import Any

from dflash.errors import ConfigError

MOST_THREADS = 512  # what llama.cpp has room for; torch takes more, and counts in 32 bits
LARGEST = 1e10  # of what is added to logits: more could overflow float32 at a low temperature


def set_fields(config: Any, **values: Any) -> None:
    """Assign fields of a frozen dataclass, for its own ``__post_init__``."""
    for name, value in values.items():
        object.__setattr__(config, name, value)


def plain_numbers(config: Any) -> None:
    """Fields that hold another library's numbers (numpy's, fractions) get Python's own.

    For ``__post_init__``, before anything is checked; arrays and tensors are no numbers.
    """
    for field in fields(config):
        set_fields(config, **{field.name: _plain_number(getattr(config, field.name))})


def _plain_number(value: Any) -> Any:
    if isinstance(value, int | float) or not isinstance(value, Real):
        return value
    try:
        return int(value) if isinstance(value, Integral) else float(value)
    except OverflowError:
        return inf  # which no check lets pass


def is_number(value: Any) -> bool:
    """A finite int or float, no larger than a float can be, and no bool."""
    whole = isinstance(value, int | float) and not isinstance(value, bool)
    return whole and abs(value) <= float_info.max


def at_least(least: int, name: str, value: Any, *, required: bool = False, hint: str = "") -> None:
    """A whole number of ``least`` or more; None passes unless ``required``."""
    if value is None and not required:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be a whole number of {least} or more{hint}, got {value!r}")


def whole_number(name: str, value: Any) -> None:
    """A whole number, of either sign; None passes."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise ConfigError(f"{name} must be a whole number, got {value!r}")


def threads(name: str, value: Any) -> None:
    """A number of threads that every backend can make; None passes."""
    at_least(1, name, value)
    if value is not None and value > MOST_THREADS:
        raise ConfigError(f"{name} must be at most {MOST_THREADS}, got {value}")


def within(name: str, value: Any, wanted: Callable[[float], bool], words: str) -> None:
    """A number that is ``wanted``; ``words`` say what that is."""
    if not is_number(value) or not wanted(value):
        raise ConfigError(f"{name} must be {words}, got {value!r}")


def switch(name: str, value: Any) -> None:
    """True or False and nothing that merely counts as one."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, got {value!r}")


def strings(name: str, value: Any) -> tuple[str, ...]:
    """One string or several, none empty, each once; None = none."""
    if value is None:
        return ()
    listed = isinstance(value, Iterable) and not isinstance(value, str)
    given = tuple(value) if listed else (value,)
    if any(not isinstance(text, str) or not text for text in given):
        raise ConfigError(f"{name} must be non-empty strings, got {value!r}")
    return tuple(dict.fromkeys(given))


def token_ids(value: Any) -> tuple[int, ...]:
    """Token ids from an int, None, or any (nested) sequence, set, array or tensor of ints.

    Each once. Raises ConfigError for anything else, negative ids included.
    """
    return tuple(dict.fromkeys(_each_id(value)))


def token_sequences(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    """Sequences of token ids, none empty; None = none. Raises ConfigError."""
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise ConfigError(f"{name} must be a list of lists of token ids, got {value!r}")
    try:
        found = tuple(tuple(_each_id(_plain(item))) for item in value)
    except ConfigError as problem:
        raise ConfigError(f"{name}: {problem}") from None
    if not all(found):
        raise ConfigError(f"{name} must not hold an empty sequence of tokens")
    return tuple(dict.fromkeys(found))


def logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """``{token: bias}``, or pairs of the two; JSON's string keys are understood; None = none."""
    if value is None:
        return ()
    pairs = tuple(value.items()) if isinstance(value, Mapping) else value
    try:
        found = {_token(token): _plain_number(bias) for token, bias in pairs}
    except (TypeError, ValueError):
        raise ConfigError(
            f"logit_bias must map token ids to numbers, as in {{50256: -100}}; got {value!r}"
        ) from None
    for token, bias in found.items():
        if token < 0 or not is_number(bias) or abs(bias) > LARGEST:
            raise ConfigError(
                f"logit_bias of token {token} is {bias!r}: ids are 0 or more, biases "
                f"are numbers between -{LARGEST:g} and {LARGEST:g}"
            )
    return tuple(sorted((token, float(bias)) for token, bias in found.items()))


def _token(given: Any) -> int:
    """Raises TypeError for what is not whole: 1.5 is nobody's id."""
    return int(given) if isinstance(given, str) else index(given)


def callables(name: str, value: Any) -> tuple[Callable[..., Any], ...]:
    """One callable or several; None = none."""
    several = isinstance(value, Iterable)
    given = () if value is None else tuple(value) if several and not callable(value) else (value,)
    if not all(callable(item) for item in given):
        raise ConfigError(f"{name} must be callables (ids, logits) -> logits, got {value!r}")
    return given


def _plain(value: Any) -> Any:
    """Arrays and tensors of every library as lists, without importing one."""
    return value.tolist() if hasattr(value, "tolist") else value


def _each_id(value: Any) -> Iterable[int]:
    value = _plain(value)
    if value is None:
        return
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ConfigError(f"token ids must be 0 or more, got {value}")
        yield value
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
        for item in value:
            yield from _each_id(item)
    else:
        raise ConfigError(f"token ids must be integers, got {value!r}")


def counted(number: int, word: str, several: str = "") -> str:
    """``1 token``, ``2 tokens``; ``several`` where an s is not enough: ``passes``."""
    return f"{number} {word}" if number == 1 else f"{number} {several or word + 's'}"


def readable(count: int) -> str:
    """``1536 -> '1.5 KiB'``."""
    if count < 1024:
        return f"{count} bytes"
    power = min((count.bit_length() - 1) // 10, 4)
    return f"{count / 1024**power:.1f} {'KMGT'[power - 1]}iB"
