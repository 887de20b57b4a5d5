"""Measure a server under load: python bench/serving.py MODEL --streams 32 --requests 256

It runs streams against `ridgeline serve` in another process, with client, server and engine on the same cores, and
compares them with `LLM.generate` on the same prompts. The gate: every stream is complete, and its tokens equal those of
`generate`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import emit

from ridgeline import LLM, SamplingParams

LAST_CHUNK = b"\r\n0\r\n\r\n"  # the end of a chunked body; a header may end like its last five bytes


def main() -> None:
    options = arguments()
    prompts = [[(i * 7 + j * 3) % 500 + 3 for j in range(options.input_len)] for i in range(options.requests)]
    program = ["-m", "ridgeline"]
    if options.step_ms is not None:
        program = [str(Path(__file__).with_name("paced.py")), str(options.step_ms)]
    command = [sys.executable, *program, "serve", options.model, "--port", "0", "--quiet",
               "--load-format", options.load_format]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        ready = r"^serving .* at http://127.0.0.1:(\d+)"
        url = next(found[1] for line in server.stderr if (found := re.search(ready, line)))
        try:
            pids = {"http": server.pid, "engine": child(server.pid)}
            started, own = {name: cpu_seconds(pid) for name, pid in pids.items()}, time.process_time()
            answers, seconds, before, after = asyncio.run(load(int(url), prompts, options))
            own = time.process_time() - own
            cpu = {name: cpu_seconds(pid) - started[name] for name, pid in pids.items()}
            rss = {name: memory(pid) for name, pid in pids.items()}
        finally:
            server.terminate()
    tokens = sum(map(len, answers))
    busy = after["ridgeline:engine_busy_seconds_total"] - before["ridgeline:engine_busy_seconds_total"]
    steps = after["ridgeline:steps_total"] - before["ridgeline:steps_total"]
    delivery = {f"delivery_p{p}_ms": percentile(before, after, p / 100) for p in (50, 90, 99)}
    offline, gate = 0.0, all(len(a) == options.output_len for a in answers)
    if options.offline and options.step_ms is None:
        offline, wanted = generate(options, prompts)
        gate = gate and answers == wanted
    emit(
        f"serving: {Path(options.model).name}, {options.streams} streams",
        gate,
        requests=options.requests,
        tokens_per_s=round(tokens / seconds, 1),
        offline_tokens_per_s=round(offline, 1),
        of_offline=round(tokens / seconds / offline, 3) if offline else None,
        engine_busy=round(busy / seconds, 3),
        step_ms=round(1e3 * busy / steps, 3),
        http_us_per_token=round(1e6 * cpu["http"] / tokens, 1),
        engine_us_per_token=round(1e6 * cpu["engine"] / tokens, 1),
        client_us_per_token=round(1e6 * own / tokens, 1),
        **delivery,
        rss_mb=rss,
        pages_used=after["ridgeline:pages_used"],
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--input-len", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--no-offline", dest="offline", action="store_false")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--step-ms", type=float, help="replace each step by a pause of this many milliseconds")
    return parser.parse_args()


async def load(port: int, prompts: list[list[int]], options: argparse.Namespace) -> tuple[Any, ...]:
    """Run streams; each sends its next request when the one before is complete."""
    answers: list[list[int]] = [[] for _ in prompts]
    queue = iter(range(len(prompts)))

    async def stream() -> None:
        for i in queue:
            answers[i] = await ask(port, prompts[i], options.output_len)

    await ask(port, prompts[0], 4)
    before, start = await metrics(port), time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(options.streams)))
    seconds = time.perf_counter() - start
    return answers, seconds, before, await metrics(port)


async def ask(port: int, prompt: list[int], length: int) -> list[int]:
    body = json.dumps({
        "prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True, "stream": True,
        "return_token_ids": True, "repetition_penalty": 1.0,
    })  # fmt: skip
    head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}"
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    transport, _ = await loop.create_connection(lambda: Reader(over), "127.0.0.1", port)
    transport.write(f"{head}\r\n\r\n{body}".encode())
    data = await over
    transport.close()
    return [int(token) for found in re.findall(rb'"token_ids":\[([\d,]*)\]', data) for token in found.split(b",")]


class Reader(asyncio.Protocol):
    """Reads an answer as it arrives, each piece once, and parses it when it is complete.

    The time that a client needs for events is not measured, but the client shares the cores.
    """

    def __init__(self, over: asyncio.Future[bytes]) -> None:
        self._over, self._pieces, self._end = over, list[bytes](), b""

    def data_received(self, data: bytes) -> None:
        self._pieces.append(data)
        self._end = (self._end + data)[-len(LAST_CHUNK) :]
        if self._end == LAST_CHUNK and not self._over.done():
            self._over.set_result(b"".join(self._pieces))

    def connection_lost(self, error: Exception | None) -> None:
        if not self._over.done():
            self._over.set_exception(RuntimeError(b"".join(self._pieces)[-400:]))


async def metrics(port: int) -> dict[str, float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    found: dict[str, float] = {}
    for line in text.splitlines():
        if (sample := re.match(r'(\w[\w:]*)\{.*?(?:le="([^"]*)")?\} (\S+)$', line)) is not None:
            name = sample[1] if sample[2] is None else f"{sample[1]}:{sample[2]}"
            found[name] = found.get(name, 0.0) + float(sample[3])
    return found


def percentile(before: dict[str, float], after: dict[str, float], share: float) -> float:
    """Return the upper bound, in milliseconds, of the histogram bucket that holds a percentile."""
    name = "ridgeline:delivery_seconds_bucket:"
    counts = {key[len(name) :]: after[key] - before.get(key, 0.0) for key in after if key.startswith(name)}
    return next(float(bound) * 1e3 for bound, count in counts.items() if count >= share * counts["+Inf"])


def child(pid: int) -> int:
    """Return the process that a server has started: its engine."""
    return int(subprocess.check_output(["ps", "-o", "pid=", "--ppid", str(pid)], text=True).split()[0])


def cpu_seconds(pid: int) -> float:
    """Return the processor time of all threads of a process so far, including the system's time for it."""
    values = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


def memory(pid: int) -> int:
    """Return the resident megabytes of a process."""
    return int(subprocess.check_output(["ps", "-o", "rss=", "-p", str(pid)], text=True)) // 1024


def generate(options: argparse.Namespace, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    """Return tokens per second of LLM.generate with the same number of sequences, and its tokens."""
    from ridgeline.settings import EngineOptions

    llm = LLM(options.model, load_format=options.load_format, engine=EngineOptions(max_num_seqs=options.streams))
    params = SamplingParams(max_tokens=options.output_len, temperature=0, ignore_eos=True)
    llm.generate(prompts[:1], params)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    answers = [o.outputs[0].token_ids for o in outputs]
    return sum(map(len, answers)) / seconds, answers


if __name__ == "__main__":
    main()
