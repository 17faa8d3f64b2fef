"""The GGUF files that the measurements of the gguf backend run on, made from the demo pair.

q4_1            the demo target as it is
q8_0            its matrices dequantised and stored again as Q8_0
sidecar         the demo draft, converted, as BF16
reduced sidecar the same with a head of its own for the N most frequent tokens of the prompts
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from bench import sets
from dflash.convert.gguf import write, write_sidecar
from dflash.convert.hf import read
from dflash.demo import demo_draft, demo_target
from dflash.drafts.spec import read_spec
from dflash.gguf_file import read_header

FOLDER = Path("runs/gguf")


def target(kind: str) -> Path:
    """The demo target as q4_1 or q8_0."""
    source = demo_target()
    return source if kind == "q4_1" else _requantised(source, FOLDER / "target.q8_0.gguf")


def sidecar(rows: int | None = None, stored: str = "BF16") -> Path:
    """The demo draft; ``rows`` is the size of a head of its own, None = the target's."""
    out = FOLDER / f"draft.{stored}{f'.{rows}' if rows else ''}.gguf"
    if out.exists():
        return out
    draft = read(demo_draft())
    if rows is None:
        return write(draft, out, demo_target(), stored)
    tensors: dict[str, Any] = {name: one.floats() for name, one in draft.tensors.items()}
    kept = _frequent(rows)
    tensors["lm_head.weight"] = _head()[kept]
    tensors["d2t"] = kept - np.arange(rows)
    return write_sidecar(read_spec(demo_draft()), tensors, demo_target(), out, stored)


def _requantised(source: Path, out: Path) -> Path:
    import gguf

    if out.exists():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    header, reader = read_header(source), gguf.GGUFReader(source)
    spare = out.with_suffix(".part")
    writer = gguf.GGUFWriter(spare, header.architecture)
    for key, value in header.metadata.items():
        kind, inner = header.kinds[key]
        sub = None if inner < 0 else gguf.GGUFValueType(inner)
        if key not in ("general.architecture", "general.file_type"):
            writer.add_key_value(key, value, gguf.GGUFValueType(kind), sub)
    q8 = gguf.GGMLQuantizationType.Q8_0
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 2:
            writer.add_tensor(tensor.name, gguf.quantize(values, q8), raw_dtype=q8)
        else:
            writer.add_tensor(tensor.name, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    spare.rename(out)
    return out


def _head() -> Any:
    """The target's head, which is its embedding, as float32 [V, E]."""
    import gguf

    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(demo_target()).tensors}
    found = tensors.get("output.weight", tensors["token_embd.weight"])
    return gguf.dequantize(found.data, found.tensor_type)


def _frequent(rows: int) -> Any:
    """The commonest token ids of all prompts, filled up from the lowest ids."""
    from dflash.backends.gguf import open_pair
    from dflash.config import LoadConfig

    pair = open_pair(LoadConfig(str(demo_target()), threads=1))
    counts: Counter[int] = Counter()
    for name in sets.ALL:
        for prompt in sets.load(name):
            counts.update(pair.tokenizer.encode(prompt.text))
    size = pair.vocab_size
    pair.close()
    best = [token for token, _ in counts.most_common(rows)]
    rest = (token for token in range(size) if token not in counts)
    return np.sort(np.array([*best, *(next(rest) for _ in range(rows - len(best)))]))
