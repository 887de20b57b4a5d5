"""Chat templates: Jinja2 in a sandbox, with the names that the templates of Hugging Face models rely on.

The environment (trim_blocks, lstrip_blocks, loop controls, `raise_exception`, `strftime_now`, a `tojson` without HTML
escapes, `{% generation %}` blocks) and the treatment of messages (keys whose value is None are left out; reasoning is
offered under all usual names) equal those of transformers' `apply_chat_template`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Environment, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ridgeline.bounded import BoundedPool, Limits, job
from ridgeline.errors import BoundExceeded, RequestError, TokenizerError
from ridgeline.load.chat_guard import Costly, GuardedSandbox

Message = Mapping[str, Any]

_REASONING = ("reasoning_content", "thinking", "reasoning")
_MAX_SHOWN = 300
MAX_SOURCE = 1 << 18  # characters of a template; published ones have up to 40,000
RENDERING = Limits(5.0, 1 << 30, result_bytes=32 << 20)  # limits of a helper process that renders a slow template


class ChatTemplate:
    """A compiled chat template; `render` returns the text of a prompt."""

    def __init__(self, source: str, name: str = "default", *, guarded: bool = True) -> None:
        """Compile `source`. Raises TokenizerError if it is not a valid Jinja template or is too long.

        guarded: limit the time of rendering; False only in a helper process, which has its own limits.
        """
        if len(source) > MAX_SOURCE:
            raise TokenizerError(
                f"chat template {name!r} has {len(source)} characters; the limit is {MAX_SOURCE}: shorten the template"
            )
        self.name = name
        self.source = source
        try:
            self._template = _environment(guarded).from_string(source)
        except TemplateSyntaxError as error:
            where = f"chat template {name!r}, line {error.lineno}"
            raise TokenizerError(f"{where}: {_line(error)}; correct the template") from error
        except (
            TemplateError,
            RecursionError,
            SyntaxError,
            MemoryError,
        ) as error:  # Python's compiler raises the last two
            raise TokenizerError(f"chat template {name!r}: {_line(error)}; correct the template") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt text for `messages`. `variables` (bos_token, eos_token, ...) are passed to the template.

        Raises RequestError if the messages, tools or documents are not plain JSON data, or if the template rejects them
        (`raise_exception`, a missing field). Raises TokenizerError if the template tries to leave the sandbox.
        """
        data = chat_data(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, documents=documents, **variables
        )
        try:
            return self.render_here(data)
        except Costly:
            return self._render_elsewhere(data)

    def render_here(self, data: Mapping[str, Any]) -> str:
        """Return the prompt text, rendered in this process. Raises Costly if that takes too long; other errors as in
        `render`.
        """
        environment = self._template.environment
        try:
            if isinstance(environment, GuardedSandbox):
                return environment.limited(lambda: self._template.render(data))
            return self._template.render(data)
        except Costly:
            raise
        except SecurityError as error:
            raise TokenizerError(f"chat template {self.name!r} is unsafe and was stopped: {_line(error)}") from error
        # A template is a program that can fail in any way; only this request may fail because of it.
        except Exception as error:
            raise RequestError(f"chat template {self.name!r} rejects these messages: {_line(error)}") from error

    def _render_elsewhere(self, data: Mapping[str, Any]) -> str:
        try:
            with BoundedPool(1) as pool:
                text = pool.run_sync(render_job, self.source, self.name, dict(data), limits=RENDERING)
        except BoundExceeded as error:
            raise RequestError(f"chat template {self.name!r} was stopped: {error}") from None
        return str(text, "utf-8", "surrogatepass")


def reads_roles(source: str) -> bool:
    """Return whether a chat template reads the roles of messages; one that does not just joins their texts.

    Raises TokenizerError if it is not a valid Jinja template.
    """
    try:
        tree = _environment(guarded=False).parse(source)
    except TemplateSyntaxError as error:
        raise TokenizerError(f"chat template, line {error.lineno}: {_line(error)}; correct the template") from error
    attributes = (node.attr for node in tree.find_all(nodes.Getattr))
    constants = (node.value for node in tree.find_all(nodes.Const))
    return "role" in (*attributes, *constants)


@job
def render_job(_: None, source: str, name: str, data: dict[str, Any]) -> bytes:
    """Render a template in a helper process."""
    try:
        return ChatTemplate(source, name, guarded=False).render_here(data).encode("utf-8", "surrogatepass")
    except RequestError as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None
        raise


def chat_data(
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> dict[str, Any]:
    """Return the variables of a template for `render_here`: copies that contain only JSON types."""
    try:
        chat = _messages(messages)
        data = {key: _plain(value, key) for key, value in variables.items()}
        data["tools"] = None if tools is None else _objects(tools, "tools")
        data["documents"] = None if documents is None else _objects(documents, "documents")
        data["add_generation_prompt"] = add_generation_prompt
        return {"messages": chat, **data}
    except RecursionError:
        raise RequestError("the messages, tools or variables of the chat are nested too deeply; flatten them") from None


class _Strict:
    """Raises an error for an unsafe attribute, where Jinja's own sandbox prints an empty text."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise SecurityError(f"access to attribute {attribute!r} of a {type(obj).__name__} is not allowed")


class _Generation(Extension):
    """Renders `{% generation %}` blocks, which mark the assistant's text for training, as plain blocks."""

    tags = {"generation"}  # noqa: RUF012 - the type that jinja2 declares

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Namespace(Namespace):
    """A `namespace()` that refuses names with a leading underscore, which belong to Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        for key in dict(*args[1:], **kwargs):
            _refuse_private(key)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


class _Free(_Strict, ImmutableSandboxedEnvironment):
    """The environment of a helper process."""


class _Guarded(_Strict, GuardedSandbox):
    """The environment of this process."""


def _environment(guarded: bool) -> Environment:
    kind = _Guarded if guarded else _Free
    environment = kind(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    if isinstance(environment, GuardedSandbox):
        environment.guard()
    return environment


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    chat = _objects(messages, "messages")
    if not chat:
        raise RequestError("messages is empty; send at least one message")
    for index, message in enumerate(chat):
        if not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{index}] has no 'role'; give it one, such as 'user'")
    return [_with_reasoning({k: v for k, v in message.items() if v is not None}) for message in chat]


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Add a message's reasoning under the names that templates read, as transformers does."""
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    if reasoning is None:
        return message
    named = {"thinking": reasoning}  # first, because a template that prints whole messages shows the order
    named.update(message)
    named["reasoning_content"] = reasoning
    return named


def _objects(items: object, what: str) -> list[dict[str, Any]]:
    if isinstance(items, str | bytes | Mapping) or not isinstance(items, Sequence):
        raise RequestError(f"{what} is a {type(items).__name__}; it must be a list of objects")
    for index, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise RequestError(f"{what}[{index}] is a {type(item).__name__}; it must be an object")
    return [_plain(item, f"{what}[{index}]") for index, item in enumerate(items)]


def _plain(value: Any, what: str) -> Any:
    """Return a copy that contains only JSON types, so that a template gets no object with methods of its own."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):  # a subclass: only its characters are passed on
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_key(key, what): _plain(item, f"{what}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{what}[{index}]") for index, item in enumerate(value)]
    raise RequestError(f"{what} is a {type(value).__name__}; chat data must be plain JSON values")


def _key(key: object, what: str) -> str:
    if not isinstance(key, str):
        raise RequestError(f"{what} has the key {key!r}; keys must be strings")
    return str.__str__(key)


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
