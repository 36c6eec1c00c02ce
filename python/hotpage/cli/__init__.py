# SPDX-License-Identifier: Apache-2.0
"""Owns the `hotpage` command: its list of subcommands and how errors end it.

Exit codes: 0 success, 1 the command ran and the answer is no, 2 the call or a setting is wrong.
A subcommand is a function in a module of its own here; it raises and never prints errors. Heavy
imports belong inside the function.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from hotpage import __version__
from hotpage.cli import demo, doctor, plan
from hotpage.errors import CapacityError, ConfigError, KernelUnavailableError

# The base of all errors in a command line. It comes from click or, in later releases, from typer's
# own copy of it, under names that differ; its place above BadParameter is the same in both.
_CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="hotpage",
    help="Keeps more sparse-attention requests running by giving up KV residency page by page.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("plan")(plan.plan)


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
    except (_CommandLineError, ConfigError, CapacityError) as error:
        return _refuse(error, 2)
    except KernelUnavailableError as error:
        return _refuse(error, 1)
    except OSError as error:
        # Without a file name it is no matter of the user's paths.
        if error.filename is None:
            raise
        return _refuse(ConfigError(f"{error.filename}: {error.strerror}"), 2)
    except (KeyboardInterrupt, typer.Abort):
        return _refuse(RuntimeError("interrupted"), 130)
    return code if isinstance(code, int) else 0


def main() -> NoReturn:
    """Entry point of the `hotpage` script."""
    sys.exit(run(sys.argv[1:]))
