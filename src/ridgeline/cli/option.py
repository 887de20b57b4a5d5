"""Declare options of commands."""

from __future__ import annotations

from typing import Any

import typer


def option(*names: str, help: str, panel: str | None = None, **more: Any) -> Any:
    """Return an option of a command. Its help names the default, so typer does not print the default again.

    panel: heading of the help under which the option is listed. more: further arguments of typer.Option.
    """
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=False, **more)
