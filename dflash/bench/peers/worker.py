"""Runs another program on prompts that come in as JSON lines; started by path, in any environment.

Stands alone: nothing of this package is imported, because in the reference wheel's environment the
import name ``dflash`` is that wheel's. Greedy, one prompt at a time, by the reader's clock: from
the call to the first token, and from there to the end.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

Spec = dict[str, Any]
Answer = Callable[[list[int], int], dict[str, Any]]
LOOKED_UP = 10  # tokens that transformers' documentation proposes for prompt look-up
DRAFTED = 16  # tokens a look-up of llama.cpp may propose


class Ticks:
    """A transformers streamer that keeps times, and how many tokens came at each."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.sizes: list[int] = []

    def put(self, value: Any) -> None:
        """The first call brings the prompt."""
        self.times.append(time.perf_counter())
        self.sizes.append(int(value.numel()))

    def end(self) -> None:
        """Nothing is held back."""


def counted(committed: Sequence[int]) -> dict[str, Any]:
    """Rounds and accepted drafts from the tokens that each round brought."""
    kept = [size - 1 for size in committed]
    histogram = [kept.count(a) for a in range(max(kept, default=0) + 1)]
    return {"rounds": len(kept), "accepted": sum(kept), "histogram": histogram}


def transformers_answer(told: Spec, **more: Any) -> Answer:
    """transformers' ``generate`` on the same weights in float32; ``more`` are its keywords."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(told["target"], dtype=torch.float32)
    model.generation_config.pad_token_id = min(told["eos"], default=0)
    model.generation_config.eos_token_id = None if told["ignore_eos"] else told["eos"] or None

    def answer(prompt: list[int], tokens: int) -> dict[str, Any]:
        ids = torch.tensor([prompt])
        ticks, options = Ticks(), {"do_sample": False, "max_new_tokens": tokens, **more}
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), streamer=ticks, **options
            )
        end = time.perf_counter()
        return {
            "ids": out[0, len(prompt) :].tolist(),
            "first": ticks.sizes[1],
            "prefill": ticks.times[1] - start,
            "decode": end - ticks.times[1],
            **(counted(ticks.sizes[2:]) if more else {}),
        }

    return answer


def transformers_dflash(told: Spec) -> Answer:
    """transformers' own DFlash: the draft's weights in the one module it has for such drafts."""
    import torch
    from safetensors.torch import load_file
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    folder = Path(told["draft"])
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    inner = config["dflash_config"]
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    more = ("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings")
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    draft: Any = MuseGlimmerAssistantModel(
        MuseGlimmerAssistantConfig(
            **{name: config[name] for name in (*names, *more)},
            rope_parameters=rope,
            layer_types=config["layer_types"],
            block_size=config["block_size"],
            mask_token_id=inner["mask_token_id"],
            target_layer_ids=inner["target_layer_ids"],
        )
    )
    weights: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    renamed = {
        "fc.weight": "encoder.fc.weight",
        "hidden_norm.weight": "encoder.output_norm_enc.weight",
    }
    weights.pop("d2t", None)  # it drafts with the target's whole head
    state = {renamed.get(name, name): tensor.float() for name, tensor in weights.items()}
    draft.load_state_dict(state)
    return transformers_answer(
        told, assistant_model=draft.to(torch.float32).eval(), speculation_type="dflash"
    )


def reference_wheel(told: Spec) -> Answer:
    """The published wheel, with its CUDA clock replaced by the processor's."""
    import torch
    from transformers import AutoModelForCausalLM

    reference = import_module("dflash.model")  # that environment's, not this package
    reference._cuda_time = time.perf_counter  # type: ignore[attr-defined]
    target: Any = AutoModelForCausalLM.from_pretrained(told["target"], dtype=torch.float32)
    draft = reference.DFlashDraftModel.from_pretrained(told["draft"], dtype=torch.float32).eval()
    stop = None if told["ignore_eos"] else told["eos"] or None

    def answer(prompt: list[int], tokens: int) -> dict[str, Any]:
        with torch.inference_mode():
            found = reference.dflash_generate(
                draft, target, torch.tensor([prompt]), tokens, stop, 0.0, return_stats=True
            )
        made = found.output_ids[0, len(prompt) :].tolist()
        return {
            "ids": made,
            "first": 1,
            "prefill": found.time_to_first_token,
            "decode": found.time_per_output_token * found.num_output_tokens,
            **counted(found.acceptance_lengths),
        }

    return answer


def llama_cpp(told: Spec) -> Answer:
    """llama.cpp through xllamacpp, on the quantised file itself; its prompt cache is off."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = told["target"], 4096, 1
    if told["threads"]:
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = told["threads"]
    drafts = told.get("drafts")  # ngram, or a sidecar's file
    if drafts is not None:
        kind = "NGRAM_SIMPLE" if drafts == "ngram" else "DRAFT_DFLASH"
        kinds = xllamacpp.common_speculative_type
        params.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{kind}")]
    if drafts not in (None, "ngram"):
        params.speculative.draft.mparams.path = drafts  # 3 drafted tokens, as it has it
    server = xllamacpp.Server(params)

    def answer(prompt: list[int], tokens: int) -> dict[str, Any]:
        body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "cache_prompt": False}
        body |= {"return_tokens": True, "ignore_eos": told["ignore_eos"], "stream": False}
        start = time.perf_counter()
        found = post(f"{server.listening_address.rstrip('/')}/completion", body)
        spent = time.perf_counter() - start
        timings, made = found["timings"], list(found["tokens"])
        if found.get("stop_type") == "eos" and made[-1:] != told["eos"][:1]:
            made += told["eos"][:1]  # it leaves out the token that ended the text
        prefill = timings["prompt_ms"] / 1e3
        counts: dict[str, Any] = {}
        if drafts is not None:
            kept = int(timings.get("draft_n_accepted") or 0)
            rounds = max(0, int(timings["predicted_n"]) - 1 - kept)
            counts = {
                "rounds": rounds,
                "accepted": kept,
                "drafted": int(timings.get("draft_n") or 0),
            }
        return {"ids": made, "first": 1, "prefill": prefill, "decode": spent - prefill, **counts}

    return answer


def post(url: str, body: Spec) -> dict[str, Any]:
    """One request to a server on this machine; its own endpoint gives ids, OpenAI's does not."""
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data=json.dumps(body).encode(), headers=head)
    with urllib.request.urlopen(request) as reply:
        found: dict[str, Any] = json.loads(reply.read())
    return found


KINDS: dict[str, Callable[[Spec], Answer]] = {
    "transformers": transformers_answer,
    "prompt-lookup": lambda told: transformers_answer(told, prompt_lookup_num_tokens=LOOKED_UP),
    "transformers-dflash": transformers_dflash,
    "reference-wheel": reference_wheel,
    "llama.cpp": llama_cpp,
}


def main() -> None:
    """Load, say so, then an answer a line until the input ends."""
    told = json.loads(sys.argv[1])
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)  # what libraries print is no answer
        if told["threads"] and told["kind"] != "llama.cpp":
            import_module("torch").set_num_threads(told["threads"])
        answer = KINDS[told["kind"]](told)
        print(json.dumps({"ready": told["kind"]}), file=out, flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            print(json.dumps(answer(asked["ids"], asked["tokens"])), file=out, flush=True)


if __name__ == "__main__":
    main()
