"""The arms of one engine, and everything about its pair that a report shows beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash.bench import roofline
from dflash.bench.arms import PLAIN, Through, engine_arm
from dflash.bench.rows import Text
from dflash.bench.trial import Contestant, Outcome, on_ids
from dflash.bench.verdict import Verdict, judge
from dflash.config import DraftTree
from dflash.doctor.measured import cost
from dflash.engine import Engine
from dflash.errors import ConfigError
from dflash.prompt import render
from dflash.verify.gap import Judge

COMMON = (2, 3, 4, 6, 8, 12, 16)  # blocks of a run that names none, as far as the draft goes


@dataclass(frozen=True, slots=True)
class Template:
    """How messages become ids. ``thinking`` None leaves the template's own default."""

    chat: bool = True
    system: str | None = None
    thinking: bool | None = None

    def encode(self, engine: Engine, messages: Sequence[dict[str, str]]) -> list[int]:
        """Ids of a conversation. Raises PromptError."""
        tokenizer = engine.pair.tokenizer
        if not self.chat or not getattr(tokenizer, "chat_template", None):
            text = "\n\n".join(message["content"] for message in messages)
            return engine.encode(text, chat_template=False)
        if self.thinking is None:
            return engine.encode(messages, system=self.system)
        switched = _Switched(tokenizer, self.thinking)
        return list(tokenizer.encode(render(switched, messages, self.system)))


@dataclass(frozen=True, slots=True)
class _Switched:
    """A tokenizer whose template is told whether to think."""

    tokenizer: Any
    thinking: bool

    @property
    def chat_template(self) -> Any:
        """The tokenizer's own."""
        return self.tokenizer.chat_template

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        """Render with ``enable_thinking``."""
        return self.tokenizer.apply_chat_template(
            messages, enable_thinking=self.thinking, **options
        )


def block_sizes(native: int, asked: Sequence[int | str] | None) -> dict[str, int | str]:
    """Arm -> block size: plain decoding first, then ``asked`` (None: the common ones and auto).

    Raises ConfigError for a size past the draft's own.
    """
    if asked is None:
        asked = [*(size for size in COMMON if size < native), native, "auto"]
    too_large = [size for size in asked if size != "auto" and int(size) > native]
    if too_large:
        raise ConfigError(
            f"block size {too_large[0]} is more than the draft's native {native}: leave it out"
        )
    found: dict[str, int | str] = {PLAIN: 1}
    for size in asked:
        if size != 1:
            found["auto" if size == "auto" else f"block {size}"] = size
    return found


def contestants(
    engine: Engine,
    blocks: Mapping[str, int | str],
    options: Mapping[str, Any],
    through: Through | None = None,
    tree: DraftTree = 0,
) -> dict[str, Contestant]:
    """An arm for each block size; ``through``: who reads the streams, where several are asked.

    All but plain decoding grow trees of ``tree`` nodes, if any.
    """
    more: dict[str, Any] = {} if through is None else {"through": through, "progress": True}
    trees = {name: 0 if size == 1 else tree for name, size in blocks.items()}
    return {
        name: on_ids(engine_arm(engine, size, draft_tree=trees[name], **more, **options))
        for name, size in blocks.items()
    }


def says(engine: Engine) -> Callable[[Outcome], str]:
    """An answer as text."""

    def text(outcome: Outcome) -> str:
        found: str = engine.pair.tokenizer.decode(outcome.ids)
        return found

    return text


def greedy_verdict(
    engine: Engine,
    texts: Mapping[tuple[str, str, int], Text],
    prompts: Mapping[tuple[str, str, int], Sequence[int]],
    arms: Sequence[str],
    settings: Mapping[str, Any],
) -> Verdict:
    """Whether the arms of ``engine`` wrote what plain decoding writes."""
    return judge(texts, prompts, arms, PLAIN, Judge(engine, settings).gap)


def costs(
    engine: Engine, prompt: Sequence[int], survival: Sequence[float]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(ceilings with how close each pass comes, the cost curve)."""
    found = cost.measure(engine.pair, prompt, survival)
    top = roofline.ceilings(engine.pair)
    passes = [("verify", b.block_size, b.verify_ms) for b in found.blocks]
    passes += [("draft", b.block_size, b.draft_ms) for b in found.blocks if b.draft_ms > 0]
    near = roofline.reached(top, engine.pair.memory(), passes)
    return (
        {
            "bytes_per_second": top.bytes_per_second,
            "flops_per_second": top.flops_per_second,
            "device": top.device,
            "dtype": top.dtype,
            "passes": [one.to_json() for one in near],
        },
        found.to_json(),
    )
