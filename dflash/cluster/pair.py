"""From names to a `Plan`: what the pair is, whether it fits, which block it gets.

Reads configs and headers only; of a hub id only config.json is fetched. Tokenizers and chat
templates are not looked at here, so the checks that need them say nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

from dflash.cluster import sidecar
from dflash.cluster.plan import Method, Plan
from dflash.config import MTP, NGRAM, NO_DRAFT, BlockSize, split_draft
from dflash.doctor.static import Choice, Finding, TargetFacts, check_pair, insist
from dflash.drafts.keys import Keys, flatten_speculators, read_config
from dflash.drafts.kinds import READERS, kind_of
from dflash.drafts.mtp import COUNTS, count_heads
from dflash.drafts.spec import read_spec
from dflash.errors import CheckpointError, ConfigError, PairError
from dflash.inspection import Inspection, hub_config, inspect

Read = Callable[[str], Mapping[str, Any]]
"""From a hub id to its config.json."""
USUAL_BLOCK = {"eagle3": 4, "mtp": 2}
"""Rows of a pass where a draft has no native block: 3 and 1 drafted, as the engines' docs have."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What a plan needs to know of a draft."""

    method: Method
    native: int | None = None  # block size, anchor included; None = drafts step by step
    default: int | None = None
    mixed_attention: bool = False
    findings: tuple[Finding, ...] = ()


def make_plan(
    target: str,
    draft: str | None,
    block: BlockSize,
    *,
    read: Read = hub_config,
    **options: Any,
) -> Plan:
    """The plan for a pair; ``plan.notes`` says what is odd about it.

    ``draft`` None or "none" is plain decoding, "mtp" the target's own heads. ``read`` asks the hub;
    ``options`` are fields of `Plan`. Raises PairError for a pair that does not fit,
    CheckpointError, DownloadError, ConfigError.
    """
    facts = target_facts(target, read)
    if draft is None or draft == NO_DRAFT:
        return Plan(target, **options)
    insist_on_model(draft)
    choice = Choice(draft, window=options.get("window"))
    found = _mtp(target, read) if draft == MTP else look(draft, facts, choice, read)
    warnings = insist(list(found.findings), facts, choice)
    plan = plan_of(found, target, draft, block, **options)
    return replace(plan, notes=(*warnings, *plan.notes))


def plan_of(found: Draft, target: str, draft: str, block: BlockSize, **options: Any) -> Plan:
    """The plan for a draft of which ``found`` is known; its notes are about the block."""
    size, notes = block_of(block, found)
    return Plan(
        target,
        method=found.method,
        draft=None if draft == MTP else draft,
        block_size=size,
        asked=block,
        mixed_attention=found.mixed_attention,
        notes=tuple(notes),
        **options,
    )


def insist_on_model(draft: str) -> None:
    """Refuse look-up drafts. Raises ConfigError."""
    model, look_up = split_draft(draft)
    if look_up or model == NGRAM:
        raise ConfigError(
            "look-up drafts are this package's own: serve them without --engine, or name a model"
        )


def target_facts(name: str, read: Read = hub_config) -> TargetFacts:
    """What configs or GGUF metadata say of a target. Raises PairError when it is a draft."""
    seen = inspect(name) if _local(name) else None
    if seen is not None and seen.format == "GGUF":
        if seen.kind != "target":
            raise PairError(f"{name} is a draft ({seen.architecture}): give it as --draft")
        facts = seen.facts
        return TargetFacts(
            name, facts["hidden size"], facts["layers"], embedding_rows=facts["vocabulary"]
        )
    config = _config(name, read)
    kind = kind_of(config)
    if kind != "target":
        raise PairError(f"{name} is a draft of kind {kind}: give it as --draft")
    text = config.get("text_config", config)
    eos = text.get("eos_token_id", config.get("eos_token_id"))
    return TargetFacts(
        name,
        hidden_size=_count(name, text, "hidden_size"),
        num_layers=_count(name, text, "num_hidden_layers"),
        embedding_rows=_count(name, text, "vocab_size"),
        eos_ids=frozenset([eos] if isinstance(eos, int) else eos or ()),
        pad_id=text.get("pad_token_id"),
    )


