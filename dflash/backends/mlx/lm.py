"""Everything that is asked of mlx-lm's inside, in one place, for it moves between releases.

Names are looked up, never imported, where that suffices: classes of caches by their name, modules
by what they have. Nothing of mlx-lm is replaced: not a class, not a function, not a model's method.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import RLock
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from dflash.checkpoint import read_config
from dflash.drafts.mtp import FINAL_NORM
from dflash.errors import CheckpointError

LOAD_ERRORS = (OSError, ValueError, TypeError, KeyError, RuntimeError, ImportError, AttributeError)
_TURN = RLock()  # forwards are written down one at a time: that takes microseconds a layer
_INSIDE = ("model", "language_model", "backbone", "transformer")


def load(folder: Path, *, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """``(model, tokenizer)`` as mlx-lm loads them. Raises CheckpointError."""
    import mlx_lm

    config = read_config(folder)
    try:
        found = mlx_lm.load(
            str(folder),
            tokenizer_config={"trust_remote_code": trust_remote_code},
            model_config={**older_names(config), **_family(config)},
        )
    except LOAD_ERRORS as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"mlx-lm cannot load {folder}: {first}") from error
    return found[0], found[1]


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Parameters of the model that ``config`` describes, by name; none is computed."""
    whole = {**config, **older_names(config), **_family(config)}
    module: Any = import_module(f"mlx_lm.models.{whole['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(whole))
    return {name: tuple(weight.shape) for name, weight in tree_flatten(model.parameters())}


def older_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers 5 writes into a config under new names, under the ones it had before.

    Most model files of mlx-lm know those alone and take a default of their own where they find
    none: the text is then almost right. Only what is not there already, as an update.
    """
    found = {**_rotation(config.get("rope_parameters")), **_pattern(config.get("layer_types"))}
    if "num_local_experts" in config:
        found["num_experts"] = config["num_local_experts"]
    found = {name: value for name, value in found.items() if config.get(name) is None}
    text = config.get("text_config")
    if isinstance(text, Mapping) and (inner := older_names(text)):
        found["text_config"] = {**text, **inner}
    return found


def _family(config: Mapping[str, Any]) -> dict[str, str]:
    """The text part of a family that mlx-lm knows as a whole only; its files read both."""
    kind = str(config.get("model_type"))
    whole = kind.removesuffix("_text")
    if whole == kind or find_spec(f"mlx_lm.models.{kind}") is not None:
        return {}
    return {"model_type": whole}


def _rotation(ropes: Any) -> dict[str, Any]:
    if not isinstance(ropes, Mapping):
        return {}
    found: dict[str, Any] = {}
    local, whole = ropes.get("sliding_attention"), ropes.get("full_attention", ropes)
    if isinstance(local, Mapping) and "rope_theta" in local:
        found["rope_local_base_freq"] = local["rope_theta"]
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in whole:
            found[name] = whole[name]
    kind = whole.get("rope_type", whole.get("type"))
    plain = kind in (None, "default")  # some model files insist on being told that, too
    found["rope_scaling"] = None if plain else {**whole, "type": kind, "rope_type": kind}
    return found


def _pattern(types: Any) -> dict[str, int]:
    """Every n-th layer sees everything, where that is how the layers' types repeat."""
    full = "full_attention"
    if not isinstance(types, list) or full not in types or len(set(types)) == 1:
        return {}
    step = types.index(full) + 1
    regular = all((kind == full) == (place % step == 0) for place, kind in enumerate(types, 1))
    return {"sliding_window_pattern": step} if regular else {}


def stack_of(model: Any) -> Any:
    """The module that has the decoder layers and the embedding. Raises CheckpointError."""
    queue = [model]
    while queue:
        module = queue.pop(0)
        if isinstance(_get(module, "layers"), list) and _get(module, "embed_tokens") is not None:
            return module
        queue += [part for part in (_get(module, name) for name in _INSIDE) if part is not None]
    raise CheckpointError(
        f"{type(model).__module__} has no decoder layers beside an embedding where they are looked "
        "for, so its hidden states cannot be tapped. Use it with --draft none, or another target"
    )


def head_of(model: Any) -> Any:
    """The callable ``[.., Ht] -> [.., V]`` that ends the model, without a soft cap."""
    queue = [model]
    while queue:
        module = queue.pop(0)
        if callable(_get(module, "lm_head")):
            return module.lm_head
        queue += [part for part in (_get(module, name) for name in _INSIDE) if part is not None]
    return stack_of(model).embed_tokens.as_linear


def _get(module: Any, name: str) -> Any:
    """An attribute that is not a property in disguise of another module's list."""
    found = module.get(name) if isinstance(module, dict) else None
    return getattr(module, name, None) if found is None and name == "lm_head" else found


def new_caches(model: Any) -> list[Any]:
    """mlx-lm's own caches for ``model``, one a layer, empty."""
    from mlx_lm.models.cache import make_prompt_cache

    return list(make_prompt_cache(model))


def causal_mask(rows: int, before: int, window: int, *, always: bool = False) -> Any:
    """What attention takes for ``rows`` after ``before`` shown ones: a mask [rows, keys] or a word.

    ``window`` counts the query's own place; ``always`` makes a mask where a word would do.
    """
    if before + rows <= window and not always:
        return None if rows == 1 else "causal"
    keys = mx.arange(before + rows)
    queries = mx.arange(before, before + rows)[:, None]
    return (keys <= queries) & (keys > queries - window)


class Tap:
    """Stands in for a decoder layer for one forward, and remembers what it gave."""

    def __init__(self, layer: Any) -> None:
        """``layer`` does the work."""
        self.layer = layer
        self.state: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's result, unchanged."""
        found = self.layer(*args, **kwargs)
        self.state = found[0] if isinstance(found, tuple) else found
        return found

    def rows(self, start: int) -> Any:
        """``[n, Ht]``: the state from row ``start`` on (batch 1)."""
        assert self.state is not None, "the forward passed this layer by"
        return self.state[0, start:]

    def __getattr__(self, name: str) -> Any:
        """What the model asks of its layers (is it linear, which window)."""
        if name in ("layer", "state"):  # not set yet: a copy in progress
            raise AttributeError(name)
        return getattr(self.layer, name)


@contextmanager
def tapped(model: Any, layers: tuple[int, ...]) -> Iterator[list[Tap]]:
    """Taps on ``layers`` of this model object while a forward is written down (not run: lazy).

    ``FINAL_NORM`` stands for the norm behind the last. The model's own list of layers holds the
    taps, and its layers again afterwards. Threads take turns; other models never notice.
    """
    with _TURN:
        places = [_place(model, layer) for layer in layers]
        own = [held[key] for held, key in places]
        taps = [Tap(module) for module in own]
        try:
            for (held, key), tap in zip(places, taps, strict=True):
                held[key] = tap
            yield taps
        finally:
            for (held, key), module in zip(places, own, strict=True):
                held[key] = module


def _place(model: Any, layer: int) -> tuple[Any, Any]:
    """What holds ``layer``, and under which key; a module of MLX is a mapping of its parts."""
    stack = stack_of(model)
    if layer != FINAL_NORM:
        return stack.layers, layer
    for name in ("norm", "final_layernorm", "norm_f"):
        if callable(stack.get(name)):
            return stack, name
    raise CheckpointError(f"{type(stack).__name__} has no final norm that could be tapped")
