"""Heads inside a target: found, used, switched off, and the same as transformers' own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeForCausalLM
from transformers.modeling_layers import MtpModel

import dflash
from dflash.backends.torch import open_pair
from dflash.config import LoadConfig
from dflash.core.decode import decode
from dflash.core.policy import Fixed
from dflash.core.types import Plan, Request, Sampling
from dflash.errors import CheckpointError

from .mtp_targets import check_commits, save_mtp_target
from .tiny import LAYERS, VOCAB

PROMPT = [71, 103, 35, 290, 120, 33, 64, 8, 401]
TOKENS = 24


@pytest.fixture(scope="module", params=["qwen3_5", "mellum", "glm4_moe"])
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        # transformers knows where this family's heads are by the depths that were published
        names = [rf"model\.layers\.{LAYERS + head}.*" for head in range(3)]
        patch.setattr(Glm4MoeForCausalLM, "_keys_to_ignore_on_load_unexpected", names)
        yield save_mtp_target(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def pair(folder: Path) -> Iterator[Any]:
    pair = open_pair(LoadConfig(str(folder), "mtp", device="cpu", dtype="float32"))
    yield pair
    pair.close()


def run(pair: Any, block: int) -> tuple[list[int], list[list[int]]]:
    """Committed tokens, and the drafted ones of every round."""
    target, (draft,) = pair.open_target(128), pair.open_drafts(128)
    drafted: list[list[int]] = []
    ask = draft.propose

    def asked(plan: Any) -> Any:
        proposal = ask(plan)
        drafted.append(torch.as_tensor(proposal.tokens).tolist())
        return proposal

    draft.propose = asked
    steps = decode(Request(PROMPT, TOKENS), target, [draft], Fixed(block), time.perf_counter_ns)
    return [token for step in steps for token in step.tokens], drafted


def plainly(folder: Path) -> list[int]:
    with dflash.load(folder, "none", device="cpu", dtype="float32", profile=False) as engine:
        ids = engine.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True).token_ids
    return list(ids)


@pytest.mark.parametrize("block", [2, 5, 8])
def test_the_text_is_the_one_of_plain_decoding(folder: Path, pair: Any, block: int) -> None:
    tokens, drafted = run(pair, block)
    assert tokens == plainly(folder) and drafted


# it assists no recurrent target
@pytest.mark.parametrize("folder, block", [("mellum", 2), ("glm4_moe", 4)], indirect=["folder"])
def test_drafts_are_those_of_transformers(
    pair: Any, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as there are heads; a head beyond the first reads drafted tokens beside new ones."""
    theirs: list[list[int]] = []
    forward = MtpModel.forward

    def told(self: Any, *args: Any, **options: Any) -> Any:
        found = forward(self, *args, **options)
        theirs.append(found[0][0].tolist())
        return found

    monkeypatch.setattr(MtpModel, "forward", told)
    out = pair.target.model.generate(
        torch.tensor([PROMPT]), use_mtp=True, do_sample=False, max_new_tokens=TOKENS,
        eos_token_id=None,
    )  # fmt: skip
    tokens, ours = run(pair, block)
    assert out[0, len(PROMPT) :].tolist() == tokens
    assert len(ours) > 5
    for mine, other in zip(ours, theirs, strict=False):
        assert mine == other[: len(mine)]  # the last one has no room for all


@pytest.mark.parametrize("folder", ["qwen3_5", "mellum"], indirect=True)
def test_a_chain_is_the_heads_run_again_on_their_own_output(pair: Any) -> None:
    """No cache, no session: the whole text through the block for every token of the chain."""
    model = pair.target.model
    heads = pair.draft.model.heads
    target, (draft,) = pair.open_target(128), pair.open_drafts(128)
    request = Request(PROMPT, TOKENS)
    draft.begin(request, 0)
    verdicts = list(target.prefill(request, 0))
    for verdict in verdicts:
        draft.commit(verdict, verdict.rows)
    tokens = [*PROMPT, *verdicts[-1].tokens]
    found = torch.as_tensor(draft.propose(Plan(rows=4, depth=4)).tokens).tolist()
    with torch.inference_mode():
        states = model.get_decoder()(input_ids=torch.tensor([PROMPT]), use_cache=False)[0]
        for count in range(4):
            places = torch.arange(1, states.shape[1] + 1)[None]
            ids = torch.tensor([tokens[1:]])
            cache = pair.draft.model.cache(64)
            out = heads.forward_layer(0, states, places, cache, input_ids=ids)
            said = int(heads.shared_head(out[:, -1]).argmax())
            assert said == found[count]
            tokens.append(said)
            states = torch.cat([states, out[:, -1:]], dim=1)


@pytest.mark.parametrize("folder", ["glm4_moe"], indirect=True)
def test_several_heads_say_after_any_commits_what_a_fresh_session_says(pair: Any) -> None:
    """Also of a text shorter than there are heads."""
    check_commits(pair, torch.cat)


def test_heads_are_used_without_being_named_and_left_alone_when_told(folder: Path) -> None:
    options: Any = {"device": "cpu", "dtype": "float32", "profile": False}
    with dflash.load(folder, **options) as engine:
        assert engine.pair.draft_name == "mtp"
        answer = engine.generate(PROMPT, max_tokens=TOKENS, block_size=4, ignore_eos=True)
        assert list(answer.token_ids) == plainly(folder)
        assert engine.pair.memory()["draft"] < engine.pair.memory()["target"]
    for asked in ({"mtp": False}, {"draft": "none"}):
        with dflash.load(folder, **{**options, **asked}) as engine:
            assert engine.pair.draft_name is None


def test_heads_that_a_config_promises_and_the_files_lack_are_no_draft(tmp_path: Path) -> None:
    folder = save_mtp_target(tmp_path, heads=False)
    with dflash.load(folder, device="cpu", profile=False) as engine:
        assert engine.pair.draft_name is None
    with pytest.raises(CheckpointError, match="no multi-token prediction heads"):
        dflash.load(folder, "mtp", device="cpu", profile=False)


def test_heads_that_cannot_be_read_are_a_note_unless_they_were_asked_for(tmp_path: Path) -> None:
    folder = save_mtp_target(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["mtp.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with (
        pytest.warns(UserWarning, match="plain decoding: the multi-token prediction heads"),
        dflash.load(folder, device="cpu", profile=False) as engine,
    ):
        assert engine.pair.draft_name is None
    with pytest.raises(CheckpointError, match="Use --no-mtp"):
        dflash.load(folder, "mtp", device="cpu", profile=False)


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_a_sampled_chain_never_names_a_token_that_is_none(pair: Any, rule: Any) -> None:
    sampling = Sampling(0.8, seed=3, rule=rule)
    target, (draft,) = pair.open_target(128), pair.open_drafts(128)
    request = Request(PROMPT, TOKENS, sampling=sampling)
    steps = list(decode(request, target, [draft], Fixed(4), time.perf_counter_ns))
    assert all(0 <= token < VOCAB for step in steps for token in step.tokens)
