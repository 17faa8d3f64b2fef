"""The MLX backend beside mlx-lm's own generation and beside torch, on tiny random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_lm")
pytest.importorskip("torch")

import mlx.core as mx
import torch
from gguf import GGMLQuantizationType
from mlx.utils import tree_flatten
from safetensors.torch import load_file, save_file

from dflash import load, opening
from dflash.backends.mlx import open_pair, target
from dflash.backends.mlx.cache import Caches, SlidingCache
from dflash.backends.mlx.dflash_session import DFlashSession
from dflash.backends.mlx.draft_run import RUNNER as MLX_RUNNER
from dflash.backends.mlx.draft_weights import load_weights
from dflash.backends.mlx.gguf import convert as convert_here
from dflash.backends.mlx.lm import tapped
from dflash.backends.mlx.target import MlxTargetSession
from dflash.backends.torch import open_pair as open_torch
from dflash.backends.torch.draft_run import RUNNER as TORCH_RUNNER
from dflash.backends.torch.gguf import convert as convert_there
from dflash.backends.toy import ScriptedDraft
from dflash.config import GgufOptions, LoadConfig
from dflash.core.decode import decode
from dflash.core.policy import Fixed
from dflash.core.types import Proposal, Request, Sampling, Step
from dflash.drafts.spec import read_spec
from dflash.engine import Engine
from dflash.errors import CheckpointError, ConfigError, WeightsError
from dflash.registry import PROBES
from tests.backends.drafts import ODDITIES, save_draft, tiny_draft, tiny_draft2
from tests.backends.eagle_drafts import save_eagle
from tests.backends.tiny import save_target, tiny_target, tiny_tokenizer
from tests.backends.tiny_gguf import write_gguf
from tests.conformance.backends import Plain
from tests.core.toys import ticks, tokens_of

pytestmark = [pytest.mark.mlx, pytest.mark.torch]

READERS = ((convert_here, "mlx"), (convert_there, "torch"))
PROMPT = [71, 103, 35, 90, 120, 33, 64, 9, 18, 27, 36]
SCRIPT = (1, 3, 0, 7, 2)


def hybrid(seed: int = 0) -> Any:
    """Three gated-delta layers and one of full attention."""
    from mlx_lm.models import qwen3_5

    text = {
        "model_type": "qwen3_5_text",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "vocab_size": 256,
        "max_position_embeddings": 512,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
        },
    }
    made = qwen3_5.Model(
        qwen3_5.ModelArgs.from_dict({"model_type": "qwen3_5", "text_config": text})
    )
    mx.random.seed(seed)
    weights = [
        (name, mx.random.normal(w.shape) * (0.3 if w.ndim > 1 else 0.1) + (w.ndim == 1))
        for name, w in tree_flatten(made.parameters())
    ]
    made.load_weights(weights)
    mx.eval(made.parameters())
    return made


def plain(model: Any) -> Plain:
    return Plain(lambda tokens: np.array(model(mx.array([list(tokens)]))[0, -1]))


def run(
    session: MlxTargetSession, said: Plain, request: Request, vocabulary: int, block: int = 6
) -> list[Step]:
    draft = ScriptedDraft(said.ahead, vocabulary, SCRIPT, 15)
    return list(decode(request, session, [draft], Fixed(block), ticks()))


def test_a_hybrid_says_what_it_says_plainly_at_every_acceptance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = hybrid()
    said, request = plain(model), Request(PROMPT, 40)
    for replay in (0, 16):  # tokens owed run in a forward of their own, or beside the block
        monkeypatch.setattr(target, "REPLAY", replay)
        steps = run(MlxTargetSession(model, (0, 2)), said, request, 256)
        assert tokens_of(steps) == said.run(request)[0]
        rounds = [step for step in steps if step.rows]
        right = [min(SCRIPT[i % len(SCRIPT)], step.rows) for i, step in enumerate(rounds)]
        assert [step.accepted for step in rounds] == right


def test_without_the_rewind_a_hybrid_says_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hybrid()
    said, request = plain(model), Request(PROMPT, 40)
    monkeypatch.setattr(Caches, "restore", lambda self, length, _state: self.trim(length))
    assert tokens_of(run(MlxTargetSession(model, ()), said, request, 256)) != said.run(request)[0]


def test_a_hybrid_resumes_where_its_state_is_known() -> None:
    model = hybrid()
    said, session = plain(model), MlxTargetSession(model, (1,), chunk=4)
    first = Request(PROMPT, 12)
    text = tokens_of(run(session, said, first, 256))
    for prompt in ([*PROMPT, *text, 5, 6], [*PROMPT[:6], 200, 3]):
        request = Request(prompt, 10)
        twin = session.fork()
        reuse = session.holds(prompt, len(prompt) - 1)
        for one in (session, twin):
            draft = ScriptedDraft(said.ahead, 256, SCRIPT, 15)
            draft.holds = lambda _, most: most  # type: ignore[method-assign]
            found = list(decode(request, one, [draft], Fixed(4), ticks(), reuse))
            assert tokens_of(found) == said.run(request)[0]


def save(family: Any, folder: Path, **keys: Any) -> Path:
    """A tiny target's folder as transformers writes it, with ``keys`` in its config."""
    save_target(tiny_target(family), tiny_tokenizer(), folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **keys}), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("gemma3", tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("llama"))


