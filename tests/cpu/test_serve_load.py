"""A server under load, and unchanged lm-eval. The tests take minutes, so all are slow or nightly."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpu.serving import Server, serving, until
from ridgeline import LLM, SamplingParams
from ridgeline.load.hub import BUILT_IN

SHAPE = {  # SmolLM2-135M's shape: steps are long enough to count them while a client disconnects
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    # The system allocates a page when it is first used. With few pages, all are in use early.
    with serving("pocket", "--quiet", "--kv-cache-memory-bytes", str(64 << 20)) as server:
        yield server


def prompt(i: int) -> list[int]:
    return [(i * 7 + j * 3) % 500 + 3 for j in range(8 + i % 9)]


async def ask(port: int, i: int, tokens: int) -> list[int]:
    """Return the tokens of a stream. Fail if it is not complete."""
    body = json.dumps({
        "prompt": prompt(i), "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "return_token_ids": True, "repetition_penalty": 1.0,
    })  # fmt: skip
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}"
    writer.write(f"{head}\r\nconnection: close\r\n\r\n{body}".encode())
    data = await reader.read()
    writer.close()
    assert b"data: [DONE]" in data, data[-300:]
    return [int(token) for found in re.findall(rb'"token_ids":\[([\d,]*)\]', data) for token in found.split(b",")]


def load(port: int, numbers: range, streams: int, tokens: int) -> dict[int, list[int]]:
    """Return the answers of all requests, sent with limited concurrency."""
    found: dict[int, list[int]] = {}
    queue = iter(numbers)

    async def stream() -> None:
        for i in queue:
            found[i] = await ask(port, i, tokens)

    async def main() -> None:
        await asyncio.gather(*(stream() for _ in range(streams)))

    asyncio.run(main())
    return found


def wanted(count: int, tokens: int) -> list[list[int]]:
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    return [o.outputs[0].token_ids for o in LLM("pocket").generate([prompt(i) for i in range(count)], params)]


def idle(server: Server) -> None:
    """Assert that no request is left and that the bookkeeping of pages is consistent."""
    for name in ("ridgeline:answers_open", "vllm:num_requests_running", "ridgeline:pages_used"):
        server.until(name, 0)
    checks = "ridgeline:page_checks_total"
    before = server.metric(checks)
    load(server.port, range(1), 1, 1)  # the bookkeeping is checked again after it
    until(lambda: server.metric(checks) > before)
    assert "inconsistent" not in server.said()
    assert server.metric("ridgeline:engine_restarts_total") == 0


def resident(server: Server) -> list[int]:
    """Return the memory of the HTTP process and of the engine process, in MB."""
    pids = f"{server.process.pid},{server.engine_pid()}"
    out = subprocess.run(["ps", "-o", "rss=", "-p", pids], capture_output=True, text=True, check=True).stdout
    return [int(kilobytes) // 1024 for kilobytes in out.split()]


def arena(server: Server) -> tuple[int, int]:
    """Return the resident memory of the engine's pages (its largest anonymous mapping) and of the rest, in MB."""
    sizes, found = list[int](), list[int]()
    for line in Path(f"/proc/{server.engine_pid()}/smaps").read_text().splitlines():
        if (head := re.match(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \d+ *$", line)) is not None:
            sizes.append(int(head[2], 16) - int(head[1], 16))
        elif re.match(r"[0-9a-f]+-", line) is not None:
            sizes.append(0)
        elif line.startswith("Rss:"):
            found.append(int(line.split()[1]))
    pages = found[sizes.index(max(sizes))]
    return pages // 1024, (sum(found) - pages) // 1024


@pytest.mark.slow
def test_two_hundred_streams_at_once(server: Server) -> None:
    answers = wanted(400, 32)
    found = load(server.port, range(400), 200, 32)
    assert [found[i] for i in range(400)] == answers
    idle(server)


@pytest.mark.nightly
def test_memory_is_flat_over_ten_thousand_requests(server: Server) -> None:
    load(server.port, range(2000), 64, 4)
    before = resident(server)
    load(server.port, range(2000, 10_000), 64, 4)
    after = resident(server)
    print("resident MB of server and engine after 2,000 and 10,000 requests:", before, after)
    assert all(b - a <= 8 for a, b in zip(before, after, strict=True)), (before, after)
    idle(server)


@pytest.mark.nightly
def test_different_prompts_take_no_more_memory() -> None:
    """The system allocates a page when it is first used, and the engine takes used pages before unused ones."""
    with serving("pocket", "--quiet", "--kv-cache-memory-bytes", str(1 << 30)) as server:
        load(server.port, range(500), 64, 4)
        before = arena(server)
        load(server.port, range(500, 3500), 64, 4)
        after = arena(server)
        print("resident MB of the pages and of all else after 500 and 3,500 requests:", before, after)
        assert after[0] - before[0] <= 4 and after[1] - before[1] <= 4, (before, after)
        idle(server)


@pytest.mark.slow
def test_a_disconnect_frees_pages_within_two_steps(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    with serving(str(tmp_path), "--load-format", "dummy", "--max-model-len", "2048") as server:
        body = {"prompt": list(range(3, 40)), "max_tokens": 1500, "ignore_eos": True, "return_token_ids": True}
        stays = server.stream("/v1/completions", body)
        for _ in range(3):
            leaves = server.stream("/v1/completions", body)
            server.until("vllm:num_requests_running", 2)
            steps = server.metric("ridgeline:steps_total")
            leaves.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            leaves.close()
            while True:
                page = server.raw("GET", "/metrics")[1].decode()
                running = re.search(r"^vllm:num_requests_running\{.*\} (\d+)$", page, re.MULTILINE)
                passed = re.search(r"^ridgeline:steps_total\{.*\} (\d+)$", page, re.MULTILINE)
                assert running is not None and passed is not None
                if running[1] == "1":
                    break
            # One step may have begun between the request and the end of the connection.
            assert int(passed[1]) - steps <= 3
        stays.close()
        server.until("ridgeline:pages_used", 0)


@pytest.mark.nightly
def test_lm_eval_runs_unchanged(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run lm-eval's local-completions on a small task: choose the likelier answer by echoed logprobs."""
    lm_eval = pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    rows = [
        {"text": f"import {name}\n\ndef f(self):\n    return", "choices": choices, "label": 0}
        for name, choices in (("os", [" self.x", " (((((", " import"]), ("re", [" None", "\n\n\nzz zz", " 5 5 5"]))
    ]
    data = tmp_path / "task.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "local", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}", "doc_to_target": "{{label}}", "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    arguments = {
        "base_url": f"{server.url}/completions", "model": "pocket", "tokenizer": str(BUILT_IN["pocket"]),
        "tokenizer_backend": "huggingface", "max_length": 512, "num_concurrent": 2,
    }  # fmt: skip
    found = lm_eval.simple_evaluate(
        model="local-completions", model_args=arguments, tasks=[task], log_samples=True, bootstrap_iters=0
    )
    llm = LLM("pocket")
    for sample, row in zip(sorted(found["samples"]["local"], key=lambda s: s["doc_id"]), rows, strict=True):
        for (logprob, _), choice in zip(sample["filtered_resps"], row["choices"], strict=True):
            context, ids = (  # lm-eval sends no BOS
                llm.frontend.tokenizer().encode(text, add_special_tokens=False)
                for text in (str(row["text"]), str(row["text"]) + choice)
            )
            (output,) = llm.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=0))
            entries = output.prompt_logprobs
            assert entries is not None
            ours = sum(e.logprob for e in entries[len(context) :] if e is not None)
            assert float(logprob) == pytest.approx(ours, abs=1e-4)
