"""Every public way to a generated text. ``test_every_entry_point_is_listed`` keeps it whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest

from dflash.core.types import Request, Sampling
from dflash.engine import Engine
from tests.conformance.backends import Scripted


@dataclass(frozen=True)
class Call:
    """What a case asks for, in words that every entry point can say."""

    text: str
    max_tokens: int = 40
    block_size: int | str = 8
    temperature: float = 0.0
    seed: int = 7
    stop: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)  # fields of Sampling, by name


@dataclass(frozen=True)
class Outcome:
    """What came back; None where the entry point does not say."""

    text: str | None
    tokens: list[int] | None
    finish: str | None


@dataclass(frozen=True)
class Entry:
    """An entry point: its public name, and how to call it."""

    name: str
    run: Callable[[Scripted, Call], Outcome]
    chat: bool = False  # puts the text through the chat template
    strings: bool = True  # has stop strings
    backends: tuple[str, ...] = ()  # () = all
    any_block: bool = False  # also "auto"
    options: bool = True  # has options beyond temperature
    seed: Callable[[int], int] = int  # the loop's seed for a call's

    def exists_on(self, backend: str) -> bool:
        """Whether this entry point exists for ``backend``."""
        return not self.backends or backend in self.backends

    def request(self, pair: Scripted, call: Call) -> Request:
        """The same call as the loop sees it."""
        ids = Engine(pair).encode(call.text, chat_template=self.chat)
        sampling = Sampling(call.temperature, seed=self.seed(call.seed), **call.options)
        return Request(ids, call.max_tokens, pair.eos_ids, sampling)


def _options(call: Call) -> dict[str, Any]:
    return {
        "max_tokens": call.max_tokens,
        "block_size": call.block_size,
        "temperature": call.temperature,
        "seed": call.seed,
        "stop": call.stop,
        "chat_template": False,
        **call.options,
    }


def generate(pair: Scripted, call: Call) -> Outcome:
    """``Engine.generate``"""
    with Engine(pair) as engine:
        found = engine.generate(call.text, **_options(call))
    return Outcome(found.text, list(found.token_ids), found.finish_reason)


def stream(pair: Scripted, call: Call) -> Outcome:
    """``Engine.stream``"""
    with Engine(pair) as engine:
        chunks = list(engine.stream(call.text, **_options(call)))
    assert all(len(chunk.token_ids) == len(chunk.sources) for chunk in chunks)
    text = "".join(chunk.text for chunk in chunks)
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    return Outcome(text, tokens, chunks[-1].finish_reason)


def _flags(call: Call) -> list[str]:
    flags = ["--model", "toy", "--draft", "toy:oracle"]  # names only: the pair is ours
    flags += ["--max-tokens", f"{call.max_tokens}", "--block-size", f"{call.block_size}"]
    flags += ["--temperature", f"{call.temperature}", "--seed", f"{call.seed}"]
    for name, value in call.options.items():
        flag = "--" + name.replace("_", "-")
        values = [f"{token}={bias}" for token, bias in value] if name == "logit_bias" else [value]
        flags += [word for one in values for word in (flag, f"{one}")]
    return flags + [word for stop in call.stop for word in ("--stop", stop)]


def _command(pair: Scripted, words: list[str], typed: str | None = None) -> str:
    from tests.cli.running import invoke

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflash.engine.open_pair", lambda config: pair)
        found = invoke(words, typed, catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.stdout_bytes.decode()  # .stdout would translate a text's own line ends


def command_generate(pair: Scripted, call: Call) -> Outcome:
    """``dflash generate``"""
    words = ["generate", call.text, "--no-chat-template", *_flags(call)]
    found = json.loads(_command(pair, [*words, "--json"]))
    aloud = _command(pair, words)
    assert aloud == found["text"] or aloud == found["text"] + "\n"
    return Outcome(found["text"], found["token_ids"], found["finish_reason"])


def command_chat(pair: Scripted, call: Call) -> Outcome:
    """``dflash chat``"""
    said = _command(pair, ["chat", *_flags(call)], typed=call.text + "\n/exit\n")
    return Outcome(said.removesuffix("\n"), None, None)


def _torch_seed(seed: int) -> int:
    """What the façade draws from torch's generator after ``manual_seed(seed)``."""
    import torch

    torch.manual_seed(seed)
    return int(torch.randint(2**62, ()))


def _facade(pair: Scripted, call: Call, *, method: bool) -> Outcome:
    import torch

    from dflash.model import dflash_generate

    draft, target = pair.objects["draft"], pair.objects["target"]
    prompt = Engine(pair).encode(call.text, chat_template=False)
    ids, stops = torch.tensor([prompt]), sorted(pair.eos_ids)
    torch.manual_seed(call.seed)
    rest: Any = (call.max_tokens, stops, call.temperature)
    with pytest.MonkeyPatch.context() as patch:
        if pair.scripted:
            patch.setattr("dflash.model_run.DFlashSession", lambda *_, **__: pair.open_drafts(0)[0])
        if method:
            found = draft.spec_generate(target, ids, *rest, block_size=call.block_size)
        else:
            found = dflash_generate(draft, target, ids, *rest, block_size=call.block_size)
    assert found[0, : len(prompt)].tolist() == prompt
    return Outcome(None, found[0, len(prompt) :].tolist(), None)


def facade_function(pair: Scripted, call: Call) -> Outcome:
    """``dflash.model.dflash_generate``"""
    return _facade(pair, call, method=False)


def facade_method(pair: Scripted, call: Call) -> Outcome:
    """``DFlashDraftModel.spec_generate``"""
    return _facade(pair, call, method=True)


