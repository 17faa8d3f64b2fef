"""Checks of a pair that need only files and configs; run at load, one check a file.

They find what would cost acceptance or crash later. Whether a fitting pair is any good is measured
elsewhere.
"""

from __future__ import annotations

from dflash.doctor.static.block import check_block
from dflash.doctor.static.depth import check_depth
from dflash.doctor.static.dtype import check_dtype
from dflash.doctor.static.facts import Check, Choice, Finding, TargetFacts
from dflash.doctor.static.mask import check_mask
from dflash.doctor.static.name import check_name
from dflash.doctor.static.template import check_template
from dflash.doctor.static.vocabulary import check_vocabulary
from dflash.doctor.static.width import check_width
from dflash.drafts.spec import DraftSpec
from dflash.errors import PairError

__all__ = ["CHECKS", "Choice", "Finding", "TargetFacts", "check_pair", "insist"]

CHECKS: tuple[Check, ...] = (
    check_width,
    check_depth,
    check_vocabulary,
    check_mask,
    check_dtype,
    check_name,
    check_template,
    check_block,
)


def check_pair(spec: DraftSpec, target: TargetFacts, choice: Choice) -> list[Finding]:
    """All findings, in the order of ``CHECKS``."""
    return [finding for check in CHECKS for finding in check(spec, target, choice)]


def insist(findings: list[Finding], target: TargetFacts, choice: Choice) -> tuple[str, ...]:
    """The warnings' messages; raises PairError with all errors at once if there is one."""
    errors = [finding.message for finding in findings if finding.level == "error"]
    if errors:
        listed = "\n".join(f"  - {message}" for message in errors)
        problem = PairError(
            f"draft {choice.draft_name} does not fit target {target.name}:\n{listed}"
        )
        problem.findings = tuple(findings)
        raise problem
    return tuple(finding.message for finding in findings)
