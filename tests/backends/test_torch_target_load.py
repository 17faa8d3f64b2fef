"""Opening targets: what is read, what is refused, and the next step in every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MambaConfig, MambaForCausalLM, T5Config

from dflash.backends.torch import memory, open_pair
from dflash.backends.torch.checkpoint import resolve
from dflash.backends.torch.load import eos_ids, load_target, pick_device, pick_dtype, wrap_target
from dflash.checkpoint import count_weights, fetch
from dflash.checks import readable
from dflash.config import LoadConfig
from dflash.errors import (
    CheckpointError,
    ConfigError,
    DownloadError,
    MissingBackend,
    OutOfMemory,
    WeightsError,
)

from .tiny import save_target, tiny_target, tiny_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_target(tiny_target(layers=2), tiny_tokenizer(), tmp_path / "target")


def load(folder: Path, **options: Any) -> Any:
    return load_target(str(folder), "cpu", **options)


def edit(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; None removes one."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def test_a_folder_becomes_a_described_target(folder: Path) -> None:
    target = load(folder)
    assert (target.hidden_size, target.num_layers, target.vocab_size) == (64, 2, 512)
    assert target.context_length == 1024 and target.eos_ids == {0}
    assert target.dtype == torch.float32 and target.device.type == "cpu"
    assert target.name == str(folder) and target.owned
    assert target.tokenizer.chat_template
    assert not target.model.training
    assert not any(p.requires_grad for p in target.model.parameters())


@pytest.mark.parametrize("pack", [True, False])
def test_the_loaded_model_computes_what_was_saved(folder: Path, pack: bool) -> None:
    ids = torch.tensor([[5, 300, 7, 41]])
    with torch.inference_mode():
        ours = load(folder, pack=pack).model(input_ids=ids).logits
        saved = tiny_target(layers=2)(input_ids=ids).logits
    torch.testing.assert_close(ours, saved, rtol=1e-5, atol=1e-5)


def test_a_dtype_is_followed(folder: Path) -> None:
    assert load(folder, dtype="bfloat16").dtype == torch.bfloat16
    assert pick_dtype(None, torch.device("cuda")) == torch.bfloat16
    assert pick_dtype(None, torch.device("cpu")) == torch.float32
    with pytest.raises(ConfigError, match="dtype must be"):
        pick_dtype("linear", torch.device("cpu"))


def test_a_device_that_is_not_there_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="must be cpu, cuda"):
        pick_device("toaster")
    with pytest.raises(ConfigError, match="not available here"):
        pick_device("cuda:97")


@pytest.mark.parametrize(
    "path", ["./nowhere", "/nowhere/at/all", "nowhere", "a/b/c", "model.gguf", "~/no/such"]
)
def test_a_path_that_does_not_exist_is_never_looked_up_on_the_hub(path: str) -> None:
    with pytest.raises(CheckpointError, match="no such file or folder"):
        resolve(path)


def test_offline_a_hub_id_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadError, match=r"HF_HUB_OFFLINE is set.*local folder"):
        resolve("somebody/something-that-is-not-cached")


def test_a_name_that_is_no_hub_id_is_a_checkpoint_error() -> None:
    with pytest.raises(CheckpointError, match="neither a local path nor a hub id"):
        fetch("some body/some:thing")


def test_hub_failures_become_download_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(*_args: Any, **_options: Any) -> None:
        raise OSError("gated\nlong story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(DownloadError, match=r"somebody/model from the hub: gated\. Check"):
        fetch("somebody/model")


def test_an_empty_folder_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither a config\.json nor a \.gguf"):
        load(tmp_path)


def test_one_safetensors_file_points_to_its_folder(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="give its folder"):
        load(folder / "model.safetensors")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickled_weights_are_refused_with_the_conversion(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(CheckpointError, match=f"{name}.*Only safetensors.*save_pretrained"):
        load(folder)


def test_a_folder_without_weights_says_so(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        load(folder)


@pytest.mark.parametrize("text", ["{not json", "[1, 2]"])
def test_a_broken_config_is_named(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 5, 100, -100])
def test_weights_that_were_cut_short_are_found_before_loading(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:keep])
    with pytest.raises(CheckpointError, match="damaged or incomplete"):
        load(folder)


def test_a_header_that_is_no_header_is_damaged(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x02" + b"\0" * 7 + b"[]")
    with pytest.raises(CheckpointError, match="damaged"):
        load(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lacks model-1\.safetensors, model-2"):
        load(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a shard index"):
        load(folder)


def test_weights_are_counted_over_all_shards(tmp_path: Path) -> None:
    model = tiny_target(layers=2)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert count_weights(tmp_path) == sum(p.numel() for p in model.parameters())


def test_a_missing_tensor_is_an_error_and_never_random(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def test_tensors_of_another_shape_than_the_config_says_are_an_error(folder: Path) -> None:
    edit(folder, intermediate_size=100)
    with pytest.raises(WeightsError, match="shapes"):
        load(folder)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.self_attn.k_proj.weight"])
@pytest.mark.parametrize("pack", [True, False])
def test_weights_that_are_not_finite_are_named(
    folder: Path, bad: float, name: str, pack: bool
) -> None:
    weights = load_file(folder / "model.safetensors")
    weights[name].view(-1)[3] = bad
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=f"NaN or infinite: {name}"):
        load(folder, pack=pack)


def test_a_draft_where_a_target_is_due_is_told_where_it_belongs(folder: Path) -> None:
    edit(folder, architectures=["DFlashDraftModel"], dflash_config={"mask_token_id": 1})
    with pytest.raises(CheckpointError, match=r"is a draft.*--draft"):
        load(folder)


def test_model_code_of_a_checkpoint_is_never_run_unasked(folder: Path) -> None:
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    edit(
        folder,
        model_type="evil",
        auto_map={"AutoConfig": "evil.A", "AutoModelForCausalLM": "evil.B"},
    )
    with pytest.raises(CheckpointError, match=r"own model code.*trust_remote_code=True"):
        load(folder)


@pytest.mark.parametrize(
    "changes", [{"model_type": "no-such-thing"}, {"hidden_size": "wide"}, {"model_type": None}]
)
def test_what_transformers_cannot_load_is_one_checkpoint_error(
    folder: Path, changes: dict[str, Any]
) -> None:
    edit(folder, **changes)
    with pytest.raises(CheckpointError, match="cannot load"):
        load(folder)


def test_a_folder_without_a_tokenizer_says_which_files_to_copy(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(CheckpointError, match=r"Copy tokenizer\.json"):
        load(folder)


def test_encoder_decoders_and_recurrent_models_are_refused(folder: Path) -> None:
    T5Config(num_layers=1, d_model=16, d_kv=4, d_ff=16, vocab_size=32).save_pretrained(folder)
    with pytest.raises(CheckpointError, match="not a decoder-only"):
        load(folder)
    state = MambaForCausalLM(MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1))
    with pytest.raises(CheckpointError, match="not in the same state after a rejected draft"):
        wrap_target(state)
    with pytest.raises(CheckpointError, match="must be a transformers causal LM"):
        wrap_target(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("value", [3, [3], (3,), torch.tensor([3]), torch.tensor(3)])
def test_every_form_of_an_end_of_text_id_is_understood(value: Any) -> None:
    model = tiny_target(eos=None)
    model.generation_config.eos_token_id = value
    assert eos_ids(model) == {3}


def test_end_of_text_ids_of_all_places_count(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 4]}))
    assert load(folder).eos_ids == {0, 4, 9}


def test_a_model_of_the_users_own_is_described_and_not_touched() -> None:
    model = tiny_target()
    before = {name: (p.data_ptr(), p.requires_grad) for name, p in model.named_parameters()}
    target = wrap_target(model, tiny_tokenizer(), "mine")
    assert target.name == "mine" and not target.owned
    assert before == {n: (p.data_ptr(), p.requires_grad) for n, p in model.named_parameters()}


def test_loading_leaves_transformers_talkative(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers.utils import logging

    level: int = logging.get_verbosity()
    load(folder)
    assert logging.get_verbosity() == level and logging.is_progress_bar_enabled()
    out, err = capfd.readouterr()
    assert out == "" and err == ""


def test_a_pair_without_a_draft_opens_sessions_and_counts_bytes(folder: Path) -> None:
    pair = open_pair(LoadConfig(str(folder), device="cpu"))
    assert pair.draft_name is None and pair.draft_block_size is None
    assert pair.open_drafts(10) == []
    session = pair.open_target(100)
    assert pair.memory()["target_kv"] > 100 * 2 * 2 * 2 * 16 * 4
    ids = pair.tokenizer.encode("<|start|>hello<|end|>")
    assert ids[0] == 1 and ids[-1] == 0
    assert pair.tokenizer.decode(ids) == "hello"
    assert not pair.tokenizer.add_bos_token and len(pair.tokenizer) == 512
    session.close()
    pair.close()
    pair.close()


def test_what_does_not_fit_is_refused_with_numbers_and_flags(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = open_pair(LoadConfig(str(folder), device="cpu"))
    monkeypatch.setattr(memory, "free_bytes", lambda _device: 1000)
    words = r"needs .*iB.*1000 bytes are free.*--dtype bfloat16.*--max-tokens"
    with pytest.raises(OutOfMemory, match=words):
        pair.open_target(1000)
    with pytest.raises(OutOfMemory, match=words):
        load(folder)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("x: can't allocate memory: y")],
)
def test_out_of_memory_of_torch_is_mapped(error: Exception) -> None:
    with pytest.raises(OutOfMemory, match="--dtype bfloat16"), memory.guard("testing"):
        raise error


def test_other_runtime_errors_pass_unchanged() -> None:
    with pytest.raises(RuntimeError, match="shape"), memory.guard("testing"):
        raise RuntimeError("shape")


def test_free_bytes_of_this_machine_are_known_and_numbers_read_well() -> None:
    free = memory.free_bytes(torch.device("cpu"))
    assert free is None or free > 0
    sizes = (0, 1023, 1024, 3 << 20, 5 << 30, 7 << 50)
    assert [readable(size) for size in sizes] == [
        "0 bytes", "1023 bytes", "1.0 KiB", "3.0 MiB", "5.0 GiB", "7168.0 TiB",
    ]  # fmt: skip


def test_without_torch_the_pip_line_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash.backends.torch.find_spec", lambda name: None)
    with pytest.raises(MissingBackend, match=r"pip install 'dflash-engine\[torch\]'"):
        open_pair(LoadConfig("anything"))
