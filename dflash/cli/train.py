"""``dflash train``: a draft for the user's own target."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from dflash.cli import options as o
from dflash.cli.groups import was_given
from dflash.cli.output import emit_json, note
from dflash.errors import ConfigError, missing
from dflash.model_folders import seek

if TYPE_CHECKING:
    from dflash.train.config import Schedule, TrainConfig

DRAFT, RUN = "Draft", "Run"
LITTLE = 1.1  # committed per pass; a pass with drafts in it takes longer than a plain one


def _draft(*names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=DRAFT, **more)


def _run(*names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=RUN, **more)


def train(
    ctx: typer.Context,
    out: Annotated[Path, _run("--out", help="Folder of the draft, its log and its checkpoint.")],
    data: Annotated[
        list[Path] | None,
        _run("--data", help="JSONL of conversations answered by the target; may be repeated."),
    ] = None,
    model: o.Model = None,
    layers: Annotated[int, _draft("--layers", help="Layers of the draft.")] = 3,
    block_size: Annotated[int, _draft("--block-size", help="Anchor included.")] = 8,
    taps: Annotated[
        str, _draft("--taps", metavar="auto|1,8,15", help="Target layers the draft reads.")
    ] = "auto",
    mask_token_id: Annotated[
        int | None, _draft("--mask-token-id", help="Default: the tokenizer's mask or unk token.")
    ] = None,
    window: Annotated[
        int | None, _draft("--window", help="Sliding window of all layers but the last.")
    ] = None,
    selector_rank: Annotated[
        int | None,
        _draft("--selector-rank", help="Makes it a DFlash2 draft: rank of its selector's tables."),
    ] = None,
    draft_vocab: Annotated[
        int | None,
        _draft("--draft-vocab", help="Most frequent tokens the draft can say; default: all."),
    ] = None,
    start: Annotated[
        Path | None,
        _draft("--start", help="Draft folder to begin with; v1 may start a DFlash2 draft."),
    ] = None,
    start_rate: Annotated[
        float,
        _run("--start-rate", help="Share of --learning-rate for what --start brought; 0: fixed."),
    ] = 1.0,
    selector_first: Annotated[
        int,
        _run("--selector-first", help="Updates in which a DFlash2 draft's selector learns alone."),
    ] = 0,
    steps: Annotated[int, _run("--steps", help="Updates in all, resumed ones included.")] = 8000,
    batch: Annotated[int, _run("--batch", help="Conversations an update.")] = 2,
    anchors: Annotated[int, _run("--anchors", help="Blocks a conversation.")] = 40,
    block_sizes: Annotated[
        str | None,
        _run(
            "--block-sizes",
            metavar="4,6,8",
            help="Block sizes taken in turn; default: half to full.",
        ),
    ] = None,
    learning_rate: Annotated[float, _run("--learning-rate", help="Peak of AdamW's.")] = 2e-3,
    decay: Annotated[
        str,
        _run("--decay", metavar="prefix|uniform|GAMMA", help="Weight of later rows in the loss."),
    ] = "prefix",
    max_length: Annotated[int, _run("--max-length", help="Tokens kept of a conversation.")] = 512,
    eval_every: Annotated[int, _run("--eval-every", help="Updates between evaluations.")] = 1000,
    checkpoint_every: Annotated[int, _run("--checkpoint-every", help="Updates in between.")] = 500,
    skip_malformed: Annotated[
        bool, _run("--skip-malformed", help="Leave malformed lines out instead of stopping.")
    ] = False,
    resume: Annotated[
        bool, _run("--resume", help="Continue the run in --out: what no flag says is as it was.")
    ] = False,
    seed: Annotated[int, _run("--seed", help="Of weights, order and anchors.")] = 0,
    device: o.Device = None,
    threads: o.Threads = None,
    as_json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Train a DFlash draft for a target, on text the target wrote.

    A line of --data is {"messages": [{"role": "user", ...}, {"role": "assistant", ...}]}. Ctrl-C
    saves; --resume with --out alone goes on exactly where the run was, and more --steps make it
    longer.
    """
    given = locals()
    told = {name for name in ctx.params if was_given(ctx, name)}
    try:
        config = _config(given, told)
        _check(config)
        from dflash.train.run import train as run
    except ModuleNotFoundError as problem:
        if problem.name is None or problem.name.split(".")[0] == "dflash":
            raise
        raise missing(f"training needs {problem.name}", "train") from problem
    with Progress(config.schedule.steps, quiet=as_json) as progress:
        outcome = run(config, progress)
    scores = (outcome.generated, outcome.walk)
    judged = next((score.mean_committed for score in scores if score and score.rounds), None)
    if as_json:
        emit_json(
            {
                "out": str(outcome.out),
                "steps": outcome.steps,
                "interrupted": outcome.interrupted,
                "mean_committed": judged,
            }
        )
    if outcome.interrupted:
        note(f"stopped at step {outcome.steps}; go on with --resume")
        raise typer.Exit(130)
    worth = "how good it is was not measured: four conversations at least, or none is held out"
    if judged is not None:
        worth = f"{judged:.2f} committed per verify pass on held-out prompts"
        if judged < LITTLE:
            worth += (
                ", and 1 comes without a draft: nothing is gained yet. More text and more steps "
                "help (docs/how-to/train-a-draft.md)"
            )
    note(f"{outcome.out}: {worth}. Try it: dflash generate --draft {outcome.out} ...")
    note(f"to ship: {', '.join(outcome.shipped)}; the rest is only for --resume")


