"""The application of Ray Serve: `serve deploy` reads `import_path: ridgeline.cli.ray_serve:build` in a YAML file."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import typer

from ridgeline.cli.flags.described import with_spec
from ridgeline.cli.flags.groups import grouped
from ridgeline.cli.flags.serve_flags import ServeCommand
from ridgeline.cli.serve import Prepared, prepared
from ridgeline.errors import RequestError

ARGUMENT = "serve"  # the key of `args` in the YAML file
USAGE_ERROR: Any = typer.BadParameter.__bases__[0]  # UsageError of the click that this version of typer has


def build(args: Mapping[str, Any]) -> Any:
    """Return the application. args: under `serve` the words that follow `ridgeline serve` on a command line.

    Raises RequestError.
    """
    from ridgeline.dist.ray_serve import application

    if set(args) != {ARGUMENT}:
        raise RequestError(f"args has {', '.join(args) or 'nothing'}; give one: `{ARGUMENT}: MODEL --replicas 2`")
    asked = read(args[ARGUMENT])
    asked.find()
    return application(asked.model, asked.arguments, asked.options, asked.replicas, quiet=asked.quiet)


def read(line: Any) -> Prepared:
    """Return what the words after `ridgeline serve` ask for. Raises RequestError."""
    if not isinstance(line, str):
        raise RequestError(f"`{ARGUMENT}` is {line!r:.100}; it must be one line of text, such as MODEL --replicas 2")
    try:
        words = shlex.split(line)
    except ValueError as e:
        raise RequestError(f"`{ARGUMENT}: {line:.200}` cannot be read: {e}; close each quotation") from None
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command("serve", cls=ServeCommand)(with_spec(grouped(prepared)))
    try:
        found = typer.main.get_command(app).main(words, prog_name="ridgeline serve", standalone_mode=False)
    except USAGE_ERROR as e:
        raise RequestError(f"`{ARGUMENT}: {line:.200}`: {e.format_message()}") from None
    if not isinstance(found, Prepared):
        raise RequestError(f"`{ARGUMENT}: {line:.200}` asks for no server; give a model and options")
    if found.ray is not None:
        raise RequestError("--ray is not an option here: the engines run on the cluster that serves the application")
    return found
