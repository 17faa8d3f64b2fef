"""Bad input gets one clear error and the next step, and never a traceback."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash.backends.torch import memory
from tests.backends.tiny import EOS, save_target, tiny_target, tiny_tokenizer
from tests.cli.running import apart, run
from tests.facades.drafts import config, save_draft

pytestmark = pytest.mark.torch


@pytest.fixture(scope="session")
def target(tmp_path_factory) -> Path:
    return save_target(tiny_target("llama"), tiny_tokenizer(), tmp_path_factory.mktemp("target"))


@pytest.fixture
def draft(tmp_path) -> Path:
    return save_draft(tmp_path / "draft")


def refused(*words: object, says: str | tuple[str, ...], code: int = 2) -> None:
    """``generate hello WORDS`` ends with ``code`` and one message that has all of ``says``."""
    found = run("generate", "hello", "--max-tokens", 4, *words)
    assert found.code == code, found.err
    assert found.out == ""
    assert "Traceback" not in found.err
    assert found.err.count("error:") == 1
    for part in (says,) if isinstance(says, str) else says:
        assert part in found.err


def test_the_pair_of_these_tests_works(target, draft):
    found = run("generate", "hello", "--model", target, "--draft", draft, "--max-tokens", 4)
    assert found.code == 0, found.err


# --- files ---------------------------------------------------------------------------------------


def test_a_target_that_is_not_there(tmp_path):
    refused("--model", tmp_path / "nowhere", says="no such file or folder")
    refused("--model", "nowhere", says=("no such file or folder", "owner/name"))


def test_a_draft_that_is_not_there(target, tmp_path):
    gone = tmp_path / "gone"
    refused("--model", target, "--draft", gone, says="no such draft folder")
    (tmp_path / "model.safetensors").write_bytes(b"\xff")
    (tmp_path / "folder.gguf").mkdir()
    refused("--model", tmp_path / "folder.gguf", says="folder.gguf is a folder")
    refused("--draft", tmp_path / "model.safetensors", says="one file, not a draft folder")


def test_a_hub_id_without_a_hub(target):
    words = ("HF_HUB_OFFLINE", "local folder")
    refused("--model", "nobody/nothing", says=words, code=1)
    refused("--model", target, "--draft", "nobody/nothing", says=words, code=1)


@pytest.mark.parametrize(
    ("words", "says", "code"),
    [
        (("--model", "nobody/nothing"), "HF_HUB_OFFLINE is set", 1),
        (("--model", "nobody/nothing", "--backend", "mlx"), "HF_HUB_OFFLINE is set", 1),
        (("--model", "nowhere"), "no such file or folder", 2),
        (("--model", "nowhere.gguf", "--draft", "none"), "no such file: nowhere.gguf", 2),
        (("--model", "nowhere.gguf", "--backend", "torch"), "no such file or folder", 2),
    ],
)
def test_a_name_of_nothing_is_refused_before_a_backend_is_imported(words, says, code):
    found = apart("generate", "hello", *words, HF_HUB_OFFLINE="1")
    assert found[:1] == (code,) and says in found[1]
    assert not {"torch", "mlx", "transformers"} & found[2]


def test_a_draft_of_nothing_is_refused_before_a_backend_is_imported(target):
    words = ("--model", target, "--draft", "nobody/nothing")
    code, said, modules = apart("generate", "hello", *words, HF_HUB_OFFLINE="1")
    assert code == 1 and "HF_HUB_OFFLINE is set" in said
    assert "torch" not in modules


def test_weights_that_are_cut_short(target, tmp_path):
    broken = shutil.copytree(target, tmp_path / "broken")
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused("--model", broken, says=("damaged or incomplete", "Download it again"))


def test_a_draft_that_is_cut_short(target, draft):
    file = draft / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    refused("--model", target, "--draft", draft, says="damaged or incomplete")


def test_a_file_that_is_neither_a_folder_nor_gguf(tmp_path):
    file = tmp_path / "model.bin"
    file.write_bytes(b"PK\x03\x04 not a model")
    refused("--model", file, says=("not a GGUF file", "safetensors"))


def test_a_damaged_gguf_file(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 64)
    refused("--model", file, says="model.gguf")


def test_pickled_weights_are_not_opened(target, draft, tmp_path):
    pickled = shutil.copytree(target, tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    refused("--model", pickled, says=("pytorch_model.bin", "safetensors"))
    (draft / "model.safetensors").rename(draft / "pytorch_model.bin")
    refused("--model", target, "--draft", draft, says=("pytorch_model.bin", "pickle"))


def test_code_in_a_checkpoint_is_not_run_unless_asked(target, tmp_path):
    coded = shutil.copytree(target, tmp_path / "coded")
    keys = json.loads((coded / "config.json").read_text())
    keys |= {"model_type": "own", "architectures": ["OwnForCausalLM"]}
    keys["auto_map"] = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (coded / "config.json").write_text(json.dumps(keys))
    (coded / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    refused("--model", coded, says="--trust-remote-code")
    assert not (tmp_path / "ran").exists()


def test_a_config_that_is_not_json(target, draft):
    (draft / "config.json").write_text("{")
    refused("--model", target, "--draft", draft, says="config.json")


def test_a_draft_whose_tensors_do_not_fit_its_config(target, draft):
    tensors = load_file(draft / "model.safetensors")
    tensors["extra.weight"] = tensors.pop("norm.weight")
    save_file(tensors, draft / "model.safetensors")
    refused("--model", target, "--draft", draft, says=("norm.weight", "extra.weight"))


def test_weights_that_are_not_finite(target, draft, tmp_path):
    for folder, name in ((shutil.copytree(target, tmp_path / "nan"), None), (draft, "fc.weight")):
        tensors = load_file(folder / "model.safetensors")
        key = name or next(iter(tensors))
        tensors[key].view(-1)[0] = torch.nan
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    refused("--model", tmp_path / "nan", says="NaN")
    refused("--model", target, "--draft", draft, says=("NaN", "fc.weight"))


# --- pairs ---------------------------------------------------------------------------------------


def test_target_and_draft_of_two_backends(target):
    refused("--model", target, "--draft", "toy:oracle", says=("torch", "toy", str(target)))
    refused("--model", "toy", "--draft", target, says=("torch", "toy", str(target)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": 32, "head_dim": 16}, ("32", "64")),
        ({"target_hidden_size": 128}, ("128", "64")),
        ({"num_target_layers": 9}, ("9", "4")),
        ({"vocab_size": 1000}, ("1000", "512")),
        ({"dflash_config": {"mask_token_id": 300, "target_layer_ids": [0, 4]}}, ("4",)),
    ],
    ids=["width", "target width", "depth", "vocabulary", "taps"],
)
def test_a_draft_for_another_target(target, tmp_path, changes, says):
    folder = save_draft(tmp_path / "other", **changes)
    refused("--model", target, "--draft", folder, says=(*says, "does not fit"))


@pytest.mark.parametrize(
    ("nested", "says"),
    [
        ({"target_layer_ids": [0, 2]}, "mask_token_id"),
        ({"target_layer_ids": [0, 2], "mask_token_id": EOS}, "end-of-sequence"),
        ({"target_layer_ids": [0, 2], "mask_token_id": 5000}, "5000"),
        ({"mask_token_id": 300}, "--taps auto"),
        ({"mask_token_id": 300, "target_layer_ids": [0, -1]}, "target_layer_ids"),
    ],
    ids=["no mask", "mask is eos", "mask beyond", "no taps", "negative tap"],
)
def test_a_draft_config_that_does_not_say_what_is_needed(target, draft, nested, says):
    (draft / "config.json").write_text(json.dumps(config(dflash_config=nested)))
    refused("--model", target, "--draft", draft, says=says)


def test_a_target_where_a_draft_is_due_and_the_reverse(target, draft):
    refused("--model", target, "--draft", target, says=("not a draft", "--model"))
    refused("--model", draft, "--draft", draft, says=("is a draft", "--draft"))


def test_a_float16_draft(target, draft, monkeypatch):
    from dflash.config import LoadConfig
    from dflash.errors import ConfigError

    with pytest.raises(ConfigError, match="bfloat16 or float32"):
        LoadConfig(str(target), str(draft), draft_dtype="float16")


# --- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--block-size", "0"], "--block-size"),
        (["--block-size", "-3"], "--block-size"),
        (["--block-size", "many"], "auto"),
        (["--draft-tokens", "-1"], "--draft-tokens"),
        (["--block-size", "4", "--draft-tokens", "3"], "give one of the two"),
        (["--temperature", "-1"], "--temperature"),
        (["--top-p", "0"], "--top-p"),
        (["--draft-sliding-window-size", "0"], "--draft-sliding-window-size"),
        (["--threads", "0"], "--threads"),
        (["--dtype", "int8"], "dtype"),
        (["--backend", "jax"], "Known: "),
        (["--taps", "some"], "taps"),
        (["--draft", "none", "--compare"], "--compare"),
        (["--prompt-file", "x"], "not both"),
    ],
)
def test_an_argument_that_cannot_be(words, says):
    refused("--model", "toy", *words, says=says)


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["bench", "--model", "toy", "--draft", "toy:oracle", "--out", ""], "--out"),
        (["bench", "--model", "toy", "--out="], "--out"),
        (["convert", "demo", "--to", "hf", "-o", ""], "-o"),
        (["generate", "--model", "toy", "--prompt-file", ""], "--prompt-file"),
        (["train", "--out", "x", "--data", ""], "--data"),
    ],
)
def test_an_empty_path_is_not_the_current_folder(words, flag, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = run(*words)
    assert (found.code, found.out) == (2, "")
    assert found.err == f"error: {flag} is empty: . is the current folder"
    assert not list(tmp_path.iterdir())


def test_a_device_that_is_not_there(target):
    refused("--model", target, "--device", "cuda:99", says=("cuda:99", "--device cpu"))
    refused("--model", "/nowhere", "--device", "toaster", says="toaster")


def test_typers_own_complaints_are_misuse_too():
    for words in (["--max-tokens", "many"], ["--no-such-flag"]):
        found = run("generate", "x", *words)
        assert found.code == 2
        assert words[0] in found.err
    assert run("no-such-command").code == 2


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ("large", ()),
        ("9" * 5000, ()),
        ("1", ("--draft-tree", 8)),
        ("4", ("--draft-tree", "auto")),
    ],
)
def test_a_block_size_of_the_environment_that_cannot_be_is_named(monkeypatch, size, words):
    monkeypatch.setenv("DFLASH_BLOCK_SIZE", size)
    refused("--model", "toy", *words, says="DFLASH_BLOCK_SIZE")


def test_the_environment_is_not_blamed_for_what_a_flag_did(monkeypatch):
    monkeypatch.setenv("DFLASH_BLOCK_SIZE", "4")
    found = run("generate", "x", "--model", "toy", "--top-p", 7)
    assert (found.code, "DFLASH_BLOCK_SIZE" in found.err) == (2, False)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--dtype", "bfloat16"], "dtype"),
        (["--taps", "1,2"], "taps"),
        (["--dtype", "float16", "--force-dflash"], "dtype and"),
    ],
)
def test_the_fake_refuses_what_it_would_ignore(words, says):
    refused("--model", "toy", *words, says=(says, "name a real model"))


@pytest.mark.parametrize("words", [[""], ["  "], ["-"], []])
def test_an_empty_prompt(words):
    found = run("generate", *words, "--model", "toy", typed="\n")
    assert found.code == 2
    assert "prompt" in found.err


def test_a_prompt_file_that_cannot_be_read(tmp_path):
    found = run("generate", "--prompt-file", tmp_path / "gone", "--model", "toy")
    assert (found.code, "cannot read" in found.err) == (2, True)
    (tmp_path / "latin").write_bytes(b"\xff\xfe\xe9")
    found = run("generate", "--prompt-file", tmp_path / "latin", "--model", "toy")
    assert (found.code, "UTF-8" in found.err) == (2, True)


def test_a_prompt_longer_than_the_context(target):
    found = run("generate", "word " * 2000, "--model", target)
    assert found.code == 2
    assert "context holds 1024" in found.err


def test_a_backend_that_is_not_installed(monkeypatch, target):
    import dflash.backends.torch as backend

    monkeypatch.setattr(backend, "find_spec", lambda name: None if name == "torch" else True)
    refused("--model", target, says=("torch", "pip install 'dflash-engine[torch]'"))


def test_a_backend_whose_module_cannot_be_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "dflash.backends.toy", None)
    refused("--model", "toy", says="toy", code=1)


def test_more_memory_than_there_is(target, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1000)
    refused("--model", target, says=("bytes", "free", "--"), code=1)


def test_a_bug_is_named_as_ours_and_debug_shows_it(monkeypatch):
    def broken(config):
        raise KeyError("lost")

    monkeypatch.setattr("dflash.engine.open_pair", broken)
    refused("--model", "toy", says=("KeyError", "fault of ours", "--debug"), code=1)
    found = run("generate", "hello", "--model", "toy", "--debug")
    assert found.code == 1
    assert "Traceback" in found.err and "in broken" in found.err


def test_debug_shows_where_a_known_error_came_from():
    found = run("generate", "hello", "--model", "toy", "--draft", "toy:what", "--debug")
    assert found.code == 2
    assert "Traceback" in found.err


def test_json_output_stays_json_on_errors():
    found = run("generate", "hello", "--model", "toy", "--draft", "toy:what", "--json")
    assert found.code == 2
    problem = json.loads(found.out)["error"]
    assert problem["type"] == "ConfigError"
    assert "toy:oracle" in problem["message"]
    assert "toy:oracle" in found.err
