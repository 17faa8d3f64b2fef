"""Where everything meets: open a pair, lease its sessions, run the loop, hand out text.

One engine serves any number of threads: every stream has its own sessions, and the engine's lock is
held for one round at a time, so streams take turns. What an engine does not do is put several
requests into one forward pass.

    with dflash.load("HuggingFaceTB/SmolLM2-135M-Instruct", draft="path/to/draft") as engine:
        print(engine.generate("Why is the sky blue?", max_tokens=64).text)
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from os import PathLike
from threading import RLock
from typing import TYPE_CHECKING

from dflash import blocks
from dflash.checks import switch
from dflash.closing import Closing
from dflash.config import GenerateConfig, LoadConfig, draft_names, from_options, path_name
from dflash.core.decode import decode
from dflash.core.policy import State
from dflash.core.profile import Profile
from dflash.core.protocols import Pair
from dflash.core.stats import Recorder, Stats
from dflash.core.types import Grammar, Request
from dflash.errors import CLOSED, ConfigError, EngineClosed
from dflash.grammar import Grammars
from dflash.opening import open_pair, pair_names
from dflash.profiles import ProfileFile, file_of
from dflash.prompt import Prompt, encode
from dflash.reader import Reader
from dflash.requests import make_request
from dflash.results import Chunk, Generation, Piece, Source, joined
from dflash.sessions import Lease, Sessions
from dflash.thinking import budget

if TYPE_CHECKING:
    from typing import Unpack

    from dflash.config import GenerateOptions, LoadOptions

IN_WORK = "the engine was closed while this text was being generated"


def load(
    target: str | PathLike[str] | None = None,
    draft: str | PathLike[str] | None = None,
    **options: Unpack[LoadOptions],
) -> Engine:
    """Open a target with its draft.

    target  folder, hub id or .gguf file; left out: the demo target
    draft   folder or hub id; "none": plain decoding; "ngram": drafts looked up in the text so far;
            "A+ngram": both; "mtp": the heads inside the target; left out: the demo target brings
            its draft, a target with such heads uses them (``mtp=False``: not), any other decodes
            plainly
    options fields of LoadConfig (backend, device, dtype, draft_sliding_window_size, ...)

    Raises ConfigError, MissingBackend, CheckpointError, PairError, DownloadError, OutOfMemory. A
    draft that was asked for and cannot be loaded is an error, never silent plain decoding.
    """
    names = pair_names(
        None if target is None else path_name("target", target),
        None if draft is None else path_name("draft", draft),
    )
    options.setdefault("mtp", draft is None)
    config = from_options(LoadConfig, {"target": names[0], "draft": names[1], **options})
    pair = open_pair(config)
    return Engine(pair, file_of(pair) if config.profile else None)


class Engine(Closing):
    """A loaded pair that generates text. Use as a context manager, or call ``close``."""

    def __init__(self, pair: Pair, profile_file: ProfileFile | None = None) -> None:
        """The engine owns ``pair`` from here on and closes it.

        ``profile_file`` is read now and written by ``close``; None = start from nothing. Raises
        ConfigError for what is neither.
        """
        if not hasattr(pair, "open_target"):
            raise ConfigError(
                f"an engine takes an opened pair, not {type(pair).__name__}: dflash.load(target, "
                "draft) opens one by its names"
            )
        if profile_file is not None and not isinstance(profile_file, ProfileFile):
            raise ConfigError(f"profile_file must be a ProfileFile, got {profile_file!r}")
        self.pair = pair
        self._sessions, self._grammars = Sessions(pair), Grammars(pair)
        self._file = profile_file
        # a machine has one speed: all requests share what they learn
        self._profile = Profile() if profile_file is None else profile_file.read()
        self._lock = RLock()  # a forgotten stream may be collected, and parked, inside a round
        self._closed = False

    def generate(
        self,
        prompt: Prompt,
        *,
        chat_template: bool = True,
        system: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """The whole answer to ``prompt``. Arguments and errors as in ``stream``."""
        return joined(
            list(self.stream(prompt, chat_template=chat_template, system=system, **options))
        )

    def stream(
        self,
        prompt: Prompt,
        *,
        chat_template: bool = True,
        system: str | None = None,
        progress: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> Iterator[Chunk]:
        """Chunks of the answer as rounds finish; the last one has finish_reason and stats.

        With ``n`` above 1 one text follows the other; ``Chunk.index`` tells which it is.

        prompt  text (one user turn of the target's chat template, or raw text with
                ``chat_template=False``), messages with role and content, or token ids
        system  text of a system message put first
        progress  also an empty chunk for each part of a long prompt, so that one ``next()`` is
                one pass of the target and never more
        options fields of GenerateConfig (max_tokens, temperature, seed, stop, block_size, ...)

        The arguments are checked at the call, before the first chunk is asked for. Raises
        ConfigError, PromptError (empty, or no room left in the context) and EngineClosed, the last
        also in the middle of a stream whose engine is closed.
        """
        config = from_options(GenerateConfig, options)
        switch("progress", progress)
        self._check_open()
        ids = self.encode(prompt, chat_template=chat_template, system=system)
        first = self._asked(ids, config, 0)
        others = (self._asked(ids, config, sample) for sample in range(1, config.n))
        return self._texts(chain([first], others), config, progress)

    def encode(
        self, prompt: Prompt, *, chat_template: bool = True, system: str | None = None
    ) -> list[int]:
        """Ids [T] that ``stream`` would run for ``prompt``. Raises PromptError, EngineClosed."""
        self._check_open()
        return encode(self.pair.tokenizer, prompt, chat_template=chat_template, system=system)

    def keep(self, texts: int, most_bytes: int) -> None:
        """How many finished texts can be gone on with, and bytes for them and those in work.

        As it is, an engine keeps the last two, and a text that begins like one of them takes it
        over; with this, texts are kept apart. The one unused for longest makes room. Raises
        EngineClosed.
        """
        with self._lock:
            self._check_open()
            self._sessions.limit(texts, most_bytes)

    @property
    def kept(self) -> Sessions:
        """The sessions: how many texts are kept and in work, and their bytes. Only to be read."""
        return self._sessions

    def close(self) -> None:
        """Free sessions and weights; idempotent. Streams still running raise EngineClosed."""
        with self._lock:
            if self._file is not None and not self._closed:
                self._file.write(self._profile)
            self._closed = True
            self._sessions.close()
            self.pair.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed(CLOSED)

    def _request(self, ids: list[int], config: GenerateConfig, sample: int = 0) -> Request:
        grammar: Grammar | None = self._grammars.start(config.constraint)
        if config.thinking_budget is not None:
            grammar = budget(self.pair, ids, config.thinking_budget)
        return make_request(self.pair, ids, config, sample, grammar)

    def _asked(
        self, ids: list[int], config: GenerateConfig, sample: int
    ) -> tuple[Request, blocks.Blocks]:
        request = self._request(ids, config, sample)
        rate, tree = config.min_acceptance_rate, config.draft_tree
        return request, blocks.choose(config.block, self.pair, self._profile, rate, tree)

    def _texts(
        self,
        asked: Iterable[tuple[Request, blocks.Blocks]],
        config: GenerateConfig,
        progress: bool,
    ) -> Iterator[Chunk]:
        """One text after the other; all but the first find the prompt in the cache."""
        for index, (request, chosen) in enumerate(asked):
            if config.echo:
                yield _echo(request, self.pair, index)
            yield from self._chunks(request, chosen, config, index, progress)

    def _chunks(
        self,
        request: Request,
        chosen: blocks.Blocks,
        config: GenerateConfig,
        index: int,
        progress: bool,
    ) -> Iterator[Chunk]:
        """The ``index``-th text, each round under the engine's lock; the loop, read."""
        recorder = Recorder(
            len(request.prompt),
            backend=self.pair.backend,
            policy=chosen.name,
            block_size=chosen.block_size,
            clamped_from=chosen.clamped_from,
            drafts=draft_names(self.pair.draft_name),
        )
        reader = Reader(self.pair.tokenizer, config.stop, config.min_tokens)
        with self._leased(request, fresh=not (config.reuse or index)) as lease:
            recorder.cached, lease.length = lease.reuse, len(request.prompt)
            drafts = [] if chosen.name == "off" else lease.drafts
            policy, clock, finish = chosen.policy, time.perf_counter_ns, None
            rounds = decode(request, lease.target, drafts, policy, clock, lease.reuse)
            while finish is None:
                with self._lock:  # not acquire and try: Ctrl-C between the two would keep it
                    if self._closed:
                        raise EngineClosed(IN_WORK)
                    step = next(rounds)
                lease.length += len(step.tokens)
                step, chunk = reader.read(step, getattr(policy, "state", None))
                recorder.add(step)
                finish = step.finish
                if finish is None and (progress or step.tokens):
                    yield replace(chunk, index=index) if index else chunk
        stats = blocks.explained(self._measured(recorder.stats()), chosen)
        reason = finish.value
        yield replace(chunk, index=index, finish_reason=reason, stats=stats, state=State.DONE)

    def _measured(self, stats: Stats) -> Stats:
        """``stats`` with the speed against plain steps, as far as this pair's were timed."""
        costs = self._profile.costs
        if not stats.tokens_per_second or not costs.knows(0, 0):
            return stats
        return replace(stats, speedup=stats.tokens_per_second * costs.plain() * costs.pace / 1e9)

    @contextmanager
    def _leased(self, request: Request, fresh: bool) -> Iterator[Lease]:
        """Sessions for one request: parked afterwards if whole, closed if a call of them raised."""
        with self._lock:
            self._check_open()
            tokens = len(request.prompt) + request.max_tokens
            lease = self._sessions.take(request.prompt, tokens, fresh=fresh)
        whole = False
        try:
            yield lease
            whole = True
        except GeneratorExit:  # the reader left between two rounds: nothing is half done
            whole = True
            raise
        finally:
            with self._lock:
                self._sessions.give_back(lease, whole)


def _echo(request: Request, pair: Pair, index: int) -> Chunk:
    """The prompt as a chunk of its own."""
    ids = tuple(request.prompt)
    text: str = pair.tokenizer.decode(ids)
    sources: list[Source] = ["prompt"] * len(ids)
    return Chunk(text, ids, tuple(sources), (Piece(text, "prompt"),), index=index)
