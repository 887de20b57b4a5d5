"""Ranks in processes: the bits of slices in one process, clear ends when one is lost, and nothing left behind."""

from __future__ import annotations

import json
import mmap
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from cpu.serving import serving, until
from cpu.test_slices import answers
from oracle.build import build
from oracle.families import CASES
from ridgeline import LLM, SamplingParams
from ridgeline.errors import DeviceError, RankError, RequestError
from ridgeline.runtime import ranks
from ridgeline.runtime.load import LoadedModel, LoadOptions
from ridgeline.runtime.rank_group import BUFFER, LOST_SECONDS, RankGroup, shared_bytes
from ridgeline.runtime.ranks import PROCESS, load_ranks
from ridgeline.runtime.slices import open_slices

PROMPT = list(range(30, 60))
TOLD_SECONDS = 30.0  # on a busy machine; LOST_SECONDS says how soon on a quiet one
# One of each way to cut: heads and neurons, experts, latents, channels of Mamba, and delta rules.
CHOSEN = ["llama_gqa", "qwen3_moe", "deepseek_v2", "mamba", "qwen3_next"]


def others() -> list[psutil.Process]:
    """Return the processes of ranks that this process has started."""
    return [p for p in psutil.Process().children(recursive=True) if PROCESS in _line(p)]


def _line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    deadline = time.monotonic() + TOLD_SECONDS
    while others() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not others()


# ---- the transport -----------------------------------------------------------------------------------------------


def run_ranks(size: int, work: Callable[[RankGroup], Any]) -> list[Any]:
    """Run each rank in a thread; return what each of them returns, or its exception."""
    memory, found = mmap.mmap(-1, shared_bytes(size)), [None] * size
    peers: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for low, high in combinations(range(size), 2):
        peers[low][high], peers[high][low] = socket.socketpair()
    groups = [RankGroup(rank, size, memory, peers[rank]) for rank in range(size)]

    def run(rank: int) -> None:
        try:
            found[rank] = work(groups[rank])
        except Exception as e:
            found[rank] = e

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for group in groups:
        group.close()
    return found


