"""Rotary settings from every spelling in use, to one: a dict per layer type.

Spellings: transformers 4 (``rope_theta`` + ``rope_scaling`` at top level), transformers 5
(``rope_parameters``), and either of them nested per layer type.
Frequencies: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071, sections 3.2 to 3.4).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dflash.errors import CheckpointError

_NEEDS: dict[str, tuple[str, ...]] = {  # keys without which a scaling is undefined
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
_NUMBERS = ("rope_theta", "partial_rotary_factor", *_NEEDS["llama3"])
_LAYER_TYPES = ("full_attention", "sliding_attention")


def read_rope(config: Mapping[str, Any], layer_types: Sequence[str]) -> dict[str, dict[str, Any]]:
    """``{layer type: {"rope_type", "rope_theta", "partial_rotary_factor", ...}}``.

    One entry for each type in ``layer_types``. Sections for several position axes are dropped: a
    draft uses the text axis alone. Raises CheckpointError if the base frequency is nowhere (it is
    never guessed: a wrong one only shows at long context) or the scaling is unknown.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise CheckpointError(f"rope_parameters must be a dict, got {given!r}")
    nested = {name: given[name] for name in _LAYER_TYPES if isinstance(given.get(name), Mapping)}
    return {
        name: _one(config, nested.get(name, {}) if nested else given, name)
        for name in dict.fromkeys(layer_types)
    }


def _one(config: Mapping[str, Any], given: Mapping[str, Any], layer_type: str) -> dict[str, Any]:
    rope = {k: v for k, v in given.items() if k != "type" and not k.startswith("mrope")}
    rope["rope_type"] = given.get("rope_type") or given.get("type") or "default"
    if rope["rope_type"] == "mrope":
        rope["rope_type"] = "default"
    for key in ("rope_theta", "partial_rotary_factor"):
        if rope.get(key) is None and config.get(key) is not None:
            rope[key] = config[key]
    if rope.get("rope_theta") is None:
        raise CheckpointError(
            f"the draft's config.json has no rope_theta for its {layer_type} layers; it cannot be "
            "guessed. Add rope_theta (the value the draft was trained with, usually the target's)"
        )
    rope["partial_rotary_factor"] = rope.get("partial_rotary_factor") or 1.0
    for key in _NUMBERS:
        if rope.get(key) is not None:
            number = _positive(key, rope[key])
            rope[key] = int(number) if key == "original_max_position_embeddings" else number
    if rope["rope_theta"] <= 1:  # all pairs would turn alike, or the wrong way round
        raise CheckpointError(f"rope_theta must be above 1, got {rope['rope_theta']}")
    _check_scaling(rope, config.get("max_position_embeddings"))
    return rope


def _positive(key: str, value: Any) -> float:
    """``value`` as a float. Raises CheckpointError unless it is above 0 and fits."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < 1e300:
        raise CheckpointError(
            f"{key} in the draft's rope settings must be a positive number, got {value!r}"
        )
    return float(value)


def _check_scaling(rope: dict[str, Any], longest: Any) -> None:
    kind = rope["rope_type"]
    if kind not in _NEEDS:
        raise CheckpointError(f"rope_type {kind!r} is not supported; known: {', '.join(_NEEDS)}")
    if "original_max_position_embeddings" in _NEEDS[kind]:
        rope.setdefault("original_max_position_embeddings", longest)
    missing = [key for key in _NEEDS[kind] if rope.get(key) is None]
    if missing:
        raise CheckpointError(
            f"rope_type {kind!r} needs {', '.join(missing)} in the draft's rope_parameters"
        )
    if kind == "llama3" and rope["low_freq_factor"] > rope["high_freq_factor"]:
        raise CheckpointError(
            f"low_freq_factor {rope['low_freq_factor']} is above high_freq_factor "
            f"{rope['high_freq_factor']} in the draft's rope settings: they look exchanged"
        )


def inverse_frequencies(size: int, rope: Mapping[str, Any]) -> tuple[list[float], float]:
    """Inverse frequencies [size / 2] in double precision, and the factor on cosine and sine.

    ``rope`` is one entry of `read_rope`; ``size`` the rotated part of a head.
    """
    theta, kind = rope["rope_theta"], rope["rope_type"]
    plain = [float(theta ** -(i / size)) for i in range(0, size, 2)]
    if kind == "default":
        return plain, 1.0
    factor = float(rope["factor"])
    if kind == "linear":
        return [one / factor for one in plain], 1.0
    if kind == "llama3":
        return [_llama3(one, factor, rope) for one in plain], 1.0
    assert kind == "yarn", f"rope_type {kind} was let through"
    return _yarn(plain, size, factor, rope), _yarn_scale(factor, rope)


def _llama3(plain: float, factor: float, rope: Mapping[str, Any]) -> float:
    """Long waves are stretched, short ones kept, those between (if any can be) blended."""
    turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    share = (turns - low) / (high - low) if high > low else float(turns >= low)
    keep = min(max(share, 0.0), 1.0)
    return float(plain * keep + plain / factor * (1 - keep))


def _yarn(plain: list[float], size: int, factor: float, rope: Mapping[str, Any]) -> list[float]:
    """Dimensions that turn often are kept, those that turn seldom are interpolated."""
    original, theta = rope["original_max_position_embeddings"], rope["rope_theta"]

    def dimension(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(rope.get("beta_fast") or 32)
    high = dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    shares = [min(max((i - low) / max(high - low, 1e-3), 0.0), 1.0) for i in range(size // 2)]
    pairs = zip(plain, shares, strict=True)
    return [one * (1 - share) + one / factor * share for one, share in pairs]


def _yarn_scale(factor: float, rope: Mapping[str, Any]) -> float:
    given = rope.get("attention_factor")
    if given is not None:
        return float(given)

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    over, under = rope.get("mscale"), rope.get("mscale_all_dim")
    return magnitude(over) / magnitude(under) if over and under else magnitude(1.0)
