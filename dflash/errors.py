"""Every failure a user can meet, as one tree.

    DFlashError
    ├── ConfigError            an argument, flag or option is wrong or contradicts another
    │   └── UnknownName        a name nobody registered (backend, draft kind, command option)
    ├── MissingBackend         the extra that brings this backend is not installed
    ├── CheckpointError        a file or folder is missing, corrupt, incomplete or of another kind
    │   └── WeightsError       tensors are missing, left over, misshapen or not finite
    ├── PairError              target and draft do not fit each other
    ├── PromptError            the prompt is empty or longer than the context
    ├── DownloadError          something could not be fetched
    ├── OutOfMemory            more bytes needed than there are
    ├── LaunchError            a program of another engine did not start, or ended by itself
    ├── EngineClosed           the engine was closed before or while it was asked
    └── DataError              training or prompt data is malformed

User mistakes raise one of these, with a message that says what to do next. Broken invariants are
``assert``. Foreign exceptions are mapped at a backend's border and chained with ``from``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CLOSED = "this engine is closed: load a new one"


class DFlashError(Exception):
    """Base of all errors this package raises on purpose."""


class ConfigError(DFlashError, ValueError):
    """An argument is out of range or contradicts another."""


class UnknownName(ConfigError):
    """A name that is not in a registry; the message lists the known ones."""


class MissingBackend(DFlashError, ImportError):
    """A backend's packages are not installed; the message has the pip command."""


def missing(what: str, extra: str) -> MissingBackend:
    """The error for packages that are not there: ``what`` they are for, and how to get them."""
    return MissingBackend(
        f"{what}: pip install 'dflash-engine[{extra}]', or pip install '.[{extra}]' in a checkout"
    )


class CheckpointError(DFlashError):
    """A checkpoint is missing, corrupt, or not what was asked for."""


class WeightsError(CheckpointError):
    """Tensors of a checkpoint do not fit its config, or hold NaN or infinity."""


class PairError(DFlashError):
    """Target and draft do not belong together; the message names both sides' numbers."""

    findings: Sequence[Any] = ()  # what `dflash.doctor.static` found, where that raised it


class PromptError(DFlashError, ValueError):
    """The prompt is empty, or leaves no room in the context."""


class DownloadError(DFlashError):
    """A file could not be fetched, or its checksum is wrong."""


class OutOfMemory(DFlashError, MemoryError):
    """Allocation failed; the message has bytes needed, bytes free and the flags that help."""


class LaunchError(DFlashError):
    """Another engine's server could not be started, did not become ready, or ended by itself."""


class EngineClosed(DFlashError):
    """The engine was closed, perhaps in the middle of a stream; load a new one."""


class DataError(DFlashError):
    """A line of training or prompt data is malformed; the message has file and line number."""
