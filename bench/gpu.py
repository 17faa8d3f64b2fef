"""Rounds of a large target without its weights: step time, roofline and what speculation gives.

    python -m bench.gpu --size 8b --dtype bfloat16
    python -m bench.gpu --size tiny --device cpu --rounds 4

A random target of the asked size and a random draft of five layers, so nothing is downloaded. The
target is built to say token t + 1 after token t by a wide margin (its head is its embedding moved
on by a row, and its layers whisper), so that a script can say how many of a block's drafts are
right: the draft runs in full, and its proposals are replaced on the device. Bounds are the bytes of
target and draft read once at the measured bandwidth. Where CUDA graphs replay the passes, the same
rounds are measured without them as well, and with ``--compile`` compiled. transformers decodes a
target of the same make, plainly and with its own DFlash, whose drafts follow the same scripts.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, cast

from bench import record
from bench.gpu_peers import dflash_rounds, plain_rounds
from dflash.bench.roofline import ceilings
from dflash.bench.table import markdown
from dflash.core.protocols import Pair
from dflash.core.types import Plan, Proposal, Request
from dflash.engine import Engine

#        hidden, layers, heads, key heads, intermediate, vocabulary
SIZES = {
    "tiny": (64, 2, 4, 2, 96, 512),
    "1b": (2048, 16, 32, 8, 8192, 128256),
    "3b": (3072, 28, 24, 8, 8192, 128256),
    "8b": (4096, 32, 32, 8, 14336, 128256),
}
DRAFT_LAYERS, WHISPER = 5, 0.02
ROWS = (1, 2, 4, 8, 16)  # of a verify pass by itself
SCRIPTS = ((8, 0), (8, 2), (8, 4), (8, 6), (16, 12))  # block size, drafts that are right


@dataclass(frozen=True, slots=True)
class Line:
    """One way of decoding."""

    name: str
    committed: float  # a round
    round_ms: float  # median
    bound_ms: float | None  # weights read once
    over_plain: float  # tokens a second over those of our plain decoding

    @property
    def efficiency(self) -> float:
        """Speed-up / committed: 1 = a round costs what a plain step does."""
        return self.over_plain / self.committed


class Scripted:
    """A pair whose draft is right ``right`` times a block, at the full price of drafting."""

    def __init__(self, inner: Pair, right: int) -> None:
        """``inner`` belongs to somebody else and stays open."""
        self.inner, self.right = inner, right

    def open_drafts(self, capacity: int) -> list[Any]:
        """The real ones, corrected."""
        size = self.inner.vocab_size
        return [Corrected(one, self.right, size) for one in self.inner.open_drafts(capacity)]

    def close(self) -> None:
        """Nothing of its own."""

    def __getattr__(self, name: str) -> Any:
        """The rest is the inner pair's."""
        return getattr(self.inner, name)


class Corrected:
    """A draft session whose tokens follow the script instead."""

    def __init__(self, inner: Any, right: int, size: int) -> None:
        """``size`` of the vocabulary."""
        self.inner, self._right, self._size, self._last = inner, right, size, 0

    def begin(self, request: Any, reuse: int) -> None:
        """Note the prompt's last token."""
        self._last = request.prompt[-1]
        self.inner.begin(request, reuse)

    def commit(self, verdict: Any, rows: int) -> None:
        """Note the last token committed."""
        if verdict.tokens[:rows]:
            self._last = verdict.tokens[:rows][-1]
        self.inner.commit(verdict, rows)

    def propose(self, plan: Plan) -> Proposal[Any]:
        """As many as the draft's own, counted on from the last token as far as the script says."""
        import torch

        proposal = self.inner.propose(plan)
        if not proposal.rows:
            return cast("Proposal[Any]", proposal)
        place = torch.arange(1, proposal.rows + 1, device=proposal.tokens.device)
        wrong = (place > self._right).long()
        return replace(proposal, tokens=(self._last + place + wrong) % self._size)

    def __getattr__(self, name: str) -> Any:
        """The rest is the session's."""
        return getattr(self.inner, name)