def test_a_sliding_target_goes_back_past_its_window(sliding: Path) -> None:
    pair = open_pair(LoadConfig(str(sliding), backend="mlx", dtype="float32"))
    said, request = plain(pair.target.model), Request(PROMPT, 60)
    session = pair.open_target(0)
    assert any(isinstance(cache, SlidingCache) for cache in session._caches.layers)
    assert tokens_of(run(session, said, request, 512)) == said.run(request)[0]


def test_a_sliding_cache_forgets_old_rows_and_says_how_far_back_it_can() -> None:
    cache, rows = SlidingCache(8, spare=4), mx.arange(40.0).reshape(1, 1, 40, 1)
    for start in range(0, 40, 2):
        keys, _ = cache.update_and_fetch(*[rows[:, :, start : start + 2]] * 2)
        seen = min(start, 7) + 2
        assert keys[0, 0, :, 0].tolist() == list(range(start + 2 - seen, start + 2))
    assert cache.keys.shape[2] <= 8 + 2 * 4 + 2
    back = 40 - cache.floor
    assert back >= 4
    cache.trim(back)
    keys, _ = cache.update_and_fetch(*[rows[:, :, 40 - back : 41 - back]] * 2)
    assert keys[0, 0, :, 0].tolist() == list(range(33 - back, 41 - back))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_greedy_ids_are_those_of_mlx_lm_and_of_torch(tmp_path: Path, family: str) -> None:
    folder = save(family, tmp_path)
    options: Any = {"max_tokens": 32, "chat_template": False, "ignore_eos": True}
    with Engine(open_torch(LoadConfig(str(folder), device="cpu", dtype="float32"))) as engine:
        wanted = list(engine.generate(PROMPT, **options).token_ids)
    pair = open_pair(LoadConfig(str(folder), backend="mlx", dtype="float32"))
    with Engine(pair) as engine:
        assert list(engine.generate(PROMPT, **options).token_ids) == wanted
        from mlx_lm.generate import generate_step

        steps = generate_step(mx.array(PROMPT), pair.target.model, max_tokens=32)
        assert [int(token) for token, _ in steps] == wanted


ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "another base": ("llama", {"rope_type": "default", "rope_theta": 300.0}),
    "a stretched one": (
        "llama",
        {
            "rope_type": "llama3",
            "rope_theta": 700.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "one a layer type": (
        "gemma3",
        {
            "full_attention": {"rope_type": "linear", "rope_theta": 4000.0, "factor": 2.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 200.0},
        },
    ),
}


@pytest.mark.parametrize("ropes", ROPES)
def test_positions_turn_as_on_torch_where_only_transformers_5_names_them(
    tmp_path: Path, ropes: str
) -> None:
    family, parameters = ROPES[ropes]
    folder = str(save(family, tmp_path, rope_parameters=parameters))
    theirs = open_torch(LoadConfig(folder, device="cpu", dtype="float32"))
    ours = open_pair(LoadConfig(folder, backend="mlx", dtype="float32"))
    prompt = [7 * place % 200 for place in range(60)]
    found = [PROBES.load(pair.backend)(pair).logits(prompt) for pair in (theirs, ours)]
    np.testing.assert_allclose(found[1], found[0], atol=2e-4)


@pytest.mark.parametrize("oddity", [*ODDITIES, "dflash2"])
def test_a_draft_says_on_mlx_what_it_says_on_torch(tmp_path: Path, oddity: str) -> None:
    made = tiny_draft2(3) if oddity == "dflash2" else tiny_draft(3, **ODDITIES[oddity])
    folder = save_draft(made, tmp_path / "draft")
    numbers = np.random.default_rng(1)
    features = numbers.standard_normal((19, 128)).astype(np.float32)
    block = numbers.standard_normal((8, 64)).astype(np.float32)
    theirs = TORCH_RUNNER.hidden_states(folder, features, block)
    ours = MLX_RUNNER.hidden_states(folder, features, block)
    assert np.abs(theirs).max() > 0.5
    np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_weights_stored_as_whole_numbers_are_refused_by_name(tmp_path: Path) -> None:
    folder = save_draft(tiny_draft(3), tmp_path / "draft")
    state = load_file(folder / "model.safetensors")
    state["layers.0.mlp.up_proj.weight"] = (state["layers.0.mlp.up_proj.weight"] * 9).char()
    save_file(state, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"int8: layers\.0\.mlp\.up_proj\.weight\. Quantised"):
        load_weights(folder, read_spec(folder), mx.float32)


def dflash(folder: Path) -> Path:
    return save_draft(tiny_draft(3), folder)


def dflash2(folder: Path) -> Path:
    return save_draft(tiny_draft2(3), folder)


def dflash_few(folder: Path, own: bool = False) -> Path:
    """Every third token is all it says, by rows of the target's head or by its ``own``."""
    kept = torch.arange(1, 256, 3)
    file = save_draft(tiny_draft(3, draft_vocab_size=len(kept)), folder) / "model.safetensors"
    state = load_file(file) | {"d2t": kept - torch.arange(len(kept))}
    if own:
        generator = torch.Generator().manual_seed(7)
        state["lm_head.weight"] = torch.randn(len(kept), 64, generator=generator)
    save_file(state, file)
    return folder


def dflash_few_of_its_own(folder: Path) -> Path:
    return dflash_few(folder, own=True)


def eagle_sliding(folder: Path) -> Path:
    return save_eagle(folder, layer_types=["sliding_attention"], sliding_window=8)


def eagle_of_another_make(folder: Path) -> Path:
    options = {"norm_before_residual": True, "fc_norm": True, "norm_output": True}
    return save_eagle(folder, num_hidden_layers=2, **options)


DRAFTED: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "dflash": (dflash, {}, {}),
    "dflash, a short window": (dflash, {"draft_sliding_window_size": 5}, {}),
    "dflash, when sure": (dflash, {}, {"draft_p_min": 0.3}),
    "dflash, sampled when sure": (dflash, {}, {"draft_p_min": 0.15, "temperature": 0.7, "seed": 3}),
    "dflash, few tokens": (dflash_few, {}, {}),
    "dflash, few tokens and a head": (dflash_few_of_its_own, {}, {}),
    "dflash2": (dflash2, {}, {}),
    "dflash2, when sure": (dflash2, {}, {"draft_p_min": 0.6}),
    "dflash2, the best path": (dflash2, {}, {"draft_path": "best"}),
    "eagle3": (save_eagle, {}, {}),
    "eagle3, sampled": (save_eagle, {}, {"temperature": 0.7, "seed": 3}),
    "eagle3, when sure": (save_eagle, {}, {"draft_p_min": 0.4}),
    "eagle3, a window": (eagle_sliding, {}, {}),
    "eagle3, other norms": (eagle_of_another_make, {}, {}),
}