def look(name: str, target: TargetFacts, choice: Choice, read: Read = hub_config) -> Draft:
    """What the draft ``name`` is, and all that is wrong with it beside ``target``."""
    if _local(name) and (seen := inspect(name)).format == "GGUF":
        if seen.kind == "draft" and target.name.endswith(".gguf"):
            sidecar.check(target.name, name)
        if seen.problem is not None:
            raise CheckpointError(seen.problem)
        return _look_gguf(seen, target)
    config, found = _config(name, read), draft_of(name, read, target.num_layers)
    if found.method not in READERS.names():
        return replace(found, findings=tuple(_sizes(Keys(flatten_speculators(config)), target)))
    spec = read_spec(config, num_target_layers=target.num_layers)
    findings = check_pair(spec, target, choice)
    return replace(found, findings=tuple(f for f in findings if f.check != "template"))


def draft_of(name: str, read: Read, depth: int) -> Draft:
    """What the config of ``name`` says, beside a target of ``depth`` layers."""
    config = _config(name, read)
    method = _method(kind_of(config), name)
    if method in READERS.names():
        spec = read_spec(config, num_target_layers=depth)
        return Draft(
            method,
            None if method in USUAL_BLOCK else spec.block_size,  # a chain has no size of its own
            spec.default_block_size,
            mixed_attention=len(set(spec.layer_types)) > 1,
        )
    keys = Keys(flatten_speculators(config))
    return Draft(method, keys.maybe("block_size") if method not in USUAL_BLOCK else None)


def _method(kind: str, name: str) -> Method:
    if kind not in get_args(Method):
        known = ", ".join(get_args(Method))
        raise PairError(f"{name} is a {kind}, not a draft that other engines run: they run {known}")
    return cast(Method, kind)


def _sizes(keys: Keys, target: TargetFacts) -> list[Finding]:
    """Width and vocabulary, for drafts without a spec of their own here."""
    pairs = (
        ("width", keys.get("target_hidden_size", keys.get("hidden_size")), target.hidden_size),
        ("vocabulary", keys.get("vocab_size"), target.embedding_rows),
    )
    return [
        Finding("error", check, f"the draft has a {check} of {its}, {target.name} of {ours}")
        for check, its, ours in pairs
        if its is not None and its != ours
    ]


def _look_gguf(seen: Inspection, target: TargetFacts) -> Draft:
    """llama.cpp ends the process for most of these faults, at the first request."""
    facts = seen.facts
    method = _method(str(facts.get("method") or seen.architecture), "the draft's file")
    wrong = {}
    if facts.get("vocabulary") != target.embedding_rows:
        wrong["vocabulary"] = (
            f"the draft has {facts.get('vocabulary')} tokens, {target.name} {target.embedding_rows}"
        )
    reach = target.num_layers - 2  # llama.cpp reads inputs of layers, so not the last output
    beyond = [tap for tap in facts.get("taps") or () if not 0 <= tap <= reach]
    if beyond:
        wrong["depth"] = (
            f"the draft taps layers {beyond}; of {target.name} llama.cpp can tap 0 to {reach}"
        )
    if method not in USUAL_BLOCK and facts.get("mask token id") is None:
        wrong["mask"] = "the draft's file names no mask token"
    findings = [Finding("error", check, message) for check, message in wrong.items()]
    native = None if method in USUAL_BLOCK else seen.block_size
    return Draft(method, native, findings=tuple(findings))


def _mtp(target: str, read: Read) -> Draft:
    """The target's own heads."""
    config = {} if target.endswith(".gguf") else _config(target, read)
    text = config.get("text_config", config)
    heads = count_heads(lambda key: text.get(key) or config.get(key))
    if not heads and not target.endswith(".gguf"):
        raise PairError(
            f"{target} has no multi-token prediction layers ({', '.join(COUNTS)} in config.json): "
            "name a draft instead"
        )
    return Draft("mtp")


def block_of(asked: BlockSize, draft: Draft) -> tuple[int, list[str]]:
    """Rows of a pass and what to say about it; as everywhere, the native size is the cap."""
    native = draft.native
    if native is None:
        size = asked if isinstance(asked, int) else USUAL_BLOCK.get(draft.method, 16)
        return size, []
    if asked == "auto":
        return native, [f"the engine has no block size 'auto': the draft's native {native} is used"]
    size = asked or draft.default or native
    if size > native:
        return native, [f"block size {size} is more than this draft can do: {native} is used"]
    return size, []


def _local(name: str) -> bool:
    return Path(name).expanduser().exists()


def _config(name: str, read: Read) -> Mapping[str, Any]:
    """config.json of a folder or a hub id."""
    if _local(name):
        return read_config(Path(name).expanduser())
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise CheckpointError(f"no such file or folder: {name} (a hub id is written owner/name)")
    return read(name)


def _count(name: str, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int):
        raise CheckpointError(f"config.json of {name} has no {key}: is it a language model?")
    return value
