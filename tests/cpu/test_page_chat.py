"""Chats on the page: stored in the browser, edited, regenerated, and rendered safely."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from cpu.audit import AUDIT, axe
from cpu.browsing import (  # noqa: F401 - fixtures are found by their names
    MARKS,
    address,
    answers,
    browser_fixture,
    complete,
    done,
    expect,
    page_fixture,
    playwright,
    say,
    server_fixture,
)
from cpu.serving import Server, serving

pytestmark = MARKS
RICH = """# A heading\n
Text with **strong**, *emphasis*, `code` and [a link](https://example.org/).\n
```python
def f(x):
    return x < 1 & "a very long line that is certainly wider than any telephone's screen could ever be"
```\n
### Another\n
- [x] one\n- two\n
| a | b |\n|---|:-:|\n| 1 | 2 |\n
> quoted\n
![a picture](https://example.org/tracker.png)
"""
HOSTILE = """<img src=x onerror="document.title='taken'"><script>document.title='taken'</script><b>bold</b>\n
[one](javascript:document.title='taken') [two](data:text/html,<script>1</script>) [three](vbscript:x) [four](/metrics)
[five](//evil.example/) <https://evil.example/a> ![six](https://evil.example/pixel.png) ![seven](x" onerror="alert(1))\n
<svg onload="document.title='taken'"><style>*{display:none}</style>
<form action="https://evil.example"><input name=key></form>\n
```"><img/src=x/onerror=document.title='taken'>
</code></pre><script>document.title='taken'</script>
```\n
<math><mtext><table><mglyph><style><!--</style><img title="--&gt;&lt;img src=1 onerror=document.title='taken'&gt;">\n
| <img src=x onerror="document.title='taken'"> | b |\n|---|---|
| <a id=notice name=model href=x>c</a> | [d](JaVaScRiPt:1) |\n
# <h1 id="content">head</h1>\n
[ref]: javascript:document.title='taken'\n[ref] &lt;script&gt;1&lt;/script&gt;
"""


def shown(page: playwright.Page) -> list[str]:
    """Return the messages on the page, from top to bottom."""
    texts: list[str] = page.locator(".history .said, .history .rendered, article .rendered").all_inner_texts()
    return texts


def saved(page: playwright.Page) -> list[dict[str, Any]]:
    """Return the chats in the browser's storage."""
    names = "Object.keys(localStorage).filter((name) => name.startsWith('ridgeline-chat:'))"
    found: list[dict[str, Any]] = page.evaluate(f"{names}.map((name) => JSON.parse(localStorage[name]))")
    return found


def test_chats_survive_a_reload(page: playwright.Page, server: Server) -> None:
    asked = answers(page, "first answer", "second answer", "third answer")
    page.get_by_label("System message").fill("Be brief.")
    for message in ("one", "two"):
        say(page, message)
        done(page)
    told = ["one", "first answer", "two", "second answer"]
    assert shown(page) == told
    page.reload()
    expect(page.locator("article .rendered")).to_have_text("second answer")
    assert shown(page) == told and page.get_by_label("System message").input_value() == "Be brief."
    page.get_by_role("button", name="New chat").click()
    assert shown(page) == []
    say(page, "three")
    done(page)
    assert [one["content"] for one in asked[-1]] == ["three"]
    page.get_by_label("Saved chats").select_option(label="one")
    assert shown(page) == told
    say(page, "four")
    done(page)
    assert [one["content"] for one in asked[-1]] == ["Be brief.", *told, "four"]
    assert [one["role"] for one in asked[-1]] == ["system", *["user", "assistant"] * 2, "user"]
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    exported = json.loads(download.value.path().read_text())
    assert [one["messages"][-1] for one in exported] == [{"role": "assistant", "content": "third answer"}] * 2
    assert len(exported[0]["messages"]) == 7 and exported[0]["model"] == "pocket"


def test_chats_can_be_deleted(page: playwright.Page) -> None:
    answers(page, "yes")
    for message in ("one", "two", "three"):
        page.get_by_role("radio", name="Chat").check()
        page.get_by_role("button", name="New chat").click()
        say(page, message)
        done(page)
    page.once("dialog", lambda dialog: dialog.dismiss())
    page.get_by_role("button", name="Delete", exact=True).click()
    assert len(saved(page)) == 3
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete", exact=True).click()
    assert sorted(one["messages"][0]["content"] for one in saved(page)) == ["one", "two"] and shown(page) == []
    page.evaluate("localStorage.setItem('ridgeline-chat:broken', '{\"version\": 1, \"messages\": 5}')")
    page.reload()
    expect(page.locator("#unread-chats")).to_have_text("This page cannot read 1 of them.")
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete all").click()
    assert saved(page) == [] and page.get_by_role("button", name="Export all").is_disabled()
    expect(page.locator("#unread-chats")).to_have_text("")


def test_a_reload_during_an_answer(page: playwright.Page) -> None:
    page.get_by_role("spinbutton", name="Max tokens").fill("900")
    say(page, "x = [")
    expect(page.locator("article .said .token").nth(3)).to_be_attached()
    page.reload()
    expect(page.locator(".history .said")).to_have_text("x = [")
    assert saved(page)[0]["answers"][0]["content"]
    expect(page.get_by_role("button", name="Regenerate")).to_be_enabled()


def test_a_browser_without_storage(browser: playwright.Browser, server: Server) -> None:
    refuse = """for (const name of ['localStorage', 'sessionStorage'])
        Object.defineProperty(window, name, { get() { throw new Error('no'); } });"""
    with browser.new_context() as context:
        page = context.new_page()
        page.add_init_script(refuse)
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(address(server))
        answers(page, "an answer")
        page.get_by_label("Theme").select_option("dark")
        say(page, "a message")
        done(page)
        expect(page.locator("article .rendered")).to_have_text("an answer")
        assert shown(page) == ["a message", "an answer"] and not problems
        expect(page.get_by_role("alert")).to_contain_text("no space to store this chat")


def test_messages_are_edited_and_answers_regenerated(page: playwright.Page) -> None:
    asked = answers(page, "a", "b", "c", "d", "e")
    for message in ("one", "two"):
        say(page, message)
        done(page)
    page.locator("article").get_by_role("button", name="Regenerate").click()
    expect(page.locator("article .rendered")).to_have_text("c")
    assert asked[-1] == asked[-2]
    page.get_by_role("button", name="Edit message 1").click()
    field = page.get_by_label("Your message")
    assert field.input_value() == "one"
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Edit message 1")).to_be_focused()
    page.keyboard.press("Enter")
    field.fill("uno")
    page.keyboard.press("Enter")
    expect(page.locator("article .rendered")).to_have_text("d")
    assert [one["content"] for one in asked[-1]] == ["uno"] and shown(page) == ["uno", "d"]
    say(page, "due")
    done(page)
    page.get_by_role("button", name="Regenerate message 2").click()
    expect(page.locator(".history li")).to_have_count(1)
    done(page)
    assert asked[-1] == asked[-3] and saved(page)[0]["messages"] == asked[-1]


def test_enter_sends_and_shift_enter_starts_a_line(page: playwright.Page) -> None:
    asked = answers(page, "yes")
    page.get_by_role("radio", name="Chat").check()
    message = page.get_by_label("Message", exact=True)
    message.fill("one")
    message.press("Shift+Enter")
    message.press_sequentially("two")
    assert asked == [] and message.input_value() == "one\ntwo"
    composing = "e => e.dispatchEvent(new KeyboardEvent('keydown', { key: 'Enter', isComposing: true, bubbles: true }))"
    message.evaluate(composing)  # the Enter of an input method does not send
    message.press("Enter")
    done(page)
    assert [one["content"] for one in asked[0]] == ["one\ntwo"] and message.input_value() == "" and len(asked) == 1
    page.get_by_role("radio", name="Completion").check()
    prompt = page.get_by_label("Prompt", exact=True)
    prompt.fill("import os")
    prompt.press("Enter")
    done(page)
    assert prompt.input_value() == "import os"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_markdown(page: playwright.Page, theme: str) -> None:
    page.get_by_label("Theme").select_option(theme)
    page.set_viewport_size({"width": 390, "height": 800})
    answers(page, RICH)
    for message in ("How?", "Again?"):
        say(page, message)
        done(page)
    answer = page.locator("article .rendered")
    expect(answer.locator("tbody td")).to_have_text(["1", "2"])
    assert [answer.locator(tag).inner_text() for tag in ("h4", "h5", "strong", "em", "blockquote")] == [
        "A heading", "Another", "strong", "emphasis", "quoted",
    ]  # fmt: skip
    expect(answer.locator(".code-head span")).to_have_text("python")
    assert 'return x < 1 & "a very' in answer.locator("pre code").inner_text()
    expect(answer.locator("li").first).to_have_text("☑ one")
    link = answer.get_by_role("link", name="a link")
    assert link.get_attribute("href") == "https://example.org/" and "noopener" in (link.get_attribute("rel") or "")
    expect(answer.get_by_role("link", name="a picture")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.get_by_role("button", name="Edit message 3").click()
    assert page.evaluate(AUDIT) == [] and axe(page) == []


def test_hostile_answers_are_harmless(page: playwright.Page, server: Server) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    answers(page, HOSTILE)
    for message in ("one", "two"):  # the first answer moves into the history
        say(page, message)
        done(page)
    expect(page.locator("article .rendered")).to_contain_text("head")
    expect(page.locator(".rendered pre")).to_have_count(2)
    assert page.title() == "Ridgeline" and all(url.startswith(address(server)) for url in asked)
    harmless = set("p h4 h5 h6 ul ol li pre code blockquote em strong del a table thead tbody tr th td br hr".split())
    harmless_attributes = set("href target rel align start data-language class tabindex role aria-label type".split())
    for rendered in page.locator(".rendered").all():
        found = rendered.evaluate("e => [...e.querySelectorAll('*')].map((one) => one.localName)")
        assert set(found) <= harmless | {"div", "span", "button"}  # these frame a block of code
        attributes = rendered.evaluate("e => [...e.querySelectorAll('*')].flatMap((one) => one.getAttributeNames())")
        assert set(attributes) <= harmless_attributes
        links = rendered.evaluate("e => [...e.querySelectorAll('a[href]')].map((one) => one.getAttribute('href'))")
        assert links and all(link.startswith("https://evil.example") for link in links)
    assert "<b>bold</b>" in page.locator("article .rendered").inner_text()  # HTML stays text


def test_a_text_that_takes_too_long_is_shown_as_its_source(page: playwright.Page) -> None:
    deep, slow = ">" * 50_000, "_a" * 60_000  # the first exceeds marked's stack, the second takes it minutes
    answers(page, deep, slow, "**fine**")
    for text in (deep, slow):
        say(page, "go on")
        done(page)
        expect(page.locator("article .rendered.plain")).to_have_text(text, timeout=30_000)
    say(page, "and now")
    done(page)
    expect(page.locator("article .rendered strong")).to_have_text("fine", timeout=30_000)


def test_a_model_without_roles_is_asked_to_complete(browser: playwright.Browser) -> None:
    with serving("pocket") as server, browser.new_context() as context:
        page = context.new_page()
        page.goto(address(server))
        expect(page.locator("#no-chat")).to_contain_text("ignores roles")
        assert page.get_by_role("radio", name="Completion").is_checked()
        example = server.ask("GET", "/live")[1]["example"]
        assert page.get_by_label("Prompt", exact=True).get_attribute("placeholder") == example["prompt"]
        page.get_by_role("button", name="Try the example").click()
        done(page)
        answer = server.post("/v1/completions", prompt=example["prompt"], **example["parameters"])[1]
        page.get_by_role("checkbox", name="Token probabilities").uncheck()
        page.get_by_role("button", name="Generate").click()
        done(page)
        assert page.locator("article .said").text_content() == answer["choices"][0]["text"]
        answers(page, "    self.path = *path*")
        for _ in range(2):
            say(page, "def __init__(self, path):")  # a chat works and shows plain text
            done(page)
        assert page.locator("article .said").inner_text() == "    self.path = *path*"
        expect(page.locator(".history .said")).to_have_text(
            [re.compile("__init__"), "self.path = *path*", re.compile("__init__")]
        )


def test_a_stopped_answer_does_not_follow_into_another_chat(page: playwright.Page) -> None:
    page.get_by_role("spinbutton", name="Max tokens").fill("900")
    say(page, "x = [")
    expect(page.locator("article .said .token").nth(3)).to_be_attached()
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_enabled()
    assert shown(page) == [] and page.locator("#status").text_content() == ""
    assert saved(page)[0]["answers"][0]["content"]
    complete(page, "import os", Max_tokens="4")
    done(page)
    page.get_by_role("radio", name="Chat").check()
    assert shown(page) == [] and len(saved(page)) == 1
