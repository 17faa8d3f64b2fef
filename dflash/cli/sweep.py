"""``dflash sweep``: the fastest block size of a pair, quickly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dflash.checks import counted
from dflash.cli import bench_flags as f
from dflash.cli import engine_flags as e
from dflash.cli import options as o
from dflash.cli.given import open_engine
from dflash.cli.groups import Given, flat, with_groups
from dflash.cli.output import emit_json, note, status
from dflash.errors import ConfigError

if TYPE_CHECKING:
    from dflash.bench.sweep import Sweep


@with_groups
def sweep(
    pair: Given = o.PAIR_FLAGS,
    engine_flags: Given = e.FLAGS,
    texts: Given = f.PROMPT_FLAGS,
    max_tokens: o.MaxTokens = 64,
    block_sizes: f.BlockSizes = None,
    seconds: Annotated[
        float, f.option(f.RUN, "--seconds", metavar="S", help="Time it may take, loading apart.")
    ] = 100.0,
    write_config: f.WriteConfig = False,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Find the fastest block size of a pair here, quickly: the slower half drops out each time."""
    given = {**flat(locals()), "system": None, "no_chat_template": False, "enable_thinking": None}
    from dflash.bench import sweep as halving
    from dflash.bench.arms import engine_arm
    from dflash.bench.lock import config_of
    from dflash.blocks import insist_on_room

    conversations = f.conversations(given)
    with open_engine({**given, "no_profile": True}) as engine:
        native = engine.pair.draft_block_size
        if native is None:
            raise ConfigError("there is no draft to sweep: name one (--draft)")
        asked = f.block_sizes(block_sizes) or halving.candidates(native)
        if write_config:
            config_of(engine.pair.draft_name)  # before the minutes, not after them
        if not seconds > 0:
            raise ConfigError(f"--seconds must be above 0, got {seconds:g}")
        if max_tokens < 2:
            raise ConfigError("a sweep times what follows the first token: --max-tokens 2 or more")
        sizes = sorted({1, *(size for size in asked if isinstance(size, int) and size <= native)})
        if sizes == [1]:
            raise ConfigError(
                f"no block size to compare with plain decoding: the draft's own is {native}, so "
                f"name some from 2 to {native} (--block-sizes)"
            )
        insist_on_room(sizes[-1], engine.pair, "block_sizes")
        arms = {size: engine_arm(engine, size) for size in sizes}
        asks = [engine.encode(c.turns[0]) for c in conversations]
        status(f"block sizes {', '.join(map(str, sizes))}, up to {seconds:.0f} s ...")
        for arm in arms.values():
            arm(asks[0], min(16, max_tokens))
        found = halving.sweep(arms, asks, max_tokens, seconds)
        name = engine.pair.draft_name
    _show(found, json)
    if write_config:
        f.write_default(name, found.block_size)


def _show(found: Sweep, as_json: bool) -> None:
    if as_json:
        emit_json(found.to_json())
    else:
        for heat in found.heats:
            gains = "  ".join(f"{arm} {gain:.2f}x" for arm, gain in heat.speedup.items())
            typer.echo(f"{counted(heat.prompts, 'prompt')}: {gains}")
        gain = "" if found.speedup is None else f": {found.speedup}x plain decoding"
        typer.echo(f"block {found.block_size}{gain} ({found.seconds:.0f} s, {found.stopped})")
    if found.noise is not None:
        note(f"{found.noise}, so do not build on this: run again while nothing else runs")
