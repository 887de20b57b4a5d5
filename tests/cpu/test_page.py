"""The page at / in Debian's Chromium: its content, its controls, and the code that it may run."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from pathlib import Path

import pytest

from cpu.audit import AUDIT, axe
from cpu.browsing import (  # noqa: F401 - fixtures are found by their names
    MARKS,
    address,
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
EVIL = "<img src=x onerror=\"document.title='taken'\"><b>bold</b>"


def test_an_answer_equals_the_apis(page: playwright.Page, server: Server) -> None:
    complete(page, "def fibonacci(n):", Temperature="0", Max_tokens="24")
    done(page)
    body = {"prompt": "def fibonacci(n):", "temperature": 0, "max_tokens": 24}
    answer = server.post("/v1/completions", **body)[1]
    text = page.locator(".said").evaluate(
        "e => [...e.childNodes].filter(n => !n.classList?.contains('unseen')).map(n => n.textContent).join('')"
    )
    assert text == answer["choices"][0]["text"]
    expect(page.locator("#status")).to_contain_text(f"{answer['usage']['completion_tokens']} tokens")


STOPPED = 24  # answers that are stopped


def test_it_streams_and_stops(page: playwright.Page, server: Server) -> None:
    long = {
        "Temperature": "0",
        "Max_tokens": "900",
        "Number_of_answers": str(STOPPED),
    }  # together they take longer than a busy browser
    complete(page, "x = [", **long)
    tokens = page.locator(".token")
    expect(tokens.nth(3)).to_be_visible()
    expect(page.get_by_role("button", name="Generate")).to_be_disabled()
    assert page.locator("#answers").get_attribute("aria-busy") == "true"
    page.get_by_role("button", name="Stop").click()
    done(page, "Stopped")
    expect(page.locator(".reason")).to_have_text(["stopped"] * STOPPED)
    assert tokens.count() < STOPPED * 900
    server.until("vllm:num_requests_running", 0)
    complete(page, "x = [", **long)
    expect(page.locator(".token").nth(3)).to_be_visible()
    page.keyboard.press("Escape")
    done(page, "Stopped")


def test_answers_are_side_by_side(page: playwright.Page) -> None:
    page.set_viewport_size({"width": 1500, "height": 900})
    complete(page, "import ", Temperature="1.5", Max_tokens="12", Seed="7", Number_of_answers="3")
    done(page)
    boxes = [card.bounding_box() for card in page.locator("article").all()]
    assert len(boxes) == 3
    assert all(a and b and a["x"] < b["x"] and a["y"] == b["y"] for a, b in pairwise(boxes))
    assert len(set(page.locator("article .said").all_text_contents())) > 1


def test_probabilities_on_hover_and_by_keyboard(page: playwright.Page, server: Server) -> None:
    body = {"prompt": "def add(a, b):", "temperature": 0, "max_tokens": 8, "logprobs": 5}
    logprobs = server.post("/v1/completions", **body)[1]["choices"][0]["logprobs"]
    complete(page, "def add(a, b):", Temperature="0", Max_tokens="8")
    done(page)
    tip, index = page.get_by_role("tooltip"), next(i for i, t in enumerate(logprobs["tokens"]) if t.strip())
    token = page.locator(".token").nth(index)
    expect(tip).to_be_hidden()
    token.hover()
    expect(tip).to_be_visible()
    assert len(tip.locator("tbody tr").all()) == len(logprobs["top_logprobs"][index])
    taken = tip.locator(".taken td").last.text_content()
    assert taken is not None
    assert float(taken.removesuffix(" %")) == pytest.approx(100 * math.exp(logprobs["token_logprobs"][index]), abs=0.06)
    page.mouse.move(1, 1)
    expect(tip).to_be_hidden()
    token.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token").nth(index + 1)).to_be_focused()
    expect(tip).to_be_visible()


def test_a_chat_continues_with_the_chosen_answer(page: playwright.Page) -> None:
    page.get_by_role("spinbutton", name="Number of answers").fill("2")
    page.get_by_role("spinbutton", name="Temperature").fill("1")
    page.get_by_role("spinbutton", name="Max tokens").fill("6")
    say(page, EVIL)
    done(page)
    assert page.locator(".history .user .said").text_content() == EVIL  # shown as text
    assert not page.locator(".history b, .history img").count() and page.title() == "Ridgeline"
    page.get_by_label("continue with this answer").nth(1).check()
    chosen = page.locator("article .said").nth(1).text_content()
    page.get_by_label("Message", exact=True).fill("And then?")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.keyboard.press("Control+Enter")
    messages = json.loads(sent.value.post_data or "")["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant", "user"]
    assert messages[1]["content"].strip() in (chosen or "")
    done(page)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("Temperature", "-1", "temperature"),
        ("Top p", "7", "top_p"),
        ("Number of answers", "0", "n "),
        ("Max tokens", "100000", "max_tokens"),
    ],
)
def test_invalid_input_is_shown_at_its_field(page: playwright.Page, field: str, value: str, said: str) -> None:
    complete(page, "x", **{field.replace(" ", "_"): value})
    expect(page.get_by_role("alert")).to_contain_text(said)
    expect(page.get_by_role("spinbutton", name=field)).to_have_attribute("aria-invalid", "true")
    expect(page.get_by_role("spinbutton", name=field)).to_be_focused()
    page.get_by_role("spinbutton", name=field).fill("1")
    page.get_by_role("button", name="Generate").click()
    done(page)
    expect(page.get_by_role("alert")).to_be_hidden()


def test_an_error_stays_on_its_tab(page: playwright.Page) -> None:
    complete(page, "x", Temperature="-1")
    expect(page.get_by_role("alert")).to_contain_text("temperature")
    page.get_by_role("link", name="Live").click()
    expect(page.locator("#latency table")).to_be_visible()
    expect(page.get_by_role("alert")).to_be_hidden()
    page.get_by_role("link", name="Playground").click()
    expect(page.get_by_role("alert")).to_contain_text("temperature")


def test_no_prompt_and_stop_strings(page: playwright.Page) -> None:
    page.get_by_role("radio", name="Completion").check()
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_role("alert")).to_contain_text("first")
    page.get_by_label("Stop at").fill("\\n")
    complete(page, "import os\nimport ", Temperature="0", Max_tokens="64")
    done(page)
    expect(page.locator(".reason")).to_have_text("complete")
    assert "\n" not in (page.locator(".said").text_content() or "")


def test_live_figures_follow_the_server(page: playwright.Page, server: Server) -> None:
    page.goto(address(server, "#live"))
    sock = server.stream("/v1/completions", {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "n": 30})
    running = page.locator(".tile", has_text="Running").locator(".value")
    expect(running).to_have_text("30", timeout=10_000)
    pages = page.locator(".tile", has_text="Pages used").locator(".more")
    expect(pages).not_to_have_text(re.compile("^0 of"))
    step = page.locator("#roofline tbody tr").first
    expect(step.locator("td").nth(0)).to_have_text(re.compile(r"[\d.]+ (ms|µs)"))
    expect(page.locator(".chart circle.measured")).to_be_visible()
    # The tests' cache has no calibration, so there is no prediction, and the page says how to calibrate.
    expect(step.locator("td").nth(1)).to_have_text("–")
    expect(page.locator("#roofline circle.predicted")).to_have_count(0)
    expect(page.locator("#roofline")).to_contain_text("ridgeline calibrate")
    sock.close()
    expect(running).to_have_text("0", timeout=10_000)
    expect(page.locator("#latency td").first).to_contain_text("s")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("view", ["playground", "live"])
def test_labels_contrast_and_structure(page: playwright.Page, server: Server, theme: str, view: str) -> None:
    page.emulate_media(color_scheme="dark" if theme == "light" else "light")  # the choice overrides the system's theme
    page.get_by_label("Theme").select_option(theme)
    complete(page, "def f(", Temperature="1", Max_tokens="8", Number_of_answers="2")
    done(page)
    page.goto(address(server, f"#{view}"))
    if view == "live":
        expect(page.locator("#latency table")).to_be_visible()
    assert page.locator("html").get_attribute("data-theme") == theme
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] < 128")
    assert dark == (theme == "dark")
    assert page.evaluate(AUDIT) == [] and axe(page) == []


def letters(page: playwright.Page) -> list[dict[str, float]]:
    """Return the positions and font sizes of the roofline's labels, in pixels of the screen."""
    found: list[dict[str, float]] = page.locator(".chart").evaluate(
        """svg => [...svg.querySelectorAll('text')].map((text) => {
            const { left, top, right, bottom } = text.getBoundingClientRect();
            const scale = text.ownerSVGElement.getScreenCTM().a;
            return { left, top, right, bottom, size: scale * parseFloat(getComputedStyle(text).fontSize) };
        })"""
    )
    return found


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_the_labels_of_the_roofline_can_be_read(page: playwright.Page, server: Server, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    complete(page, "x", Max_tokens="2")
    done(page)
    page.goto(address(server, "#live"))
    expect(page.locator(".chart circle.measured")).to_be_visible()
    found = letters(page)
    assert len(found) >= 6 and all(one["size"] >= 12 for one in found)
    assert all(one["left"] >= 0 and one["right"] <= width for one in found)
    for i, a in enumerate(found):
        for b in found[i + 1 :]:
            apart = (
                a["right"] <= b["left"] or b["right"] <= a["left"] or a["bottom"] <= b["top"] or b["bottom"] <= a["top"]
            )
            assert apart, (a, b)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_wider_window_draws_the_roofline_again(page: playwright.Page, server: Server) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(address(server, "#live"))
    expect(page.locator(".chart")).to_be_visible()
    page.set_viewport_size({"width": 700, "height": 800})
    expect(page.locator(".chart")).to_have_attribute("viewBox", re.compile(r"^0 0 (5[5-9]|6)\d\d? "))


def test_the_description_lists_endpoints_and_fields(browser: playwright.Browser) -> None:
    """The docs work without a key and send no request to other servers."""
    with serving("pocket", "--api-key", "secret") as server, browser.new_context() as context:
        page = context.new_page()
        asked: list[str] = []
        said: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(address(server, "docs"))
        chat = page.get_by_role("article", name="POST /v1/chat/completions", exact=True)
        chat.locator("summary").click()
        row = chat.get_by_role("row", name="messages")
        expect(row).to_contain_text("list of ChatMessage")
        expect(row).to_contain_text("yes")
        expect(chat.get_by_role("row", name="stop", exact=False).first).to_contain_text("32")
        for theme in ("light", "dark"):
            page.emulate_media(color_scheme=theme)
            assert page.evaluate(AUDIT) == [] and axe(page) == [] and said == []
        assert all(url.startswith(address(server)) for url in asked)
        page.set_viewport_size({"width": 375, "height": 700})
        assert page.evaluate("document.documentElement.scrollWidth") <= 375


def test_reasoning_is_not_sent_back(page: playwright.Page) -> None:
    pieces: list[dict[str, str]] = [{"reasoning_content": "hmm"}, {"content": "yes"}]
    events = [{"choices": [{"index": 0, "delta": piece, "finish_reason": None}]} for piece in pieces]
    text = "".join(f"data: {json.dumps(one)}\n\n" for one in events) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=text))
    for said in ("one", "two"):
        with page.expect_request("**/v1/chat/completions") as sent:
            say(page, said)
        done(page)
    expect(page.locator("article .thought")).to_have_text("hmm")
    expect(page.locator("article .rendered")).to_have_text("yes")
    page.get_by_role("button", name="Tokens").click()
    expect(page.locator("article .said")).to_have_text("hmmyes")
    expect(page.locator("article .rendered")).to_be_hidden()
    told = json.loads(sent.value.post_data or "")["messages"]
    assert told[1] == {"role": "assistant", "content": "yes"}