def _check(config: TrainConfig) -> None:
    """What can be wrong without torch, before the seconds that importing it takes."""
    from dflash.train.data import check_files
    from dflash.train.place import made

    if find_spec("torch") is not None:
        with made(config.out, trial=True):
            check_files(config.data)
            seek(config.target)


def _saved(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """The settings of the run to resume; None for a new one."""
    if not given["resume"]:
        return None
    from dflash.train.checkpoint import saved_run

    _, settings = saved_run(given["out"])
    return settings


def _config(given: Mapping[str, Any], told: Collection[str]) -> TrainConfig:
    """TrainConfig from the command's parameters; those not ``told`` as a resumed run has them.

    Raises ConfigError, and CheckpointError when there is nothing to resume.
    """
    from dflash.opening import pair_names
    from dflash.train.config import DraftShape, Objective, TrainConfig, continued

    saved = _saved(given)
    if saved is not None:
        given = {**given, "data": given["data"] or saved["data"]}
    if saved is not None and "model" not in told:
        target = saved["target"]
    else:
        target, _ = pair_names(given["model"], "none")
    config = TrainConfig(
        target=str(target),
        target_name=demo_name() if given["model"] in (None, "demo") else None,
        data=tuple(given["data"] or ()),
        out=given["out"],
        shape=DraftShape(
            layers=given["layers"],
            block_size=given["block_size"],
            taps="auto" if given["taps"] == "auto" else _numbers("--taps", given["taps"]),
            mask_token_id=given["mask_token_id"],
            window=given["window"],
            selector_rank=given["selector_rank"],
            draft_vocab_size=given["draft_vocab"],
        ),
        objective=Objective(decay=_decay(given["decay"]), soft_mix=0.5),
        schedule=_schedule(given),
        start=given["start"],
        max_length=given["max_length"],
        eval_every=given["eval_every"],
        checkpoint_every=given["checkpoint_every"],
        skip_malformed=given["skip_malformed"],
        resume=given["resume"],
        device=given["device"],
        threads=given["threads"],
    )
    return config if saved is None else continued(config, saved, told)


def _schedule(given: Mapping[str, Any]) -> Schedule:
    """The schedule in the command's parameters. Raises ConfigError."""
    from dflash.train.config import Schedule

    size, sizes = given["block_size"], given["block_sizes"]
    return Schedule(
        steps=given["steps"],
        learning_rate=given["learning_rate"],
        sequences=given["batch"],
        anchors=given["anchors"],
        block_sizes=_numbers("--block-sizes", sizes) if sizes else spread(size),
        seed=given["seed"],
        selector_first=given["selector_first"],
        start_rate=given["start_rate"],
    )


def spread(size: int) -> tuple[int, ...]:
    """Four block sizes from half to full: 8 gives 4, 5, 6, 8."""
    return tuple(sorted({max(2, size * part // 8) for part in (4, 5, 6, 8)}))


def demo_name() -> str:
    """The name under which the demo target is known everywhere."""
    from dflash.demo import HUB_ID

    return HUB_ID


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{flag} takes numbers like 1,8,15, got {text!r}") from None


def _decay(text: str) -> Any:
    if text in ("prefix", "uniform"):
        return text
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if value <= 0:
        raise ConfigError(f"--decay takes prefix, uniform or a number above 0, got {text!r}")
    return value


class Progress(AbstractContextManager["Progress"]):
    """A bar on standard error: step, loss, first-row accuracy, accepted prefix."""

    def __init__(self, steps: int, *, quiet: bool) -> None:
        """``quiet`` shows nothing (for --json)."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        self.bar = Bar(*columns, console=Console(stderr=True), disable=quiet)
        self.task = self.bar.add_task("preparing", total=steps)
        self.smooth: dict[str, float] = {}

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.bar.stop()

    def __call__(self, record: Mapping[str, Any]) -> None:
        """One step's record, or an evaluation."""
        if record.get("event") == "features":
            text = f"target features of {record['done']} of {record['of']} conversations"
            self.bar.update(self.task, description=text)
            return
        if record.get("event") == "evaluation":
            real = record["generated"]
            text = (
                f"step {record['step']}: {record['walk']['mean_committed']:.3f} committed by walk"
            )
            if real:
                text += f", {real['mean_committed']:.3f} by real generation"
            self.bar.console.print(text)
            return
        for key in ("loss", "first", "prefix"):
            value = record.get(key, float("nan"))
            if value == value:  # a step without anchors has no loss
                self.smooth[key] = 0.98 * self.smooth.get(key, value) + 0.02 * value
        text = "  ".join(f"{key} {value:.3f}" for key, value in self.smooth.items())
        self.bar.update(self.task, completed=record["step"], description=text)
