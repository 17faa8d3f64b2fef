"""What only the gguf backend can be told: settings handed on to llama.cpp.

Names are llama.cpp's. Checked once; every problem raises ConfigError with the value found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dflash.checks import at_least, switch, threads, within
from dflash.errors import ConfigError

CACHE_TYPES = {  # name -> ggml type number
    "f32": 0,
    "f16": 1,
    "bf16": 30,
    "q8_0": 8,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
}
WHOLE = ("f32", "f16", "bf16")  # not quantised
FLASH = {"auto": -1, "off": 0, "on": 1}
GpuLayers = int | Literal["auto", "all"]


@dataclass(frozen=True, slots=True)
class GgufOptions:
    """Settings of llama.cpp for target and draft.

    n_ctx       most tokens of a context, prompt and output; None = what the model was trained for
    n_batch     rows of one decode call, prompt chunks and verify passes alike
    n_ubatch    rows computed at once
    n_gpu_layers  layers on a GPU: a number, "all" or "auto" (as many as fit)
    threads_batch threads for passes of several rows, prompts and verify passes; None = those for
                single tokens (LoadConfig.threads)
    type_k, type_v  number format of cached keys and values
    flash_attn  "auto", "on" or "off"
    repack      let llama.cpp rearrange weights for this CPU
    draft_p_min a draft stops before a token it gives less than this probability
    draft_n_min a shorter draft is thrown away, unless it was sampled token after token: what was
                drawn would have decided that, and biased the text
    draft_n_gpu_layers, draft_threads, draft_type_k, draft_type_v  the same for the draft; None =
                as for the target
    draft_threads_batch threads for passes of several rows of the draft, its blocks among them;
                None = draft_threads
    verbose     llama.cpp's own lines on standard error
    """

    n_ctx: int | None = None
    n_batch: int = 512
    n_ubatch: int = 512
    n_gpu_layers: GpuLayers = "auto"
    threads_batch: int | None = None
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attn: Literal["auto", "on", "off"] = "auto"
    repack: bool = True
    draft_p_min: float = 0.0
    draft_n_min: int = 0
    draft_n_gpu_layers: GpuLayers | None = None
    draft_threads: int | None = None
    draft_threads_batch: int | None = None
    draft_type_k: str | None = None
    draft_type_v: str | None = None
    verbose: bool = False

    def __post_init__(self) -> None:
        """Refuse impossible values. Raises ConfigError."""
        at_least(1, "n_ctx", self.n_ctx)
        at_least(1, "n_batch", self.n_batch)
        at_least(1, "n_ubatch", self.n_ubatch)
        threads("threads_batch", self.threads_batch)
        threads("draft_threads", self.draft_threads)
        threads("draft_threads_batch", self.draft_threads_batch)
        at_least(0, "draft_n_min", self.draft_n_min)
        within("draft_p_min", self.draft_p_min, lambda share: 0 <= share <= 1, "between 0 and 1")
        for name in ("repack", "verbose"):
            switch(name, getattr(self, name))
        if self.flash_attn not in tuple(FLASH):
            raise ConfigError(f"flash_attn must be auto, on or off, got {self.flash_attn!r}")
        for name in ("type_k", "type_v", "draft_type_k", "draft_type_v"):
            value = getattr(self, name)
            if value is not None and value not in tuple(CACHE_TYPES):
                known = ", ".join(CACHE_TYPES)
                raise ConfigError(f"{name} must be one of {known}, got {value!r}")
        for name in ("type_v", "draft_type_v"):
            if self.flash_attn == "off" and (getattr(self, name) or "f16") not in WHOLE:
                raise ConfigError(
                    f"{name} {getattr(self, name)} needs flash attention, and flash_attn is off: "
                    f"leave flash_attn out, or take {name} f16 (or f32, bf16)"
                )
        for name in ("n_gpu_layers", "draft_n_gpu_layers"):
            gpu_layers(name, getattr(self, name))


def gpu_layers(name: str, value: GpuLayers | None) -> int:
    """The number llama.cpp takes: -1 = as many as fit, -2 = all. Raises ConfigError."""
    if value is None or value == "auto":
        return -1
    if value == "all":
        return -2
    if isinstance(value, bool) or not isinstance(value, int) or value < -2:
        raise ConfigError(f'{name} must be a number of layers, "auto" or "all", got {value!r}')
    return value
