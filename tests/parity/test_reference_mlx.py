"""The MLX drafts against the golden files of the reference implementation, as the torch ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

pytest.importorskip("mlx_lm")

import mlx.core as mx
from mlx.utils import tree_flatten

from dflash.backends.mlx.dflash_session import DFlashSession, Tables
from dflash.backends.mlx.kinds import KINDS
from dflash.core.types import Plan, Request, Verdict
from dflash.drafts.spec import DraftSpec, read_spec
from dflash.model_mlx import load_draft, stream_generate
from tests.parity import script, script_mlx

pytestmark = pytest.mark.mlx

GOLDEN = Path(__file__).parent / "golden"
RUNS: dict[str, Any] = json.loads((GOLDEN / "runs.json").read_text(encoding="utf-8"))["runs"]
STATES = load_file(GOLDEN / "states.safetensors")
PROMPT = "long"  # beyond every window, with a shortened last block


def open_session(case: str) -> Any:
    """The case's draft over the scripted tables."""
    spec = read_spec(script.config(case))
    kind = KINDS.load(spec.kind)
    model = kind.module(spec)
    shapes = {name: weight.shape for name, weight in tree_flatten(model.parameters())}
    made = {name: script.weight(case, name, shape) for name, shape in shapes.items()}
    model.load_weights([(name, mx.array(values)) for name, values in made.items()])
    embed, head = (mx.array(table) for table in script.tables())
    scale = spec.embedding_scale_for(None)
    tables = Tables(lambda ids: embed[ids], lambda h: h @ head.T, script.VOCAB, scale)
    return kind.session(model, tables)


def features(spec: DraftSpec, start: int, stop: int) -> Any:
    return mx.array(
        np.concatenate([script.states(layer, stop)[start:] for layer in spec.taps], axis=-1)
    )


def play(session: Any, length: int) -> Iterator[tuple[list[int], list[int]]]:
    """Rounds of one scripted run, as (committed, drafted); the first is the prompt's token."""
    spec = session._model.spec
    position, left = length, script.max_tokens(length)
    session.begin(Request(script.prompt(length), left), 0)
    session.commit(Verdict([5], rows=length, features=features(spec, 0, length)), length)
    yield [5], []
    for round_ in range(left):
        left_now = left - 1 - (position - length)
        if not left_now:
            return
        rows = min(spec.block_size - 1, left_now)  # the reference drafts up to the very end
        drafted = session.propose(Plan(rows=rows, depth=rows)).tokens.tolist()
        own, accepted = script.answer(drafted, round_)
        kept = min(accepted + 1, left_now)
        told = features(spec, position, position + accepted + 1)
        session.commit(Verdict(own[: accepted + 1], features=told), kept)
        position += kept
        yield own[:kept], drafted


@pytest.mark.parametrize("case", script.CASES)
def test_whole_greedy_runs_draft_and_end_like_the_reference(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, length = open_session(case), script.PROMPTS[PROMPT]
    states: list[Any] = []
    honest = session._block

    def keep(start: int, rows: int) -> Any:
        states.append(honest(start, rows))
        return states[-1]

    monkeypatch.setattr(session, "_block", keep)
    rounds = list(play(session, length))
    told = RUNS[f"{case}/{PROMPT}"]
    assert [drafted for _, drafted in rounds[1:]] == told["drafted"]
    ids = script.prompt(length) + [token for tokens, _ in rounds for token in tokens]
    assert ids == told["ids"]
    golden = {key: value for key, value in STATES.items() if key.startswith(f"{case}/{PROMPT}/")}
    assert golden
    for key, value in golden.items():
        found = np.array(states[int(key.rsplit("/", 1)[1])])[0]
        np.testing.assert_allclose(found, value.reshape(found.shape), rtol=0, atol=2e-5)


def target(kind: str) -> Any:
    """mlx-lm's model with the script's weights."""
    config = script_mlx.CONFIGS[kind]
    module: Any = import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    shapes = {name: weight.shape for name, weight in tree_flatten(model.parameters())}
    made = {name: script_mlx.target_weight(kind, name, shape) for name, shape in shapes.items()}
    model.load_weights([(name, mx.array(values)) for name, values in made.items()])
    return model


def saved_draft(case: str, folder: Path) -> Path:
    """The case's draft as a folder."""
    (folder / "config.json").write_text(json.dumps(script.config(case)), encoding="utf-8")
    spec = read_spec(folder)
    model = KINDS.load(spec.kind).module(spec)
    shapes = {name: weight.shape for name, weight in tree_flatten(model.parameters())}
    made = {name: mx.array(script.weight(case, name, shape)) for name, shape in shapes.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), made)
    return folder


class Silent:
    """A tokenizer whose ids have no text."""

    def __len__(self) -> int:
        return script.VOCAB

    def decode(self, _: Any, **__: Any) -> str:
        return ""


@pytest.mark.parametrize(("kind", "case"), script_mlx.RUNS)
def test_the_generator_commits_and_drafts_what_the_references_does(
    kind: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = json.loads((GOLDEN / "mlx.json").read_text(encoding="utf-8"))["runs"][f"{kind}/{case}"]
    text = [token for tokens, _ in told["responses"] for token in tokens]
    prompt, drafted = script.prompt(script_mlx.PROMPT), list[list[int]]()
    logits, propose = DFlashSession._logits, DFlashSession.propose

    def steered(self: DFlashSession, hidden: Any) -> Any:
        rows, said = logits(self, hidden), len(self._tokens) - len(prompt)
        return rows + mx.array(script_mlx.steering(text[said:], len(rows), len(drafted)))

    def kept(self: DFlashSession, plan: Plan) -> Any:
        proposal = propose(self, plan)
        drafted.append([int(token) for token in proposal.tokens])
        return proposal

    monkeypatch.setattr(DFlashSession, "_logits", steered)
    monkeypatch.setattr(DFlashSession, "propose", kept)
    tokenizer = SimpleNamespace(_tokenizer=Silent(), eos_token_ids=set())
    draft = load_draft(saved_draft(case, tmp_path))
    options: Any = {"max_tokens": script_mlx.TOKENS}
    found = list(stream_generate(target(kind), draft, tokenizer, prompt, **options))
    *responses, end = told["responses"]
    assert end == [[], None]  # upstream says in a response of its own that it has ended
    assert [[one.tokens, one.accepted] for one in found] == responses
    assert [r.finish_reason for r in found] == [None] * (len(found) - 1) + ["length"]
    whole = [block for block in told["drafted"] if len(block) == draft.config.block_size - 1]
    assert drafted[: len(whole)] == whole  # at the end it drafts a row more than can be kept
    assert len(whole) > 6