def make_target(size: str, device: str, dtype: Any) -> Any:
    """A random causal LM of transformers that counts."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers, heads, keys, inner, vocab = SIZES[size]
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        intermediate_size=inner,
        vocab_size=vocab,
        max_position_embeddings=16384,
        tie_word_embeddings=False,
        eos_token_id=None,
    )
    config.dtype = dtype
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device=device).to(dtype)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            quiet = WHISPER if "o_proj" in name or "down_proj" in name else 1.0
            if weight.dim() == 1:
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, quiet * weight.shape[1] ** -0.5)
        model.lm_head.weight.copy_(model.model.embed_tokens.weight.roll(1, dims=0) * 8)
        model.model.embed_tokens.weight.mul_(hidden**0.5)
    return model


def make_pair(flags: Namespace) -> Any:
    """Target and draft without files."""
    import torch

    from dflash.backends.torch.dflash import DFlashDraftModel
    from dflash.backends.torch.draft_fused import fuse_draft
    from dflash.backends.torch.draft_load import LoadedDraft, make_tables
    from dflash.backends.torch.load import take_target
    from dflash.backends.torch.pair import TorchPair
    from dflash.backends.torch.wrap import NoText
    from dflash.drafts.spec import read_spec
    from dflash.hf_tokenizer import ModelTokenizer

    hidden, layers, heads, keys, inner, vocab = SIZES[flags.size]
    dtype = getattr(torch, flags.dtype)
    torch.manual_seed(0)
    target = take_target(make_target(flags.size, flags.device, dtype), f"random {flags.size}")
    taps = sorted({layers * place // 6 for place in range(1, 6)} | {0})
    spec = read_spec(
        {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": DRAFT_LAYERS,
            "num_attention_heads": heads,
            "num_key_value_heads": keys,
            "head_dim": hidden // heads,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "vocab_size": vocab,
            "max_position_embeddings": 16384,
            "num_target_layers": layers,
            "block_size": 16,
            "dflash_config": {"mask_token_id": 3, "target_layer_ids": taps},
        }
    )
    draft = DFlashDraftModel(spec).to(device=flags.device, dtype=dtype).eval()
    with torch.no_grad():
        for weight in draft.parameters():
            weight.normal_(0.0, weight.shape[-1] ** -0.5) if weight.dim() > 1 else weight.fill_(1.0)
    fuse_draft(draft)
    beside = LoadedDraft(draft, make_tables(spec, target, {}), "random draft")
    pair = TorchPair(target, beside).replay(not flags.no_cuda_graphs)
    pair.tokenizer = ModelTokenizer(NoText())
    return pair


def run(pair: Any, block: int, right: int, flags: Namespace) -> tuple[float, float]:
    """(committed a round, median milliseconds a round) of scripted rounds behind the context."""
    engine = Engine(cast(Pair, Scripted(pair, right)))
    prompt = [place % pair.vocab_size for place in range(flags.context)]
    most = (flags.rounds + 4) * (right + 1) + block + 2
    chunks = engine.stream(prompt, max_tokens=most, block_size=block, ignore_eos=True, reuse=False)
    spent, made, last = list[float](), list[int](), 0.0
    for place, chunk in enumerate(chunks):
        now = time.perf_counter()
        if place > 3:
            spent.append(1e3 * (now - last))
            made.append(len(chunk.token_ids))
        last = now
        if len(spent) == flags.rounds:
            break
    return sum(made) / len(made), median(spent)


def verify_ms(pair: Any, flags: Namespace) -> dict[int, float]:
    """Milliseconds of a pass of the target alone behind the context, by its rows."""
    import torch

    prompt = [place % pair.vocab_size for place in range(flags.context)]
    session, found = pair.open_target(flags.context + flags.rounds + 64), dict[int, float]()
    with closing(session):
        for rows in ROWS:
            list(session.prefill(Request(prompt, flags.rounds + 4), 0))
            spent = list[float]()
            for place in range(flags.rounds + 4):
                said = (flags.context + place + 1 + torch.arange(rows - 1)) % pair.vocab_size
                start = time.perf_counter()
                session.verify(Proposal(said.to(pair.target.device), rows - 1))
                spent.append(1e3 * (time.perf_counter() - start))
                session.commit(1)
            found[rows] = median(spent[4:])
    return found


def measure(flags: Namespace) -> tuple[list[Line], dict[str, Any]]:
    """All ways, plain decoding first; without CUDA graphs and compiled too, where that goes."""
    pair = make_pair(flags)
    top, replayed = ceilings(pair), pair.replayed()
    lines = ours(pair, flags, top.bytes_per_second)
    step, compiled, passes = lines[0].round_ms, "not asked for", verify_ms(pair, flags)
    if not replayed.startswith("off"):
        pair.replay(False)
        lines += ours(pair, flags, top.bytes_per_second, ", no graphs", step)
    if flags.compile:
        pair.compile(not flags.no_cuda_graphs)
        compiled = pair.compiled()
        lines += ours(pair, flags, top.bytes_per_second, ", compiled", step)
    lines += theirs(pair, flags, step)
    made = {"bytes_per_second": top.bytes_per_second, "flops_per_second": top.flops_per_second}
    return lines, {**made, "cuda_graphs": replayed, "compiled": compiled, "verify_ms": passes}


def theirs(pair: Any, flags: Namespace, step: float) -> list[Line]:
    """transformers' generate over our layers and over its own, and its DFlash by the scripts."""
    import torch

    ways = [("transformers generate, our layers", plain_rounds(pair.target.model, flags))]
    model = make_target(flags.size, flags.device, getattr(torch, flags.dtype)).eval()
    ways.append(("transformers generate", plain_rounds(model, flags)))
    for block, right in SCRIPTS:
        found = dflash_rounds(model, pair.draft.spec, (block, right), flags)
        ways.append((f"transformers DFlash, block {block}, {right} right", found))
    return [Line(name, kept, ms, None, kept * step / ms) for name, (kept, ms) in ways]


