"""Open the page in Debian's Chromium: a server, a browser, and the most frequent actions of a user."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator

import pytest

from cpu.serving import Server, serving, write_template

playwright = pytest.importorskip("playwright.sync_api", reason="pip install 'ridgeline[browser]'")
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MARKS = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="no chromium; apt install chromium")]
expect = playwright.expect


@pytest.fixture(scope="module", name="server")
def server_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    template = write_template(tmp_path_factory.mktemp("page"))
    with serving("pocket", "--chat-template", template) as one:
        yield one


@pytest.fixture(scope="module", name="browser")
def browser_fixture() -> Iterator[playwright.Browser]:
    with playwright.sync_playwright() as running:
        one = running.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield one
        one.close()


@pytest.fixture(name="page")
def page_fixture(browser: playwright.Browser, server: Server) -> Iterator[playwright.Page]:
    """Yield a new page; any message on its console is an error."""
    with browser.new_context(reduced_motion="reduce") as context:
        one = context.new_page()
        said: list[str] = []
        one.on("console", lambda message: said.append(message.text))
        one.on("pageerror", lambda error: said.append(str(error)))
        one.goto(address(server))
        expect(one.locator("#model")).to_have_text("pocket · cpu")
        yield one
        # a console also reports failed requests
        errors = [line for line in said if not re.search(r"status of 4\d\d|ERR_CONNECTION", line)]
        assert not errors, errors


def address(server: Server, view: str = "") -> str:
    return f"http://127.0.0.1:{server.port}/{view}"


def complete(page: playwright.Page, prompt: str, **fields: str) -> None:
    page.get_by_role("radio", name="Completion").check()
    page.get_by_label("Prompt", exact=True).fill(prompt)
    for label, value in fields.items():
        page.get_by_role("spinbutton", name=label.replace("_", " "), exact=True).fill(value)
    page.get_by_role("button", name="Generate").click()


def say(page: playwright.Page, message: str) -> None:
    """Send a message in a conversation."""
    page.get_by_role("radio", name="Chat").check()
    page.get_by_label("Message", exact=True).fill(message)
    page.get_by_role("button", name="Send", exact=True).click()


def done(page: playwright.Page, word: str = "Done") -> None:
    expect(page.locator("#status")).to_contain_text(word, timeout=30_000)


def answers(page: playwright.Page, *texts: str) -> list[list[dict[str, str]]]:
    """Replace the server's answers by these texts; the last one is repeated. Returns the list of messages that it
    received.
    """
    asked: list[list[dict[str, str]]] = []

    def answer(route: playwright.Route) -> None:
        asked.append(json.loads(route.request.post_data or "")["messages"])
        text = texts[min(len(asked), len(texts)) - 1]
        pieces = [{"content": text[at : at + 40]} for at in range(0, len(text), 40)]
        choices = [{"index": 0, "delta": piece, "finish_reason": None} for piece in pieces]
        choices.append({"index": 0, "delta": {}, "finish_reason": "stop"})
        route.fulfill(
            body="".join(f"data: {json.dumps({'choices': [one]})}\n\n" for one in choices) + "data: [DONE]\n\n"
        )

    page.route("**/v1/chat/completions", answer)
    return asked
