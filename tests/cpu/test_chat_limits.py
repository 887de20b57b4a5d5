"""Chat templates as attacks: none runs for long in the process that serves other requests, and none runs forever."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest

from cpu.test_chat import CHATS, KITCHEN, TOOLS, USER
from oracle.data import shared_data
from ridgeline.bounded import Limits
from ridgeline.errors import RequestError, TokenizerError
from ridgeline.load import chat as chats
from ridgeline.load.chat import MAX_SOURCE, ChatTemplate, chat_data
from ridgeline.load.chat_guard import Costly

LOOP = "{% for i in range(90000) %}"
END = "{% endfor %}"
BOMBS = {
    "loops": LOOP * 4 + "x" + END * 4,
    "silent loops": LOOP * 4 + END * 4,
    "a filtered loop": "{% for i in range(90000) if range(90000) | list | length == 0 %}x{% endfor %}",
    "a filtered loop that compares": "{% set a = range(90000) | list %}{% for i in a if -1 in a %}x{% endfor %}",
    "recursion": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(99) }}",
    "mapped": LOOP + "{{ range(90000) | map('string') | map('upper') | join('') | length }}" + END,
    "repetition": "{{ 'x' * 10000000000 }}",
    "repetition of a list": "{{ ([0] * 10000000000) | length }}",
    "a power": "{{ 9 ** 9 ** 9 ** 9 ** 9 ** 9 ** 9 }}",
    "squares": "{% set n = namespace(a=3) %}" + LOOP + "{% set n.a = n.a * n.a %}" + END,
    "a width": "{{ '%10000000000d' % 1 }}",
    "a width in braces": "{{ '{:10000000000}'.format(1) }}",
    "centered": "{{ 'x' | center(10000000000) }}",
    "justified": "{{ 'x'.ljust(10000000000) }}",
    "indented": "{{ 'x\ny' | indent(10000000000) }}",
    "indented JSON": "{{ [[1]] | tojson(indent=10000000000) }}",
    "replaced": "{{ ('x' * 4000000) | replace('x', 'x' * 4000000) }}",
    "replaced by the method": "{{ ('x' * 4000000).replace('', 'x' * 4000000) }}",
    "joined": "{{ range(90000) | join('x' * 4000000) }}",
    "joined by the method": "{{ ('x' * 4000000).join('x' * 4000000) | length }}",
    "doubled": "{% set n = namespace(a='x') %}" + LOOP + "{% set n.a = n.a ~ n.a %}" + END,
    "added": "{% set n = namespace(a='x') %}" + LOOP + "{% set n.a = n.a + n.a %}" + END,
    "doubled lists": "{% set n = namespace(a=[1]) %}" + LOOP + "{% set n.a = n.a + n.a %}" + END,
    "nested": "{% set n = namespace(a=[1]) %}" + LOOP + "{% set n.a = [n.a, n.a] %}" + END,
    "nested objects": "{% set n = namespace(a=1) %}" + LOOP + "{% set n.a = dict(a=n.a, b=n.a) %}" + END,
    "nested arguments": "{% macro m() %}{{ m(varargs, varargs) }}{% endmacro %}{{ m(1) }}",
    "nested namespaces": "{% set n = namespace(a=1) %}" + "{% set n = namespace(a=n, b=n) %}" * 99 + "{{ n }}",
    "blocks": "{% set n = namespace(a='x') %}" + LOOP + "{% set a %}{{ n.a }}{{ n.a }}{% endset %}"
    "{% set n.a = a %}" + END,
    "output": "{% set a = 'x' * 4000000 %}" + LOOP + "{{ a }}" + END,
    "filler text": "{{ lipsum(n=10000000) }}",
    "batches": "{{ [1] | batch(10000000000, 'x') | list | length }}",
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_no_template_runs_for_long_here(name: str) -> None:
    """The limit is a quarter of a second. A busy machine may take ten times as long; the attacks would run forever."""
    template, began = ChatTemplate(BOMBS[name]), time.thread_time()
    with pytest.raises((Costly, RequestError)):
        template.render_here(chat_data([USER]))
    assert time.thread_time() - began < 2.5


def sources() -> list[str]:
    lines = (shared_data() / "prompts" / "ollama_chat_templates.jsonl").read_text(encoding="utf-8").splitlines()
    qwen = json.loads((shared_data() / "tokenizers" / "qwen2.5" / "chat_template.json").read_text())["chat_template"]
    return [KITCHEN, qwen, *(source for line in lines for source in json.loads(line).values())]


def outcome(template: ChatTemplate, data: dict[str, Any]) -> str:
    try:
        return template.render_here(data)
    except RequestError as e:
        return f"refused: {e}"


def test_published_templates_are_rendered_here() -> None:
    """None of them is costly, and the guard does not change their output."""
    for source in sources():
        guarded, free = ChatTemplate(source), ChatTemplate(source, guarded=False)
        for chat in CHATS:
            for tools in (None, TOOLS):
                data = chat_data(chat, tools=tools, bos_token="<s>", eos_token="</s>")
                assert outcome(guarded, data) == outcome(free, data)


MORE = """
{{ 'ab' | center(9) }}|{{ '%05d' % 7 }}|{{ '{:>4}'.format('x') }}|{{ [1, 2, 3] | batch(2) | list }}|{{ [1, 2] | sum }}
{{ '-' * 3 }}|{{ 2 ** 9 }}|{{ 7 % 4 }}|{{ 'a' ~ 1 ~ [2] ~ missing ~ none }}|{{ [1] + [2] }}|{{ (1, 2) }}|{{ (1,) }}
{% for k, v in {'a': 1, 'b': missing}.items() if v is defined %}{{ k }}{{ v }}{{ loop.last }}{% endfor %}
{% for m in messages recursive %}{{ m.role }}{{ loop.cycle('x', 'y') }}{% endfor %}
{% macro f(a) %}{{ a }}{{ varargs }}{{ kwargs }}{{ caller() if caller else '' }}{% endmacro %}
{{ f(1, 2, x=3) }}{% call f(5) %}in{% endcall %}{% filter upper %}abc{% endfilter %}{% set b %}q{% endset %}{{ b }}
{{ 'a,b'.split(',') | join(';') }}|{{ ['b', 'a'] | sort | first }}|{{ 'x' | indent(2, true) }}|{{ 1.5 }}|{{ true }}
{{ messages | map(attribute='role') | join(' ') }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{ 'abc'.replace('b', 'xx', 1) }}|{{ 'aXa' | replace('a', 'b', 1) }}|{{ {'k': [1]} | tojson }}
{{ [messages[0]] | tojson }}
"""


def test_the_rest_of_the_language() -> None:
    """Operations that are not known to be cheap are rendered in a helper process, with equal output."""
    parts = [line for line in MORE.strip().splitlines() if "macro" not in line and "f(1" not in line]
    parts.append("".join(line for line in MORE.splitlines() if "macro" in line or "f(1" in line))
    for source in [piece for part in parts for piece in ([part] if "%}" in part else part.split("|{{"))]:
        source = source if source.count("{{") == source.count("}}") else "{{" + source
        free = outcome(ChatTemplate(source, guarded=False), chat_data([USER]))
        assert not free.startswith("refused"), source
        try:
            assert ChatTemplate(source).render_here(chat_data([USER])) == free
        except Costly:
            assert any(name in source for name in ("center", "%05d", "format", "batch", "sum")), source
    whole = ChatTemplate(MORE)
    assert whole.render([USER]) == ChatTemplate(MORE, guarded=False).render_here(chat_data([USER]))


def test_a_stopped_template_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chats, "RENDERING", Limits(0.5, 256 << 20))
    with pytest.raises(RequestError, match=r"'default' was stopped: it takes longer than the limit of 0.5 s"):
        ChatTemplate(BOMBS["loops"]).render([USER])
    if sys.platform == "linux":
        monkeypatch.setattr(chats, "RENDERING", Limits(60, 256 << 20))
        with pytest.raises(RequestError, match="was stopped: it needs more memory than the limit of 256 MiB"):
            ChatTemplate(BOMBS["repetition"]).render([USER])


WRONG = {
    "long": "x" * (MAX_SOURCE + 1),
    "open": "{% if 1 %}" * 300,
    "loops": "{% for i in messages %}" * 30 + END * 30,
    "parentheses": "{{" + "(" * 3000 + ")" * 3000 + "}}",
}


@pytest.mark.parametrize("source", WRONG.values(), ids=WRONG)
def test_a_source_that_cannot_be_compiled(source: str) -> None:
    with pytest.raises(TokenizerError, match="chat template 'default'"):
        ChatTemplate(source)


def test_compiling_computes_nothing() -> None:
    """Jinja computes constants when it compiles, so an attack could already run then."""
    source = "{{ 'x' | center(10000000000) }}{{ 9 ** 9 ** 9 }}{% set a = 'x' * 10000000000 %}{{ ['x'] | join | upper }}"
    script = f"from ridgeline.load.chat import ChatTemplate; ChatTemplate({source!r})"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
