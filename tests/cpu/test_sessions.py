"""Streams, conversations, static batches, priorities, salts, and prompts' log probabilities, through LLM."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from oracle.build import build
from oracle.data import shared_data
from oracle.families import CASES
from ridgeline import LLM, SamplingParams
from ridgeline.engine import Engine
from ridgeline.errors import RequestError
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.sample.logits import log_softmax
from ridgeline.sample.sampler import NoiseKey
from ridgeline.settings import EngineOptions

SHORT = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    build(CASES["gemma3"], path)
    return str(path)


@pytest.fixture(scope="module")
def llm(folder: str) -> LLM:
    return LLM(folder, engine=EngineOptions(block_size=4))


@pytest.fixture(scope="module")
def stories() -> LLM:
    return LLM(str(shared_data() / "models/stories260K"))


# ---- streams ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["on", "off"])
def test_a_stream_is_the_answer_in_pieces(stories: LLM, cache: str) -> None:
    llm = LLM(str(shared_data() / "models/stories260K"), cache=cache)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=40, seed=1, n=2, stop=["mom", "park"], logprobs=1)
    (whole,) = stories.generate("Once upon a time", params)
    chunks = list(llm.stream("Once upon a time", params))
    assert all(chunk.output is None for chunk in chunks[:-1])
    result = chunks[-1].output
    assert result is not None
    for answer, expected in zip(result.outputs, whole.outputs, strict=True):
        mine = [c for c in chunks if c.index == answer.index]
        assert "".join(c.text for c in mine) == answer.text == expected.text
        assert [t for c in mine for t in c.token_ids] == answer.token_ids == expected.token_ids
        assert len([p for c in mine for p in c.logprobs]) == len(answer.token_ids)
        assert mine[-1].finish_reason == answer.finish_reason == expected.finish_reason
        assert mine[-1].stop_reason == answer.stop_reason == expected.stop_reason


def test_streams_side_by_side_and_calls_between(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=6 + i, seed=i, ignore_eos=True) for i in range(3)]
    wanted = [llm.generate([[5 + i]], p)[0].outputs[0].token_ids for i, p in enumerate(params)]
    streams = [llm.stream([5 + i], p) for i, p in enumerate(params)]
    found: list[list[int]] = [[], [], []]
    for _ in range(6):
        for tokens, stream in zip(found, streams, strict=True):
            tokens += next(stream).token_ids
        assert llm.generate([[8, 9]], SHORT)[0].outputs[0].finish_reason == "length"
    for tokens, stream in zip(found, streams, strict=True):
        tokens += [t for chunk in stream for t in chunk.token_ids]
    assert found == wanted


def test_a_stream_closed_at_any_chunk_leaves_nothing_behind(llm: LLM) -> None:
    for after in range(8):
        stream = llm.stream([3, 4], SamplingParams(max_tokens=8, ignore_eos=True))
        for _ in range(after):
            next(stream)
        stream.close()
        assert len(llm.session) == 0
        stats = llm.stats()
        assert stats is not None
        assert (stats.running, stats.waiting) == (0, 0)
    llm.stream([3])  # a stream that is never iterated sends no request
    assert len(llm.session) == 0


def test_a_lost_stream_is_reported(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = llm.stream([3, 4], SamplingParams(max_tokens=8, ignore_eos=True))
    next(stream)

    def interrupted(index: int, output: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5]], SHORT, on_done=interrupted)
    with pytest.raises(RequestError, match="cut short"):
        list(stream)
    assert len(llm.generate([[5]], SHORT)[0].outputs[0].token_ids) == 4


def test_a_stream_refuses_at_once(llm: LLM) -> None:
    with pytest.raises(RequestError, match="exceed the context"):
        llm.stream([3], SamplingParams(max_tokens=10**6))


# ---- chat ---------------------------------------------------------------------------------------------------


def test_chat_goes_through_the_template(stories: LLM, tmp_path: Path) -> None:
    for file in (shared_data() / "models/stories260K").iterdir():
        (tmp_path / file.name).symlink_to(file)
    template = "{% for m in messages %}{{ m.content }} {% endfor %}{% for t in tools or [] %}{{ t.name }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    llm = LLM(str(tmp_path))
    talk = [{"role": "user", "content": "Once upon"}, {"role": "assistant", "content": "a time"}]
    (one,) = llm.chat(talk, SHORT)
    assert one.prompt_token_ids == stories.encode("Once upon a time ")
    assert len(llm.chat([talk, talk[:1]], SHORT)) == 2
    (with_tools,) = llm.chat(talk, SHORT, tools=[{"name": "play"}])
    assert with_tools.prompt_token_ids == stories.encode("Once upon a time play")


# ---- static batches -----------------------------------------------------------------------------------------


def test_static_batches_run_one_after_another_with_equal_answers(folder: str, llm: LLM) -> None:
    static = LLM(folder, batching="static", engine=EngineOptions(max_num_seqs=4))
    prompts = [[3 + i] * (1 + 3 * i) for i in range(10)]
    params = [SamplingParams(max_tokens=3 + i % 4, seed=i, n=1 + i % 2, ignore_eos=True) for i in range(10)]
    order: list[int] = []
    found = static.generate(prompts, params, on_done=lambda i, output: order.append(i))
    wanted = llm.generate(prompts, params)
    assert [[a.token_ids for a in o.outputs] for o in found] == [[a.token_ids for a in o.outputs] for o in wanted]
    batch = {i: b for b, members in enumerate([(0, 1, 2), (3, 4), (5, 6), (7, 8), (9,)]) for i in members}
    assert [batch[i] for i in order] == sorted(batch.values())  # batches have 4 sequences at most
    with pytest.raises(RequestError, match="lower n"):
        static.session.add(request([3], SamplingParams(n=5, max_tokens=2)), lambda chunk: None)


def test_static_batches_reserve_the_longest_context(folder: str) -> None:
    config = LLM(folder, engine=EngineOptions(block_size=4)).config
    assert config is not None
    memory = sum(2 * (g.most_pages(config.max_model_len) + 1) * g.page_bytes for g in config.groups)
    options = EngineOptions(block_size=4, kv_cache_memory_bytes=memory)
    running = {}
    for batching in ("static", "continuous"):
        llm = LLM(folder, batching=batching, engine=options)  # type: ignore[arg-type]
        for _ in range(12):
            llm.session.add(request([5, 6], SHORT), lambda chunk: None)
        llm.session.step()
        stats = llm.stats()
        assert stats is not None
        running[batching] = stats.running
    assert running["static"] <= 2 < 10 <= running["continuous"]


def request(prompt: list[int], params: SamplingParams, **more: int | str) -> GenerationRequest:
    noise = tuple(NoiseKey(params.seed or 0, choice) for choice in range(params.n))
    return GenerationRequest(prompt, params, noise, **more)  # type: ignore[arg-type]


# ---- priorities and salts -----------------------------------------------------------------------------------


def test_urgent_requests_go_first_and_tokens_stay(folder: str) -> None:
    llm = LLM(folder, engine=EngineOptions(max_num_seqs=1))
    prompts, order = [[3 + i] for i in range(5)], []
    found = llm.generate(prompts, SHORT, priority=[0, 2, -1, 1, 0], on_done=lambda i, output: order.append(i))
    assert order == [2, 0, 4, 3, 1]
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in llm.generate(prompts, SHORT)]
    with pytest.raises(RequestError, match="5 prompts, but 2 priority"):
        llm.generate(prompts, SHORT, priority=[1, 2])
    with pytest.raises(RequestError, match=r"priority is 0\.5"):
        llm.generate([[3]], SHORT, priority=[0.5])  # type: ignore[list-item]


def test_prefixes_are_shared_under_one_salt_only(llm: LLM) -> None:
    ids = list(range(100, 130))

    def cached(salt: str) -> int:
        prompt = {"prompt_token_ids": ids, "cache_salt": salt} if salt else ids
        return llm.generate([prompt], SHORT)[0].num_cached_tokens

    assert [cached(s) for s in ("", "", "a", "a", "b", "b", "")] == [0, 28, 0, 28, 0, 28, 28]
    with pytest.raises(RequestError, match="cache_salt is 3"):
        llm.generate([{"prompt_token_ids": ids, "cache_salt": 3}], SHORT)


# ---- log probabilities of prompts ---------------------------------------------------------------------------


@pytest.mark.parametrize("tight", [False, True])
def test_prompt_logprobs_come_from_the_prefill(llm: LLM, monkeypatch: pytest.MonkeyPatch, tight: bool) -> None:
    """Chunks of 5 tokens, two steps in flight, with and without preemption; other requests have cached the same
    prefixes.
    """
    monkeypatch.setattr("ridgeline.runtime.generator.PROMPT_CHUNK", 3)
    rng, options = np.random.default_rng(0), EngineOptions(
        block_size=4, max_num_batched_tokens=5, max_num_seqs=6, steps_in_flight=2,
    )  # fmt: skip
    prompts = [rng.integers(3, 200, n).tolist() for n in (40, 1, 17, 33, 2)]
    small = LLM(llm.checkpoint.folder.as_posix(), engine=options)
    assert small.config is not None
    engine = Engine(small.loaded, small.config)
    if tight:
        pages = tuple(g.most_pages(56) + 2 for g in small.config.groups)
        engine = Engine(small.loaded, replace(small.config, num_pages=pages))
    params = SamplingParams(max_tokens=12, temperature=0, prompt_logprobs=2, n=2, ignore_eos=True)
    plain = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add(2 * i, request(prompt, plain))
        engine.add(2 * i + 1, request(prompt, params))
    entries = {}
    while len(engine):
        for event in engine.step():
            if event.prompt_logprobs is not None:
                assert event.request not in entries
                entries[event.request] = event.prompt_logprobs
        engine.check()
    assert set(entries) == {1, 3, 5, 7, 9}
    assert not tight or engine.stats().preempted_recompute > 0
    for i, prompt in enumerate(prompts):
        rows = log_softmax(llm.logits([prompt])[0])
        found = entries[2 * i + 1]
        assert [e.token_id for e in found] == prompt[1:]
        wanted = [rows[at, token] for at, token in enumerate(prompt[1:])]
        np.testing.assert_allclose([e.logprob for e in found], wanted, atol=2e-5)
        assert [e.top[0][0] for e in found] == rows[: len(found)].argmax(1).tolist()


# ---- too many requests --------------------------------------------------------------------------------------


def test_a_thousand_requests_on_a_pool_that_is_too_small_for_one(folder: str) -> None:
    """Requests that fit are answered; the others get an error with the numbers."""
    llm = LLM(folder, engine=EngineOptions(block_size=4, max_num_seqs=16))
    assert llm.config is not None
    few = tuple(12 for _ in llm.config.groups)
    engine = Engine(llm.loaded, replace(llm.config, num_pages=few))
    rng = np.random.default_rng(0)
    sizes = [int(n) for n in rng.integers(1, 60, 1000)]
    refused, one = 0, replace(SHORT, max_tokens=1)
    for i, n in enumerate(sizes):
        try:
            engine.add(i, request([3 + i % 50] * n, one))
        except RequestError as e:
            refused += 1
            assert "pages of 4 tokens" in str(e)
            assert "there are 11" in str(e)
    finished = set()
    while len(engine):
        for event in engine.step():
            assert event.error is None
            if event.finish_reason:
                finished.add(event.request)
    assert refused == sum(n + 1 > 44 for n in sizes) > 200
    assert len(finished) == 1000 - refused
    engine.check()
