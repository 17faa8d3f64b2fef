"""A Ray Serve application: replicas of our own engine, with all its routes, behind one address.

    serve run dflash.cluster.ray_app:build model=owner/target draft=owner/draft replicas=2

Each replica loads the pair and keeps a prefix cache of its own. A replica on GPUs needs ``device``
to say so: Ray hides them from a replica that has reserved none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from dflash.config import BlockSize, parse_block_size
from dflash.errors import ConfigError

EVERYWHERE = "0.0.0.0"  # Ray's proxy listens, and decides from where one may call
ROOM = (
    4  # requests Ray may hand a replica beyond those that run and wait there; it refuses with 429
)


@dataclass(frozen=True, slots=True)
class Asked:
    """The application's arguments; a command line has them as text."""

    model: str | None = None  # None = the demo pair
    draft: str | None = None
    replicas: int = 1
    block_size: BlockSize = None
    draft_sliding_window_size: int | None = None
    device: str = "cpu"
    dtype: str | None = None
    threads: int | None = (
        1  # a replica computes with them, and reserves as many CPUs; None = as it is
    )
    served_name: str | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Asked:
        """From keywords. Raises ConfigError for unknown ones and for values that are none."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(given) - known)
        if unknown:
            raise ConfigError(f"unknown arguments {unknown}. Known: {', '.join(sorted(known))}")
        found = dict(given)
        for name in ("replicas", "threads", "draft_sliding_window_size"):
            if name in found:
                found[name] = _whole(name, found[name])
        if isinstance(found.get("block_size"), str):
            found["block_size"] = parse_block_size(found["block_size"], "block_size")
        return cls(**found)


def _whole(name: str, value: Any) -> int:
    if not str(value).isdecimal() or int(value) < 1:
        raise ConfigError(f"{name} must be a whole number of 1 or more, got {value!r}")
    return int(value)


def build(given: Mapping[str, Any]) -> Any:
    """The application for ``serve run``. Raises ConfigError."""
    from ray import serve

    asked = Asked.of(given)

    def app() -> Any:
        return replica(asked)

    on_gpu = asked.device != "cpu"
    room = _serve_config(asked)
    deployment = serve.deployment(
        serve.ingress(app)(),
        name="dflash",
        num_replicas=asked.replicas,
        max_ongoing_requests=room.most_running + room.most_waiting + ROOM,
        ray_actor_options={"num_cpus": asked.threads or 1, "num_gpus": int(on_gpu)},
    )
    return deployment.bind()


def replica(asked: Asked) -> Any:
    """The ASGI application of one replica; loads the pair."""
    from dflash.engine import load
    from dflash.serve import apart, create_app

    engine = apart(
        lambda: load(
            asked.model,
            asked.draft,
            device=asked.device,
            dtype=asked.dtype,
            threads=asked.threads,
            draft_sliding_window_size=asked.draft_sliding_window_size,
        )
    )
    return create_app(engine, _serve_config(asked))


def _serve_config(asked: Asked) -> Any:
    from dflash import env
    from dflash.serve import ServeConfig

    key = env.api_key()
    return ServeConfig(
        host=EVERYWHERE,
        name=asked.served_name,
        block_size=asked.block_size,
        api_keys=() if key is None else (key,),
    )
