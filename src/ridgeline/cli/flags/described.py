"""The option --spec of each command that takes a model: a description of a checkpoint that no family has."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Annotated, Any

import typer

from ridgeline.cli.flags.groups import with_arguments
from ridgeline.cli.flags.options import DEFAULT_MODEL

# Parameters that name the model of a command: the last two are those of serve and run-batch.
MODEL, ARGUMENT, OPTION = "model", "model_argument", "model_option"
Spec = Annotated[
    str | None,
    typer.Option(
        "--spec",
        help="JSON file that describes the model in place of its config.json: its layers, and which tensors of the "
        "checkpoint are which weights (docs/models.md). Give it for an architecture that is not in the list there. "
        "Default: the model's own config.json.",
        rich_help_panel="Model",
    ),
]


def with_spec(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command with --spec. Its model becomes the folder that `load.described.described` makes."""
    arguments: list[Parameter] = []
    for one in signature(command, eval_str=True).parameters.values():
        arguments.append(one.replace(kind=Parameter.KEYWORD_ONLY))
        if one.name in (MODEL, ARGUMENT):
            arguments.append(Parameter("spec", Parameter.KEYWORD_ONLY, annotation=Spec, default=None))

    def run(*, spec: str | None, **given: Any) -> Any:
        if spec is not None:
            given |= _described(spec, given)
        return command(**given)

    return with_arguments(run, command, arguments)


def _described(spec: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a command that change with a description."""
    from ridgeline.load.described import described
    from ridgeline.load.hub import MODEL_FILES, SMALL_FILES

    names = [name for name in (MODEL, ARGUMENT, OPTION) if given.get(name) is not None]
    if len({given[name] for name in names}) > 1:
        return {}  # the command says that only one may be given
    model = given[names[0]] if names else DEFAULT_MODEL
    loads = given.get("load_format", "dummy") != "dummy"
    folder = described(model, spec, revision=given.get("revision"), files=MODEL_FILES if loads else SMALL_FILES)
    changed: dict[str, Any] = dict.fromkeys(names or [ARGUMENT], str(folder))
    if "revision" in given:
        changed["revision"] = None  # the folder is local
    if "served_model_name" in given:
        changed["served_model_name"] = given["served_model_name"] or [model]
    return changed
