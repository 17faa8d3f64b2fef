"""The GGUF files that the measurements of the gguf backend run on, made from the demo pair.

q4_1            the demo target as it is
q8_0            its matrices dequantised and stored again as Q8_0
sidecar         the demo draft, converted, as BF16
whole sidecar   the same with the target's head instead of one for its frequent tokens
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from dflash.convert.gguf import write
from dflash.convert.hf import read
from dflash.demo import demo_draft, demo_target
from dflash.gguf_file import read_header

FOLDER = Path("runs/gguf")


def target(kind: str) -> Path:
    """The demo target as q4_1 or q8_0."""
    source = demo_target()
    return source if kind == "q4_1" else _requantised(source, FOLDER / "target.q8_0.gguf")


def sidecar(whole: bool = False, stored: str = "BF16") -> Path:
    """The demo draft; ``whole`` has it say every token of the target's."""
    out = FOLDER / f"draft.{stored}.{'all' if whole else 'few'}.gguf"
    if out.exists():
        return out
    draft = read(demo_draft())
    if whole:
        config = {name: value for name, value in draft.config.items() if name != "draft_vocab_size"}
        tensors = {name: tensor for name, tensor in draft.tensors.items() if name != "d2t"}
        draft = replace(draft, config=config, tensors=tensors)
    return write(draft, out, demo_target(), stored)


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