def ours(
    pair: Any, flags: Namespace, speed: float, more: str = "", plain: float | None = None
) -> list[Line]:
    """Plain decoding and the scripts; ``plain`` milliseconds a step are what 1.00 means, None =
    those of the first line. ``speed`` is the device's bytes a second, ``more`` is for the names."""
    sizes, read = pair.memory(), 1e3 / speed
    for block, right in ((1, 0), (8, 2)):
        run(pair, block, right, flags)  # warm-up
    _, step = run(pair, 1, 0, flags)
    plain = step if plain is None else plain
    lines = [Line(f"plain{more}", 1.0, step, sizes["target"] * read, plain / step)]
    both = (sizes["target"] + sizes["draft"]) * read
    for block, right in SCRIPTS:
        committed, spent = run(pair, block, right, flags)
        if abs(committed - right - 1) > 0.01:
            raise SystemExit(f"{committed} tokens a round were committed, {right + 1} by script")
        name = f"block {block}, {right} right{more}"
        lines.append(Line(name, committed, spent, both, committed * plain / spent))
    return lines


def table_of(lines: Sequence[Line]) -> str:
    """For the terminal."""
    rows = [
        [
            line.name,
            f"{line.committed:.1f}",
            f"{line.round_ms:.2f}",
            "" if line.bound_ms is None else f"{line.round_ms / line.bound_ms:.2f}",
            f"{line.over_plain:.2f}",
            f"{line.efficiency:.2f}",
        ]
        for line in lines
    ]
    head = ["way", "committed", "ms a round", "x its bound", "x plain", "x plain / committed"]
    return markdown(head, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write JSON."""
    parser = record.parser(__doc__, tokens=0, prompts=0)
    parser.add_argument("--size", choices=sorted(SIZES), default="8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--no-cuda-graphs", action="store_true", help="do not try them")
    parser.add_argument("--compile", action="store_true", help="also with compiled passes")
    flags = parser.parse_args(arguments)
    before = record.conditions(flags.threads)
    lines, top = measure(flags)
    said = f"cuda graphs: {top['cuda_graphs']}; compiled: {top['compiled']}"
    passes = top["verify_ms"]
    rows = ", ".join(f"{n} rows {ms:.2f} ({ms / passes[1]:.2f} x)" for n, ms in passes.items())
    print(f"{table_of(lines)}\n\n{said}\nms of a verify pass, and over one row: {rows}")
    found = [{**asdict(line), "efficiency": line.efficiency} for line in lines]
    out = flags.out or Path("runs/gpu.json")
    record.write(out, {"conditions": before, "ceilings": top, "lines": found})


if __name__ == "__main__":
    main()
