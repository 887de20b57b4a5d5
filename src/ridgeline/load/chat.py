"""Chat templates: Jinja2 in a sandbox, with the names that the templates of Hugging Face models rely on.

The environment (trim_blocks, lstrip_blocks, loop controls, `raise_exception`, `strftime_now`, a `tojson` that
escapes nothing, `{% generation %}` blocks) and the treatment of messages (a key whose value is None is left
out; reasoning is offered under the names in use) are those of transformers' `apply_chat_template`.
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
RENDERING = Limits(5.0, 1 << 30, result_bytes=32 << 20)  # of a template that takes long, in a helper process


class ChatTemplate:
    """One compiled chat template: `render` turns messages into the text of the prompt."""

    def __init__(self, source: str, name: str = "default", *, guarded: bool = True) -> None:
        """Compile `source`; raises TokenizerError when it is not a valid Jinja template, or a very long one.

        guarded: False only in a helper process, whose limits are others.
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
        ) as error:  # the last two are Python's compiler's
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
        """Return the prompt text for `messages`; `variables` (bos_token, eos_token, ...) reach the template.

        Raises RequestError when the messages, tools or documents are not plain JSON data, or when the
        template rejects them (`raise_exception`, a missing field); TokenizerError when it tries to leave the
        sandbox.
        """
        data = chat_data(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, documents=documents, **variables
        )
        try:
            return self.render_here(data)
        except Costly:
            return self._render_elsewhere(data)

    def render_here(self, data: Mapping[str, Any]) -> str:
        """Return the prompt text, made in this process; raises Costly where that would take long, else as `render`."""
        environment = self._template.environment
        try:
            if isinstance(environment, GuardedSandbox):
                return environment.limited(lambda: self._template.render(data))
            return self._template.render(data)
        except Costly:
            raise
        except SecurityError as error:
            raise TokenizerError(f"chat template {self.name!r} is unsafe and was stopped: {_line(error)}") from error
        # A template is a program: it can fail in any way, and whatever it is, it is this request that fails.
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
    """Whether a chat template looks at the roles of messages; one that does not only joins their texts.

    Raises TokenizerError when it is not a valid Jinja template.
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
    """Render in a helper process."""
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
    """Return what the template is given, for `render_here`: copies that consist of JSON types only."""
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
    """Fails at an unsafe attribute; Jinja's own sandbox yields an undefined that prints as ''."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise SecurityError(f"access to attribute {attribute!r} of a {type(obj).__name__} is not allowed")


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it only renders."""

    tags = {"generation"}  # noqa: RUF012 - the type that jinja2 declares

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Namespace(Namespace):
    """`namespace()` without names that begin with an underscore: those are Python's internals."""

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
    """In a helper process."""


class _Guarded(_Strict, GuardedSandbox):
    """In this one."""


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
    """Offer a message's reasoning under both names that templates read, as transformers does."""
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    if reasoning is None:
        return message
    named = {"thinking": reasoning}  # first: a template that prints whole messages shows the order
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
    """Return a copy made of JSON types only: a template must get no object that has methods of its own."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):  # of a subclass: only its characters go on
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
