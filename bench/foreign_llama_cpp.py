"""Run llama.cpp's own server tests against `ridgeline serve`, and print the reason for each failure.

    pip download --no-binary :all: --no-deps llama-cpp-python     # its sdist holds llama.cpp
    tar xzf llama_cpp_python-*.tar.gz
    python bench/foreign_llama_cpp.py llama_cpp_python-*/vendor/llama.cpp/tools/server/tests --data ../shared/data

Their suite starts the program that LLAMA_SERVER_BIN_PATH names. This file is that program: it reads llama-server's
options, starts `ridgeline serve` with the same meaning, or uses one that runs with these settings already, and
forwards the port. Their files are neither changed nor copied; foreign_llama_cpp_plugin.py is loaded into their pytest.
The result of a test is "passed", "to come" (it uses endpoints, options or fields of llama.cpp that Ridgeline does not
have), "theirs" (it checks something other than the API; foreign_llama_cpp.json says what) or "ours" (Ridgeline is
wrong; no test should have this result).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TABLE = HERE / "foreign_llama_cpp.json"
AS_SERVER = "--as-server"
STATE = "FOREIGN_STATE"  # a folder that lists the servers that run, and why a server could not be started
DATA = "FOREIGN_DATA"
KINDS = ("passed", "ours", "theirs", "to come", "skipped")  # skipped: by the tests' own marks
NOT_STARTED = 3  # exit status
START_SECONDS = 120.0

# Models that their tests name, and the folder of ../shared/data/models that is used instead. A decoder can do all that
# their tests of embeddings need.
MODELS = {
    "ggml-org/test-model-stories260K": "stories260K",
    "tinyllamas/stories260K.gguf": "stories260K",
    "bert-bge-small/ggml-model-f16.gguf": "stories260K",
}
# Names that their tests give as `model`. llama-server accepts any name.
NAMES = (
    "gpt-3.5-turbo-instruct", "gpt-3.5-turbo", "gpt-4.1", "davinci-002", "text-embedding-3-small", "codellama70b",
    "dummy", "test",
)  # fmt: skip
WITHOUT_VALUE = frozenset(
    "--offline --cont-batching --embedding --reranking --metrics --kv-unified --swa-full --slots --no-slots --verbose "
    "--context-shift --no-ui --no-models-autoload --jinja --no-jinja --no-mmproj --no-cache-idle-slots --ui-mcp-proxy "
    "--backend_sampling".split()
)
# Options of features that Ridgeline does not have.
TO_COME = {
    "--reranking": "reranking", "--lora": "LoRA adapters", "--models-dir": "several models in one server",
    "--models-preset": "several models in one server", "--mmproj-url": "images", "--media-path": "images",
    "--spec-type": "draft tokens", "--model-draft": "draft tokens", "--slot-save-path": "saved slots",
    "--context-shift": "context shift", "--tools": "tools that the server runs", "--mcp-servers-config": "MCP",
    "--mcp-servers-json": "MCP", "--ui-mcp-proxy": "MCP", "--sleep-idle-seconds": "sleep",
    "--no-ui": "a server without a page", "--tags": "tags of models", "--cors-origins": "CORS with patterns of origins",
    "--grp-attn-n": "self-extend",
}  # fmt: skip
CHATML = """{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA3 = """{%- for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3}  # templates that llama-server knows by name


# The program that their suite starts as its server -----------------------------------------------------


def as_server(args: list[str]) -> int:
    """Act as llama-server for their suite. Return the exit status."""
    given = parsed(args)
    state = Path(os.environ[STATE])
    try:
        command = mapped(given, Path(os.environ[DATA]), state)
    except LookupError as e:
        (state / "why").write_text(str(e.args[0]))
        print(f"ridgeline cannot do this: {e.args[0]}")
        return NOT_STARTED
    port = running(command, state)
    reset(port, given.get("--api-key"))
    asyncio.run(forward(given["--host"], int(given["--port"]), port))
    return 0


def parsed(args: list[str]) -> dict[str, str]:
    """Return options and their values; "" where an option has none."""
    found, rest = {}, iter(args)
    for name in rest:
        found[name] = "" if name in WITHOUT_VALUE else next(rest)
    return found


def mapped(given: dict[str, str], data: Path, state: Path) -> list[str]:
    """Return the arguments of `ridgeline serve`. Raises LookupError with the reason where there are none."""
    for name, what in TO_COME.items():
        if name in given:
            raise LookupError(f"to come: needs {what} ({name})")
    if "," in given["--host"]:
        raise LookupError("to come: needs several addresses (--host)")
    model = given.get("--hf-file") or given.get("--hf-repo") or given.get("--model")
    if model is None:
        raise LookupError("to come: needs several models in one server (the test names no model)")
    if model not in MODELS:
        raise LookupError(f"theirs: needs the model {model}, which is not in ../shared/data")
    if given.get("--pooling") == "none":
        raise LookupError("to come: needs a vector for each token (--pooling none)")
    folder = data / "models" / MODELS[model]
    context = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    slots = int(given.get("--parallel", 1))
    wanted = int(given.get("--ctx-size", context)) // (1 if "--kv-unified" in given else slots)
    template = state / f"template-{hashlib.sha256(repr(template_of(given)).encode()).hexdigest()[:8]}.jinja"
    template.write_text(template_of(given))
    names = [*given.get("--alias", model).split(","), *NAMES]
    return [
        str(folder), *(part for name in names for part in ("--served-model-name", name)),
        "--max-model-len", str(min(wanted, context)), "--max-num-seqs", str(max(slots, 2)),
        "--seed", given.get("--seed", "0"), "--server-dev-mode",
        "--chat-template", str(template), "--unknown-fields", "ignore",
        *(("--api-key", given["--api-key"]) if "--api-key" in given else ()),
        *(("--threads", given["--threads"]) if "--threads" in given else ()),
    ]  # fmt: skip


def template_of(given: dict[str, str]) -> str:
    """Return the chat template from a file, a known name, or the text itself; llama-server's default is ChatML."""
    if file := given.get("--chat-template-file"):
        return Path(file).read_text(encoding="utf-8")
    return TEMPLATES.get(given.get("--chat-template", "chatml"), given.get("--chat-template", ""))


def running(command: list[str], state: Path) -> int:
    """Return the port of a server with these arguments; start one if none runs."""
    known = state / f"{hashlib.sha256(repr(command).encode()).hexdigest()[:16]}.json"
    if known.exists():
        return int(json.loads(known.read_text())["port"])
    log = known.with_suffix(".log")
    process = subprocess.Popen(
        [sys.executable, "-m", "ridgeline", "serve", *command, "--port", "0"],
        stdout=subprocess.DEVNULL, stderr=log.open("w"), start_new_session=True,
    )  # fmt: skip
    end = time.monotonic() + START_SECONDS
    while not (found := re.search(r"serving .* at http://127\.0\.0\.1:(\d+)", log.read_text())):
        if process.poll() is not None or time.monotonic() > end:
            raise SystemExit(log.read_text())
        time.sleep(0.05)
    known.write_text(json.dumps({"port": int(found[1]), "pid": process.pid}))
    return int(found[1])


def reset(port: int, key: str | None) -> None:
    """Reset the prefix cache of a server, since each of their tests expects a new one."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    url = f"http://127.0.0.1:{port}/reset_prefix_cache"
    urllib.request.urlopen(urllib.request.Request(url, b"", headers), timeout=START_SECONDS).close()


async def forward(host: str, port: int, to: int) -> None:
    """Hand every connection to another port of this machine, until the process is ended."""

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                target.write(data)
                await target.drain()
        target.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind, sink = await asyncio.open_connection("127.0.0.1", to)
        await asyncio.gather(copy(reader, sink), copy(behind, writer))

    server = await asyncio.start_server(connected, host, port)
    await server.serve_forever()


# The run and its results ------------------------------------------------------------------------------


def judged(result: dict[str, Any], table: list[dict[str, str]]) -> tuple[str, str]:
    """Return the kind of a result, and the reason."""
    if result["outcome"] == "passed":
        return "passed", ""
    if result["why"]:
        kind, _, reason = result["why"].partition(": ")
        return kind, reason
    for row in table:
        if re.search(row["test"], result["test"]):
            return row["kind"], row["reason"]
    return ("skipped", result["error"]) if result["outcome"] == "skipped" else ("ours", result["error"])


def run_suite(tests: Path, data: Path, state: Path, select: str) -> list[dict[str, Any]]:
    """Run their suite in a pytest of its own; return a result for each test."""
    program = state / "llama-server"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" {AS_SERVER} "$@"\n')
    program.chmod(0o755)
    (state / "wget.py").write_text("")  # their file for downloads, which are not needed here
    results = state / "results.jsonl"
    environment = os.environ | {
        "LLAMA_SERVER_BIN_PATH": str(program), STATE: str(state), DATA: str(data.resolve()),
        "PYTHONPATH": os.pathsep.join([str(HERE), str(state)]), "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "foreign_llama_cpp_plugin", "-p", "no:cacheprovider", "--tb=line",
        "-k", select, "unit",
    ]  # fmt: skip
    try:
        subprocess.run(command, cwd=tests, env=environment, stdout=(state / "pytest.log").open("w"), check=False)
    finally:
        for known in state.glob("*.json"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(json.loads(known.read_text())["pid"], signal.SIGTERM)
    return [json.loads(line) for line in results.read_text().splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", type=Path, help="llama.cpp's folder tools/server/tests")
    parser.add_argument(
        "--data", type=Path, default=Path("../shared/data"), help="folder that contains models/stories260K"
    )
    parser.add_argument("-k", default="", help="run only the tests that match, as pytest's -k")
    parser.add_argument("--markdown", action="store_true", help="print tables for the documentation")
    parser.add_argument("--state", type=Path, help="keep the logs in this folder")
    given = parser.parse_args()
    table = json.loads(TABLE.read_text())
    with tempfile.TemporaryDirectory() as folder:
        state = given.state or Path(folder)
        state.mkdir(parents=True, exist_ok=True)
        results = run_suite(given.tests.resolve(), given.data, state, given.k)
    rows = [(result["test"].removeprefix("unit/"), *judged(result, table)) for result in results]
    if given.markdown:
        print("\n".join([*by_file(rows), "", *by_reason(rows)]))
    else:
        print("\n".join(f"{kind:<8} {test}{f'  ({reason})' if reason else ''}" for test, kind, reason in rows))
    counts = Counter(kind for _, kind, _ in rows)
    print("; ".join(f"{counts[kind]} {kind}" for kind in KINDS))
    return 1 if counts["ours"] else 0


def by_file(rows: list[tuple[str, str, str]]) -> list[str]:
    """Return a Markdown table: results of each of their files."""
    files = {test.partition("::")[0]: Counter[str]() for test, _, _ in rows}
    for test, kind, _ in rows:
        files[test.partition("::")[0]][kind] += 1
    lines = [f"| {name} | {' | '.join(str(counts[kind]) for kind in KINDS)} |" for name, counts in files.items()]
    return [f"| file | {' | '.join(KINDS)} |", "|---" * (1 + len(KINDS)) + "|", *lines]


def by_reason(rows: list[tuple[str, str, str]]) -> list[str]:
    """Return a Markdown table: how many tests did not pass, by reason."""
    named = [
        (kind, re.sub(r"the model \S+, which", "a model that", reason)) for _, kind, reason in rows if kind != "passed"
    ]
    counts = Counter(named)
    lines = [f"| {kind} | {count} | {reason} |" for (kind, reason), count in sorted(counts.items(), reverse=True)]
    return ["| result | tests | reason |", "|---|---|---|", *lines]


if __name__ == "__main__":
    raise SystemExit(as_server(sys.argv[2:]) if sys.argv[1:2] == [AS_SERVER] else main())