@pytest.mark.parametrize("case", DRAFTED)
def test_drafted_tokens_are_those_of_torch_round_by_round(
    tmp_path: Path, llama: Path, case: str
) -> None:
    save_it, load, sampling = DRAFTED[case]
    draft = str(save_it(tmp_path / "draft"))
    config = LoadConfig(str(llama), draft, dtype="float32", draft_dtype="float32", **load)
    request = Request(PROMPT, 24, sampling=Sampling(**sampling))
    found, said = [], []
    for pair in (open_torch(config), open_pair(config)):
        sessions, drafted = (pair.open_target(128), pair.open_drafts(128)), []
        propose = sessions[1][0].propose

        def keep(plan: Any, propose: Any = propose, drafted: Any = drafted) -> Proposal[Any]:
            proposal = propose(plan)
            drafted.append([int(token) for token in proposal.tokens])
            return proposal

        sessions[1][0].propose = keep  # type: ignore[method-assign]
        said.append(tokens_of(list(decode(request, *sessions, Fixed(6), ticks()))))
        found.append(drafted)
    assert found[0] == found[1]
    assert said[0] == said[1]
    assert len(found[0]) > 3
    if "draft_p_min" in sampling:
        assert len(set(map(len, found[0]))) > 1
    if "few" in case:
        assert {token % 3 for drafted in found[0] for token in drafted} == {1}


