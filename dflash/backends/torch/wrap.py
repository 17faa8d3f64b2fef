"""A pair over objects that the user holds: a transformers model, and a draft loaded beside it.

The target is never altered. The draft moves to its target's device, as it does in the façade.
"""

from __future__ import annotations

from typing import Any

from dflash import target_facts
from dflash.backends.torch.dflash import DFlashDraftModel
from dflash.backends.torch.draft_load import LoadedDraft, load_draft, make_tables
from dflash.backends.torch.load import LoadedTarget, wrap_target
from dflash.backends.torch.pair import TorchPair
from dflash.doctor.static import Choice
from dflash.errors import ConfigError, PromptError
from dflash.hf_tokenizer import ModelTokenizer


class NoText:
    """The tokenizer of a target that came without one: ids in, ids out."""

    def encode(self, *_: Any, **__: Any) -> list[int]:
        """There is nothing to encode with."""
        raise PromptError("this target came without a tokenizer: give token ids")

    def decode(self, *_: Any, **__: Any) -> str:
        """No text."""
        return ""


def wrap_pair(target: Any, draft: Any = None) -> TorchPair:
    """A pair of the user's own ``target``, a transformers causal LM.

    ``draft`` is a loaded DFlashDraftModel, the name of one, or None. Raises CheckpointError,
    PairError, and what loading a draft raises.
    """
    loaded = wrap_target(target)
    if draft is None:
        beside = None
    elif isinstance(draft, str):
        beside = load_draft(draft, loaded, pack=False)
    elif isinstance(draft, DFlashDraftModel):
        beside = _wrap_draft(draft, loaded)
    else:
        raise ConfigError(
            "a draft is a name, or a DFlashDraftModel as DFlashDraftModel.from_pretrained loads "
            f"it; got {type(draft).__name__}"
        )
    pair = TorchPair(loaded, beside)
    pair.tokenizer = ModelTokenizer(NoText())
    return pair


def _wrap_draft(model: DFlashDraftModel, target: LoadedTarget) -> LoadedDraft:
    window = window_of(model, target)
    name, own = getattr(model, "name", "draft"), getattr(model, "own_tables", {})
    warnings = settle(model, target, name, window)
    return LoadedDraft(model, make_tables(model.spec, target, own), name, window, warnings)


def window_of(model: DFlashDraftModel, target: LoadedTarget) -> int | None:
    """Context rows the draft keeps; None where that is no bound in this target's context."""
    asked: int | None = getattr(model, "sliding_window_size", None)
    return None if asked is None or asked >= target.context_length else asked


def settle(
    model: DFlashDraftModel, target: LoadedTarget, name: str, window: int | None
) -> tuple[str, ...]:
    """Move the draft to its target and check that the two belong together.

    What is odd comes back in sentences; what is wrong raises PairError.
    """
    weight = model.fc.weight
    if weight.device != target.device:
        model.to(target.device)
    choice = Choice(name, dtype=str(weight.dtype).removeprefix("torch."), window=window)
    return target_facts.settle(model.spec, target, choice)
