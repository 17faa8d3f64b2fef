"""Every PyTorch form that people use today, on a tiny pair."""

from __future__ import annotations

import inspect
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import dflash
from dflash.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MissingBackend,
    PairError,
    PromptError,
)
from dflash.model import (
    DFlashDraftModel,
    GenerationStats,
    build_target_layer_ids,
    dflash_generate,
    extract_context_feature,
    load_and_process_dataset,
    sample,
)
from tests.backends.tiny import EOS, reference_generate, tiny_target, tiny_tokenizer
from tests.facades.drafts import MASK, NATIVE, save_draft

pytestmark = pytest.mark.torch

PROMPT = [5, 9, 200, 31, 77, 4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_draft(tmp_path_factory.mktemp("draft"))


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


@pytest.fixture
def draft(folder):
    return DFlashDraftModel.from_pretrained(folder)


@pytest.fixture
def ids():
    return torch.tensor([PROMPT])


def expected(target, count, eos=()):
    return [*PROMPT, *reference_generate(target, PROMPT, count, eos)]


# --- the forms of call-forms.md ------------------------------------------------------------------


def test_the_generate_function_by_keyword(draft, target, ids):
    tokenizer = tiny_tokenizer()
    draft.block_size = draft.config.block_size
    found = dflash_generate(
        model=draft,
        target=target,
        input_ids=ids,
        max_new_tokens=40,
        stop_token_ids=tokenizer.eos_token_id,
        temperature=0.0,
        block_size=draft.block_size,
    )
    assert found.shape[0] == 1
    assert found.dtype == torch.long
    assert found[0].tolist() == expected(target, 40, {EOS})


def test_the_generate_function_with_every_extra(draft, target, ids):
    found = dflash_generate(
        model=draft,
        target=target,
        input_ids=ids,
        max_new_tokens=30,
        stop_token_ids=None,
        temperature=0.0,
        block_size=4,
        mask_token_id=MASK + 1,
        return_stats=True,
        top_p=0.9,
        top_k=20,
    )
    assert isinstance(found, GenerationStats)
    assert found.output_ids[0].tolist() == expected(target, 30)
    assert found.num_input_tokens == len(PROMPT)
    assert found.num_output_tokens == 30
    assert found.time_to_first_token > 0 and found.time_per_output_token > 0
    assert sum(found.acceptance_lengths) == 29  # the prefill gives the first token
    assert 1 <= min(found.acceptance_lengths) <= max(found.acceptance_lengths) <= 4
    assert draft.mask_token_id == MASK


@pytest.mark.parametrize(
    "form", [int, lambda i: [i], lambda i: (i, 400), torch.tensor, lambda i: torch.tensor([i])]
)
def test_stop_ids_of_every_form(draft, target, ids, form):
    whole = reference_generate(target, PROMPT, 40)
    stop = whole[17]
    end = whole.index(stop) + 1
    found = dflash_generate(draft, target, ids, 40, form(stop), 0.0)
    assert found[0].tolist() == [*PROMPT, *whole[:end]]


def test_no_stop_ids_stop_nowhere(draft, target, ids):
    whole = reference_generate(target, PROMPT, 60)
    target.generation_config.eos_token_id = whole[10]
    try:
        assert dflash_generate(draft, target, ids, 60).shape[1] == len(PROMPT) + 60
    finally:
        target.generation_config.eos_token_id = EOS


def test_the_method_with_positional_target_and_ids(draft, target, ids):
    with pytest.warns(UserWarning, match=f"native {NATIVE}"):
        found = draft.spec_generate(target, ids, block_size=10, max_new_tokens=28)
    assert found[0].tolist() == expected(target, 28, {EOS})


def test_the_method_by_keyword(draft, target, ids):
    found = draft.spec_generate(
        input_ids=ids,
        max_new_tokens=28,
        temperature=0.0,
        target=target,
        stop_token_ids=[EOS],
    )
    assert found[0].tolist() == expected(target, 28, {EOS})


def test_stop_ids_left_out_are_those_of_the_generation_config(draft, target, ids):
    whole = reference_generate(target, PROMPT, 40)
    target.generation_config.eos_token_id = [whole[8], 499]
    try:
        found = draft.spec_generate(target, ids, max_new_tokens=40)
        everywhere = draft.spec_generate(target, ids, max_new_tokens=40, stop_token_ids=[])
    finally:
        target.generation_config.eos_token_id = EOS
    assert found[0].tolist() == [*PROMPT, *whole[: whole.index(whole[8]) + 1]]
    assert everywhere[0].tolist() == [*PROMPT, *whole]


def test_a_tokenizers_batch_encoding_is_a_prompt(draft, target):
    messages = [{"role": "user", "content": "hello"}]
    encoded = tiny_tokenizer().apply_chat_template(
        messages, return_tensors="pt", return_dict=True, add_generation_prompt=True
    )
    found = draft.spec_generate(target=target, input_ids=encoded, max_new_tokens=8)
    assert found[0, : encoded["input_ids"].shape[1]].tolist() == encoded["input_ids"][0].tolist()


def test_layer_ids_follow_the_published_formula():
    assert build_target_layer_ids(36, 5) == [1, 9, 17, 25, 33]
    assert build_target_layer_ids(60, 6) == [1, 12, 23, 35, 46, 57]
    assert build_target_layer_ids(32, 1) == [16]


def test_a_block_beyond_the_native_one_is_clamped_with_one_line(draft, target, ids):
    draft.block_size = 64
    with pytest.warns(UserWarning, match="block size 64") as seen:
        stats = dflash_generate(draft, target, ids, 20, return_stats=True)
    assert len(seen) == 1
    assert max(stats.acceptance_lengths) <= NATIVE


# --- attributes ----------------------------------------------------------------------------------


def test_attributes_are_readable_and_assignable(draft, target, ids):
    assert draft.config.block_size == draft.block_size == NATIVE
    assert draft.config.mask_token_id == draft.mask_token_id == MASK
    assert draft.config.target_layer_ids == draft.target_layer_ids == [0, 2]
    assert draft.config.hidden_size == 64
    assert draft.sliding_window_size is None
    draft.block_size = 3
    draft.mask_token_id = 44
    draft.target_layer_ids = [1, 3]
    draft.sliding_window_size = 8192
    stats = dflash_generate(draft, target, ids, 20, return_stats=True)
    assert max(stats.acceptance_lengths) <= 3
    assert stats.output_ids[0].tolist() == expected(target, 20)
    assert (draft.mask_token_id, draft.target_layer_ids) == (44, [1, 3])


@pytest.mark.parametrize("value", [0, -1])
def test_a_window_that_is_no_window_is_refused(draft, folder, value):
    with pytest.raises(ValueError, match="sliding_window_size"):
        draft.sliding_window_size = value
    with pytest.raises(ValueError, match="sliding_window_size"):
        DFlashDraftModel.from_pretrained(folder, sliding_window_size=value)


def test_a_small_window_bounds_the_draft_and_changes_no_text(draft, target, ids):
    draft.sliding_window_size = 4
    with pytest.warns(UserWarning, match="last 4 tokens"):
        found = dflash_generate(draft, target, ids, 40)
    assert found[0].tolist() == expected(target, 40)


def test_another_number_of_taps_is_refused(draft):
    with pytest.raises(ConfigError, match="2 tapped layers"):
        draft.target_layer_ids = [0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, "bfloat16", "bf16"])