@pytest.mark.parametrize("save_it", [dflash, dflash2, save_eagle, eagle_sliding])
def test_a_draft_that_knows_the_text_is_kept_whole(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch, save_it: Any
) -> None:
    load = LoadConfig(str(llama), str(save_it(tmp_path / "draft")), dtype="float32")
    pair, logits = open_pair(load), DFlashSession._logits
    for seed in (None, 5):
        sampling = Sampling() if seed is None else Sampling(0.9, seed=seed)
        request = Request(PROMPT, 25, sampling=sampling)
        text = [*PROMPT, *plain(pair.target.model).run(request)[0]]

        def knowing(self: Any, hidden: Any, text: list[int] = text) -> Any:
            rows, cache = logits(self, hidden), self._caches[0]
            first = cache.first + cache.count + 1  # place of what the first row says
            for row, token in enumerate(text[first:][: rows.shape[0]]):
                rows[row, token] = 1e4
            return rows

        monkeypatch.setattr(DFlashSession, "_logits", knowing)
        for size in (2, 5, 7):
            sessions = pair.open_target(64), pair.open_drafts(64)
            steps = list(decode(request, *sessions, Fixed(size), ticks()))
            assert [*PROMPT, *tokens_of(steps)] == text
            assert all(step.accepted == step.rows for step in steps[1:])
            assert len(steps) == 1 + -(-24 // size)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_target_says_what_mlx_lm_says_with_it(
    tmp_path: Path, llama: Path, bits: int
) -> None:
    from mlx_lm import convert
    from mlx_lm.generate import generate_step

    folder = tmp_path / "target"
    convert(str(llama), str(folder), quantize=True, q_bits=bits, q_group_size=32)
    load = LoadConfig(str(folder), str(dflash(tmp_path / "draft")), draft_bits=bits)
    pair = open_pair(load)
    steps = generate_step(mx.array(PROMPT), pair.target.model, max_tokens=24)
    wanted = [int(token) for token, _ in steps]
    said, request = plain(pair.target.model), Request(PROMPT, 24)
    assert tokens_of(run(pair.open_target(64), said, request, 512)) == wanted
    sessions = pair.open_target(64), pair.open_drafts(64)
    assert tokens_of(list(decode(request, *sessions, Fixed(6), ticks()))) == wanted


