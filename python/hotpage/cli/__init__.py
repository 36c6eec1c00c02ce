# SPDX-License-Identifier: Apache-2.0
"""Owns the `hotpage` command: its list of subcommands and how errors end it.

Exit codes: 0 success, 1 the command ran and the answer is no, 2 the call or a setting is wrong or
the output could not be written, 130 interrupted, 141 the reader of the output went away (what a
shell reports of a program that SIGPIPE ends).
A subcommand is a function in a module of its own here; it raises and never prints errors. Heavy
imports belong inside the function.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from hotpage import __version__
from hotpage.cli import demo, doctor, plan, simulate
from hotpage.errors import CapacityError, ConfigError, KernelUnavailableError

# The base of all errors in a command line. It comes from click or, in later releases, from typer's
# own copy of it, under names that differ; its place above BadParameter is the same in both.
_CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]

_INTERRUPTED = 130
_READER_GONE = 141


class _InterruptedError(Exception):
    """An interrupt that passes the command line library, which would print an empty line."""


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise _InterruptedError from None


app = typer.Typer(
    name="hotpage",
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Keeps more sparse-attention requests running by giving up KV residency page by page.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("plan")(plan.plan)
app.command("simulate")(simulate.simulate)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"hotpage {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def _refuse(error: Exception, code: int) -> int:
    """Prints one sentence to stderr; returns the code."""
    format_message = getattr(error, "format_message", None)
    text = format_message() if format_message else str(error)
    print(f"hotpage: error: {' '.join(text.split())}", file=sys.stderr)
    return code


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code.

    Raises:
        Exception: a bug; what a user can cause ends as one sentence on stderr instead.
    """
    try:
        code = app(args=list(arguments), prog_name="hotpage", standalone_mode=False)
        # Here and not at the interpreter's end, where a failure would be a traceback.
        if sys.stdout is not None:
            sys.stdout.flush()
    except (_CommandLineError, ConfigError, CapacityError) as error:
        return _refuse(error, 2)
    except KernelUnavailableError as error:
        return _refuse(error, 1)
    except OSError as error:
        return _end_of_system_error(error)
    except SystemExit:
        # NOTE: of a closed pipe the command line library and rich make an exit with code 1, which
        # means something else here; nothing else exits, since this is not standalone mode.
        return _abandon_output(_READER_GONE)
    except (_InterruptedError, KeyboardInterrupt, typer.Abort):
        print("hotpage: interrupted", file=sys.stderr)
        return _INTERRUPTED
    return code if isinstance(code, int) else 0


def _end_of_system_error(error: OSError) -> int:
    """Exit code for an error of the operating system, after its sentence.

    A file's name makes it a matter of the user's paths. Without one, and with a number, it is the
    output that could not be written: a full device is code 2; a closed pipe, as of `| head`, is
    the reader's choice, so it ends silently with 141 and never with 1, which would say that rows
    were wrong. Anything else is a bug and is raised again.
    """
    if error.filename is not None:
        return _refuse(ConfigError(f"{error.filename}: {error.strerror}"), 2)
    if error.errno == errno.EPIPE:
        return _abandon_output(_READER_GONE)
    if error.errno is None:
        raise error
    text = f"the output could not be written: {error.strerror}; send it elsewhere"
    return _abandon_output(_refuse(ConfigError(text), 2))


def _abandon_output(code: int) -> int:
    """Sends what is still buffered nowhere, so that the interpreter's last flush does not fail."""
    try:
        descriptor = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):
        return code  # Not a real file, or closed: nothing is flushed to it.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
    return code


def main() -> NoReturn:
    """Entry point of the `hotpage` script."""
    sys.exit(run(sys.argv[1:]))
