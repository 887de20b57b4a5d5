"""`ridgeline run-batch`: answers in OpenAI's batch format; the same command continues an interrupted run."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.serve.api import batch
from ridgeline.serve.api.batch import Line, read_done
from ridgeline.serve.api.types import CompletionBody
from ridgeline.serve.gate import Gate
from ridgeline.serve.options import ServeOptions
from ridgeline.serve.service import Service


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ridgeline", "run-batch", *args], capture_output=True, text=True)


def line(i: int, **body: Any) -> dict[str, Any]:
    body = {"model": "pocket", "prompt": f"def f{i}(", "max_tokens": 6, "temperature": 0, **body}
    return {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body}


def test_a_batch_and_its_second_half(tmp_path: Path) -> None:
    requests, out = tmp_path / "requests.jsonl", tmp_path / "out.jsonl"
    lines = [line(i) for i in range(20)]
    lines[3]["body"]["temperature"] = -1
    lines[4] = {**lines[4], "url": "/v1/embeddings", "body": {"input": "x", "pooling": "mean"}}
    lines[5] = {**lines[5], "url": "/v1/responses", "body": {"input": "x", "previous_response_id": "a"}}
    # U+2028 ends a line in other formats, but not in JSON
    lines[6]["body"] |= {"model": "another", "prompt": "a\u2028b"}
    requests.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in lines), encoding="utf-8")
    first = run(str(requests), "-o", str(out), "--max-num-seqs", "4")
    assert (first.returncode, first.stdout) == (1, "") and "3 of 20 requests failed" in first.stderr, first.stderr
    results = {r["custom_id"]: r for r in map(json.loads, out.read_text().splitlines())}
    assert len(results) == 20
    bad = {name: r["error"]["message"] for name, r in results.items() if r["error"]}
    assert set(bad) == {"r3", "r5", "r6"} and "temperature" in bad["r3"] and "stores nothing" in bad["r5"]
    assert results["r3"]["response"]["status_code"] == 400 and results["r6"]["response"]["status_code"] == 404
    assert len(results["r4"]["response"]["body"]["data"][0]["embedding"]) == 256
    params = SamplingParams(max_tokens=6, temperature=0, repetition_penalty=1.1)
    for i, output in zip(
        range(7, 20), LLM("pocket").generate([f"def f{i}(" for i in range(7, 20)], params), strict=True
    ):
        assert results[f"r{i}"]["response"]["body"]["choices"][0]["text"] == output.outputs[0].text
    # Cut in the middle of a line, as by a power failure.
    whole = out.read_bytes()
    kept = whole.splitlines(keepends=True)[:7]
    out.write_bytes(b"".join(kept) + whole[:40])
    second = run(str(requests), "-o", str(out))
    assert second.returncode == 1 and "7 of 20" in second.stderr and "3 of 20" in second.stderr
    again = list(map(json.loads, out.read_text().splitlines()))
    assert sorted(r["custom_id"] for r in again) == sorted(results)
    for r in again:
        if r["error"] is None and "choices" in r["response"]["body"]:
            same = results[r["custom_id"]]["response"]["body"]["choices"]
            assert r["response"]["body"]["choices"] == same


def test_a_request_that_failed_temporarily_is_repeated(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    statuses = {"a": 200, "b": 400, "c": 429, "d": 503, "e": 500, "f": 404}
    made = [json.dumps({"custom_id": name, "response": {"status_code": s}}) for name, s in statuses.items()]
    out.write_text("\n".join([*made, '{"cut']))
    assert read_done(out) == {"a": False, "b": True, "f": True}
    assert out.read_text().splitlines() == [made[0], made[1], made[5]]
    assert read_done(out) == {"a": False, "b": True, "f": True} and list(tmp_path.iterdir()) == [out]


def test_a_batch_waits_for_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of many answers each need more slots than the queue has, and none of them gets a 429."""
    gate, service = Gate(2, 1), cast(Service, SimpleNamespace(options=ServeOptions(("m",))))

    class Slow:
        def __init__(self, service: Any, body: CompletionBody) -> None:
            self.n = body.n or 1

        async def answer(self) -> dict[str, Any]:
            gate.enter(self.n)
            await asyncio.sleep(0.01)
            gate.leave(self.n)
            return {"n": self.n}

    async def ask() -> list[dict[str, Any]]:
        wanted = [Line(str(n), "/v1/completions", {"prompt": "x", "n": n}) for n in (3, 2, 3, 1, 4)]
        return await asyncio.gather(*(batch._result(service, line) for line in wanted))

    monkeypatch.setattr(batch, "Completion", Slow)
    monkeypatch.setattr(batch, "RETRY_SECONDS", 0.001)
    assert [r["response"]["status_code"] for r in asyncio.run(ask())] == [200, 200, 200, 200, 400]


def test_invalid_batches(tmp_path: Path) -> None:
    requests, out = tmp_path / "requests.jsonl", str(tmp_path / "out.jsonl")
    cases = [
        ("", "no requests"),
        ("{", "line 1"),
        (json.dumps(line(1)) + "\n" + json.dumps(line(1)), "line 2: line 1 has the same custom_id 'r1'"),
        (json.dumps({**line(1), "url": "/x"}), "/x"),
        (json.dumps(line(1, stream=True)), "stream"),
    ]
    for text, words in cases:
        requests.write_text(text)
        found = run(str(requests), "-o", out)
        assert found.returncode == 2 and words in found.stderr, found.stderr
        assert found.stderr.count("\n") == 1
