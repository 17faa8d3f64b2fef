"""``with`` for what has a ``close``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """Closed when its ``with`` ends, however that is."""

    @abstractmethod
    def close(self) -> None:
        """Free everything; idempotent."""

    def __enter__(self) -> Self:
        """This object."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()
