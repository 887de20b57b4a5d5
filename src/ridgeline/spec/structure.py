"""Define the structure that an answer must follow: a schema, a regular expression, a grammar or a choice."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ridgeline.errors import RequestError
from ridgeline.spec.checks import check_flag, texts_of

STRUCTURES = ("json", "regex", "choice", "grammar", "json_object")  # exactly one of these fields is set
MAX_STRUCTURE_CHARACTERS = 1 << 18  # characters of structured_outputs
MAX_STRUCTURE_LEVELS = 127  # nested objects and lists in a JSON schema


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """The structure that an answer must follow; exactly one field is set. Needs the extra `structured` (llguidance).

    json: a JSON schema, as text. regex: a regular expression for the whole answer. choice: one of these texts.
    grammar: a context-free grammar in Lark's notation, or in llama.cpp's (GBNF). json_object: any JSON object. Names as
    in vLLM.
    whitespace_pattern: with json or json_object, a regular expression of the white space between two tokens of JSON.
    """

    json: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        for name in ("json", "regex", "grammar", "whitespace_pattern"):
            if not isinstance(getattr(self, name), str | None):
                raise RequestError(f"structured_outputs: {name} is {getattr(self, name)!r:.100}; it must be a text")
        check_flag("structured_outputs: json_object", self.json_object)
        if self.choice is not None:
            object.__setattr__(self, "choice", texts_of("structured_outputs: choice", self.choice))
        given = [name for name in STRUCTURES if getattr(self, name) not in (None, False)]
        if len(given) != 1 or self.choice == ():
            raise RequestError(f"structured_outputs has {given}; give exactly one of json, regex, choice, grammar, "
                               "json_object")  # fmt: skip
        if self.whitespace_pattern is not None and given[0] not in ("json", "json_object"):
            raise RequestError(f"structured_outputs has whitespace_pattern with {given[0]}; only JSON has white space")
        _at_most_long(self.kind, self.value)
        _at_most_long("whitespace_pattern", self.whitespace_pattern or "")

    @property
    def kind(self) -> str:
        """Return the name of the field that is set."""
        return next(name for name in STRUCTURES if getattr(self, name) not in (None, False))

    @property
    def value(self) -> str | tuple[str, ...] | bool:
        """Return the value of the field that is set."""
        found: str | tuple[str, ...] | bool = getattr(self, self.kind)
        return found

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> StructuredOutputs:
        """Return the structure of a JSON object, whose schema may be an object itself. Raises RequestError."""
        if unknown := sorted(set(given) - {f.name for f in fields(cls)}):
            raise RequestError(f"structured_outputs has {unknown[0]!r}, which is not known")
        values = {name: value for name, value in given.items() if value is not None}
        if isinstance(values.get("json"), Mapping | bool):
            _at_most_long("json", values["json"])
            values["json"] = json.dumps(values["json"])
        return cls(**values)


def _at_most_long(kind: str, value: object) -> None:
    """Raise RequestError for a structure that is too long or nested too deeply, before it is used."""
    length, level = 0, [value]
    for _ in range(MAX_STRUCTURE_LEVELS):
        below: list[object] = []
        for part in level:
            texts = (*part, *part.values()) if isinstance(part, Mapping) else part
            if isinstance(texts, list | tuple):
                below += texts
                length += 2 * len(texts)
            else:
                length += len(texts) if isinstance(texts, str) else 1
        if length > MAX_STRUCTURE_CHARACTERS:
            raise RequestError(
                f"structured_outputs: {kind} has more than {MAX_STRUCTURE_CHARACTERS} characters, which is the limit: "
                "simplify it"
            )
        if not below:
            return
        level = below
    raise RequestError(
        f"structured_outputs: {kind} is nested deeper than {MAX_STRUCTURE_LEVELS} levels: move inner parts to $defs"
    )
