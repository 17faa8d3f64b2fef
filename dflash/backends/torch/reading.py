"""Models and tokenizers through transformers: whole, quiet, and with our errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoTokenizer
from transformers.utils import logging

from dflash.backends.torch.memory import guard
from dflash.errors import CheckpointError, WeightsError

LOAD_ERRORS = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    RuntimeError,
    ImportError,
    SafetensorError,
    StrictDataclassError,
)


def read_model(folder: Path, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """The model with every weight from the checkpoint. Raises CheckpointError, WeightsError."""
    from transformers import AutoModelForCausalLM  # two seconds: only who needs it pays for them

    try:
        with guard(f"loading {folder}"):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
    except LOAD_ERRORS as error:
        raise explain(folder, error) from error
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:
        raise WeightsError(
            f"{folder} lacks {len(missing)} tensors its config asks for: {_some(missing)}. "
            "The download is incomplete or the config belongs to another model"
        )
    return model


def read_tokenizer(folder: Path, trust_remote_code: bool, config: Any = None) -> Any:
    """The tokenizer in ``folder``. Raises CheckpointError.

    ``config`` is the model's, where it is there: its class need not be imported then, if the
    tokenizer's files name their own.
    """
    try:
        beside = {} if config is None or not _says_its_class(folder) else {"config": config}
        return AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code, **beside
        )
    except LOAD_ERRORS as error:
        raise CheckpointError(
            f"{folder} has no tokenizer that can be read: {_first_line(error)}. "
            "Copy tokenizer.json and tokenizer_config.json into the folder"
        ) from error


def _says_its_class(folder: Path) -> bool:
    file = folder / "tokenizer_config.json"
    said = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return "tokenizer_class" in said and "auto_map" not in said


def explain(folder: Path, error: BaseException) -> CheckpointError:
    """transformers' complaint as ours."""
    text = str(error)
    if "trust_remote_code" in text:
        return CheckpointError(
            f"{folder} brings its own model code, which is not run unless you say so: read it, "
            "then pass --trust-remote-code (trust_remote_code=True)"
        )
    if "Unrecognized configuration class" in text:
        return CheckpointError(f"{folder} is not a decoder-only language model (a causal LM)")
    if "size mismatch" in text or "mismatched" in text:
        return WeightsError(f"tensors of {folder} do not have the shapes of its config: {text}")
    return CheckpointError(f"transformers cannot load {folder}: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


class FiniteCheck:
    """Looks at weights as they pass; NaN and infinity show in a sum, so it is cheap."""

    def __init__(self, name: str) -> None:
        """``name`` of the checkpoint, for the error."""
        self._name = name
        self._bad: list[str] = []

    def look(self, key: str, weight: torch.Tensor) -> None:
        """Remember ``key`` if ``weight`` has a NaN or an infinity."""
        if weight.is_floating_point() and not weight.sum(dtype=torch.float32).isfinite():
            self._bad.append(key)

    def done(self) -> None:
        """Raise WeightsError if there was one."""
        if self._bad:
            raise WeightsError(
                f"{self._name} has weights that are NaN or infinite: {_some(self._bad)}. The file "
                "is damaged or was converted to too narrow a dtype; get it again"
            )


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and warnings: what matters is raised instead."""
    speaker: Any = logging
    level, bars = speaker.get_verbosity(), speaker.is_progress_bar_enabled()
    speaker.set_verbosity_error()
    speaker.disable_progress_bar()
    try:
        yield
    finally:
        speaker.set_verbosity(level)
        if bars:
            speaker.enable_progress_bar()
