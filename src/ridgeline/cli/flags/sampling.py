"""Make the flags of sampling from the declarations of the parameters (spec/request.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from inspect import Parameter as Argument
from typing import Annotated, Any

import typer

from ridgeline.errors import RequestError
from ridgeline.spec.parameters import Biases, Choice, Declared, Flag, Number, Parameter, Texts, TokenIds, Whole
from ridgeline.spec.request import BEAM_SEARCH, SAMPLING, BeamSearchParams, Params, SamplingParams

PANEL = "Sampling"
TYPES: dict[type[Parameter], Any] = {
    Whole: int | None, Number: float | None, Choice: str | None, Flag: bool, TokenIds: list[int] | None,
    Texts: list[str] | None, Biases: list[str] | None,
}  # fmt: skip
SHORT = {"n": ("-n",)}
# The command's seed is the model's: it counts for dummy weights too, and a run over a file continues with it.
WITHOUT = frozenset({"seed"})


@dataclass(frozen=True)
class SamplingFlags:
    """Stands for the flags of sampling in a command's signature.

    The command gets the parameters that were given, by name and as the parameters' own types. beams: whether there are
    flags of beam search. only: names of the parameters that have a flag; empty: all. defaults: descriptions of
    defaults that the command chooses itself.
    """

    beams: bool = True
    only: frozenset[str] = frozenset()
    defaults: Mapping[str, str] = field(default_factory=dict)

    def parameters(self) -> tuple[Declared, ...]:
        """Return the parameters that have a flag."""
        known = {one.name for one in SAMPLING}
        every = (*SAMPLING, *(one for one in BEAM_SEARCH if self.beams and one.name not in known))
        wanted = [one for one in every if one.parameter.flag and one.name not in WITHOUT]
        return tuple(one for one in wanted if not self.only or one.name in self.only)

    def arguments(self) -> list[Argument]:
        """Return the flags as arguments of a typer command."""
        return [self._argument(one) for one in self.parameters()]

    def _argument(self, one: Declared) -> Argument:
        kind, dashes = TYPES[type(one.parameter)], one.name.replace("_", "-")
        negative = isinstance(one.parameter, Flag) and one.default is True
        names = (*SHORT.get(one.name, ()), f"--no-{dashes}" if negative else f"--{dashes}")
        option = typer.Option(*names, help=self._help(one, negative), rich_help_panel=PANEL, show_default=False)
        default = False if isinstance(one.parameter, Flag) else None
        return Argument(one.name, Argument.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])

    def _help(self, one: Declared, negative: bool) -> str:
        parameter = one.parameter
        if isinstance(parameter, Flag):
            return parameter.negative if negative else parameter.help
        more = ""
        if isinstance(parameter, Biases):
            more = " Write ID=NUMBER."
        if isinstance(parameter, TokenIds | Texts | Biases):
            more += " May be given several times."
        return f"{parameter.help}{more} Default: {self.defaults.get(one.name) or default_text(one)}."

    def given(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters that were given. Raises RequestError for one that is not understood."""
        found = {}
        for name, default, parameter in self.parameters():
            value = values[name]
            if isinstance(parameter, Flag):
                if value:
                    found[name] = default is not True
            elif value is not None and value != []:
                found[name] = _value(name, value, parameter)
        return found


def default_text(one: Declared) -> str:
    """Return a parameter's default in words, for help and documentation."""
    if one.default is None or one.default is MISSING:
        return one.parameter.none or "none"
    if isinstance(one.default, tuple):
        return " ".join(map(json.dumps, one.default)) or "none"
    plain = str(one.default).lower() if isinstance(one.default, bool) else f"{one.default}"
    return f"the model's generation_config.json, else {plain}" if one.parameter.recommended else plain


def params_of(given: Mapping[str, Any]) -> tuple[type[Params], dict[str, Any]]:
    """Return SamplingParams, or BeamSearchParams if beam_width was given, and the fields of it that were given.

    Raises RequestError for a sampling parameter in a beam search.
    """
    if "beam_width" not in given:
        known = {one.name for one in SAMPLING}
        return SamplingParams, {name: value for name, value in given.items() if name in known}
    search, defaults = {one.name for one in BEAM_SEARCH}, {one.name: one.default for one in SAMPLING}
    for name, value in given.items():
        if name not in search and value != defaults[name]:
            flag = f"--{name.replace('_', '-')}"
            raise RequestError(f"{flag} has no effect with --beam-width, which draws no tokens: leave one of them out")
    # The command returns one answer by default, sampled or searched.
    return BeamSearchParams, {"n": 1} | {name: value for name, value in given.items() if name in search}


def _value(name: str, value: Any, parameter: Parameter) -> Any:
    if isinstance(parameter, Biases):
        return _biases(name, value)
    if isinstance(parameter, Choice):
        return {str(one).lower(): one for one in parameter.values}.get(value.lower(), value)
    return value


def _biases(name: str, items: list[str]) -> dict[int, float]:
    """Return pairs ID=NUMBER as a dict. Raises RequestError for anything else."""
    found = {}
    for item in items:
        token, _, bias = item.partition("=")
        try:
            found[int(token)] = float(bias)
        except ValueError:
            flag = f"--{name.replace('_', '-')}"
            raise RequestError(f"{flag} {item}: write ID=BIAS, as in {flag} 50256=-5") from None
    return found