def test_a_draft_loads_in_the_dtype_asked_for(folder, dtype):
    draft = DFlashDraftModel.from_pretrained(folder, dtype=dtype)
    assert draft.dtype == (torch.float32 if dtype == torch.float32 else torch.bfloat16)


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_a_float16_draft_is_refused(folder, name):
    with pytest.raises(ConfigError, match="float16"):
        DFlashDraftModel.from_pretrained(folder, **{name: torch.float16})


def test_a_draft_stored_in_float16_runs_in_bfloat16(tmp_path):
    half = DFlashDraftModel.from_pretrained(save_draft(tmp_path, torch.float16))
    assert half.dtype == torch.bfloat16


def test_a_draft_keeps_the_dtype_it_is_stored_in(tmp_path):
    stored = save_draft(tmp_path, torch.bfloat16)
    assert DFlashDraftModel.from_pretrained(stored, dtype="auto").dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:.*stored in float16")
def test_features_of_a_half_precision_target_are_cast_to_the_drafts(folder, ids):
    target = tiny_target("llama", dtype=torch.float16)
    for dtype in ("float32", "bfloat16"):
        draft = DFlashDraftModel.from_pretrained(folder, dtype=dtype)
        found = dflash_generate(draft, target, ids, 12)
        assert found.shape == (1, len(PROMPT) + 12)


def test_the_draft_moves_to_its_targets_device_on_first_use(draft, target, ids):
    moved = []
    draft.to = lambda device: moved.append(device)
    meta = tiny_target("llama").to("meta")
    with pytest.raises(Exception):  # noqa: B017 - nothing can run on meta
        dflash_generate(draft, meta, ids, 4)
    assert moved == [torch.device("meta")]


def test_parameters_have_the_published_names(draft):
    names = set(draft.state_dict())
    assert {"fc.weight", "hidden_norm.weight", "norm.weight"} < names
    assert "layers.1.self_attn.q_norm.weight" in names
    assert len(names) == 3 + 11 * 2


