"""Make pictures of the page's live view for the docs: python bench/page_pictures.py [--out docs/images] [--streams 8]

Run it on a quiet machine, after `ridgeline calibrate`. It starts `ridgeline serve` on the built-in model, keeps
--streams requests open all the time, watches the live view in Chromium, dark and then light, and writes
page-live-dark.png and page-live-light.png, 1280 pixels wide. The gate: the measured time of a step is within 30 % of
the predicted time, both in the median of 20 polls of the view and for the step that the picture shows. If not, the
script says so and writes nothing.

It needs the extra `browser` and a Chromium on the PATH.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import re
import shutil
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import emit

from ridgeline.cost.calibration import load as load_calibration

THEMES = ("dark", "light")
WIDTH, HEIGHT = 1280, 900
WITHIN = 0.3  # relative to the predicted time of a step
WARM_UP, POLLS, TRIES = 10, 20, 30  # numbers of polls of the view, which has one each second
POLL_MS = 10_000  # a poll that takes longer is an error
PROMPT_TOKENS, ANSWER_TOKENS = 32, 512
READY = r"^serving .* at http://127\.0\.0\.1:(\d+)"


def main() -> None:
    options = arguments()
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        sys.exit("there is no chromium on the PATH: apt install chromium")
    if load_calibration() is None:
        sys.exit("this machine is not calibrated, so the view would predict the roof: ridgeline calibrate")
    pictures: dict[str, bytes] = {}
    with serving(options.serve) as port, steady_load(port, options.streams):
        for theme in THEMES:
            picture, ratio, shown = take(browser, port, theme, options.streams)
            emit(f"page: {theme}", picture is not None, measured_over_predicted=ratio, shown=shown)
            if picture is None:
                sys.exit(
                    f"nothing was written: a step takes {ratio:.2f} times what was predicted, in the median of {POLLS} "
                    f"polls; in the median and in its own step a picture needs {1 - WITHIN:.1f} to {1 + WITHIN:.1f}. "
                    "Calibrate this machine while it is quiet, and try again"
                )
            pictures[theme] = picture
    for theme, picture in pictures.items():
        (options.out / f"page-live-{theme}.png").write_bytes(picture)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="folder for the pictures")
    parser.add_argument(
        "--streams", type=int, default=8, help="number of requests that are open at the same time; default: 8"
    )
    parser.add_argument(
        "--serve", nargs=argparse.REMAINDER, default=[],
        help="arguments of ridgeline serve, last on the line; default: the built-in model. On two cores the client and "
        "HTTP disturb steps as short as its own",
    )  # fmt: skip
    return parser.parse_args()


@contextlib.contextmanager
def serving(more: list[str]) -> Iterator[int]:
    """Run a server with further arguments of `ridgeline serve`, and give its port."""
    command = [sys.executable, "-m", "ridgeline", "serve", "--port", "0", "--quiet", *more]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            found = next(
                filter(None, (re.search(READY, line) for line in server.stderr)),
                None,
            )
            if found is None:
                sys.exit(f"the server ended with status {server.wait()}")
            yield int(found[1])
        finally:
            server.terminate()


@contextlib.contextmanager
def steady_load(port: int, streams: int) -> Iterator[None]:
    """Keep some requests open, each followed by another. Prompts differ, so that no prefix is shared."""
    over = threading.Event()

    def client(number: int) -> None:
        asked = 0
        while not over.is_set():
            prompt = [3 + (number * 7919 + asked * 104729 + i * 31) % 4000 for i in range(PROMPT_TOKENS)]
            body = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "temperature": 0}
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
                connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
                answer = connection.getresponse()
                said = answer.read()
            if answer.status != 200:
                raise RuntimeError(f"the server answers {answer.status}: {said[:200]!r}")
            asked += 1

    clients = [threading.Thread(target=client, args=(i,)) for i in range(streams)]
    for one in clients:
        one.start()
    try:
        yield
    finally:
        over.set()
        for one in clients:
            one.join()


def take(browser: str, port: int, theme: str, streams: int) -> tuple[bytes | None, float, float | None]:
    """Return the picture or None, and measured over predicted time: the median, and that of the step in the picture."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as running:
        one = running.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = one.new_page(
            viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=theme, reduced_motion="reduce"
        )  # fmt: skip
        polled: list[Any] = []
        page.on("response", lambda answer: polled.append(answer) if answer.url.endswith("/live") else None)

        def poll() -> float | None:
            """Return measured over predicted time of the next step shown, if it decodes all streams."""
            with page.expect_response("**/live", timeout=POLL_MS) as answer:
                pass
            step = answer.value.json().get("step")
            if not step or not step["tokens"] == step["sequences"] == streams:
                return None
            return step["measured_s"] / step["predicted_s"]

        try:
            page.goto(f"http://127.0.0.1:{port}/#live")
            for _ in range(WARM_UP):
                poll()
            seen = [ratio for _ in range(POLLS) if (ratio := poll()) is not None]
            median = statistics.median(seen) if seen else float("nan")
            if not agrees(median):
                return None, median, None
            for _ in range(TRIES):
                ratio, before = poll(), len(polled)
                if ratio is None or not agrees(ratio):
                    continue
                page.wait_for_timeout(100)  # give the view time to draw the poll's result
                picture = page.screenshot(full_page=True)
                if len(polled) == before:  # the picture still shows the step of the last poll
                    return picture, median, ratio
            return None, median, None
        finally:
            one.close()


def agrees(ratio: float) -> bool:
    return abs(ratio - 1) <= WITHIN


if __name__ == "__main__":
    main()
