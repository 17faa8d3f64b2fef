"""transformers' tokenizers in the seam's words: no special tokens unless somebody wrote them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any


class ModelTokenizer:
    """The ``Tokenizer`` protocol over a transformers tokenizer; other attributes pass through."""

    def __init__(self, inner: Any) -> None:
        """``inner`` is left as it is."""
        self.inner = inner

    def encode(self, text: str) -> list[int]:
        """Text to ids; markers such as ``<|im_start|>`` in the text become their tokens."""
        # verbose would warn of texts beyond a length that is not the target's context
        ids: list[int] = self.inner.encode(text, add_special_tokens=False, verbose=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text, special tokens left out, spaces exactly as the tokens have them."""
        text: str = self.inner.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    @cached_property
    def add_bos_token(self) -> bool:
        """Whether a plain text of this model begins with its begin-of-text token."""
        bos = getattr(self.inner, "bos_token_id", None)
        return bos is not None and self.inner.encode("a")[:1] == [bos]

    def __len__(self) -> int:
        """Tokens, added ones included."""
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        """Whatever else the tokenizer offers (chat template, special ids, vocabulary)."""
        if name == "inner":  # not set yet: a copy or an unpickling in progress
            raise AttributeError(name)
        return getattr(self.inner, name)
