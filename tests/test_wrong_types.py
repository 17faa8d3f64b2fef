"""Values of a wrong type, for every parameter of what people import: one error of ours each.

A call may also succeed (a path is as good as a text); it may not leave with a bare AttributeError.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import dflash
from dflash import datasets, speculative
from dflash.convert import convert
from dflash.engine import Engine
from dflash.errors import DFlashError
from dflash.inspection import inspect


class Odd:
    """Of no type that anything here takes."""


VALUES = (
    *(None, 3, -1, 3.5, float("nan"), True, 10**30),
    *("", "x", b"x", Path("x"), [], [None], ["x"], (1, 2), {}, {"a": 1}, Odd(), print),
)
PROMPTS = (
    *("\ud800", [1.5], [10**40], [True], [[1], [2]], [["a"]], {"role": "user", "content": "x"}),
    *([{"role": "user"}], [{"role": 3, "content": "x"}], [{"role": "user", "content": 3}]),
    *([3, {"role": "user", "content": "x"}], [{"role": "user", "content": "x"}, 3]),
)
Call = Callable[..., Any]


def foreign(call: Call, good: Mapping[str, Any], name: str, values: Any = VALUES) -> list[str]:
    """Errors that are not ours, of ``call`` with each of ``values`` as ``name``."""
    found = []
    for value in values:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call(**{**good, name: value})
        except DFlashError:
            pass
        except Exception as problem:  # noqa: BLE001 - what it is is the finding
            found.append(f"{name}={value!r}: {type(problem).__name__}: {problem}")
    return found


def insist(call: Call, good: Mapping[str, Any], *names: str, values: Any = VALUES) -> None:
    """No parameter of ``names`` lets an error through that is not ours."""
    assert not [line for name in names for line in foreign(call, good, name, values)]


def fields(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with dflash.load("toy", draft="toy:oracle") as engine:
        yield engine


def test_the_check_sees_a_bare_error() -> None:
    def careless(value: Any) -> Any:
        return value.strip()

    assert len(foreign(careless, {}, "value")) == len(VALUES) - 3  # texts and bytes can be stripped


@pytest.mark.parametrize("kind", [dflash.LoadConfig, dflash.GenerateConfig])
def test_configs(kind: Any) -> None:
    insist(kind, {"target": "toy"} if kind is dflash.LoadConfig else {}, *fields(kind))


def test_loading() -> None:
    def load(**given: Any) -> None:
        dflash.load(**given).close()

    values = [value for value in VALUES if value is not None]  # that is the demo pair
    insist(load, {"draft": "none"}, "target", values=values)
    insist(load, {"target": "toy"}, "draft", "backend", "device", "gguf", values=values)


def test_an_engine(engine: Engine) -> None:
    insist(Engine, {"pair": engine.pair}, "pair", "profile_file")
    insist(engine.keep, {"texts": 2, "most_bytes": 1 << 20}, "texts", "most_bytes")
    engine.keep(2, 1 << 30)


def test_prompts(engine: Engine) -> None:
    def stream(**given: Any) -> None:
        list(engine.stream(**given, max_tokens=2))

    good = {"prompt": "hello"}
    insist(stream, good, "prompt", "system", values=(*VALUES, *PROMPTS))
    insist(stream, good, "chat_template", "progress")
    insist(engine.encode, good, "prompt", "chat_template", "system", values=(*VALUES, *PROMPTS))


def test_prompt_sets_and_inspection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "_download", lambda _: [])
    insist(datasets.load_and_process_dataset, {"name": "gsm8k"}, "name", "data_dir")
    insist(inspect, {}, "name")


def test_conversions(tmp_path: Path) -> None:
    good = {"source": tmp_path / "nowhere", "to": "mlx", "out": tmp_path / "out"}
    values = [value for value in VALUES if value != {}]
    insist(convert, good, "source", "to", "out", "target", "stored", values=values)


def test_speculative_configs() -> None:
    config = speculative.SpeculativeConfig
    insist(config, {}, *fields(config))
    insist(config.profile, {}, "name")
    insist(speculative.SpeculativeConfigBuilder, {}, "start")
    for name in fields(config):

        def build(value: Any, name: str = name) -> None:
            getattr(speculative.SpeculativeConfigBuilder(), name)(value).build()

        insist(build, {}, "value")


def test_speculative_decoders() -> None:
    def decode(**given: Any) -> None:
        with speculative.SpeculativeDecoder(**given) as decoder:
            decoder.generate([1, 2], max_tokens=2)

    values = [value for value in VALUES if value is not None]
    insist(decode, {"target": "toy", "draft": "none"}, "target", "draft", "config", values=values)
    with speculative.SpeculativeDecoder("toy", "toy:oracle") as decoder:
        insist(decoder.generate, {}, "prompt_tokens", values=(*VALUES, *PROMPTS))


@pytest.mark.torch
def test_the_pytorch_face(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from dflash.model import build_target_layer_ids
    from tests.backends.tiny import tiny_target
    from tests.facades.drafts import save_draft

    folder, target = save_draft(tmp_path / "draft"), tiny_target("llama")
    states = (torch.zeros(1, 2, 3),) * 4
    insist(
        dflash.extract_context_feature,
        {"hidden_states": states, "layer_ids": [0, 1]},
        *("hidden_states", "layer_ids"),
        values=(*VALUES, [9], [-9], [1.5]),
    )
    logits = torch.zeros(1, 2, 5)
    insist(
        dflash.sample,
        {"logits": logits, "temperature": 1.0},
        *("logits", "temperature", "top_p", "top_k"),
    )
    counts = {"num_target_layers": 30, "num_draft_layers": 5}
    values = [value for value in VALUES if value != 10**30]  # so many taps are a long list
    insist(build_target_layer_ids, counts, *counts, values=values)
    load = dflash.DFlashDraftModel.from_pretrained
    insist(load, {"path": folder}, "path", "dtype", "device_map", "sliding_window_size", "taps")
    draft = load(folder)
    good = {"target": target, "input_ids": torch.tensor([[1, 2, 3]]), "max_new_tokens": 2}
    names = (*good, "stop_token_ids", "temperature", "block_size", "mask_token_id", "top_p")
    insist(draft.spec_generate, good, *names, "top_k", values=values)
    for name in ("mask_token_id", "target_layer_ids", "sliding_window_size"):
        insist(lambda value, name=name: setattr(draft, name, value), {}, "value")


@pytest.mark.torch
def test_the_mlx_face(tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm")
    from dflash import model_mlx
    from tests.backends.tiny import save_target, tiny_target, tiny_tokenizer
    from tests.facades.drafts import save_draft

    folder = save_draft(tmp_path / "draft")
    place = save_target(tiny_target("llama"), tiny_tokenizer(), tmp_path / "target")
    insist(model_mlx.load, {}, "path_or_hf_repo")
    insist(model_mlx.load_draft, {"draft_id": folder}, "draft_id", "sliding_window_size")
    model, tokenizer = model_mlx.load(str(place))
    draft = model_mlx.load_draft(folder)
    good = {"model": model, "draft": draft, "tokenizer": tokenizer, "prompt": [1, 2, 3]}
    names = (*good, "block_size", "max_tokens", "temperature", "sampler", "top_p", "top_k")

    def begin(**given: Any) -> None:
        model_mlx.stream_generate(**given)  # the arguments are checked at the call

    insist(begin, good, *names)
