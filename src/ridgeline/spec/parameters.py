"""Declare a parameter of a request once: its type, range, default, help, and when it acts.

`SamplingParams` and `BeamSearchParams` declare their fields with `declare`. The flags of the command line, the fields
of the HTTP API, the form of the page and the table in docs/generate.md all derive from these declarations.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, NamedTuple

from ridgeline.errors import RequestError
from ridgeline.spec.breakers import breakers_of
from ridgeline.spec.checks import check_flag, check_number, check_sizes, check_whole, ids_of, pairs_of, texts_of
from ridgeline.spec.structure import StructuredOutputs

KEY = "parameter"  # key in a field's metadata
# Declarations are constants of the program: nobody compares or prints them. Each method that dataclass writes for a
# class takes time whenever a command starts, so the classes below leave out the methods that are not used.


class Stage(Enum):
    """Where a parameter acts. The stages from MASK to FILTER change the logits, in this order."""

    ANSWER = "the answers and their length"
    MASK = "masks"
    BIAS = "bias"
    PENALTY = "penalties"
    TEMPERATURE = "temperature"
    FILTER = "filters"
    DRAW = "the draw"
    END = "the end of an answer"
    PASSES = "the passes of a diffusion model"
    SPEED = "the speed"
    REPORT = "what is reported"
    SEARCH = "beam search"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Parameter(ABC):
    """A parameter of a request: what it means and which values it may have. Subclasses are its types.

    help: the effect of the value, in full sentences. stage: the step at which it acts. flag: whether the command line
    has a flag for it. api: whether it is a field of the HTTP API by its own name. recommended: whether a model's
    generation_config.json may set it. none: the meaning of None. optional: whether None is allowed although it is not
    the default. label: its name in the page's form; "": it is not in the form. step: the change by an arrow key
    there. start: the first value in the form.
    """

    help: str
    stage: Stage
    flag: bool = True
    api: bool = True
    recommended: bool = False
    none: str = ""
    optional: bool = False
    label: str = ""
    step: float = 1
    start: int | None = None

    @abstractmethod
    def check(self, name: str, value: Any) -> Any:
        """Return the value as it is kept. Raises RequestError, which names the value and the limit."""

    def schema(self) -> dict[str, Any]:
        """Return the range in the words of JSON Schema."""
        return {}

    @abstractmethod
    def limits(self) -> str:
        """Return the allowed values in words, for the documentation."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Flag(Parameter):
    """True or False. negative: help of the flag that sets False, for a parameter that is True by default."""

    negative: str = ""

    def check(self, name: str, value: Any) -> Any:
        check_flag(name, value)
        return value

    def limits(self) -> str:
        return "true or false"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Whole(Parameter):
    """A whole number from `low` to `high`."""

    low: int
    high: int | None = None

    def check(self, name: str, value: Any) -> Any:
        check_whole(name, value, self.low, self.high)
        return value

    def schema(self) -> dict[str, Any]:
        return {"minimum": self.low} | ({} if self.high is None else {"maximum": self.high})

    def limits(self) -> str:
        return f"at least {self.low}" if self.high is None else f"{self.low} to {self.high}"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Number(Parameter):
    """A finite number from `low` to `high`. open_low: `low` itself is not allowed."""

    low: float = 0.0
    high: float = math.inf
    open_low: bool = False

    def check(self, name: str, value: Any) -> Any:
        check_number(name, value, self.low, self.high, open_low=self.open_low)
        return value

    def schema(self) -> dict[str, Any]:
        low = {"exclusiveMinimum" if self.open_low else "minimum": self.low}
        return low | ({"maximum": self.high} if math.isfinite(self.high) else {})

    def limits(self) -> str:
        if math.isinf(self.high):
            return f"above {self.low:g}" if self.open_low else f"at least {self.low:g}"
        return f"above {self.low:g}, to {self.high:g}" if self.open_low else f"{self.low:g} to {self.high:g}"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Choice(Parameter):
    """One of a few values. Values are of several types where True and a text are both allowed."""

    values: tuple[Any, ...]

    def check(self, name: str, value: Any) -> Any:
        if not any(type(value) is type(one) and value == one for one in self.values):
            raise RequestError(f"{name} is {value!r:.100}; it must be {self.limits()}")
        return value

    def limits(self) -> str:
        *others, last = (str(one).lower() for one in self.values)
        return f"{', '.join(others)} or {last}"


