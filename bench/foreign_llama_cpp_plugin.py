"""A pytest plugin for llama.cpp's server tests: skips tests of missing features, and writes a JSON line per result.

bench/foreign_llama_cpp.py loads it. Paths without /v1, which llama-server also accepts, become paths with /v1.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import openai
import pytest
import requests

STATE = Path(os.environ["FOREIGN_STATE"])
ALIASES = {f"/{name}": f"/v1/{name}" for name in ("chat/completions", "responses", "models")}
# Endpoints of llama.cpp and of other APIs that Ridgeline does not have. In llama.cpp, /embeddings
# without /v1 differs from OpenAI's.
TO_COME = (
    "/embeddings", "/rerank", "/v1/rerank", "/lora-adapters", "/tools", "/cors-proxy", "/predict", "/v1/stream",
    "/models/load", "/chat/completions/input_tokens", "/sw.js",
)  # fmt: skip
# Fields of requests and answers that only llama.cpp has: a pattern in a test's source, and the name.
DIALECT = (
    (r'"(__verbose|timings_per_token|return_progress)"', "{}"),
    (r'"/chat/completions"[\s\S]*"(grammar)": ', "{} of a chat"),
    (r'"/chat/completions"[\s\S]*"(json_schema)": json_schema', "{} of a chat"),
)  # fmt: skip


def _url(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=ALIASES.get(parts.path, parts.path)))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if why := _to_come(item):
            item.add_marker(pytest.mark.skip(reason=why))


def _to_come(item: pytest.Item) -> str:
    """Return why a test cannot run, from what its source uses."""
    source = inspect.getsource(getattr(item, "function"))  # noqa: B009 - an Item need not have one
    asked = re.findall(r'"(/[a-zA-Z0-9_/.-]*)["?]', source)
    for path in asked:
        first = next((own for own in TO_COME if path == own or path.startswith(own + "/")), "")
        if first:
            return f"to come: uses the endpoint {first}"
    for pattern, name in DIALECT:
        if found := re.search(pattern, source):
            return f"to come: uses the field {name.format(found[1])}"
    return ""


def pytest_collection_finish(session: pytest.Session) -> None:
    import utils  # type: ignore[import-not-found] # theirs, which conftest.py has put on the path

    utils.ServerPreset.load_all = staticmethod(lambda: None)  # the original starts each model once, to download it
    request, read, begin = requests.Session.request, requests.Response.json, openai.OpenAI.__init__

    def asked(self: Any, method: str, url: str, *args: Any, **kwargs: Any) -> Any:
        return request(self, method, _url(url), *args, **kwargs)

    def begun(self: Any, *, base_url: str, **kwargs: Any) -> None:
        begin(self, base_url=f"{base_url.removesuffix('/v1')}/v1", **kwargs)

    def built(self: requests.Response, **kwargs: Any) -> Any:
        """Name the build as llama.cpp does: nearly all of their tests check it first, and stop otherwise."""
        found = read(self, **kwargs)
        if isinstance(found, dict) and "system_fingerprint" in found:
            found["system_fingerprint"] = f"b of {found['system_fingerprint']}"
        return found

    requests.Response.json = built  # type: ignore[method-assign]
    requests.Session.request = asked  # type: ignore[method-assign]
    openai.OpenAI.__init__ = begun  # type: ignore[method-assign]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = (yield).get_result()
    if report.when == "teardown" or (report.when == "setup" and report.passed):
        return
    why = STATE / "why"
    text = str(report.longrepr[2]) if report.skipped and isinstance(report.longrepr, tuple) else str(report.longrepr)
    text = text.removeprefix("Skipped: ")
    reason = why.read_text() if why.exists() else text if text.startswith("to come") else ""
    why.unlink(missing_ok=True)
    lines = [line for line in text.splitlines() if line.strip()]
    result = {"test": item.nodeid, "outcome": report.outcome, "why": "" if report.passed else reason,
              "error": "" if report.passed or not lines else lines[-1][:300]}  # fmt: skip
    with (STATE / "results.jsonl").open("a") as file:
        file.write(json.dumps(result) + "\n")
