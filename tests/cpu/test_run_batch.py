"""`ridgeline run-batch`: answers in OpenAI's batch format; a run that was cut short goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from ridgeline import LLM, SamplingParams


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ridgeline", "run-batch", *args], capture_output=True, text=True)


def line(i: int, **body: Any) -> dict[str, Any]:
    body = {"model": "any", "prompt": f"def f{i}(", "max_tokens": 6, "temperature": 0, **body}
    return {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body}


def test_a_batch_and_its_second_half(tmp_path: Path) -> None:
    requests, out = tmp_path / "requests.jsonl", tmp_path / "out.jsonl"
    lines = [line(i) for i in range(20)]
    lines[3]["body"]["temperature"] = -1
    lines[4] = {**lines[4], "url": "/v1/embeddings", "body": {"input": "x"}}
    lines[5] = {**lines[5], "url": "/v1/responses", "body": {"input": "x", "previous_response_id": "a"}}
    requests.write_text("".join(json.dumps(one) + "\n" for one in lines))
    first = run(str(requests), "-o", str(out), "--max-num-seqs", "4")
    assert (first.returncode, first.stdout) == (0, ""), first.stderr
    results = {r["custom_id"]: r for r in map(json.loads, out.read_text().splitlines())}
    assert len(results) == 20
    bad = {name: r["error"]["message"] for name, r in results.items() if r["error"]}
    assert set(bad) == {"r3", "r5"} and "temperature" in bad["r3"] and "stores nothing" in bad["r5"]
    assert results["r3"]["response"]["status_code"] == 400
    assert len(results["r4"]["response"]["body"]["data"][0]["embedding"]) == 256
    params = SamplingParams(max_tokens=6, temperature=0, repetition_penalty=1.1)
    for i, output in zip(
        range(6, 20), LLM("pocket").generate([f"def f{i}(" for i in range(6, 20)], params), strict=True
    ):
        assert results[f"r{i}"]["response"]["body"]["choices"][0]["text"] == output.outputs[0].text
    # Cut in the middle of a line, as a power cut would.
    whole = out.read_bytes()
    kept = whole.splitlines(keepends=True)[:7]
    out.write_bytes(b"".join(kept) + whole[:40])
    second = run(str(requests), "-o", str(out))
    assert second.returncode == 0 and "7 of 20" in second.stderr
    again = list(map(json.loads, out.read_text().splitlines()))
    assert sorted(r["custom_id"] for r in again) == sorted(results)
    for r in again:
        if r["error"] is None and "choices" in r["response"]["body"]:
            same = results[r["custom_id"]]["response"]["body"]["choices"]
            assert r["response"]["body"]["choices"] == same


def test_what_is_no_batch(tmp_path: Path) -> None:
    requests, out = tmp_path / "requests.jsonl", str(tmp_path / "out.jsonl")
    cases = [
        ("", "no requests"),
        ("{", "line 1"),
        (json.dumps(line(1)) + "\n" + json.dumps(line(1)), "line 2: custom_id 'r1' is that of line 1"),
        (json.dumps({**line(1), "url": "/x"}), "/x"),
        (json.dumps(line(1, stream=True)), "stream"),
    ]
    for text, words in cases:
        requests.write_text(text)
        found = run(str(requests), "-o", out)
        assert found.returncode == 2 and words in found.stderr, found.stderr
        assert found.stderr.count("\n") == 1
