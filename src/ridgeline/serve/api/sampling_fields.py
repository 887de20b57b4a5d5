"""Make the sampling fields of request bodies from the declarations of the parameters (spec/request.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, Field, GetCoreSchemaHandler, create_model

from ridgeline.spec.parameters import Biases, Choice, Flag, Number, Parameter, Stage, Texts, TokenIds, Whole
from ridgeline.spec.request import SAMPLING

MAX_STOP = 32  # number of texts that end an answer: each is looked for in every token's text
MAX_STOP_CHARS = 1024  # characters of each of them
MAX_VOCABULARY = 1 << 19  # number of token ids that are allowed, excluded, biased or end an answer

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")


@dataclass(frozen=True)
class AtMost:
    """Bounds the length of a list or dict. Validation ends at the first bad element, and at this length.

    A body of 16 MiB has millions of elements, and pydantic would keep an error for each.
    """

    length: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return {**handler(source), "fail_fast": True, "max_length": self.length}


TokenId = Annotated[int, Field(json_schema_extra={"minimum": 0})]
TokenSet = Annotated[list[TokenId], AtMost(MAX_VOCABULARY), AfterValidator(lambda ids: list(dict.fromkeys(ids)))]
BiasMap = Annotated[dict[str, float], AtMost(MAX_VOCABULARY)]
EightBytes = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]  # the range of counters of 8 bytes


def _short(stop: str | list[str]) -> str | list[str]:
    if (longest := max(map(len, [stop] if isinstance(stop, str) else stop), default=0)) > MAX_STOP_CHARS:
        raise ValueError(f"a stop string has {longest} characters; the limit is {MAX_STOP_CHARS}: shorten it")
    return stop


Stop = Annotated[str | Annotated[list[str], AtMost(MAX_STOP)], AfterValidator(_short)]
# Parameters whose fields in the API are stricter than their declarations.
OWN: dict[str, Any] = {"stop": Stop}
# Fields of /v1/responses: OpenAI's own are named differently, and an answer there is one message.
RESPONSE_FIELDS = (
    "bad_words",
    *(name for name, _, one in SAMPLING
      if one.api and one.stage in (Stage.PENALTY, Stage.TEMPERATURE, Stage.FILTER, Stage.DRAW, Stage.SPEED)),
)  # fmt: skip


def same_fields(taken: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Return the names of the parameters that are fields of the API by the same name, without those of `taken`."""
    return tuple(name for name, _, one in SAMPLING if one.api and name not in taken)


def with_sampling(*names: str) -> Callable[[type[B]], type[B]]:
    """Return a decorator that adds the fields of parameters to a body. names: the parameters; none: all of them.

    A field that the class declares itself stays as it is. pydantic checks types and sizes; SamplingParams checks the
    range, whose errors say more, so bounds are only shown in /openapi.json.
    """

    def add(body: type[B]) -> type[B]:
        wanted = names or same_fields()
        fields: dict[str, Any] = {
            name: (Annotated[_field(name, one) | None, Field(description=one.help)], None)
            for name, _, one in SAMPLING
            if name in wanted and name not in body.model_fields
        }
        made = create_model(body.__name__, __base__=body, __doc__=body.__doc__, __module__=body.__module__, **fields)
        made.__qualname__ = body.__qualname__
        return made

    return add


def _field(name: str, parameter: Parameter) -> Any:
    """Return the type of a parameter's field."""
    return Annotated[OWN.get(name) or _type(parameter), Field(json_schema_extra=parameter.schema())]


def _type(parameter: Parameter) -> Any:
    match parameter:
        case Whole():
            return EightBytes
        case Number():
            return float
        case Flag():
            return bool
        case Choice(values=values):
            return Literal[values]
        case TokenIds():
            return TokenSet
        case Biases():
            return BiasMap
        case Texts(most=int(most)):
            return Annotated[list[str], AtMost(most)]
    raise TypeError(f"{type(parameter).__name__} has no type in the API: set api=False, or add the type here")
