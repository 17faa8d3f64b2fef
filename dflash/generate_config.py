"""How one text is to be generated: the options, checked once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from dflash import checks
from dflash.core.types import MOST_NODES, Path, Rule
from dflash.errors import ConfigError

BlockSize = int | Literal["auto"] | None
DraftTree = int | Literal["auto"]
RULES = ("match", "rejection", "block")
PATHS = ("walk", "best")
PLAIN = {"block_size": 1, "draft_tokens": None, "min_acceptance_rate": None, "draft_tree": 0}
"""What makes any options those of plain decoding: the other side of a comparison."""
DRAFT_TOKENS = 4  # of a block with a least acceptance rate, where no size was asked for


@dataclass(frozen=True, slots=True)
class GenerateConfig:
    """How one text is to be generated. temperature 0 is argmax, the lowest id winning ties.

    max_tokens      new tokens at most; clipped to the room the context leaves
    top_k, top_p, min_p  0, 1.0 and 0.0 = off; min_p is a share of the likeliest's probability
    repetition_penalty   divides logits of tokens in prompt and output (1.0 = off)
    presence_penalty, frequency_penalty  subtracted for tokens of the output, once and each time
    no_repeat_ngram runs of that many tokens occur once; 0 = off
    logit_bias      {token: number added to its logit}
    bad_words       sequences of token ids that may not occur
    min_tokens      neither end of text nor a stop before that many tokens
    logits_processors  callables (ids of prompt and output, logits [V]) -> logits [V], numpy
    seed            None = fresh randomness each time (matters only above temperature 0)
    stop            strings that end the text (left out of it)
    stop_token_ids  ids that end it: an int, or any list, tuple, set, array or tensor of them
    ignore_eos      go on to max_tokens whatever the model says
    json_schema, regex, grammar  what the text must be: a schema (text or mapping), a regular
                    expression, or a grammar in EBNF with a rule named root; one of the three
    thinking_budget tokens of reasoning (between <think> and </think>) at most; then the closing
                    mark is the only choice. None = off
    logprobs        log-probability of each token, and of that many likeliest (True = 0, None = off)
    n               how many texts
    echo            the prompt's own text and ids come first
    block_size      anchor included; 1 = plain decoding; "auto" = chosen while running;
                    None = the draft's own default
    draft_tokens    the same without the anchor; give one of the two
    strict_mode     keep a draft only where it equals the target's own sample; off: rejection
                    sampling, which keeps more of them. Both lossless, and a seed implies the former
    rule            the rule by name: match, rejection or block; None = as strict_mode and seed say
    greedy_drafts   above temperature 0 the draft proposes its likeliest token instead of a sample
    draft_path      "walk": a draft token after token, as it is sampled; "best": the path of tokens
                    that is likeliest as a whole, where the draft can tell
    draft_p_min     stop drafting where the likeliest token has less probability; 0.0 = off
    draft_tree      candidates judged in one pass as a tree of that many nodes, as deep as a block;
                    "auto" = where it is measured to be faster (with block_size "auto"); 0 = chains
    min_acceptance_rate  give the block up while fewer of its drafts are accepted, and probe;
                    without a block size of its own, for one of 4 drafts. None = never give it up
    reuse           resume from an earlier request that begins with the same tokens
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    logits_processors: tuple[Callable[[list[int], Any], Any], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None
    thinking_budget: int | None = None
    logprobs: int | None = None
    n: int = 1
    echo: bool = False
    block_size: BlockSize = None
    draft_tokens: int | None = None
    strict_mode: bool = False
    rule: Rule | None = None
    greedy_drafts: bool = False
    draft_path: Path = "walk"
    draft_p_min: float = 0.0
    draft_tree: DraftTree = 0
    min_acceptance_rate: float | None = None
    reuse: bool = True

    def __post_init__(self) -> None:
        """Normalise forms and refuse impossible values. Raises ConfigError."""
        checks.plain_numbers(self)
        checks.set_fields(
            self,
            stop=checks.strings("stop", self.stop),
            stop_token_ids=checks.token_ids(self.stop_token_ids),
            logit_bias=checks.logit_bias(self.logit_bias),
            bad_words=checks.token_sequences("bad_words", self.bad_words),
            logits_processors=checks.callables("logits_processors", self.logits_processors),
            logprobs=_logprobs(self.logprobs),
            json_schema=_schema(self.json_schema),
        )
        for name in ("ignore_eos", "echo", "strict_mode", "greedy_drafts", "reuse"):
            checks.switch(name, getattr(self, name))
        self._check_lengths()
        self._check_sampling()
        self._check_penalties()
        self._check_constraint()
        self._check_block()
        self._check_tree()

    def _check_lengths(self) -> None:
        checks.at_least(0, "max_tokens", self.max_tokens, required=True)
        checks.at_least(0, "min_tokens", self.min_tokens, required=True)
        checks.at_least(0, "logprobs", self.logprobs)
        checks.at_least(0, "thinking_budget", self.thinking_budget)
        checks.at_least(1, "n", self.n, required=True)
        if self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens is {self.min_tokens} and max_tokens {self.max_tokens}: the former "
                "must not be more"
            )

    def _check_sampling(self) -> None:
        usable = "0 or more (above 0: at least 1e-20)"
        checks.within("temperature", self.temperature, lambda x: x == 0 or x >= 1e-20, usable)
        checks.at_least(0, "top_k", self.top_k, required=True)
        checks.within("top_p", self.top_p, lambda x: 0 < x <= 1, "above 0 and at most 1")
        checks.within("min_p", self.min_p, lambda x: 0 <= x <= 1, "between 0 and 1")
        checks.at_least(0, "seed", self.seed)
        if self.seed is not None and self.seed >= 2**64:
            raise ConfigError(f"seed must be below 2**64, got {self.seed}")
        if self.rule is not None and self.rule not in RULES:
            raise ConfigError(f"rule must be one of {', '.join(RULES)}, got {self.rule!r}")
        if self.strict_mode and self.rule not in (None, "match"):
            raise ConfigError(f"strict_mode is the match rule, and rule is {self.rule!r}")

    def _check_penalties(self) -> None:
        most = checks.LARGEST
        checks.within(
            "repetition_penalty", self.repetition_penalty, lambda x: 1 / most <= x <= most,
            f"above 0 (from {1 / most:g} to {most:g})",
        )  # fmt: skip
        words = f"between -{most:g} and {most:g}"
        for name in ("presence_penalty", "frequency_penalty"):
            checks.within(name, getattr(self, name), lambda x: abs(x) <= most, words)
        checks.at_least(0, "no_repeat_ngram", self.no_repeat_ngram, required=True)

    def _check_constraint(self) -> None:
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)}: a text can be held to one of them")
        for name in given:
            if not isinstance(getattr(self, name), str) or not getattr(self, name).strip():
                raise ConfigError(f"{name} must be text, got {getattr(self, name)!r}")
            if self.ignore_eos:
                raise ConfigError(
                    f"a text held to a {name} ends where that does: leave out ignore_eos"
                )
            if self.thinking_budget is not None:
                raise ConfigError(
                    f"a text held to a {name} has no reasoning before it: leave out thinking_budget"
                )

    def _check_block(self) -> None:
        checks.at_least(0, "draft_tokens", self.draft_tokens)
        checks.within("draft_p_min", self.draft_p_min, lambda x: 0 <= x <= 1, "between 0 and 1")
        if self.draft_path not in PATHS:
            raise ConfigError(
                f"draft_path must be one of {', '.join(PATHS)}, got {self.draft_path!r}"
            )
        if self.draft_path == "best" and self.draft_p_min:
            raise ConfigError(
                'draft_p_min stops a walk, and draft_path="best" chooses a whole path: give one of '
                "the two"
            )
        rate = self.min_acceptance_rate
        if rate is not None:
            checks.within(
                "min_acceptance_rate", rate, lambda x: 0 <= x <= 1, "a share between 0 and 1"
            )
        if rate is not None and self.block_size == "auto":
            raise ConfigError(
                'min_acceptance_rate is a rule for a fixed block, and block_size="auto" decides by '
                "measured time: give one of the two"
            )
        if self.block_size != "auto":
            hint = ' (1 = plain decoding, or "auto")'
            checks.at_least(1, "block_size", self.block_size, hint=hint)
        if self.block_size is not None and self.draft_tokens is not None:
            raise ConfigError(
                "block_size and draft_tokens say the same thing (block_size = draft_tokens + 1): "
                "give one of the two"
            )

    def _check_tree(self) -> None:
        tree = self.draft_tree
        if tree != "auto":
            checks.at_least(0, "draft_tree", tree, required=True, hint=' (0 = chains, or "auto")')
            if tree > MOST_NODES:
                raise ConfigError(f"draft_tree is {tree}: at most {MOST_NODES} nodes")
        others = {
            'draft_path="best" chooses one path': self.draft_path == "best",
            "draft_p_min ends a path": self.draft_p_min > 0,
            "min_acceptance_rate gives chains up": self.min_acceptance_rate is not None,
            f"block_size {self.block} leaves it no level": self.block == 1,
        }
        for other, given in others.items():
            if tree and given:
                raise ConfigError(f"draft_tree weighs its own branches, and {other}: give one")
        if tree == "auto" and self.block not in (None, "auto"):
            raise ConfigError(
                'draft_tree="auto" decides by measured time, and the block is fixed to '
                f"{self.block}: give a number of nodes, or leave the block out"
            )

    @property
    def block(self) -> BlockSize:
        """The block size asked for in either form; None = nothing was asked."""
        if self.draft_tokens is not None:
            return self.draft_tokens + 1
        if self.block_size is None and self.min_acceptance_rate is not None:
            return DRAFT_TOKENS + 1
        return self.block_size

    @property
    def acceptance(self) -> Rule:
        """The rule of acceptance: a seed implies match, whose text depends on nothing else."""
        if self.rule is not None:
            return self.rule
        return "match" if self.strict_mode or self.seed is not None else "rejection"

    @property
    def constraint(self) -> tuple[str, str] | None:
        """(json_schema, regex or grammar; its text), if there is one."""
        texts = ((name, getattr(self, name)) for name in CONSTRAINTS)
        return next(((name, text) for name, text in texts if text is not None), None)