def test_the_forward_is_a_plain_function_of_all_the_context(draft):
    generator = torch.Generator().manual_seed(0)
    context = torch.randn(1, 5, 128, generator=generator)
    block = torch.randn(1, NATIVE, 64, generator=generator)
    positions = torch.arange(5 + NATIVE)[None]
    found = draft(position_ids=positions, noise_embedding=block, target_hidden=context)
    assert found.shape == (1, NATIVE, 64)
    assert found.isfinite().all()
    shifted = draft(positions + 7, block, context)
    torch.testing.assert_close(found, shifted, atol=1e-4, rtol=1e-4)  # rotary is relative


def test_a_forward_that_would_need_masks_says_so(tmp_path):
    draft = DFlashDraftModel.from_pretrained(save_draft(tmp_path, is_causal=True))
    with pytest.raises(ConfigError, match="spec_generate"):
        draft(torch.arange(8)[None], torch.zeros(1, 4, 64), torch.zeros(1, 4, 128))


# --- the target is the caller's ------------------------------------------------------------------


def test_the_callers_target_is_never_altered(draft, ids):
    target = tiny_target("qwen3")
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    modules = {name: type(module) for name, module in target.named_modules()}
    hooks = sum(len(module._forward_hooks) for module in target.modules())
    draft.spec_generate(target, ids, max_new_tokens=20)
    assert {name: type(module) for name, module in target.named_modules()} == modules
    assert sum(len(module._forward_hooks) for module in target.modules()) == hooks
    for name, tensor in target.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("kind", ["llama", "qwen3", "swa"])
@pytest.mark.parametrize("block_size", [1, 2, NATIVE])
def test_greedy_output_is_the_targets_own(draft, ids, kind, block_size):
    target = tiny_target(kind)
    found = dflash_generate(draft, target, ids, 50, block_size=block_size)
    assert found[0].tolist() == expected(target, 50)


def test_plain_decoding_is_block_size_one(draft, target, ids):
    stats = dflash_generate(draft, target, ids, 20, block_size=1, return_stats=True)
    assert stats.acceptance_lengths == [1] * 19


def test_threads_on_one_target_take_turns(draft, target):
    prompts = [[5, 6, i] for i in range(4)]
    wanted = [[*p, *reference_generate(target, p, 20)] for p in prompts]

    def run(prompt):
        return dflash_generate(draft, target, torch.tensor([prompt]), 20)[0].tolist()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, prompts * 3)) == wanted * 3


@pytest.mark.parametrize("count", [0, 1, 2, NATIVE, NATIVE + 1])
def test_exactly_as_many_tokens_as_asked_for(draft, target, ids, count):
    stats = dflash_generate(draft, target, ids, count, return_stats=True)
    assert stats.num_output_tokens == count
    assert stats.output_ids.shape == (1, len(PROMPT) + count)


def test_sampling_repeats_with_torchs_seed(draft, target, ids):
    def run(seed):
        torch.manual_seed(seed)
        return dflash_generate(draft, target, ids, 30, temperature=1.0)[0].tolist()

    assert run(1) == run(1)
    assert run(1) != run(2)
    torch.manual_seed(1)
    plain = dflash_generate(draft, target, ids, 30, temperature=1.0, block_size=1)[0].tolist()
    assert plain == run(1)


# --- what cannot work ----------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["auto", "8"])
def test_a_block_size_in_words_is_refused_with_the_call_that_takes_it(draft, target, ids, value):
    with pytest.raises(ConfigError, match=r"dflash\.load"):
        dflash_generate(draft, target, ids, 4, block_size=value)


def test_several_sequences_at_once_are_refused(draft, target):
    with pytest.raises(PromptError, match="one sequence"):
        draft.spec_generate(target, torch.tensor([[1, 2], [3, 4]]), max_new_tokens=4)


def test_target_and_draft_the_wrong_way_round_are_refused(draft, target, ids):
    with pytest.raises(ConfigError, match=r"takes the draft first.*got Llama.* and DFlash"):
        dflash_generate(target, draft, ids, 4)


@pytest.mark.parametrize("ids", [torch.zeros(1, 0, dtype=torch.long), torch.tensor([])])
def test_an_empty_prompt_is_refused(draft, target, ids):
    with pytest.raises(PromptError, match="empty"):
        draft.spec_generate(target, ids, max_new_tokens=4)


def test_a_prompt_longer_than_the_context_is_refused(draft, target):
    with pytest.raises(PromptError, match="context holds 1024"):
        draft.spec_generate(target, torch.ones(1, 1024, dtype=torch.long), max_new_tokens=4)


