"""What servers tell of speculation: Prometheus counters, and fields in their answers.

Names as vLLM has them (``vllm:spec_decode_num_drafts_total`` and so on; llama-server and this
package have the same under other prefixes), SGLang's per-request details, llama-server's timings.
A draft in vLLM's words is a verify pass, so its mean acceptance length is 1 + accepted / drafts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_LINE = re.compile(
    r"^(?P<prefix>[A-Za-z_]+):spec_decode_num_(?P<name>drafts|draft_tokens|accepted_tokens"
    r"|accepted_tokens_per_pos)(?:_total)?(?:\{(?P<labels>[^}]*)\})?\s+(?P<value>[-+.eE\d]+)",
    re.M,
)
_POSITION = re.compile(r'position="(\d+)"')
PREFIXES = ("vllm", "llamacpp", "dflash")  # a server may serve the same counters under several


@dataclass(frozen=True, slots=True)
class Counters:
    """Since the server's start, or between two readings."""

    rounds: int
    drafted: int
    accepted: int
    by_position: tuple[int, ...] = ()  # [i]: rounds that kept draft i+1

    def __sub__(self, before: Counters) -> Counters:
        """What happened in between."""
        pairs = zip(self.by_position, [*before.by_position, *[0] * 999], strict=False)
        return Counters(
            self.rounds - before.rounds,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            tuple(now - then for now, then in pairs),
        )

    def to_json(self) -> dict[str, Any]:
        """Counts, and the rates in vLLM's definitions."""
        rounds = max(1, self.rounds)
        return {
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_rate": self.accepted / max(1, self.drafted),
            "acceptance_length": 1 + self.accepted / rounds,
            "by_position": [kept / rounds for kept in self.by_position],
        }


def parse(metrics: str) -> Counters | None:
    """Counters in a Prometheus page; None where there are none. Engines of a server add up."""
    found: dict[str, dict[str, float]] = {}
    for line in _LINE.finditer(metrics):
        name = line["name"]
        if name == "accepted_tokens_per_pos":
            place = _POSITION.search(line["labels"] or "")
            name = f"at {place[1] if place else 0}"
        counts = found.setdefault(line["prefix"], {})
        counts[name] = counts.get(name, 0.0) + float(line["value"])
    if not found:
        return None
    prefix = next((p for p in PREFIXES if p in found), next(iter(found)))
    counts = found[prefix]
    places = sorted(int(name[3:]) for name in counts if name.startswith("at "))
    rounds, drafted, accepted = (
        int(counts.get(name, 0)) for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    return Counters(
        rounds,
        drafted,
        accepted,
        by_position=tuple(int(counts[f"at {place}"]) for place in places),
    )


def of_answer(answer: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """Fields of ``trial.Outcome`` that one answer tells; {} where it says nothing.

    ``tokens`` are those of the answer, the prefill's one included.
    """
    choices: Sequence[Mapping[str, Any]] = answer.get("choices") or [{}]
    metrics = answer.get("metrics") or {}
    if details := metrics.get("speculative_decoding"):
        return _vllm(details)
    for place in (answer.get("sglext"), choices[0].get("sglext")):
        if place and (details := place.get("spec_tokens_details")):
            return _sglang(details)
    meta = answer.get("meta_info") or choices[0].get("meta_info") or {}
    if "spec_verify_ct" in meta:
        return _sglang(meta)
    timings = answer.get("timings") or {}
    if "draft_n" in timings:
        accepted = int(timings.get("draft_n_accepted") or 0)
        made = int(timings.get("predicted_n") or tokens)
        rounds = max(0, made - 1 - accepted)  # each brings its accepted drafts and one more
        return {"rounds": rounds, "drafted": int(timings["draft_n"]), "accepted": accepted}
    return {}


def _vllm(details: Mapping[str, Any]) -> dict[str, Any]:
    rounds = int(details.get("num_spec_steps") or 0)
    each: Sequence[int] | None = details.get("per_step_drafted")
    if each:
        judged = tuple(sum(depth > place for depth in each) for place in range(max(each)))
    else:
        judged = (rounds,) * int(details.get("num_spec_tokens") or 0)
    return {
        "rounds": rounds,
        "drafted": int(details.get("num_draft_tokens") or 0),
        "accepted": int(details.get("num_accepted_draft_tokens") or 0),
        "histogram": tuple(details.get("acceptance_histogram") or ()),
        "judged": judged,
    }


def _sglang(details: Mapping[str, Any]) -> dict[str, Any]:
    rounds = int(details.get("spec_verify_ct") or 0)
    histogram = tuple(details.get("spec_correct_drafts_histogram") or ())
    return {
        "rounds": rounds,
        "drafted": int(details.get("spec_num_proposed_drafts") or 0),
        "accepted": int(details.get("spec_num_correct_drafts") or 0),
        "histogram": histogram,
        "judged": (rounds,) * max(0, len(histogram) - 1),
    }