def speculative(pair: Scripted, call: Call) -> Outcome:
    """``SpeculativeDecoder.generate``"""
    from dflash.speculative import SpeculativeConfig, SpeculativeDecoder

    config = SpeculativeConfig(max(1, int(call.block_size) - 1), min_acceptance_rate=0.3)
    options = _options(call)
    del options["block_size"]
    with Engine(pair) as engine:
        tokens = SpeculativeDecoder(engine, None, config).generate(call.text, **options)
    return Outcome(None, tokens, None)


def speculative_stream(pair: Scripted, call: Call) -> Outcome:
    """``SpeculativeDecoder.stream``"""
    from dflash.speculative import SpeculativeConfigBuilder, SpeculativeDecoder, State

    config = SpeculativeConfigBuilder().draft_tokens_per_step(max(1, int(call.block_size) - 1))
    options = _options(call)
    del options["block_size"]
    with Engine(pair) as engine:
        decoder = SpeculativeDecoder(engine, None, config.min_acceptance_rate(0).build())
        tokens = [token for some in decoder.stream(call.text, **options) for token in some]
    assert decoder.state is State.DONE
    return Outcome(None, tokens, None)


def _mlx_seed(seed: int) -> int:
    """What the façade draws from MLX's generator after ``seed(seed)``."""
    import mlx.core as mx

    mx.random.seed(seed)
    return int(mx.random.randint(0, 2**31 - 1).item())


def facade_mlx(pair: Scripted, call: Call) -> Outcome:
    """``dflash.model_mlx.stream_generate``"""
    import mlx.core as mx

    from dflash.backends.mlx import pair as module
    from dflash.model_mlx import load_draft, stream_generate

    draft = load_draft(pair.objects["draft"])
    prompt = Engine(pair).encode(call.text, chat_template=False)
    tokenizer = SimpleNamespace(_tokenizer=pair.tokenizer.inner, eos_token_ids=set(pair.eos_ids))
    options: Any = {"block_size": call.block_size, "max_tokens": call.max_tokens}
    options["temperature"] = call.temperature
    mx.random.seed(call.seed)
    with pytest.MonkeyPatch.context() as patch:
        if pair.scripted:
            patch.setattr(module.MlxPair, "open_drafts", lambda *_: pair.open_drafts(0))
        found = list(stream_generate(pair.objects["model"], draft, tokenizer, prompt, **options))
    text = "".join(response.text for response in found)
    tokens = [token for response in found for token in response.tokens]
    return Outcome(text, tokens, found[-1].finish_reason)


def over_http(url: str) -> Callable[[Scripted, Call], Outcome]:
    """``POST url``, answered whole and as a stream in turn."""
    streamed = cycle((False, True))

    def run(pair: Scripted, call: Call) -> Outcome:
        from tests.conformance.served import ask

        return Outcome(*ask(pair, call, url, next(streamed)))

    return run


def _llama(pair: Scripted, call: Call, *, chat: bool) -> Outcome:
    from dflash.llama import Llama, SpecConfig, SpeculativeType

    if call.max_tokens == 0:  # "no limit" in that interface
        return Outcome(None, None, None)
    drafts = max(1, int(call.block_size) - 1)
    spec = SpecConfig(SpeculativeType.DRAFT_DFLASH, drafts, draft_model_path="theirs.gguf")
    options = {"max_tokens": call.max_tokens, "temperature": call.temperature, "seed": call.seed}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflash.llama.load", lambda *_, **__: Engine(pair))
        with Llama("theirs.gguf", speculative=spec) as llama:
            if not chat:
                found = llama.create_completion(call.text, stop=call.stop, **options)["choices"][0]
                return Outcome(found["text"], None, found["finish_reason"])
            turns = [{"role": "user", "content": call.text}]
            parts = llama.create_chat_completion(turns, stop=call.stop, stream=True, **options)
            choices = [part["choices"][0] for part in parts]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    return Outcome(text, None, choices[-1]["finish_reason"])


def llama_completion(pair: Scripted, call: Call) -> Outcome:
    """``Llama.create_completion``"""
    return _llama(pair, call, chat=False)


def llama_chat(pair: Scripted, call: Call) -> Outcome:
    """``Llama.create_chat_completion``"""
    return _llama(pair, call, chat=True)


GGUF: dict[str, Any] = {"backends": ("gguf",), "options": False}
TORCH: dict[str, Any] = {
    "backends": ("torch",),
    "strings": False,
    "options": False,
    "seed": _torch_seed,
}
MLX: dict[str, Any] = {
    "backends": ("mlx",),
    "strings": False,
    "options": False,
    "seed": _mlx_seed,
}
ENTRIES = [
    Entry("dflash.Engine.generate", generate, any_block=True),
    Entry("dflash.Engine.stream", stream, any_block=True),
    Entry("dflash generate", command_generate, any_block=True),
    Entry("dflash chat", command_chat, chat=True, any_block=True),
    Entry("dflash.speculative.SpeculativeDecoder.generate", speculative),
    Entry("dflash.speculative.SpeculativeDecoder.stream", speculative_stream),
    Entry("dflash.llama.Llama.create_completion", llama_completion, **GGUF),
    Entry("dflash.llama.Llama.create_chat_completion", llama_chat, chat=True, **GGUF),
    Entry("dflash.model.dflash_generate", facade_function, **TORCH),
    Entry("dflash.DFlashDraftModel.spec_generate", facade_method, **TORCH),
    Entry("dflash.model_mlx.stream_generate", facade_mlx, **MLX),
    Entry("POST /v1/completions", over_http("/v1/completions"), any_block=True),
    # behind these is the same server; what differs is words, which the toy has as well
    *(
        Entry(f"POST {url}", over_http(url), chat=True, any_block=True, backends=("toy",))
        for url in ("/v1/chat/completions", "/v1/responses", "/v1/messages")
    ),
]
