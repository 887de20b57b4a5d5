"""`ridgeline man`: print the manual page of all commands, made from their help."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

from ridgeline import __version__

_STYLE = re.compile(r"\[/?[a-z ]+\]")  # rich's marks in help, such as [bold]


def man(context: typer.Context) -> None:
    """Print the manual page of all commands, in the format of `man`."""
    print("\n".join(page(context.find_root().command)))


def page(program: Any) -> Iterator[str]:
    """Yield the lines of the manual page of a command line program. program: click's command with all others in it."""
    name = program.name
    yield f'.TH {name.upper()} 1 "" "{name} {__version__}" "User Commands"'
    yield from (".SH NAME", f"{name} \\- {_text(program.help).rstrip('.')}")
    yield from (".SH SYNOPSIS", f".B {name}", ".I COMMAND", "[\\fIOPTIONS\\fR] [\\fIARGUMENTS\\fR]")
    yield from (".SH OPTIONS", *_options(program))
    yield ".SH COMMANDS"
    for path, command in commands(program, name):
        yield from (f".SS {_text(path)}{_arguments(command)}", _text(command.help), *_options(command))


def commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the path and the command of each command of a group that is not hidden, those of inner groups included."""
    for name, command in group.commands.items():
        if getattr(command, "commands", None):
            yield from commands(command, f"{path} {name}")
        elif not command.hidden:
            yield f"{path} {name}", command


def _arguments(command: Any) -> str:
    """Return the names of a command's arguments, in brackets where they may be left out."""
    found = [p for p in command.params if p.param_type_name == "argument" and not getattr(p, "hidden", False)]
    names = [(p.metavar or p.name.upper().removesuffix("_ARGUMENT"), p.required) for p in found]
    return "".join(f" {_text(name) if required else f'[{_text(name)}]'}" for name, required in names)


def _options(command: Any) -> Iterator[str]:
    """Yield the entry of each option and of each argument that has help."""
    for one in command.params:
        text = getattr(one, "help", None)
        if getattr(one, "hidden", False) or not text:
            continue
        if one.param_type_name == "argument":
            names = f"\\fI{_text(one.metavar or one.name.upper().removesuffix('_ARGUMENT'))}\\fR"
        else:
            names = ", ".join(f"\\fB{_text(name)}\\fR" for name in (*one.opts, *one.secondary_opts))
            if not one.is_flag and not one.count:
                names += f" \\fI{_text(_value(one))}\\fR"
        yield from (".TP", names, _text(text))


def _value(option: Any) -> str:
    """Return what stands for the value of an option: its choices, or the name of its type."""
    choices = getattr(option.type, "choices", None)
    return option.metavar or ("|".join(map(str, choices)) if choices else option.type.name.upper())


def _text(text: str | None) -> str:
    """Return text on one line, with what troff would read as commands escaped."""
    flat = " ".join(_STYLE.sub("", text or "").split()).replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{flat}" if flat[:1] in (".", "'") else flat
