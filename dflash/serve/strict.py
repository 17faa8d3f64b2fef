"""Functions whose calls must fit their schema: a call that does not is none, and stays text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from dflash.errors import missing
from dflash.serve.calls import Call
from dflash.serve.errors import ApiError

_BYTES = [bytes([byte]) for byte in range(256)]
_END = 256  # the one token that is no byte


class Strict:
    """The schemas of strict functions, compiled."""

    def __init__(self, schemas: Mapping[str, Any]) -> None:
        """``schemas``: name -> schema of the arguments.

        Raises ApiError for what is no schema, MissingBackend without xgrammar.
        """
        self._compiled: dict[str, Any] = {}
        if not schemas:
            return
        try:
            self._xgrammar = import_module("xgrammar")
        except ImportError as problem:
            raise missing("strict functions need xgrammar", "grammar") from problem
        info = self._xgrammar.TokenizerInfo(
            [*_BYTES, b"</s>"], self._xgrammar.VocabType.RAW, stop_token_ids=[_END]
        )
        compiler = self._xgrammar.GrammarCompiler(info, cache_enabled=False)
        for name, schema in schemas.items():
            try:
                text = json.dumps(schema or {"type": "object"})
                self._compiled[name] = compiler.compile_json_schema(text, any_order=True)
            except (RuntimeError, ValueError) as problem:
                why = str(problem).strip().splitlines()[-1]
                raise ApiError(400, f"the schema of {name!r} cannot be used: {why}") from problem

    def fits(self, call: Call) -> bool:
        """Whether ``call`` may be made: of a strict function only with fitting arguments."""
        if call.name not in self._compiled:
            return True
        matcher = self._xgrammar.GrammarMatcher(
            self._compiled[call.name], terminate_without_stop_token=True
        )
        return bool(matcher.accept_string(call.arguments) and matcher.is_terminated())