@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_ranks_get_all_parts(size: int) -> None:
    """Sizes around that of a buffer; types and shapes; many calls, in which ranks are late at random."""
    shapes = [(1,), (0, 4), (63, 5), (BUFFER // 4 - 1,), (BUFFER // 4 + 1,), (3, BUFFER // 4)]
    kinds = ["float32", "float16", "int64", "uint16"]

    def part(rank: int, call: int) -> np.ndarray[Any, Any]:
        rng = np.random.default_rng([rank, call])
        return (rng.integers(0, 1 << 15, shapes[call % len(shapes)])).astype(kinds[call % len(kinds)])

    def work(group: RankGroup) -> None:
        late = np.random.default_rng(group.rank)
        for call in range(60):
            if not late.integers(6):
                time.sleep(float(late.uniform(0, 0.003)))
            for rank, got in enumerate(group.gather(part(group.rank, call))):
                wanted = part(rank, call)
                assert got.dtype == wanted.dtype and np.array_equal(got, wanted)
            message = {"call": call, "bytes": bytes(300_000)}  # more than the buffer of a socket
            assert group.broadcast(message if group.rank == 0 else None) == message

    assert run_ranks(size, work) == [None] * size


def test_a_rank_that_leaves_tells_why() -> None:
    def work(group: RankGroup) -> None:
        if group.rank == 1:
            group.close("rank 1 has no memory")
        group.gather(np.zeros(3))

    found = run_ranks(3, work)
    assert all(isinstance(e, RankError) and str(e) == "rank 1 has no memory" for e in found)


# ---- models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHOSEN)
def test_ranks_have_the_bits_of_slices(name: str, tmp_path: Path) -> None:
    build(CASES[name], tmp_path)
    options = LoadOptions(device="cpu", max_model_len=256, threads=1)
    with open_slices(str(tmp_path), options, 2) as first:
        wanted, logits = answers(first, PROMPT), logits_of(first)
    loaded = load_ranks(str(tmp_path), options, 2)
    assert answers(loaded, PROMPT) == wanted
    assert np.array_equal(logits_of(loaded), logits)
    assert loaded.model.group is not None
    loaded.model.group.leave()


def logits_of(loaded: LoadedModel) -> np.ndarray[Any, Any]:
    """Return log probabilities that the engine gives for an answer, which show each bit of the logits."""
    from ridgeline.engine import Engine
    from ridgeline.runtime.generator import GenerationRequest
    from ridgeline.sample.sampler import NoiseKey
    from ridgeline.settings import EngineOptions, resolve

    config = resolve(
        loaded.spec, 64, EngineOptions(max_num_seqs=2), free_bytes=1 << 28, fixed_len=True,
        kv_cache_dtype=loaded.storage.dtype, float_bytes=loaded.table.memory.float_bytes,
    )  # fmt: skip
    engine, found = Engine(loaded, config), list[float]()
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=5)
    engine.add(0, GenerationRequest(PROMPT, params, (NoiseKey(0, 0),)))
    while len(engine):
        for event in engine.step():
            found += [value for entry in event.logprobs for _, value, *_ in entry.top]
    return np.array(found)


def test_four_ranks_of_pocket_give_the_tokens_of_one() -> None:
    params = [SamplingParams(max_tokens=24, temperature=t, seed=5, n=2) for t in (0.0, 1.0)]
    prompts = ["def add(a, b):", "import os"]
    wanted = LLM("pocket", threads=1).generate(prompts, params)
    llm = LLM("pocket", tensor_parallel_size=4)
    found = llm.generate(prompts, params)
    for one, other in zip(wanted, found, strict=True):
        assert [a.token_ids for a in one.outputs] == [a.token_ids for a in other.outputs]
    assert len(others()) == 3
    with pytest.raises(RequestError, match="this needs the whole model, and it is cut for 4 ranks"):
        llm.embed(["text"], pooling="mean")


# ---- ranks that are lost -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "message"),
    [(signal.SIGKILL, "rank 1 of 2 has ended by signal 9"), (signal.SIGSTOP, "rank 1 of 2 does not answer")],
    ids=["killed", "stopped"],
)
def test_a_lost_rank_ends_a_request(number: signal.Signals, message: str) -> None:
    llm = LLM("pocket", tensor_parallel_size=2)
    llm.generate(["def"], SamplingParams(max_tokens=2))
    (process,) = others()
    sent = list[float]()

    def send() -> None:
        sent.append(time.monotonic())
        process.send_signal(number)

    threading.Timer(0.3, send).start()
    with pytest.raises(RankError, match=message):
        while True:
            llm.generate(["def f(x):"], SamplingParams(max_tokens=500, ignore_eos=True))
    assert time.monotonic() - sent[0] < TOLD_SECONDS
    with pytest.raises(RankError, match=message):  # and each later one, at once
        llm.generate(["def"], SamplingParams(max_tokens=2))


