"""Template: the chat template of the text the draft was trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from dflash.doctor.static.facts import Choice, Finding, TargetFacts
from dflash.drafts.keys import Keys
from dflash.drafts.spec import DraftSpec

KEY = "chat_template_sha256"


def check_template(spec: DraftSpec, target: TargetFacts, _: Choice) -> Iterator[Finding]:
    """A recorded chat template should be the target's: it is part of every text."""
    trained, used = Keys(spec.raw).get(KEY), target.template_digest
    unknown = target.tokenizer_size is None  # a model without its tokenizer
    if trained is None or trained == used or unknown:
        return
    found = "none" if used is None else f"another one ({used[:12]})"
    yield Finding(
        "warning",
        "template",
        f"the draft was trained with a chat template (digest {str(trained)[:12]}), and the target "
        f"now brings {found}: if acceptance is poor, use the template it was trained with",
    )


def template_digest(template: Any) -> str | None:
    """SHA-256 of a chat template's text, white space at its ends aside; None for none.

    The text and not what it renders, because some templates render the date.
    """
    if not isinstance(template, str) or not template.strip():
        return None  # several templates by name: which one is used is not known here
    return hashlib.sha256(template.strip().encode()).hexdigest()
