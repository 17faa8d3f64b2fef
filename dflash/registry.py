"""Names to objects, imported on use, so that naming a backend never imports it."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from dflash.errors import UnknownName


class Registry:
    """A fixed table ``name -> "module:attribute"``; ``load`` imports the module when asked."""

    def __init__(self, kind: str, table: Mapping[str, str]) -> None:
        """``kind`` is the word used in errors (backend, draft)."""
        self.kind = kind
        self._table = dict(table)

    def names(self) -> list[str]:
        """All registered names, sorted."""
        return sorted(self._table)

    def load(self, name: str) -> Any:
        """The object behind ``name``. Raises UnknownName with the known names."""
        if name not in self._table:
            close = get_close_matches(name, self._table, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise UnknownName(
                f"unknown {self.kind} {name!r}. Known: {', '.join(self.names())}.{hint}"
            )
        module, _, attribute = self._table[name].partition(":")
        return getattr(import_module(module), attribute)


BACKENDS = Registry(
    "backend",
    {
        "gguf": "dflash.backends.gguf:open_pair",
        "mlx": "dflash.backends.mlx:open_pair",
        "torch": "dflash.backends.torch:open_pair",
        "toy": "dflash.backends.toy:open_pair",
    },
)

PROBES = Registry(
    "probe",
    {
        "gguf": "dflash.backends.gguf.probe:GgufProbe",
        "mlx": "dflash.backends.mlx.probe:MlxProbe",
        "torch": "dflash.backends.torch.probe:TorchProbe",
        "toy": "dflash.backends.toy.probe:ToyProbe",
    },
)
"""Backend name to what audits see of its pairs, see `dflash.verify.probe`."""

WRAPPERS = Registry("model library", {"torch": "dflash.backends.torch.wrap:wrap_pair"})
"""Library to a pair over a model that the user loaded with it."""

DRAFT_RUNNERS = Registry(
    "draft runner",
    {
        "mlx": "dflash.backends.mlx.draft_run:RUNNER",
        "torch": "dflash.backends.torch.draft_run:RUNNER",
    },
)
"""Backend name to what runs a draft alone, on features that are given (`dflash.convert.check`)."""
