"""llama.cpp's server from the xllamacpp wheel, with llama-server's flags.

    python -m dflash.cluster.llama_wheel --model target.gguf --port 8080

Only the flags that `dflash.cluster.llama_server` writes, and a few beside them, are understood.
"""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Sequence
from typing import Any

from dflash.cluster.llama_server import TYPES


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until SIGINT or SIGTERM."""
    asked = parser().parse_args(argv)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    import xllamacpp

    server = xllamacpp.Server(parameters(xllamacpp, asked))
    stop.wait()
    del server  # ends its threads


def parser() -> argparse.ArgumentParser:
    """llama-server's names for what we set."""
    flags = argparse.ArgumentParser(prog="llama-server (xllamacpp)", allow_abbrev=False)
    flags.add_argument("--model", required=True)
    flags.add_argument("--host", default="127.0.0.1")
    flags.add_argument("--port", type=int, default=8080)
    flags.add_argument("--metrics", action="store_true")
    flags.add_argument("--alias")
    flags.add_argument("--ctx-size", type=int)
    flags.add_argument("--parallel", type=int)
    flags.add_argument("--threads", type=int)
    flags.add_argument("--spec-type", choices=sorted(set(TYPES.values())))
    flags.add_argument("--spec-draft-model")
    flags.add_argument("--spec-draft-n-max", type=int)
    return flags


def parameters(library: Any, asked: argparse.Namespace) -> Any:
    """xllamacpp's CommonParams for the flags."""
    found = library.CommonParams()
    found.model.path = asked.model
    found.hostnames, found.port = [asked.host], asked.port
    found.endpoint_metrics = asked.metrics
    if asked.alias is not None:
        found.model_alias = {asked.alias}
    if asked.ctx_size is not None:
        found.n_ctx = asked.ctx_size
    if asked.parallel is not None:
        found.n_parallel = asked.parallel
    if asked.threads is not None:
        found.cpuparams.n_threads = asked.threads
    if asked.spec_type is not None:
        name = asked.spec_type.upper().replace("-", "_")
        kinds = library.common_speculative_type
        found.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{name}")]
    if asked.spec_draft_model is not None:
        found.speculative.draft.mparams.path = asked.spec_draft_model
    if asked.spec_draft_n_max is not None:
        found.speculative.draft.n_max = asked.spec_draft_n_max
    return found


if __name__ == "__main__":
    main()