def test_a_prompt_outside_the_vocabulary_is_refused(draft, target):
    with pytest.raises(PromptError, match="vocabulary of 512"):
        draft.spec_generate(target, torch.tensor([[9999]]), max_new_tokens=4)


def test_a_target_of_another_shape_is_refused(draft, ids):
    with pytest.raises(PairError, match="layers"):
        draft.spec_generate(tiny_target("llama", layers=2), ids, max_new_tokens=4)


def test_a_folder_that_is_a_target_is_refused(tmp_path):
    tiny_target("llama").save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="not a draft"):
        DFlashDraftModel.from_pretrained(tmp_path)


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no such draft"):
        DFlashDraftModel.from_pretrained(tmp_path / "nowhere")


def test_one_device_for_a_draft(folder):
    assert DFlashDraftModel.from_pretrained(folder, device_map={"": "cpu"}).device.type == "cpu"
    with pytest.raises(ConfigError, match="one device"):
        DFlashDraftModel.from_pretrained(folder, device_map={"fc": "cpu", "norm": "cuda:0"})


# --- the small functions -------------------------------------------------------------------------


def test_context_features_are_the_outputs_of_the_named_layers(target, ids):
    with torch.inference_mode():
        hidden = target(ids, output_hidden_states=True).hidden_states
    found = extract_context_feature(hidden, [0, 2])
    assert torch.equal(found, torch.cat([hidden[1], hidden[3]], dim=-1))


def test_sampling_logits():
    logits = torch.tensor([[[0.0, 5.0, 1.0], [3.0, 2.0, 9.0]]])
    assert sample(logits).tolist() == [[1, 2]]
    assert sample(logits, temperature=0.7, top_k=1).tolist() == [[1, 2]]
    assert sample(logits, temperature=0.7, top_p=0.01).tolist() == [[1, 2]]
    torch.manual_seed(0)
    drawn = sample(torch.zeros(1, 3000, 3), temperature=1.0)
    counts = torch.bincount(drawn.flatten(), minlength=3)
    assert drawn.shape == (1, 3000)
    assert counts.min() > 850


def test_upstreams_names_are_public():
    for name in (
        "DFlashDraftModel",
        "extract_context_feature",
        "load_and_process_dataset",
        "sample",
    ):
        assert getattr(dflash, name) is not None
        assert name in dflash.__all__


def test_upstreams_argument_names_are_kept():
    assert list(inspect.signature(dflash_generate).parameters)[:11] == [
        "model",
        "target",
        "input_ids",
        "max_new_tokens",
        "stop_token_ids",
        "temperature",
        "block_size",
        "mask_token_id",
        "return_stats",
        "top_p",
        "top_k",
    ]


# --- prompt sets ---------------------------------------------------------------------------------


def test_prompt_sets_come_from_a_file_or_a_folder(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"turns": ["x", "y"], "id": 1}\n\n{"prompt": "z"}\n')
    (tmp_path / "b.jsonl").write_text('{"turns": ["w"]}\n')
    one = load_and_process_dataset(tmp_path / "a.jsonl")
    assert [row["turns"] for row in one] == [["x", "y"], ["z"]]
    assert one[0]["id"] == 1
    assert len(load_and_process_dataset(str(tmp_path))) == 3


@pytest.mark.parametrize("line", ["{", "[1]", '{"turns": []}', '{"turns": "x"}', '{"text": "x"}'])
def test_a_malformed_line_is_named_by_file_and_number(tmp_path, line):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=r"bad\.jsonl:2"):
        load_and_process_dataset(file)


def test_a_prompt_set_that_is_no_utf8_is_named(tmp_path):
    file = tmp_path / "latin.jsonl"
    file.write_bytes(b'{"prompt": "One"}\n{"prompt": "caf\xe9"}\n')
    with pytest.raises(DataError, match=r"latin\.jsonl is not UTF-8"):
        load_and_process_dataset(file)


def test_an_unknown_prompt_set_lists_the_known_ones():
    with pytest.raises(ConfigError, match="gsm8k"):
        load_and_process_dataset("no-such-set")


def test_an_empty_folder_is_no_prompt_set(tmp_path):
    with pytest.raises(DataError, match="has no"):
        load_and_process_dataset(tmp_path)


def test_a_named_set_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingBackend, match="pip install datasets"):
        load_and_process_dataset("gsm8k")


def test_a_named_set_becomes_turns(monkeypatch):
    class Fake:
        @staticmethod
        def load_dataset(repository, config, split):
            return [{"question": "1 + 1?", "prompt": ["a", "b"]}]

    monkeypatch.setitem(sys.modules, "datasets", Fake)
    assert load_and_process_dataset("gsm8k")[0]["turns"][0].startswith("1 + 1?")
    assert load_and_process_dataset("mt_bench")[0]["turns"] == ["a", "b"]
