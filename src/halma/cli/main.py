"""The command line's frame: which commands there are, and how each of them may end.

0: it did what was asked. 1: a check that was asked for did not hold. 2: a refusal, with its reasons on standard
error and no traceback. 130: interrupted. 141: nobody reads what we print. A traceback is always a defect of ours.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from halma import __version__
from halma.cli.backends import backends
from halma.cli.bench import bench
from halma.cli.capture import capture
from halma.cli.conformance import conformance
from halma.cli.doctor import doctor
from halma.cli.explain import explain
from halma.cli.ffn import ffn
from halma.cli.generate import generate
from halma.cli.output import print_refusal
from halma.cli.verify import verify
from halma.hal.errors import HalmaError
from halma.hal.settings import refuse_unknown, settings

REFUSED = 2
INTERRUPTED = 130
BROKEN_PIPE = 141
COMMANDS = (generate, ffn, bench, capture, verify, backends, explain, conformance, doctor)

app = typer.Typer(
    name="halma",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich" if sys.stdout.isatty() else None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (default: this process's) and return its exit code; never raises."""
    command = typer.main.get_command(app)
    try:
        command.main(args=None if arguments is None else list(arguments), prog_name="halma")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except HalmaError as error:
        print_refusal(f"halma: {error}")
        code = REFUSED
    except KeyboardInterrupt:
        code = INTERRUPTED
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        code = BROKEN_PIPE
    return code


def _ends_cleanly(command: Callable[..., None]) -> Callable[..., None]:
    """Say how an interrupted command ends, before the library has its own idea, which varies with its version."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            _drop_output()
            raise typer.Exit(BROKEN_PIPE) from None

    return wrapped


def _drop_output() -> None:
    """Send what is left in the buffer nowhere: the interpreter flushes it at exit, and would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"halma {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """DeepSeek-V4 on any backend: text, checks, and reasons."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        return
    if context.invoked_subcommand != doctor.__name__:  # which reports broken settings, so it must start with them
        refuse_unknown()
        logging.basicConfig(format="halma: %(levelname)s: %(message)s")
        logging.getLogger("halma").setLevel(settings().log.upper())


for _command in COMMANDS:
    # Without a short help the list of commands cuts each off where its column ends.
    app.command(short_help=inspect.getdoc(_command))(_ends_cleanly(_command))
