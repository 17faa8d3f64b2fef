"""Taking a cache back to an earlier token, recurrent layers included.

Keys and values are cropped. A recurrent state has absorbed the rejected rows and cannot be
cropped; it comes back in one of two ways:

* *within the last recorded pass*: the state from before it is restored, and the layers that own a
  state (not the whole model) run the kept rows again, from the inputs they had. No other layer's
  result changes by it, so the cache is that of a pass of the kept rows alone;
* *further back*: the newest remembered place at or before the wanted token is restored, and the
  caller runs the rows from there on. Places are remembered at the end of prompts, which is where
  the next turn of a chat usually resumes.

For caches without recurrent layers everything is a change of length.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dflash.backends.torch.cache import PreallocatedCache
from dflash.backends.torch.rollback_state import State

PLACES = 3  # remembered places; each holds a copy of every recurrent state


class Place(NamedTuple):
    """A token count, and every recurrent state at it."""

    length: int
    states: list[State]


class Call(NamedTuple):
    """A module that wrote a recurrent state, and what it was called with."""

    module: nn.Module
    args: tuple[Any, ...]
    options: dict[str, Any]


@dataclass
class Pass:
    """A forward that can be taken back to any of its rows."""

    start: Place
    calls: list[Call] = field(default_factory=list)
    rows: int = 0
    end: int = 0  # tokens held after it; fewer once it was taken back


class Rewind:
    """Moves one cache of one model back. Not for use by several threads at a time."""

    def __init__(self, model: Any, cache: PreallocatedCache) -> None:
        """Looks for the modules that could own a state; hooks exist only while `record` runs."""
        self._cache = cache
        self._model = model
        self._owners = _owners(model) if cache.states else []
        self._places: list[Place] = []
        self._last: Pass | None = None

    @property
    def recurrent(self) -> bool:
        """Whether any layer keeps a state that cannot be cropped."""
        return bool(self._cache.states)

    def fork(self, cache: PreallocatedCache) -> Rewind:
        """The same for a copy of the cache; places are shared, they never change."""
        twin = Rewind(self._model, cache)
        twin._places = list(self._places)
        return twin

    @contextmanager
    def record(self) -> Iterator[None]:
        """Make the one forward inside a pass that `to` can go back into."""
        if not self.recurrent:
            yield
            return
        self._last = None
        found = Pass(self._here())
        with ExitStack() as hooks:
            for module in self._owners:
                hook = module.register_forward_hook(self._keeper(found), with_kwargs=True)
                hooks.callback(hook.remove)
            yield
        found.end = self._cache.length
        found.rows = found.end - found.start.length
        self._last = found

    def remember(self) -> None:
        """Keep the state here, so that a later prompt can resume at this token."""
        if self.recurrent:
            kept = [place for place in self._places if place.length < self._cache.length]
            self._places = [*kept, self._here()][-PLACES:]

    def reach(self, length: int) -> int:
        """The longest token count, at most ``length``, that `to` would arrive at."""
        if not self.recurrent or length == self._cache.length or self._inside(length):
            return length
        return max((place.length for place in self._places if place.length <= length), default=0)

    def to(self, length: int) -> int:
        """Go back to ``length`` tokens, or to the nearest place before; returns where it is."""
        reached = self.reach(length)
        if reached == self._cache.length:
            return reached
        if self.recurrent:
            if self._last is not None and self._inside(reached):
                self._replay(self._last, reached)
            else:
                self._restore(self._place(reached))
                self._last = None
        self._cache.rollback(reached)
        self._places = [place for place in self._places if place.length <= reached]
        return reached

    def forget(self) -> None:
        """Drop every copy of a state; idempotent."""
        self._places, self._last = [], None

    def bytes(self) -> int:
        """Bytes of the remembered states."""
        held = [*self._places, *([self._last.start] if self._last else [])]
        sides = [side for place in held for state in place.states for side in state]
        return sum(part.nbytes for side in sides for part in side.values() if part is not None)

    def _here(self) -> Place:
        with torch.inference_mode():
            return Place(self._cache.length, [layer.save() for layer in self._cache.states])

    def _inside(self, length: int) -> bool:
        """Whether the last recorded pass ran the token at ``length`` and nothing came after it."""
        last = self._last
        return (
            last is not None
            and last.end == self._cache.length
            and last.start.length <= length < last.end
        )

    def _place(self, length: int) -> Place:
        empty = Place(0, [({}, {})] * len(self._cache.states))
        return next((p for p in reversed(self._places) if p.length == length), empty)

    def _restore(self, place: Place) -> None:
        with torch.inference_mode():
            for layer, state in zip(self._cache.states, place.states, strict=True):
                layer.restore(state)

    def _replay(self, last: Pass, length: int) -> None:
        """Run the first rows of the last pass again where there is a state."""
        self._restore(last.start)
        keep, last.end = length - last.start.length, length
        if keep:
            with torch.inference_mode():
                for module, args, options in last.calls:
                    module(*_cut(args, last.rows, keep), **_cut(options, last.rows, keep))

    def _keeper(self, found: Pass) -> Any:
        """A hook that notes calls that wrote a state: of the innermost module, which ends first."""
        owner = get_ident()

        def keep(module: Any, args: tuple[Any, ...], options: dict[str, Any], _out: Any) -> None:
            layer = self._cache.layers[module.layer_idx]
            if get_ident() == owner and getattr(layer, "touched", False):
                layer.touched = False
                found.calls.append(Call(module, args, options))

        return keep


def _owners(model: Any) -> list[nn.Module]:
    """Modules that know which layer of the cache is theirs."""
    return [m for m in model.modules() if isinstance(getattr(m, "layer_idx", None), int)]


def _cut(value: Any, rows: int, keep: int) -> Any:
    """``value`` with the first ``keep`` of ``rows`` in every tensor ``[B, rows, ...]`` in it."""
    if isinstance(value, Tensor):
        has_rows = value.dim() >= 2 and value.shape[1] == rows
        return value[:, :keep] if has_rows else value
    if isinstance(value, dict):
        return {name: _cut(part, rows, keep) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_cut(part, rows, keep) for part in value)
    return value
