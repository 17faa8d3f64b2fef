"""From prompt ids and options to what the loop runs. Here options meet the pair they are for."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from dflash.core.protocols import Pair
from dflash.core.types import Grammar, Request, Sampling
from dflash.errors import ConfigError, PromptError
from dflash.generate_config import GenerateConfig


def make_request(
    pair: Pair,
    ids: Sequence[int],
    config: GenerateConfig,
    sample: int = 0,
    grammar: Grammar | None = None,
) -> Request:
    """The request for the ``sample``-th text after ``ids``.

    Raises PromptError when the prompt does not fit, ConfigError for tokens the target has not.
    """
    _check_ids(pair, ids, config)
    eos = frozenset() if config.ignore_eos else pair.eos_ids
    return Request(
        prompt=ids,
        max_tokens=min(config.max_tokens, pair.context_length - len(ids)),
        stop_ids=eos | frozenset(config.stop_token_ids),
        sampling=_sampling(config, sample),
        grammar=grammar,
    )


def _sampling(config: GenerateConfig, sample: int) -> Sampling:
    return Sampling(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        rule=config.acceptance,
        seed=secrets.randbits(63) if config.seed is None else config.seed,
        sample=sample,
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty,
        presence_penalty=config.presence_penalty,
        frequency_penalty=config.frequency_penalty,
        no_repeat_ngram=config.no_repeat_ngram,
        logit_bias=config.logit_bias,
        bad_words=config.bad_words,
        min_tokens=config.min_tokens,
        processors=config.logits_processors,
        logprobs=config.logprobs,
        greedy_drafts=config.greedy_drafts,
        draft_path=config.draft_path,
        draft_p_min=config.draft_p_min,
    )


def _check_ids(pair: Pair, ids: Sequence[int], config: GenerateConfig) -> None:
    if len(ids) >= pair.context_length:
        raise PromptError(
            f"the prompt has {len(ids)} tokens and the context holds {pair.context_length}, the "
            "answer included: shorten the prompt"
        )
    size = pair.vocab_size
    beyond = [i for i in ids if i >= size]
    if beyond:
        raise PromptError(f"token id {beyond[0]} is outside the target's vocabulary of {size}")
    named = {
        "logit_bias": [token for token, _ in config.logit_bias],
        "bad_words": [token for word in config.bad_words for token in word],
    }
    for name, tokens in named.items():
        if tokens and max(tokens) >= size:
            raise ConfigError(
                f"{name} names token {max(tokens)}, outside the target's vocabulary of {size}"
            )
