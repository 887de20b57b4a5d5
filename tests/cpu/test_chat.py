"""Chat templates: equal to transformers' rendering, safe, and with clear errors."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from oracle.data import shared_data
from ridgeline.errors import RequestError, TokenizerError
from ridgeline.load.chat import ChatTemplate, reads_roles
from ridgeline.load.tokenizer import Tokenizer

USER = {"role": "user", "content": "Hé, how's <b>it</b> going? 🦙"}
SYSTEM = {"role": "system", "content": "Be brief."}
ASSISTANT = {"role": "assistant", "content": "Fine."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}],
}
RESULT = {"role": "tool", "content": '{"temp": 3}'}
PARTS = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "It's <the> weather & more",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CHATS = [
    [USER],
    [SYSTEM, USER],
    [USER, ASSISTANT, USER],
    [SYSTEM, USER, ASSISTANT, PARTS],
    [USER, CALL, RESULT, ASSISTANT, USER],
]

# One template with everything that templates use: every helper, whitespace control, loops with break, macros.
KITCHEN = """
{%- macro say(role, text) -%}<|{{ role }}|>{{ text | trim }}{%- endmacro -%}
{{- bos_token }}
{% if tools %}
    [TOOLS]{{ tools | tojson }}|{{ tools | tojson(indent=2) }}|{{ tools[0] | tojson(sort_keys=True) }}
    {{ {"é": "<"} | tojson(ensure_ascii=True, separators=(",", ":")) }}
{% endif %}
{% set ns = namespace(count=0, last=none) %}
{% for message in messages %}
    {% if message.role == 'stop' %}{% break %}{% endif %}
    {% if message['role'] == 'skip' %}{% continue %}{% endif %}
    {% set ns.count = ns.count + 1 %}
    {% if message.content is string %}
        {{ say(message.role, message.content) }}
    {% elif message.content is defined %}
        {% for part in message.content %}{{ part.text }}{{ ', ' if not loop.last }}{% endfor %}
    {% endif %}
    {% if message.reasoning_content %}<think>{{ message.reasoning_content }}{{ message.thinking }}</think>{% endif %}
    {% if message.role == 'assistant' %}
        {% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
    {% endif %}
    {% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}
{% endfor %}
{{ ns.count }} {{ missing }} {{ dict(a=1) }} {{ messages[-1].keys() | list }}
{% if documents %}{{ documents[0]['title'] }}{% endif %}
{% if add_generation_prompt %}<|assistant|>{% endif %}
"""


@functools.cache
def qwen() -> Tokenizer:
    return Tokenizer.from_folder(shared_data() / "tokenizers" / "qwen2.5")


@functools.cache
def qwen_oracle() -> Any:
    return AutoTokenizer.from_pretrained(shared_data() / "tokenizers" / "qwen2.5")


def reference(source: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    kept = [{key: value for key, value in message.items() if value is not None} for message in messages]
    rendered, _ = render_jinja_template([kept], chat_template=source, **variables)
    return str(rendered[0])


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS, ids=range(len(CHATS)))
def test_qwen_matches_transformers(chat: list[dict[str, Any]], prompt: bool, tools: Any) -> None:
    ours = qwen().encode_chat(chat, add_generation_prompt=prompt, tools=tools)
    theirs = qwen_oracle().apply_chat_template(chat, add_generation_prompt=prompt, tools=tools, return_dict=False)
    assert ours == theirs
    assert qwen().chat_template is not None
    text = qwen().chat_template.render(chat, add_generation_prompt=prompt, tools=tools)
    kwargs = {"add_generation_prompt": prompt, "tools": tools, "tokenize": False}
    assert text == qwen_oracle().apply_chat_template(chat, **kwargs)


def test_qwen_template_variable() -> None:
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "x"}]}]
    ours = qwen().encode_chat(chat, add_vision_id=True)
    theirs = qwen_oracle().apply_chat_template(chat, add_generation_prompt=True, add_vision_id=True, return_dict=False)
    assert ours == theirs


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize(
    "chat",
    [*CHATS, [USER, {"role": "skip", "content": ""}, ASSISTANT, {"role": "stop", "content": ""}, USER]],
    ids=range(len(CHATS) + 1),
)
def test_every_feature_matches_transformers(chat: list[dict[str, Any]], tools: Any) -> None:
    variables = {"bos_token": "<s>", "eos_token": "</s>", "tools": tools, "documents": [{"title": "T", "text": "t"}]}
    for prompt in (True, False):
        expected = reference(KITCHEN, chat, add_generation_prompt=prompt, **variables)
        assert ChatTemplate(KITCHEN).render(chat, add_generation_prompt=prompt, **variables) == expected


@pytest.mark.parametrize("field", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_under_any_name(field: str) -> None:
    chat = [USER, {"role": "assistant", "content": "x", field: "because"}]
    assert ChatTemplate(KITCHEN).render(chat) == reference(KITCHEN, chat, add_generation_prompt=True)
    assert "<think>becausebecause</think>" in ChatTemplate(KITCHEN).render(chat)


def test_other_families_match_transformers() -> None:
    lines = (shared_data() / "prompts" / "ollama_chat_templates.jsonl").read_text(encoding="utf-8").splitlines()
    sources = [source for line in lines for source in json.loads(line).values()]
    assert len(sources) > 10
    variables = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
    for source in sources:
        for chat in CHATS[:3]:
            try:
                expected = reference(source, chat, **variables)
            except Exception:
                with pytest.raises(RequestError):
                    ChatTemplate(source).render(chat, **variables)
            else:
                assert ChatTemplate(source).render(chat, **variables) == expected


@pytest.mark.parametrize(
    ("source", "roles"),
    [
        ("{{ messages | map(attribute='content') | join('\\n') }}", False),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{# by role #}role: {{ messages[0].content }}", False),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}", True),
        ("{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{{ m['content'] }}{% endfor %}", True),
        ("{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | first }}", True),
    ],
)
def test_whether_a_template_reads_roles(source: str, roles: bool) -> None:
    assert reads_roles(source) is roles


def test_templates_of_published_models_know_roles() -> None:
    lines = (shared_data() / "prompts" / "ollama_chat_templates.jsonl").read_text(encoding="utf-8").splitlines()
    sources = [source for line in lines for source in json.loads(line).values()]
    assert len(sources) > 10 and all(map(reads_roles, sources))
    with pytest.raises(TokenizerError, match="line 1"):
        reads_roles("{% for %}")


def test_strftime_now() -> None:
    text = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render([USER])
    assert len(text) == 10 and text[4] == text[7] == "-"


ATTACKS = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__'] }}",
    "{{ '' | attr('__class__') | attr('__mro__') }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ messages.append({}) }}",
    "{{ messages[0].update({'a': 1}) }}",
    "{{ messages[0].pop('role') }}",
    "{{ namespace(__class__=1) }}",
    "{% set ns = namespace() %}{% set ns.__class__ = dict %}",
    "{{ (messages | map(attribute='__class__') | list)[0].__name__ }}",
]


@pytest.mark.parametrize("source", ATTACKS)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises((TokenizerError, RequestError)) as caught:
        ChatTemplate(source).render([USER])
    assert "\n" not in str(caught.value)


def test_escape_is_the_templates_fault() -> None:
    with pytest.raises(TokenizerError, match="unsafe"):
        ChatTemplate("{{ ''.__class__ }}").render([USER])


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", "{% endif %}", "{{ x | nofilter }}", "{% generation %}"])
def test_syntax_errors(source: str) -> None:
    with pytest.raises(TokenizerError, match="chat template 'mine'") as caught:
        ChatTemplate(source, "mine")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
        ("{{ messages[0]['content'] + 1 }}", "concatenate"),
        ("{{ messages[7]['role'].x }}", "no element 7|undefined"),
        ("{{ 1 // 0 }}", "division"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ messages | tojson(indent='x', sort_keys=3, nokey=1) }}", "nokey"),
    ],
)
def test_a_template_that_rejects_is_the_requests_error(source: str, text: str) -> None:
    with pytest.raises(RequestError, match=text) as caught:
        ChatTemplate(source).render([USER])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], "messages is empty"),
        ("hello", "list of objects"),
        ({"role": "user"}, "list of objects"),
        (None, "list of objects"),
        (["hello"], r"messages\[0\] is a str"),
        ([{"content": "x"}], "no 'role'"),
        ([{"role": 3}], "no 'role'"),
        ([{"role": "user", "content": object()}], "content is a object"),
        ([{"role": "user", "content": b"x"}], "content is a bytes"),
        ([{"role": "user", 3: "x"}], "key 3"),
    ],
)
def test_bad_messages(messages: Any, text: str) -> None:
    with pytest.raises(RequestError, match=text):
        ChatTemplate("{{ messages }}").render(messages)


def test_bad_tools() -> None:
    with pytest.raises(RequestError, match=r"tools\[0\] is a function"):
        ChatTemplate("").render([USER], tools=[test_bad_tools])  # type: ignore[list-item]


def test_the_callers_messages_stay_as_they_are() -> None:
    chat = [{"role": "assistant", "content": None, "reasoning": "r"}]
    ChatTemplate("{{ messages }}").render(chat)
    assert chat == [{"role": "assistant", "content": None, "reasoning": "r"}]


def copy_of_stories(tmp_path: Path) -> Path:
    folder = shared_data() / "models" / "stories260K"
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_bytes((folder / "tokenizer_config.json").read_bytes())
    return tmp_path


def test_no_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(copy_of_stories(tmp_path))
    assert tokenizer.chat_template is None
    with pytest.raises(TokenizerError, match=r"no chat template 'default'.*it has none"):
        tokenizer.encode_chat([USER])


def test_where_templates_come_from(tmp_path: Path) -> None:
    """chat_template.jinja has priority over chat_template.json and tokenizer_config.json; named templates are added."""
    folder = copy_of_stories(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())

    def source() -> str:
        template = Tokenizer.from_folder(folder).chat_template
        assert template is not None
        return template.source

    config["chat_template"] = "config"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert source() == "config"
    config["chat_template"] = [{"name": "tool_use", "template": "tool"}, {"name": "default", "template": "listed"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert source() == "listed"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert source() == "json"
    (folder / "chat_template.jinja").write_text("jinja")
    assert source() == "jinja"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("rag {{ documents[0].text }}")
    tokenizer = Tokenizer.from_folder(folder)
    assert sorted(tokenizer.chat_templates) == ["default", "rag", "tool_use"]
    rag = tokenizer.encode_chat([USER], template="rag", documents=[{"text": "x"}])
    assert rag == tokenizer.encode("rag x")
    assert tokenizer.encode_chat([USER], tools=TOOLS) == tokenizer.encode("tool")
    with pytest.raises(TokenizerError, match="it has default, rag, tool_use"):
        tokenizer.encode_chat([USER], template="none")


@pytest.mark.parametrize("value", [3, [{"name": "default"}], ["x"], {"default": "x"}])
def test_bad_template_entry(tmp_path: Path, value: Any) -> None:
    folder = copy_of_stories(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(TokenizerError, match="chat_template must be"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("source", ["{{ bos_token }}[INST] x", "[INST] x", "{{ bos_token }}{{ bos_token }}[INST] x"])
def test_one_bos_in_a_chat(tmp_path: Path, source: str) -> None:
    folder = copy_of_stories(tmp_path)
    (folder / "chat_template.jinja").write_text(source)
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode_chat([USER])
    assert ids[0] == tokenizer.bos_token_id and ids.count(1) == 1
    assert ids == tokenizer.encode("[INST] x")
