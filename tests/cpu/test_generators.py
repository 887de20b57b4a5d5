"""The two generators behind LLM.generate, the engine and naive sampling: their tokens are equal, also after errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oracle.build import build
from oracle.families import CASES
from ridgeline import LLM, SamplingParams
from ridgeline.errors import RequestError
from ridgeline.runtime.runner import DeviceRunner
from ridgeline.settings import EngineOptions

PROMPTS = [[5, 6, 7], [9] * 30, [5, 6, 8, 11], [3]]
MIXED = [
    SamplingParams(max_tokens=12, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=9, seed=3, n=3, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=20, seed=4, top_p=0.8, presence_penalty=1.0, ignore_eos=True),
    SamplingParams(max_tokens=5, temperature=0, prompt_logprobs=1, n=2, ignore_eos=True),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build(CASES["gemma3"], path)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder))


def tokens(llm: LLM, prompts: Any = None, params: Any = None) -> list[list[list[int]]]:
    outputs = llm.generate(prompts or PROMPTS, params or MIXED)
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


def test_engine_and_naive_sampling_give_equal_answers(llm: LLM, folder: Path) -> None:
    naive = LLM(str(folder), cache="off")
    assert naive.config is None
    assert llm.config is not None
    for a, b in zip(llm.generate(PROMPTS, MIXED), naive.generate(PROMPTS, MIXED), strict=True):
        assert [c.token_ids for c in a.outputs] == [c.token_ids for c in b.outputs]
        assert [c.finish_reason for c in a.outputs] == [c.finish_reason for c in b.outputs]
        for x, y in zip(a.outputs, b.outputs, strict=True):
            assert (x.logprobs is None) == (y.logprobs is None)
            for p, q in zip(x.logprobs or [], y.logprobs or [], strict=True):
                assert p.logprob == pytest.approx(q.logprob, abs=1e-4)
        assert (a.prompt_logprobs is None) == (b.prompt_logprobs is None)
        assert 0 < a.timing.ttft_s <= a.timing.total_s


def test_a_second_call_finds_the_first_ones_prefix(folder: Path) -> None:
    llm = LLM(str(folder), engine=EngineOptions(block_size=4))
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    prompt = list(range(3, 43))
    (first,), (again,) = llm.generate([prompt], params), llm.generate([[*prompt, 7]], params)
    assert first.num_cached_tokens == 0
    assert again.num_cached_tokens == 40
    assert again.to_json()["usage"]["cached_tokens"] == 40
    (cold,) = LLM(str(folder)).generate([[*prompt, 7]], params)
    assert again.outputs[0].token_ids == cold.outputs[0].token_ids


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("when", [1, 3, 8])
def test_an_interrupt_leaves_a_model_that_answers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, when: int, steps_in_flight: int
) -> None:
    llm = LLM(str(folder), engine=EngineOptions(steps_in_flight=steps_in_flight, max_num_batched_tokens=16))
    wanted = tokens(llm)
    submit, calls = DeviceRunner.submit, 0

    def interrupted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == when:
            raise KeyboardInterrupt
        return submit(*args)

    with monkeypatch.context() as patch:
        patch.setattr(DeviceRunner, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tokens(llm)
    assert tokens(llm) == wanted


def test_results_are_reported_as_they_are_complete(llm: LLM) -> None:
    order: list[int] = []
    outputs = llm.generate(PROMPTS, MIXED, on_done=lambda index, output: order.append(index))
    lengths = [p.max_tokens or 0 for p in MIXED]
    assert order == sorted(range(4), key=lambda i: lengths[i])  # all requests start in the first step
    assert [o.prompt_token_ids for o in outputs] == PROMPTS


def test_a_request_that_can_never_fit_fails_alone(folder: Path) -> None:
    """With few pages, the default length is reduced at the start, and a requested length that
    does not fit is refused.
    """
    groups_of_page = LLM(str(folder), engine=EngineOptions(block_size=4)).config
    assert groups_of_page is not None
    few = sum(11 * g.page_bytes for g in groups_of_page.groups)
    small = LLM(str(folder), engine=EngineOptions(block_size=4, kv_cache_memory_bytes=few))
    assert small.config is not None
    assert 36 <= small.max_model_len < 256
    assert str(small.max_model_len) in small.config.reasons["max_model_len"]
    with pytest.raises(RequestError, match=f"context of {small.max_model_len}"):
        small.generate([[5] * small.max_model_len], SamplingParams(max_tokens=1))
    assert tokens(small, [PROMPTS[0]], [MIXED[0]]) == tokens(LLM(str(folder)), [PROMPTS[0]], [MIXED[0]])
    with pytest.raises(RequestError, match="lower --max-model-len to"):
        LLM(str(folder), max_model_len=256, engine=EngineOptions(block_size=4, kv_cache_memory_bytes=few))


@pytest.mark.parametrize(
    "options",
    [{"max_num_seqs": 0}, {"max_num_batched_tokens": -1}, {"block_size": 2.5}, {"steps_in_flight": 3},
     {"kv_cache_memory_bytes": 10}],
)  # fmt: skip
def test_engine_options_out_of_range(folder: Path, options: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        LLM(str(folder), engine=EngineOptions(**options))


def test_a_cache_of_another_name(folder: Path) -> None:
    with pytest.raises(RequestError, match="'on' or 'off'"):
        LLM(str(folder), cache="static")  # type: ignore[arg-type]