def test_a_draft_is_quantised_where_that_is_asked_for(tmp_path: Path, llama: Path) -> None:
    folder = str(dflash(tmp_path / "draft"))
    whole, small = (
        open_pair(LoadConfig(str(llama), folder, draft_bits=bits, dtype="float32"))
        for bits in (None, 8)
    )
    assert small.memory()["draft"] < 0.5 * whole.memory()["draft"]
    assert small.runs_on()["draft_dtype"] == "8 bit"
    features, block = mx.random.normal((1, 9, 128)), mx.random.normal((1, 6, 64))
    states = []
    for pair in (whole, small, PROBES.load("mlx")(small).variant(taps=(0, 1))):
        model = pair.draft.model
        states.append(model.block(block, 9, model.context_kv(model.fuse(features), 0), [None] * 2))
    assert mx.array_equal(states[1], states[2])
    assert 0 < mx.abs(states[0] - states[1]).max().item() < 0.2


def test_what_mlx_cannot_do_is_said(tmp_path: Path, llama: Path) -> None:
    folder = str(dflash(tmp_path / "draft"))
    for backend in ("torch", "toy"):
        target = "toy" if backend == "toy" else str(llama)
        draft = "toy:script:1" if backend == "toy" else folder
        with pytest.raises(ConfigError, match="draft_bits is for the mlx backend"):
            opening.open_pair(LoadConfig(target, draft, backend=backend, draft_bits=4))
    with pytest.raises(ConfigError, match="draft_bits must be 4 or 8, got 3"):
        LoadConfig("target", draft_bits=3)
    with pytest.raises(ConfigError, match="are for the gguf backend"):
        opening.open_pair(LoadConfig(str(llama), folder, backend="mlx", gguf=GgufOptions(n_ctx=64)))
    with pytest.raises(CheckpointError, match="no multi-token prediction heads"):
        open_pair(LoadConfig(str(llama), "mtp", backend="mlx"))
    odd = str(save_draft(tiny_draft(3, intermediate_size=72), tmp_path / "odd"))
    with pytest.raises(ConfigError, match="rows of 72"):
        open_pair(LoadConfig(str(llama), odd, backend="mlx", draft_bits=4))


def test_two_models_with_other_taps_live_side_by_side() -> None:
    one, two = hybrid(1), hybrid(2)
    stacks = [model.language_model.model for model in (one, two)]
    layers = [list(map(id, stack.layers)) for stack in stacks]
    request = Request(PROMPT, 1)
    alone = [
        next(iter(MlxTargetSession(model, taps).prefill(request, 0)))
        for model, taps in ((one, (0,)), (two, (3, 1)))
    ]
    with tapped(one, (0,)), tapped(two, (3, 1)):
        assert [list(map(id, stack.layers)) for stack in stacks] != layers
    first, second = MlxTargetSession(one, (0,)), MlxTargetSession(two, (3, 1))
    both = [next(iter(session.prefill(request, 0))) for session in (first, second)]
    for a, b in zip(alone, both, strict=True):
        assert a.features is not None
        assert mx.array_equal(a.features, b.features)
    assert [list(map(id, stack.layers)) for stack in stacks] == layers
    assert both[1].features.shape == (len(PROMPT), 128)  # type: ignore[union-attr]


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
def test_a_dflash2_draft_samples_in_order_and_the_text_is_the_targets(
    tmp_path: Path, rule: Any
) -> None:
    folder = save_target(tiny_target("llama"), tiny_tokenizer(), tmp_path / "target")
    draft = save_draft(tiny_draft2(3), tmp_path / "draft")
    pair = open_pair(LoadConfig(str(folder), str(draft), backend="mlx", dtype="float32"))
    request = Request(PROMPT, 24, sampling=Sampling(0.9, seed=5, rule=rule))
    sessions = pair.open_target(0), pair.open_drafts(0)
    steps = list(decode(request, *sessions, Fixed(6), ticks()))
    assert len(tokens_of(steps)) == 24
    if rule == "match":
        assert tokens_of(steps) == plain(pair.target.model).run(request)[0]


