"""Long prompts on llama.cpp: features come and are taken in by pieces, as torch has them whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("xllamacpp")

from dflash.backends.gguf import open_pair, queued  # noqa: E402 - after the checks
from dflash.backends.torch import open_pair as open_torch  # noqa: E402
from dflash.config import LoadConfig  # noqa: E402
from dflash.convert import gguf, hf  # noqa: E402
from dflash.core.types import PLAIN, Plan, Proposal, Request, Verdict  # noqa: E402
from tests.conformance.gguf_backend import EXACT  # noqa: E402

from .eagle_drafts import save_eagle  # noqa: E402
from .gguf_files import DFLASH2, save_folder, save_sidecar  # noqa: E402
from .gguf_parity import drafts_alike  # noqa: E402
from .mtp_targets import save_mtp_target  # noqa: E402
from .tiny import save_target, tiny_target, tiny_tokenizer  # noqa: E402
from .tiny_gguf import write_gguf  # noqa: E402
from .tiny_qwen35 import write_qwen35  # noqa: E402

LONG = [3 + (7 * place + place * place) % 499 for place in range(168)]
"""More than a batch of a target (64 here), of a sidecar (128) and of a chain (16)."""

Names = tuple[str, str]  # target and draft
Make = Callable[[Path], tuple[Names, Names]]


def llama(folder: Path) -> tuple[Path, str]:
    """A target as a file, and as a folder."""
    model = tiny_target("llama")
    target = write_gguf(folder / "target.gguf", model, tiny_tokenizer())
    return target, str(save_target(model, tiny_tokenizer(), folder / "target"))


def sidecar(folder: Path, **changes: Any) -> tuple[Names, Names]:
    """DFlash."""
    target, source = llama(folder)
    draft = save_sidecar(folder / "draft.gguf", target, **changes)
    return (str(target), str(draft)), (source, str(save_folder(folder / "draft", **changes)))


def sidecar2(folder: Path) -> tuple[Names, Names]:
    """DFlash2."""
    return sidecar(folder, **DFLASH2)


def eagle(folder: Path) -> tuple[Names, Names]:
    """EAGLE-3."""
    target, source = llama(folder)
    taps = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    draft = save_eagle(folder / "eagle", **taps)
    made = gguf.write(gguf.settled(hf.read(draft), target), folder / "eagle.gguf", target, "F32")
    return (str(target), str(made)), (source, str(draft))


def heads(folder: Path) -> tuple[Names, Names]:
    """Prediction heads in the target."""
    source = save_mtp_target(folder / "source")
    return (str(write_qwen35(folder / "target.gguf", source)), "mtp"), (str(source), "mtp")


@pytest.fixture(scope="module", params=[sidecar, sidecar2, eagle, heads], ids=lambda m: m.__name__)
def names(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Names of one pair, as files and as folders."""
    return request.param(tmp_path_factory.mktemp("long"))


def ours(names: Any) -> Any:
    return open_pair(LoadConfig(*names[0], threads=1, gguf=EXACT))


def theirs(names: Any) -> Any:
    return open_torch(LoadConfig(*names[1], dtype="float32", pack_weights=False))


def test_a_long_prompt_is_taken_in_whole(names: Any) -> None:
    drafts_alike(theirs(names), ours(names), LONG, (5, 1, 3, 5))


def test_a_queue_that_is_full_is_taken_in_and_drafts_stay_the_same(
    names: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queued, "QUEUE_BYTES", 0)
    waiting = list[int]()
    commit = queued.QueuedDraft.commit

    def noted(draft: Any, verdict: Any, rows: int) -> None:
        commit(draft, verdict, rows)
        waiting.append(draft._queued - draft._newest)

    monkeypatch.setattr(queued.QueuedDraft, "commit", noted)
    drafts_alike(theirs(names), ours(names), LONG[:40], (5, 1, 3, 5))
    assert set(waiting) == {0}, "at most the row that a proposal begins with"


def test_features_of_a_prompt_in_pieces_are_torchs(names: Any) -> None:
    found = []
    for pair in (ours(names), theirs(names)):
        target = pair.open_target(256)
        parts = [verdict.features for verdict in target.prefill(Request(LONG, 4), 0)]
        found.append(np.concatenate([np.asarray(part) for part in parts]))
        target.close()
    assert found[0].shape[0] == len(LONG)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-3, atol=2e-3)


def told(pair: Any, prompt: list[int]) -> Verdict[Any]:
    """What a target of the pair says of a whole prompt."""
    target = pair.open_target(256)
    parts = list(target.prefill(Request(prompt, 4), 0))
    target.close()
    features = np.concatenate([part.features for part in parts])
    return Verdict(parts[-1].tokens, rows=len(prompt), features=features)


def proposed(draft: Any) -> list[int]:
    return [int(token) for token in draft.propose(Plan(0, 5, 5)).tokens]


def begun(pair: Any, prompt: list[int], verdict: Verdict[Any]) -> Any:
    """A fresh draft session that was told of ``prompt``."""
    (draft,) = pair.open_drafts(256)
    draft.begin(Request(prompt, 20), 0)
    draft.commit(verdict, len(prompt))
    return draft


@pytest.mark.parametrize("common", [1, 2, 20, 29])
def test_a_session_that_goes_on_with_another_text_drafts_as_a_fresh_one(
    common: int, names: Any
) -> None:
    pair = ours(names)
    first, second = LONG[:30], [*LONG[:common], *LONG[60 : 90 - common]]
    draft, verdict = begun(pair, first, told(pair, first)), told(pair, second)
    proposed(draft)
    reuse = draft.holds(second, len(second) - 1)
    assert common - 1 <= reuse <= common
    draft.begin(Request(second, 20), reuse)
    rest = Verdict(verdict.tokens, rows=30 - reuse, features=verdict.features[reuse:])
    draft.commit(rest, 30 - reuse)
    assert proposed(draft) == proposed(begun(pair, second, verdict))


def test_a_fork_has_what_waits_and_goes_its_own_way(names: Any) -> None:
    pair, prompt = ours(names), LONG[:30]
    verdict = told(pair, prompt)
    draft = begun(pair, prompt, verdict)  # all of it waits
    twin, alone = draft.fork(), proposed(begun(pair, prompt, verdict))
    more = Verdict([7], rows=1, features=verdict.features[-1:])
    twin.commit(more, 1)
    assert proposed(draft) == alone
    longer = begun(pair, prompt, verdict)
    longer.commit(more, 1)
    assert proposed(twin) == proposed(longer)
    target = pair.open_target(256)
    list(target.prefill(Request(prompt, 9), 0))
    other = target.fork()
    other.verify(Proposal([1, 2], 2))
    other.commit(1)
    fresh = pair.open_target(256)
    list(fresh.prefill(Request(prompt, 9), 0))
    for _ in range(2):
        assert target.verify(PLAIN).tokens == fresh.verify(PLAIN).tokens
        target.commit(1)
        fresh.commit(1)


def test_features_stay_what_they_were_when_the_next_pass_runs(names: Any) -> None:
    target = ours(names).open_target(256)
    (*_, first) = target.prefill(Request(LONG[:30], 9), 0)
    before = first.features.copy()
    for _ in range(2):
        verdict = target.verify(Proposal([5, 6, 7], 3))
        target.commit(1)
        kept = verdict.features.copy()
        target.verify(Proposal([9, 8], 2))
        target.commit(1)
        np.testing.assert_array_equal(verdict.features, kept)
    np.testing.assert_array_equal(first.features, before)
    target.close()
