"""The torch backend under test: a tiny random Llama, and a tiny random draft of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from dflash.backends.torch import open_pair, packed
from dflash.backends.torch.compiled import TorchCompiler
from dflash.backends.torch.graph_target import GraphForward
from dflash.backends.torch.graphs import Graphs
from dflash.backends.torch.load import load_target
from dflash.backends.torch.pair import TorchPair
from dflash.config import LoadConfig
from dflash.model import DFlashDraftModel
from tests.backends.tape import Tape
from tests.backends.tiny import LAYERS, save_target, tiny_target, tiny_tokenizer
from tests.conformance.backends import BLOCK, Backend, Plain
from tests.facades.drafts import MASK, save_draft


def saved(folder: Path, ties: bool, layers: int = LAYERS) -> tuple[Any, str, str]:
    """The target, and the folders of it and of a draft for it."""
    model = tiny_target("llama", layers=layers)
    if ties:
        with torch.no_grad():
            head = model.lm_head.weight
            head[1::2] = head[::2]
    target = str(save_target(model, tiny_tokenizer(), folder / "target"))
    places = {"mask_token_id": MASK, "target_layer_ids": [0, layers // 2]}
    sizes = {"num_target_layers": layers, "num_hidden_layers": layers // 2, "block_size": BLOCK}
    return model, target, str(save_draft(folder / "draft", dflash_config=places, **sizes))


def make_rounded(folder: Path, ties: bool) -> Backend:
    """A target whose weights were rounded to int8: the text is the rounded one's."""
    _, target, draft = saved(folder, ties)

    def opened(beside: str | None = None) -> TorchPair:
        return TorchPair.open(
            LoadConfig(target, beside, device="cpu", dtype="float32", weights="int8")
        )

    pair = opened()
    rounded = load_target(target, "cpu", "float32", weights="int8").model

    def logits(tokens: Sequence[int]) -> Any:
        with torch.inference_mode():
            return rounded(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, -1]

    return Backend(
        "torch",
        pair,
        Plain(lambda tokens: logits(tokens).numpy()),
        own=lambda: opened(draft),
        objects={"target": rounded, "draft": DFlashDraftModel.from_pretrained(draft)},
    )


def make(folder: Path, ties: bool, layers: int = LAYERS) -> Backend:
    """A target saved and loaded as a user's would be; plain decoding recomputes everything."""
    model, target, draft = saved(folder, ties, layers)

    def logits(tokens: Sequence[int]) -> Any:
        with torch.inference_mode():
            return (
                model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, -1].numpy()
            )

    return Backend(
        "torch",
        open_pair(LoadConfig(target, device="cpu", dtype="float32")),
        Plain(logits),
        own=lambda: open_pair(LoadConfig(target, draft, device="cpu", dtype="float32")),
        objects={"target": model, "draft": DFlashDraftModel.from_pretrained(draft)},
    )


def make_replayed(folder: Path, ties: bool) -> Backend:
    """The same pair with its passes replayed, by a tape where a GPU has CUDA graphs."""
    made = make(folder, ties)
    assert isinstance(made.pair, TorchPair)
    made.pair._graphs = Graphs(Tape())
    session = made.pair.open_target(8)
    assert isinstance(session._forward, GraphForward), "nothing would be replayed"
    session.close()

    def own() -> TorchPair:
        pair = made.own()
        assert isinstance(pair, TorchPair)
        pair._graphs = Graphs(Tape())
        return pair

    return replace(made, own=own)


def make_compiled(folder: Path, ties: bool) -> Backend:
    """A pair of two layers, unpacked as on a GPU, with its passes traced, compiled and replayed.

    Each number of rows is traced anew, which takes a fixed time a layer.
    """
    with patch.object(packed, "_why_not", lambda *_: "as on a GPU"):
        made = make(folder, ties, layers=2)
    assert isinstance(made.pair, TorchPair)
    made.pair._graphs = Graphs(Tape(), TorchCompiler("eager"))

    def own() -> TorchPair:
        with patch.object(packed, "_why_not", lambda *_: "as on a GPU"):
            pair = made.own()
        assert isinstance(pair, TorchPair)
        pair._graphs = Graphs(Tape(), TorchCompiler("eager"))
        return pair

    return replace(made, own=own)