def test_the_audit_and_the_doctor_look_at_a_pair(sliding: Path, tmp_path: Path) -> None:
    draft = save_draft(tiny_draft(3), tmp_path / "draft")
    pair = open_pair(LoadConfig(str(sliding), str(draft), backend="mlx", dtype="float32"))
    probe = PROBES.load("mlx")(pair)
    wanted = np.array(pair.target.model(mx.array([PROMPT]))[0, -1])
    np.testing.assert_allclose(probe.logits(PROMPT), wanted, atol=1e-4)
    assert (probe.dtype, probe.layers, probe.spec) == ("float32", 4, pair.draft.spec)
    changed = probe.variant(taps=(0, 1))
    assert changed.draft.spec.taps == (0, 1)
    assert mx.array_equal(changed.draft.model.fc.weight, pair.draft.model.fc.weight)
    assert len(probe.norms()) == 2 + 4 * 2
    assert probe.findings() is not None


def test_options_are_those_of_the_reference(sliding: Path) -> None:
    pair = open_pair(LoadConfig(str(sliding), backend="mlx", dtype="float32"))
    said = plain(pair.target.model)
    sampling = Sampling(0.8, 12, 0.9, seed=4, repetition_penalty=1.3, min_p=0.02, bad_words=((7,),))
    request = Request(PROMPT, 16, sampling=sampling)
    assert tokens_of(run(pair.open_target(0), said, request, 512)) == said.run(request)[0]


def test_a_gguf_target_is_read_bit_for_bit_as_torch_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    quant, model = GGMLQuantizationType.Q8_0, tiny_target("llama")
    file = write_gguf(tmp_path / "tiny.gguf", model, tiny_tokenizer(), quant=quant)
    for dtype in ("float32", "bfloat16"):
        places = [make(file, dtype, tmp_path / name) for make, name in READERS]
        ours, theirs = (load_file(place / "model-00001.safetensors") for place in places)
        assert ours.keys() == theirs.keys()
        assert all(ours[name].dtype == theirs[name].dtype for name in ours)
        assert all(bool((ours[name] == theirs[name]).all()) for name in ours)
        told = [sorted(path.name for path in place.iterdir()) for place in places]
        assert told[0] == told[1]
    options: Any = {"max_tokens": 12, "chat_template": False, "ignore_eos": True}
    said = []
    for backend in ("mlx", "torch"):
        load = LoadConfig(str(file), backend=backend, dtype="float32")
        with Engine(opening.open_pair(load)) as engine:
            assert engine.pair.backend == backend
            said.append(list(engine.generate(PROMPT, **options).token_ids))
    assert said[0] == said[1]


def test_without_torch_mlx_opens_a_gguf_target_beside_a_draft_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opening, "find_spec", lambda name: None if name == "torch" else name)
    assert opening.backend_of(LoadConfig("some.gguf", "some/draft")) == "mlx"
    assert opening.backend_of(LoadConfig("some.gguf")) == "gguf"
    monkeypatch.setattr(opening, "find_spec", lambda name: name if name == "mlx_lm" else None)
    assert opening.backend_of(LoadConfig("some.gguf")) == "mlx"
    there = ("mlx_lm", "llama_cpp")
    monkeypatch.setattr(opening, "find_spec", lambda name: name if name in there else None)
    assert opening.backend_of(LoadConfig("some.gguf")) == "gguf"


@pytest.mark.demo
def test_the_demo_pair_runs_on_mlx_and_says_what_it_says_on_torch() -> None:
    answers = []
    for backend in ("mlx", "torch"):
        with load(backend=backend, device="cpu", dtype="float32", profile=False) as engine:
            answers.append(engine.generate("How do rainbows form?", max_tokens=24, block_size=4))
    ours, theirs = answers
    assert ours.token_ids == theirs.token_ids
    assert ours.stats.accepted == theirs.stats.accepted > 0


def test_apple_silicon_takes_mlx_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    load = LoadConfig("some/target", "some/draft")
    assert opening.backend_of(load) == "torch"
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert opening.backend_of(load) == "mlx"
    assert opening.backend_of(LoadConfig("some/target", device="mps")) == "torch"
    assert opening.backend_of(LoadConfig("toy")) == "toy"
    assert opening.backend_of(LoadConfig("some.gguf", "some/draft")) == "mlx"
    assert opening.backend_of(LoadConfig("some/target", backend="torch")) == "torch"