def test_it_fits_a_phone(page: playwright.Page) -> None:
    page.set_viewport_size({"width": 375, "height": 700})
    complete(page, "x = [", Temperature="0", Max_tokens="48")
    done(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 375


def test_the_page_asks_for_a_key(browser: playwright.Browser) -> None:
    with serving("pocket", "--api-key", "secret") as server, browser.new_context() as context:
        page = context.new_page()
        page.goto(address(server))
        page.get_by_role("link", name="Live").click()  # every view requires the key
        page.get_by_label("API key").fill("wrong")
        page.get_by_role("button", name="Use this key").click()
        expect(page.get_by_role("alert")).to_contain_text("API key")
        page.get_by_label("API key").fill("secret")
        page.get_by_role("button", name="Use this key").click()
        expect(page.locator("#model")).to_contain_text("pocket")
        expect(page.get_by_label("API key")).to_be_hidden()
        page.get_by_role("link", name="Playground").click()
        complete(page, "import os", Max_tokens="4")
        done(page)
        server.stop()
        page.get_by_role("button", name="Generate").click()
        expect(page.get_by_role("alert")).to_contain_text("cannot be reached")
        expect(page.get_by_role("button", name="Generate")).to_be_enabled()


def test_without_a_template_there_is_no_chat(page: playwright.Page) -> None:
    about = {"model": "base", "device": "cpu", "chat": False, "engine": {"state": "ready"}}
    page.route("**/live", lambda route: route.fulfill(json=about))
    page.reload()
    expect(page.locator("#model")).to_have_text("base · cpu")
    assert page.get_by_role("radio", name="Chat").is_disabled()
    assert page.get_by_role("radio", name="Completion").is_checked()
    expect(page.locator("#no-chat")).to_contain_text("--chat-template")
    expect(page.get_by_role("button", name="Try the example")).to_be_hidden()


def test_a_broken_stream_is_reported(page: playwright.Page) -> None:
    page.route("**/v1/completions", lambda route: route.fulfill(body='data: {"choices": []}\n\n'))
    complete(page, "x")
    expect(page.get_by_role("alert")).to_contain_text("ended before")
    page.route("**/v1/completions", lambda route: route.fulfill(status=429, headers={"Retry-After": "3"}, body="{}"))
    complete(page, "x")
    expect(page.get_by_role("alert")).to_contain_text("Try again in 3 s")
    page.route("**/v1/completions", lambda route: route.fulfill(body='data: {"error": {"message": "lost"}}\n\n'))
    complete(page, "x")
    expect(page.get_by_role("alert")).to_contain_text("lost")


def test_files_and_headers(server: Server) -> None:
    status, body, headers = server.raw("GET", "/")
    assert status == 200 and "default-src 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    html = body.decode() + server.raw("GET", "/docs")[1].decode()
    assert not re.search(r"https?://|\son\w+=|<style|\sstyle=|<script(?![^>]*src=)", html)
    named = set(re.findall(r'(?:src|href)="page/([\w.]+)"', html))
    static = Path(__file__).parents[2] / "src/ridgeline/serve/http/static"
    for file in (one for one in static.rglob("*") if one.is_file()):
        name = file.relative_to(static).as_posix()
        status, data, headers = server.raw("GET", f"/page/{name}")
        assert status == 200 and data == file.read_bytes() and headers["x-content-type-options"] == "nosniff"
        if file.suffix in (".js", ".mjs"):
            assert headers["content-type"] == "text/javascript; charset=utf-8"
        if file.suffix == ".js" and not name.startswith("vendor/"):
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", data.decode())
            named |= set(re.findall(r"from '\./([\w./-]+)'|Worker\('page/([\w.-]+)'", data.decode()))
    flat = {part for name in named for part in (name if isinstance(name, tuple) else (name,)) if part}
    ours = {file.name for file in static.iterdir() if file.is_file() and file.suffix != ".html"}
    assert flat == ours | {"declared.js", "vendor/marked/marked.esm.js", "vendor/dompurify/purify.es.mjs"}
    for wrong in ("nothing.js", "..%2Fapp.py", "vendor", "vendor/marked", "vendor/..%2F..%2Fpage.py"):
        assert server.raw("GET", f"/page/{wrong}")[0] == 404
