"""A plan in llama.cpp's words: ``llama-server --spec-type draft-dflash``.

Where the program is not installed but the xllamacpp wheel is, `dflash.cluster.llama_wheel` runs the
same server from the wheel and takes the same flags. DFlash and DFlash2 are one type; llama.cpp
tells them apart by the tensors of the draft's file.
"""

from __future__ import annotations

from dflash.cluster.plan import Command, Plan, address, no_window
from dflash.errors import ConfigError

TYPES = {
    "dflash": "draft-dflash",
    "dflash2": "draft-dflash",
    "eagle3": "draft-eagle3",
    "mtp": "draft-mtp",
}
OWN_LOOP = (
    "drafts are llama.cpp's own loop here, not this package's: its figures are in `timings` of a "
    "reply and at /metrics"
)


def render(plan: Plan) -> Command:
    """The command. Raises ConfigError for what llama-server cannot do."""
    _check(plan)
    argv = ["llama-server", "--model", plan.target, "--host", plan.host, "--port", str(plan.port)]
    argv += ["--metrics"]
    if plan.served_name is not None:
        argv += ["--alias", plan.served_name]
    if plan.method is not None:
        argv += ["--spec-type", TYPES[plan.method]]
        if plan.draft is not None:
            argv += ["--spec-draft-model", plan.draft]
        argv += ["--spec-draft-n-max", str(plan.draft_tokens)]
    base = address(plan)
    return Command(
        engine="llama-server",
        argv=(*argv, *plan.extra),
        url=f"{base}/v1",
        health=f"{base}/health",
        install="llama.cpp's own releases, or pip install 'dflash-engine[gguf]' for its server",
        stand_in=("xllamacpp", "python", "-m", "dflash.cluster.llama_wheel"),
        notes=() if plan.method is None else (OWN_LOOP,),
    )


def _check(plan: Plan) -> None:
    for flag, name in (("--model", plan.target), ("--draft", plan.draft)):
        if name is not None and not name.endswith(".gguf"):
            raise ConfigError(
                f"llama-server is given GGUF files, and {flag} {name} is none. "
                f"{_advice(plan, name)}"
            )
    if plan.tensor_parallel > 1 or plan.data_parallel > 1:
        raise ConfigError(
            "llama-server spreads one copy over all devices it sees by itself: leave "
            "--tensor-parallel-size and --data-parallel-size out (for copies, start several "
            "servers behind a proxy)"
        )
    if plan.dtype is not None:
        raise ConfigError("the number format of a GGUF file is in the file: leave --dtype out")
    no_window(plan, "llama-server")


def _advice(plan: Plan, name: str) -> str:
    """How to come by a file: a draft is converted here, a target is got as a file."""
    if name != plan.draft:
        return "Name the target's own .gguf file"
    target = plan.target if plan.target.endswith(".gguf") else "TARGET.gguf"
    return f"Convert it: dflash convert {name} --to gguf --target {target} --out draft.gguf"
