"""The ``dflash`` command, and the one door through which errors leave it.

Exit codes: 0 done, 1 failed, 2 the user can fix it (arguments, files, a pair that does not fit),
130 interrupted, 141 the reader of the output left (as a shell reports it). Text goes to standard
output; progress, notes, stats and errors to standard error.
No traceback without ``--debug``.
"""

from __future__ import annotations

import errno
import sys
import traceback
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from dflash.cli import bench, chat, doctor, generate, inspect, pull, serve, sweep, train
from dflash.cli.compare import compare
from dflash.cli.convert import convert
from dflash.cli.naming import flags_of, in_flags
from dflash.cli.output import emit_json, error, forgive_characters, note, quiet_libraries
from dflash.cli.verify import verify as audit
from dflash.errors import (
    ConfigError,
    DFlashError,
    DownloadError,
    EngineClosed,
    OutOfMemory,
    PromptError,
)

FAILED, MISUSED, INTERRUPTED, UNREAD = 1, 2, 130, 141
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
_NOT_THE_USERS_FAULT = (DownloadError, EngineClosed, OutOfMemory)
_OF_OPTIONS = (ConfigError, PromptError)  # others speak of files, whose keys look alike


class Door(TyperGroup):
    """Runs a command; whatever it raises becomes one message and an exit code."""

    def make_context(self, *given: Any, **more: Any) -> Any:
        """What the words ask for; ``--help`` writes here. Raises typer.Exit."""
        try:
            with _unread():
                return super().make_context(*given, **more)
        except OSError as problem:
            raise typer.Exit(_report(problem, {}, {})) from None

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Raises typer.Exit for every error that is not typer's own."""
        if sys.stdout is None:  # Python's way of saying that it is closed
            error("standard output is closed, so there is nowhere to write: leave out >&-")
            raise typer.Exit(FAILED)
        with warnings.catch_warnings():
            _warnings_as_notes()
            try:
                with _unread():
                    return super().invoke(ctx)
            except KeyboardInterrupt:
                raise typer.Exit(INTERRUPTED) from None
            except Exception as problem:
                if hasattr(problem, "exit_code") or isinstance(problem, typer.Abort):
                    raise  # typer's own way of ending
                raise typer.Exit(_report(problem, ctx.meta, self._flags(ctx))) from None

    def _flags(self, ctx: Any) -> dict[str, str]:
        command = self.commands.get(ctx.invoked_subcommand or "")
        return {} if command is None else flags_of(command.params)


def _report(problem: Exception, meta: dict[str, Any], flags: dict[str, str]) -> int:
    if meta.get("dflash.debug"):
        traceback.print_exception(problem)
    if isinstance(problem, OSError) and problem.errno in _FULL:
        _forget_output()
        error(f"could not write: {problem.strerror} ({problem.filename or 'the output'})")
        return FAILED
    known = isinstance(problem, DFlashError)
    text = str(problem) if known else f"{type(problem).__name__}: {problem}"
    if isinstance(problem, _OF_OPTIONS):
        text = in_flags(text, flags)
    if not known and not meta.get("dflash.debug"):
        text += "\nThis is a fault of ours; --debug shows where it happened."
    error(text)
    if meta.get("dflash.json"):
        emit_json({"error": {"type": type(problem).__name__, "message": text}})
    return MISUSED if known and not isinstance(problem, _NOT_THE_USERS_FAULT) else FAILED


def _warnings_as_notes() -> None:
    """Our own warnings become one line each; those of libraries are not the user's business."""
    warnings.simplefilter("ignore")
    warnings.filterwarnings("default", category=UserWarning, module=r"dflash\b")
    warnings.showwarning = lambda message, *_args, **_more: note(str(message))


def _forget_output() -> None:
    """Keep the interpreter from flushing into a closed pipe on its way out."""
    sys.stdout = None


@contextmanager
def _unread() -> Iterator[None]:
    """Where the reader of the output leaves, end as quietly as a program in C does."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, and not behind the door
    except (BrokenPipeError, SystemExit) as problem:
        if not _is_unread(problem):
            raise
        _forget_output()
        raise typer.Exit(UNREAD) from None


def _is_unread(problem: BaseException) -> bool:
    """Whether this is a closed pipe, or the SystemExit that rich makes of one."""
    left = problem.__context__ if isinstance(problem, SystemExit) else problem
    return isinstance(left, BrokenPipeError)


class Verb(TyperCommand):
    """A command whose switches are shown without a type: they take no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        """All parameters, ``--help`` included."""
        params: list[Any] = super().get_params(ctx)
        for param in params:
            if getattr(param, "is_flag", False) and param.metavar is None:
                param.metavar = ""
        return params

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Values of the parameters. ConfigError for an empty path: it would be the folder here."""
        words = list(args)
        rest: list[str] = super().parse_args(ctx, args)
        for param in self.get_params(ctx):
            value = ctx.params.get(param.name)
            if Path() in (value if isinstance(value, list | tuple) else [value]):
                _insist_on_path(param.opts, words)
        return rest


def _insist_on_path(flags: Collection[str], words: Sequence[str]) -> None:
    for word, value in pairwise([*words, "."]):
        flag, equals, rest = word.partition("=")
        if flag in flags and not (rest if equals else value):
            raise ConfigError(f"{flag} is empty: . is the current folder")


app = typer.Typer(
    cls=Door,
    name="dflash",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="A local model answers faster, with unchanged output: lossless speculative decoding.",
)
for command in (
    *(generate.generate, chat.chat, train.train, inspect.inspect, pull.pull),
    *(audit, doctor.doctor, convert, compare, serve.serve),
    *(bench.bench, sweep.sweep),
):
    app.command(cls=Verb)(command)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"dflash {version('dflash-engine')}")
        except PackageNotFoundError:
            typer.echo("dflash from a source folder, not installed")
        raise typer.Exit


@app.callback()
def start(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """A local model answers faster, with unchanged output: lossless speculative decoding."""
    del version  # its callback did it
    quiet_libraries()
    forgive_characters()


def main() -> None:
    """Run the command that the arguments name."""
    app()