class TokenIds(Parameter):
    """A list of token ids, kept as a tuple."""

    def check(self, name: str, value: Any) -> Any:
        return ids_of(name, value)

    def limits(self) -> str:
        return "token ids"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Biases(Parameter):
    """A mapping from token ids to numbers from -`most` to `most`, kept as sorted pairs."""

    most: float

    def check(self, name: str, value: Any) -> Any:
        pairs = pairs_of(name, value)
        for token, bias in pairs:
            check_whole(f"{name}: a token id", token, 0)
            check_number(f"{name} of token {token}", bias, -self.most, self.most)
        return pairs

    def limits(self) -> str:
        return f"token id: {-self.most:g} to {self.most:g}"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Texts(Parameter):
    """One text, or a list of texts that are not empty, kept as a tuple.

    most: number of texts. characters: number of characters in all texts. longest: number of characters in each text.
    None: no limit. visible: whether a text of white space alone is refused.
    """

    most: int | None = None
    characters: int | None = None
    longest: int | None = None
    visible: bool = False

    def check(self, name: str, value: Any) -> Any:
        texts = texts_of(name, value)
        if self.visible and any(not text.strip() for text in texts):
            raise RequestError(f"{name} has a text of white space alone; leave it out")
        if self.most is not None:
            check_sizes(name, texts, self.most, self.characters or self.most * (self.longest or 0), "characters")
        if self.longest is not None and (found := max(map(len, texts), default=0)) > self.longest:
            raise RequestError(f"{name} has a text of {found} characters; the limit is {self.longest}")
        return texts

    def limits(self) -> str:
        return "texts" if self.most is None else f"at most {self.most} texts"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TokenSequences(Parameter):
    """A list of lists of token ids that are not empty, kept as tuples. most: number of lists. tokens: ids in all."""

    most: int
    tokens: int

    def check(self, name: str, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise RequestError(f"{name} is {value!r:.100}; it must be a list of lists of token ids")
        found = tuple(ids_of(name, ids) for ids in value)
        if () in found:
            raise RequestError(f"{name} has an empty list; leave it out")
        check_sizes(name, found, self.most, self.tokens, "token ids")
        return found

    def limits(self) -> str:
        return f"at most {self.most} lists of token ids"


class Breakers(Parameter):
    """A list of TokenBreaker, kept as a tuple."""

    def check(self, name: str, value: Any) -> Any:
        return breakers_of(name, value)

    def limits(self) -> str:
        return "TokenBreaker objects"


class Structure(Parameter):
    """A StructuredOutputs, or an object with its fields."""

    def check(self, name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return StructuredOutputs.of(value)
        if not isinstance(value, StructuredOutputs):
            raise RequestError(f"{name} is {value!r:.100}; it must be an object, see StructuredOutputs")
        return value

    def limits(self) -> str:
        return "an object"


class Declared(NamedTuple):
    """A parameter with its name and its default. A default of None means that the parameter may be left out."""

    name: str
    default: Any
    parameter: Parameter


def declare(default: Any, parameter: Parameter) -> Any:
    """Return a dataclass field with a default, declared as `parameter`."""
    return field(default=default, metadata={KEY: parameter})


def required(parameter: Parameter) -> Any:
    """Return a dataclass field without a default, declared as `parameter`."""
    return field(metadata={KEY: parameter})


def declared(kind: Any) -> tuple[Declared, ...]:
    """Return the parameters that the fields of a dataclass declare, in their order."""
    return tuple(Declared(f.name, f.default, f.metadata[KEY]) for f in fields(kind) if KEY in f.metadata)


def check_declared(params: Any, parameters: tuple[Declared, ...]) -> None:
    """Check every field of a frozen dataclass and keep the checked values. Raises RequestError."""
    for name, default, parameter in parameters:
        value = getattr(params, name)
        if value is not None or not (default is None or parameter.optional):
            object.__setattr__(params, name, parameter.check(name, value))


def described(parameters: tuple[Declared, ...]) -> str:
    """Return a line for each parameter, for the docstring of the class that declares them."""
    return "\n".join(
        f"{name}: {parameter.help}" + (f" None: {parameter.none}." if parameter.none else "")
        for name, _, parameter in parameters
    )
