"""What a server was asked to be: addresses, limits, keys. Frozen, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from dflash import checks
from dflash.config import BlockSize, DraftTree, GenerateConfig
from dflash.errors import ConfigError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MOST_CHOICES = 16  # texts of one request: prompts x n
MOST_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """How an engine is offered over HTTP.

    host, port      where to listen; the default is reachable from this machine only
    name            the model name that clients see and send; None = from the target's
    block_size      of requests that do not say (anchor included; "auto"; None = the draft's own)
    draft_tree      nodes of the trees that requests are drafted in, as deep as their blocks; 0 =
                    chains; "auto" weighs them by measured time where the block is "auto", too
    api_keys        one of them must come with each request; () = no key is asked for
    origins         web origins that may call from a browser (CORS); () = none
    hosts           further names that a Host header may carry while only loopback is listened to
    most_running    requests that take turns, a pass each
    most_waiting    requests that wait for a turn; one more is refused with 429
    most_body       bytes of a request
    most_tokens     largest max_tokens; None = what the context holds
    most_seconds    deadline of a request, waiting included; a request may ask for less
    cache_bytes     of keys and values, those of running requests included; above it the texts
                    unused for longest are forgotten
    cache_sessions  finished texts kept, to be gone on with; 0 = none
    drain_seconds   how long running requests may go on after the signal to stop
    log_prompts     write prompts and answers to the log
    """

    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    block_size: BlockSize = None
    draft_tree: DraftTree = 0
    api_keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    most_running: int = 8
    most_waiting: int = 64
    most_body: int = 8 << 20
    most_tokens: int | None = None
    most_seconds: float = 600.0
    cache_bytes: int = 1 << 30
    cache_sessions: int = 32
    drain_seconds: float = 30.0
    log_prompts: bool = False

    def __post_init__(self) -> None:
        """Refuse impossible values. Raises ConfigError."""
        for name in ("api_keys", "origins", "hosts"):
            checks.set_fields(self, **{name: checks.strings(name, getattr(self, name))})
        if not isinstance(self.host, str) or not self.host:
            raise ConfigError("host is empty: 127.0.0.1 is this machine only, 0.0.0.0 is everybody")
        checks.within("port", self.port, lambda x: 0 <= x < 65536, "between 0 and 65535")
        for name in ("most_running", "most_body", "cache_bytes"):
            checks.at_least(1, name, getattr(self, name), required=True)
        for name in ("most_waiting", "cache_sessions"):
            checks.at_least(0, name, getattr(self, name), required=True)
        checks.at_least(1, "most_tokens", self.most_tokens)
        checks.within("most_seconds", self.most_seconds, lambda x: x > 0, "above 0")
        checks.within("drain_seconds", self.drain_seconds, lambda x: x >= 0, "0 or more")
        if self.block_size != "auto":
            checks.at_least(1, "block_size", self.block_size, hint=' (1 = plain, or "auto")')
        GenerateConfig(block_size=self.block_size, draft_tree=self.draft_tree)

    @property
    def only_here(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host in LOOPBACK
