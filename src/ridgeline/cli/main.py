"""`ridgeline`: the commands, and how an error looks."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ridgeline import __version__
from ridgeline.cli import doctor, generate, inspect
from ridgeline.errors import RidgelineError

app = typer.Typer(
    name="ridgeline",
    help="LLM inference that predicts its cost, runs at the roofline, and proves its outputs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("generate")(generate.generate)
app.command("inspect")(inspect.inspect)
app.command("doctor")(doctor.doctor)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ridgeline {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run a command. Errors that a user can cause are one line on stderr and exit status 2."""
    try:
        app()
    except RidgelineError as e:
        sys.exit(_fail(str(e), 2))


def _fail(message: str, status: int) -> int:
    print("ridgeline: " + " ".join(message.split()), file=sys.stderr)
    return status