def test_a_program_that_was_stopped_goes_on() -> None:
    """As by Ctrl-Z and fg: all ranks are stopped for longer than LOST_SECONDS."""
    code = (
        "from ridgeline import LLM, SamplingParams\nllm = LLM('pocket', tensor_parallel_size=2)\n"
        "params = SamplingParams(max_tokens=900, temperature=0, ignore_eos=True)\nprint('ready', flush=True)\n"
        "print(sum(len(o.outputs[0].token_ids) for _ in range(3) for o in llm.generate(['def', 'import'], params)))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None and first.stdout.readline() == "ready\n"
        both = [psutil.Process(first.pid), *others()]
        assert len(both) == 2
        time.sleep(0.3)  # it computes
        for process in both:
            process.suspend()
        time.sleep(LOST_SECONDS + 2)
        for process in both:
            process.resume()
        assert first.stdout.read() == "5400\n"


def test_ranks_end_with_rank_0() -> None:
    """Its process is killed, so that it can close nothing."""
    code = (
        "from ridgeline import LLM\nllm = LLM('pocket', tensor_parallel_size=2)\nprint('ready', flush=True)\ninput()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None and first.stdout.readline() == "ready\n"
        (process,) = others()
        first.kill()
        process.wait(TOLD_SECONDS)


def test_a_part_that_cannot_be_loaded_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The folder is gone when the other rank reads it, and that has ended before rank 0 waits for it."""
    build(CASES["llama_gqa"], tmp_path / "model")
    load = ranks.load_model

    def late(*args: Any, **named: Any) -> LoadedModel:
        loaded = load(*args, **named)
        until(lambda: not others())
        return loaded

    monkeypatch.setattr(ranks, "load_model", late)
    broadcast = RankGroup.broadcast

    def elsewhere(self: RankGroup, message: Any = None) -> Any:
        return broadcast(self, (str(tmp_path / "absent"), message[1]))

    monkeypatch.setattr(RankGroup, "broadcast", elsewhere)
    with pytest.raises(RankError, match=r"rank 1 of 2: .*absent"):
        load_ranks(str(tmp_path / "model"), LoadOptions(device="cpu", threads=1), 2)


def test_clients_are_told_and_ranks_start_again() -> None:
    body = {"prompt": "def f(", "max_tokens": 900, "ignore_eos": True, "temperature": 0}
    with serving("pocket", "--tensor-parallel-size", "2") as server:
        wanted = server.post("/v1/completions", prompt="import os", max_tokens=12, temperature=0)[1]["choices"][0]
        (process,) = (p for p in psutil.Process(server.engine_pid()).children() if PROCESS in _line(p))
        answer = list[tuple[int, Any]]()
        thread = threading.Thread(target=lambda: answer.append(server.post("/v1/completions", **body)))
        thread.start()
        server.until("vllm:num_requests_running", 1)
        killed = time.monotonic()
        process.kill()
        thread.join()
        assert time.monotonic() - killed < TOLD_SECONDS
        assert answer[0][0] in (500, 503), answer
        assert "rank 1 of 2 has ended by signal 9" in json.dumps(answer[0][1])
        until(lambda: server.ask("GET", "/health")[0] == 503)
        until(lambda: server.ask("GET", "/health")[0] == 200)
        again = server.post("/v1/completions", prompt="import os", max_tokens=12, temperature=0)[1]["choices"][0]
        assert again == wanted


# ---- options that are refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tensor_parallel_size": 0}, RequestError, "is 0; it must be 1 to 64"),
        ({"tensor_parallel_size": 65}, RequestError, "is 65; it must be 1 to 64"),
        ({"tensor_parallel_size": 3}, RequestError, "cannot be cut for 3 ranks .*take"),
        ({"tensor_parallel_size": 2, "cache": "off"}, RequestError, "leave cache='off' out"),
        ({"tensor_parallel_size": 2, "weights": "int8"}, RequestError, "scales belong to whole matrices"),
        ({"tensor_parallel_size": 2, "speculative": "pocket-draft"}, RequestError, "no draft model or head"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LLM("pocket", **options)


def test_a_gpu_has_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "resolve_device", lambda device: "cuda")
    with pytest.raises(DeviceError, match="run on device cpu or reference, and this is cuda; serve replicas"):
        LLM("pocket", tensor_parallel_size=2)


def test_the_price_of_a_kv_cache_is_not_measured() -> None:
    llm = LLM("pocket", tensor_parallel_size=2, kv_cache_dtype="int8")
    assert "the cost in accuracy of --kv-cache-dtype is not measured for a model that is cut" in llm.loaded.notes
    assert LOST_SECONDS < TOLD_SECONDS
