"""Open a target: a Hugging Face folder, a hub id, a GGUF file, or a model the user already has.

Reads safetensors and GGUF only; nothing in a checkpoint is executed unless ``trust_remote_code``
is switched on by name. Every problem is one error of ``dflash.errors`` with the next step.
Weights are complete, finite and in one dtype when ``load_target`` returns.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from dflash.backends.torch.cache import make_cache
from dflash.backends.torch.checkpoint import resolve
from dflash.backends.torch.fused import FuseReport
from dflash.backends.torch.memory import guard, require
from dflash.backends.torch.packed import PackReport
from dflash.backends.torch.reading import quiet, read_model, read_tokenizer
from dflash.backends.torch.rollback_check import check_state
from dflash.backends.torch.tuning import Source, as_it_is, tuned
from dflash.checkpoint import count_weights, read_config, require_target
from dflash.errors import CheckpointError, ConfigError
from dflash.target_facts import joined_ids


@dataclass(frozen=True)
class LoadedTarget:
    """A causal LM ready to run, and what the rest of the package needs to know of it."""

    model: Any  # transformers PreTrainedModel
    tokenizer: Any  # transformers tokenizer; None if the user gave none
    name: str  # what the user asked for
    device: torch.device
    dtype: torch.dtype
    eos_ids: frozenset[int]
    context_length: int  # most tokens, prompt and output together
    packed: PackReport = field(default_factory=PackReport)
    fused: FuseReport = field(default_factory=FuseReport)
    weights: str | None = None  # a form of `narrow.WEIGHTS` that was asked for
    owned: bool = True  # False: the user's own model object, never altered

    @property
    def config(self) -> Any:
        """The text config of the model."""
        return self.model.config.get_text_config(decoder=True)

    @property
    def hidden_size(self) -> int:
        """Ht, width of a tapped state."""
        return int(self.config.hidden_size)

    @property
    def num_layers(self) -> int:
        """Decoder layers: taps are 0 .. num_layers - 1."""
        return int(self.config.num_hidden_layers)

    @property
    def vocab_size(self) -> int:
        """V, rows of the head (may be more than the tokenizer has tokens)."""
        return int(self.embedding.shape[0])

    @property
    def embedding(self) -> torch.Tensor:
        """Raw input embedding table ``[V, Ht]``, no family-specific scale applied."""
        weight: torch.Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def head(self) -> nn.Module:
        """The output head ``[.., Ht] -> [.., V]``, without softcap or multiplier."""
        head: nn.Module = self.model.get_output_embeddings()
        return head

    def bytes(self) -> int:
        """Bytes of the weights, packed copies included."""
        return self.packed.bytes + sum(int(p.nbytes) for p in self.model.parameters())


def load_target(  # noqa: PLR0913 - what LoadConfig says of the target
    path: str,
    device: str | None = None,
    dtype: str | None = None,
    *,
    pack: bool = True,
    weights: str | None = None,
    trust_remote_code: bool = False,
    whole: bool = True,
) -> LoadedTarget:
    """Open the target at ``path``: a folder, a ``.gguf`` file or a hub id.

    ``dtype`` None is float32 on a CPU and bfloat16 elsewhere. ``pack`` lets prepacked copies
    replace the weights of linear layers on a CPU (``packed.py``), and fused layers those of the
    common dense families on any device (``fused.py``). ``weights`` holds them in another form
    (`narrow.WEIGHTS`). ``whole=False``: the model will only be run by sessions, so that it need not
    be transformers' own (``dense.py``).
    Raises CheckpointError, WeightsError, DownloadError, ConfigError, OutOfMemory.
    """
    where = pick_device(device)
    kind = pick_dtype(dtype, where)
    folder = resolve(path, code=trust_remote_code, dtype=str(kind).removeprefix("torch."))
    config = read_config(folder)
    require_target(config, path)
    require(f"the target {path}", count_weights(folder) * kind.itemsize, where)

    def read() -> Any:
        model = read_model(folder, kind, trust_remote_code)
        read_texts(None)
        with guard(f"moving {path} to {where}"):
            return model.to(where).eval().requires_grad_(False)

    def read_texts(config: Any) -> None:
        if not texts:  # not before: two threads had better not import transformers' parts at once
            texts.append(beside.submit(read_tokenizer, folder, trust_remote_code, config))

    if weights is not None and not pack:
        raise ConfigError(f"weights={weights!r} are packed weights: leave out pack_weights=False")
    texts: list[Future[Any]] = []
    bare = None if whole or trust_remote_code else folder
    source = Source(path, read, config, kind, where, weights, bare, read_texts)
    with quiet(), ThreadPoolExecutor(1) as beside:
        model, packed, fused = tuned(source) if pack else as_it_is(source)
        tokenizer = texts[0].result()
    if weights is not None and not packed.layers:
        raise ConfigError(f"weights={weights!r} cannot be had for {path}: {packed.reason}")
    return replace(_describe(model, tokenizer, path, packed, fused), weights=weights)


def take_target(model: Any, name: str) -> LoadedTarget:
    """A model made in memory and given away: fused and packed as one that came from files.

    Raises CheckpointError for models that cannot be a target.
    """
    made = [model.eval().requires_grad_(False)]

    def read() -> Any:
        if not made:
            raise CheckpointError(f"{name}: fused layers give other logits, and it is used up")
        return made.pop()

    source = Source(name, read, model.config.to_dict(), model.dtype, model.device)
    del model
    model, packed, fused = tuned(source)
    return _describe(model, None, name, packed, fused)


def wrap_target(model: Any, tokenizer: Any = None, name: str | None = None) -> LoadedTarget:
    """The same description for a model the user holds. The model is not changed in any way.

    Raises CheckpointError for models that are not decoder-only causal LMs with a cache that can
    be rolled back.
    """
    if not hasattr(model, "config") or not hasattr(model, "get_input_embeddings"):
        raise CheckpointError(
            f"a target must be a transformers causal LM, got {type(model).__name__}"
        )
    title = name or getattr(model, "name_or_path", "") or type(model).__name__
    yours = "the model is yours"
    target = _describe(model, tokenizer, title, PackReport(reason=yours), FuseReport(reason=yours))
    return replace(target, owned=False)


def _describe(
    model: Any, tokenizer: Any, name: str, packed: PackReport, fused: FuseReport
) -> LoadedTarget:
    if getattr(model.config, "is_encoder_decoder", False):
        raise CheckpointError(f"{name} is an encoder-decoder model; a target is decoder-only")
    make_cache(model.config, 0)
    check_state(model, name)
    if model.get_output_embeddings() is None:
        raise CheckpointError(f"{name} has no language-model head, so it cannot be a target")
    weight = model.get_input_embeddings().weight
    return LoadedTarget(
        model=model,
        tokenizer=tokenizer,
        name=name,
        device=weight.device,
        dtype=weight.dtype,
        eos_ids=eos_ids(model, tokenizer),
        context_length=_context_length(model.config, tokenizer),
        packed=packed,
        fused=fused,
    )


def eos_ids(model: Any, tokenizer: Any = None) -> frozenset[int]:
    """Every id that ends a text, from generation config, model config and tokenizer together.

    Each may hold an int, a list, a tuple or a tensor, or nothing.
    """
    sources = (
        getattr(model, "generation_config", None),
        model.config,
        model.config.get_text_config(decoder=True),
        tokenizer,
    )
    values = (getattr(source, "eos_token_id", None) for source in sources)
    return joined_ids(
        value.flatten().tolist() if isinstance(value, torch.Tensor) else value for value in values
    )


def _context_length(config: Any, tokenizer: Any) -> int:
    text = config.get_text_config(decoder=True)
    length = getattr(text, "max_position_embeddings", None)
    if length is None:  # families without positions to run out of: trust the tokenizer
        length = min(getattr(tokenizer, "model_max_length", 1 << 15), 1 << 20)
    return int(length)


def pick_device(device: str | None) -> torch.device:
    """``device``, or the best there is. Raises ConfigError for one that is not there."""
    if device is None:
        best = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.device("mps" if torch.backends.mps.is_available() else best)
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device must be cpu, cuda, cuda:N or mps, got {device!r}") from error
    available = {
        "cpu": True,
        "cuda": (chosen.index or 0) < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }
    if not available.get(chosen.type, False):
        build = chosen.type == "cuda" and torch.version.cuda is None
        why = f" (torch {torch.__version__} was built without CUDA)" if build else ""
        raise ConfigError(f"device {device!r} is not available here{why}. Use device='cpu'")
    return chosen


def pick_dtype(dtype: str | None, device: torch.device) -> torch.dtype:
    """``dtype`` by name, or float32 on a CPU and bfloat16 elsewhere."""
    if dtype is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    chosen = getattr(torch, dtype, None)
    if not isinstance(chosen, torch.dtype):
        raise ConfigError(f"dtype must be float32, bfloat16 or float16, got {dtype!r}")
    return chosen