CONSTRAINTS = ("json_schema", "regex", "grammar")


class GenerateOptions(TypedDict, total=False):
    """The fields of GenerateConfig, in every form that it takes."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    no_repeat_ngram: int
    logit_bias: Mapping[Any, float] | Sequence[tuple[int, float]] | None
    bad_words: Sequence[Any] | None
    min_tokens: int
    logits_processors: Any  # a callable, or several
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Any  # an int, or any list, tuple, set, array or tensor of ints
    ignore_eos: bool
    json_schema: str | Mapping[str, Any] | None
    regex: str | None
    grammar: str | None
    thinking_budget: int | None
    logprobs: int | bool | None
    n: int
    echo: bool
    block_size: BlockSize
    draft_tokens: int | None
    strict_mode: bool
    rule: Rule | None
    greedy_drafts: bool
    draft_path: Path
    draft_p_min: float
    draft_tree: DraftTree
    min_acceptance_rate: float | None
    reuse: bool


def parse_block_size(text: str, name: str = "--block-size") -> int | Literal["auto"]:
    """``auto`` or a number. Raises ConfigError naming ``name``."""
    if text == "auto":
        return "auto"
    try:
        size = int(text)
    except ValueError:
        raise ConfigError(f"{name} must be a number or 'auto', got {text!r}") from None
    checks.at_least(1, name, size, hint=" (1 = plain decoding, or 'auto')")
    return size


def parse_draft_tree(text: str, name: str = "--draft-tree") -> DraftTree:
    """``auto`` or a number of nodes. Raises ConfigError naming ``name``."""
    if text == "auto" or text.isdecimal():
        return "auto" if text == "auto" else int(text)
    raise ConfigError(f"{name} must be a number of nodes or 'auto', got {text!r}")


def _logprobs(value: Any) -> Any:
    """True asks for the token's own, without alternatives."""
    return (0 if value else None) if isinstance(value, bool) else value


def _schema(value: Any) -> Any:
    """A schema as text; mappings keep the order of their keys, which is the order of the output."""
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as problem:
            raise ConfigError(f"json_schema is not JSON: {problem}") from None
    if not isinstance(value, Mapping | bool):
        raise ConfigError(f"json_schema must be a schema, as text or as a mapping; got {value!r}")
    return json.dumps(value)
