"""The exactness contract: an answer's tokens never depend on chunks, pages, the batch,
preemption or steps in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from oracle.build import build
from oracle.case import VOCAB
from oracle.families import CASES
from oracle.ours import SPECS, write
from ridgeline import LLM, SamplingParams
from ridgeline.engine import Engine
from ridgeline.errors import RequestError
from ridgeline.runtime.generator import Event, GenerationRequest
from ridgeline.sample.sampler import NoiseKey
from ridgeline.settings import EngineConfig, EngineOptions, resolve
from ridgeline.spec import LatentAttention
from ridgeline.spec.request import CompletionOutput, TokenLogprobs
from shares import ONE_OF_EACH, daily

Tokens = dict[tuple[int, int], list[int]]
FREE = 1 << 30

# One request for each way of serving: greedy and sampled, one answer and several, prompts that share a prefix, prompts
# shorter and longer than every window and page of the cases.
RNG = np.random.default_rng(0)
SHARED = RNG.integers(3, VOCAB, 40).tolist()
PROMPTS = [RNG.integers(3, VOCAB, n).tolist() for n in (1, 7, 30, 60)]
PROMPTS += [[*SHARED, 5, 6, 7], [*SHARED, 9], SHARED[:33]]
KINDS = [(0.0, 1), (1.0, 1), (0.0, 3), (1.0, 4), (0.0, 1), (1.0, 2), (0.0, 1)]
REQUESTS = [
    SamplingParams(max_tokens=20, temperature=t, seed=i, n=n, ignore_eos=True, logprobs=None if t or i == 6 else 2)
    for i, (t, n) in enumerate(KINDS)
]
# The largest difference that other sequences may make to a logit of device `reference`, which computes in float64: a
# logit is rounded to float32 once, so it is the same number or its neighbor, and the largest logits of the cases are
# below 16.
REFERENCE_NOISE = 1e-6


CONTEXT = {name: case.max_model_len for name, case in CASES.items()}
CONTEXT |= {name: spec.max_position_embeddings for name, spec in SPECS.items()}


# The scheduler is the same on every device, so one family of each kind runs on kernels without torch, the others on
# torch.
ON_CPU = {
    "llama_gqa", "gemma3", "gpt_oss", "cla_mixed", "cla3_mqa", "deepseek_v2", "deepseek_v3", "qwen2_window", "qwen3",
    "qwen3_moe", "mamba", "mamba2", "jamba", "lfm2", "minimax", "qwen3_next", "kimi_linear", "nemotron_h_latent",
    "s4", "s4d_alone", "lightning",
}  # fmt: skip


@cache
def loaded(name: str) -> LLM:
    with TemporaryDirectory() as folder:
        if name in SPECS:
            write(SPECS[name], folder)
        else:
            build(CASES[name], folder)
        return LLM(folder, max_model_len=CONTEXT[name], cache="off", device="cpu" if name in ON_CPU else "reference")


def request(prompt: list[int], params: SamplingParams, seed: int) -> GenerationRequest:
    return GenerationRequest(prompt, params, tuple(NoiseKey(seed, choice) for choice in range(params.n)))


def fitting(name: str) -> list[int]:
    """Return the requests that fit the context of a case (a few cases have a context of 100 tokens)."""
    return [i for i, p in enumerate(PROMPTS) if len(p) + 20 <= CONTEXT[name]]


@cache
def alone(name: str) -> dict[tuple[int, int], CompletionOutput]:
    """Run naive sampling, one request at a time."""
    llm, out = loaded(name), {}
    for i in fitting(name):
        (answer,) = llm.generate([PROMPTS[i]], REQUESTS[i])
        out |= {(i, choice.index): choice for choice in answer.outputs}
    return out


def baseline(name: str) -> Tokens:
    """Return the tokens of naive sampling."""
    return {key: answer.token_ids for key, answer in alone(name).items()}


def compare_logprobs(name: str, events: Sequence[Event]) -> tuple[float, float]:
    """Return the largest difference of a log probability between events and naive sampling, and the smallest lead of a
    greedy token over the next best, of the answers that request log probabilities.
    """
    noise, lead, found = 0.0, float("inf"), dict[tuple[int, int], list[TokenLogprobs]]()
    for event in events:
        found.setdefault((event.request, event.choice), []).extend(event.logprobs)
    for key, entries in found.items():
        for got, wanted in zip(entries, alone(name)[key].logprobs or (), strict=True):
            pairs = zip(got.top, wanted.top, strict=True)
            noise = max(noise, *(abs(a - b) for (_, a), (_, b) in pairs))
            lead = min(lead, wanted.top[0][1] - wanted.top[1][1])
    return noise, lead


def config(name: str, *, tight: bool = False, **options: int) -> EngineConfig:
    spec, length = loaded(name).loaded.spec, CONTEXT[name]
    float_bytes = loaded(name).loaded.table.memory.float_bytes
    chosen = resolve(spec, length, EngineOptions(**options), free_bytes=FREE, fixed_len=True, float_bytes=float_bytes)
    if tight:  # little more than the longest request needs alone, so that the others are preempted
        chosen = replace(chosen, num_pages=tuple(g.most_pages(85) + 3 for g in chosen.groups))
    return chosen


def serve(
    name: str,
    settings: EngineConfig,
    arrivals: Mapping[int, int] | None = None,
    between: Callable[[Engine], None] | None = None,
    seen: list[Event] | None = None,
) -> tuple[Tokens, Engine]:
    """Run all requests through one engine; page tables are checked at every step.

    arrivals: request -> the step at which it arrives. seen: a list to which all events are added.
    """
    engine, out, step = Engine(loaded(name).loaded, settings), {}, 0
    todo = {i: (arrivals or {}).get(i, 0) for i in fitting(name)}
    while todo or len(engine):
        for i in [i for i, when in todo.items() if when <= step]:
            engine.add(i, request(PROMPTS[i], REQUESTS[i], i))
            del todo[i]
        for event in engine.step():
            assert event.error is None
            out.setdefault((event.request, event.choice), []).extend(event.tokens)
            if seen is not None:
                seen.append(event)
        if between:
            between(engine)
        engine.check()
        step += 1
        assert step < 5000, "no progress"
    return out, engine


# The verification of the same families has batches, too.
@pytest.mark.parametrize("name", daily(CONTEXT, ("llama_gqa", "cla_mixed", "jamba"), slow=False))
def test_every_family_is_exact_in_a_batch(name: str) -> None:
    """With small chunks, small and too few pages, and two steps in flight, the tokens equal those of naive sampling.

    For this to mean something on any CPU, the other sequences must not be able to change a token: a tenth of the
    smallest lead must be more than the largest difference.
    """
    settings = config(name, tight=True, max_num_seqs=6, max_num_batched_tokens=16, block_size=4, steps_in_flight=2)
    events: list[Event] = []
    out, engine = serve(name, settings, seen=events)
    assert out == baseline(name)
    noise, lead = compare_logprobs(name, events)
    assert lead > 10 * noise
    if name not in ON_CPU:
        assert noise < REFERENCE_NOISE < lead / 10
    if CONTEXT[name] > 100:
        assert engine.stats().preempted_recompute > 0


MATRIX = [
    {"max_num_batched_tokens": chunk, "block_size": page, "steps_in_flight": depth}
    for chunk in (1, 7, 16, 1000)
    for page in (1, 16, 64)
    for depth in (1, 2)
]


@pytest.mark.parametrize("options", [m for m in MATRIX if m["max_num_batched_tokens"] > 1][::3], ids=str)
@pytest.mark.parametrize("name", ["llama_gqa", "gemma3", "gpt_oss", "cla_mixed", "deepseek_v3"])
def test_chunks_pages_and_steps_in_flight_change_nothing(name: str, options: dict[str, int]) -> None:
    out, _ = serve(name, config(name, max_num_seqs=6, **options))
    assert out == baseline(name)


@pytest.mark.parametrize("absorb", [True, False])
def test_either_form_of_latent_attention_alone(absorb: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch decides which form is cheaper; the result must not depend on it."""
    name = "deepseek_v2"
    wanted = baseline(name)
    monkeypatch.setattr(LatentAttention, "absorbs", lambda self, tokens, context: absorb)
    settings = config(name, tight=True, max_num_seqs=6, max_num_batched_tokens=16, block_size=4, steps_in_flight=2)
    assert serve(name, settings)[0] == wanted


@pytest.mark.parametrize("name", daily(CONTEXT, {*ONE_OF_EACH, "gemma3"}))
def test_the_matrix_for_every_family(name: str) -> None:
    """Each family runs three settings of the matrix, the next family another three; with
    plenty of pages and with few.
    """
    at = list(CONTEXT).index(name)
    for options in (MATRIX * 10)[5 * at : 5 * at + 15 : 5]:
        for tight in (False, True):
            out, _ = serve(name, config(name, tight=tight, max_num_seqs=6, **options))
            assert out == baseline(name), options


@pytest.mark.parametrize("seed", range(5))
def test_random_arrivals_change_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrivals = {i: int(rng.integers(0, 60)) for i in range(len(PROMPTS))}
    out, _ = serve("qwen2_window", config("qwen2_window", max_num_seqs=3, max_num_batched_tokens=20), arrivals)
    assert out == baseline("qwen2_window")


@pytest.mark.parametrize("name", ["llama_gqa", "cla3_mqa"])
def test_a_shared_prefix_is_computed_once(name: str) -> None:
    """Later requests use the pages of earlier ones, and choices of one prompt share its pages."""
    arrivals = {i: 40 * i for i in range(len(PROMPTS))}
    out, engine = serve(name, config(name, block_size=4), arrivals)
    assert out == baseline(name)
    # 41 tokens of request 5 and 33 of request 6, in whole pages without the last token
    assert engine.stats().hit_tokens >= 40 + 32


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_an_abort_at_any_step_affects_no_other(steps_in_flight: int) -> None:
    for when in range(0, 40, 3):
        step = iter(range(1000))

        def abort(engine: Engine, when: int = when, step=step) -> None:
            if next(step) == when:
                engine.abort(3)

        settings = config("llama_gqa", max_num_batched_tokens=16, steps_in_flight=steps_in_flight)
        out, _ = serve("llama_gqa", settings, between=abort)
        others = {key: tokens for key, tokens in baseline("llama_gqa").items() if key[0] != 3}
        assert {key: tokens for key, tokens in out.items() if key[0] != 3} == others
        for key, tokens in out.items():
            assert tokens == baseline("llama_gqa")[key][: len(tokens)]


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_stop_with_a_step_in_flight(steps_in_flight: int) -> None:
    """A stop token is the last token of an answer; tokens that the next step has already computed are discarded."""
    name, wanted = "llama_gqa", baseline("llama_gqa")[0, 0]
    stop = wanted[7]
    end = wanted.index(stop)
    engine = Engine(loaded(name).loaded, config(name, steps_in_flight=steps_in_flight))
    params = SamplingParams(max_tokens=20, temperature=0, stop_token_ids=(stop,), ignore_eos=True)
    engine.add(0, request(PROMPTS[0], params, 0))
    events = []
    while len(engine):
        events += engine.step()
        engine.check()
    assert [t for e in events for t in e.tokens] == wanted[: end + 1]
    assert (events[-1].finish_reason, events[-1].stop_reason) == ("stop", stop)
    assert engine.step() == []
    engine.check()


def test_a_request_that_can_never_fit_fails_alone() -> None:
    name = "llama_gqa"
    settings = replace(config(name, block_size=4), num_pages=(10,))
    engine = Engine(loaded(name).loaded, settings)
    with pytest.raises(RequestError, match="need 16 pages of 4 tokens"):
        engine.add(0, request(PROMPTS[4], replace(REQUESTS[4], n=1), 0))
    engine.add(1, request(PROMPTS[0], REQUESTS[0], 0))
    tokens = []
    while len(engine):
        tokens += [t for e in engine.step() for t in e.tokens]
        engine.check()
    assert tokens == baseline(name)[0, 0]


def test_requests_beyond_the_context_are_refused() -> None:
    engine = Engine(loaded("llama_gqa").loaded, config("llama_gqa"))
    longest = engine.config.max_model_len
    for prompt, params in (([5] * longest, SamplingParams(max_tokens=None)), ([5] * (longest - 9), REQUESTS[0])):
        with pytest.raises(RequestError, match=f"exceed the context of {longest}"):
            engine.add(0, request(prompt, params, 0))
    assert len(engine) == 0


def test_penalties_survive_preemption() -> None:
    """The sampler's counts are rebuilt when a sequence is recomputed."""
    name = "qwen3"
    params = SamplingParams(
        max_tokens=20, temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.5, ignore_eos=True
    )
    llm = loaded(name)
    wanted = [llm.generate([p], replace(params, seed=i))[0].outputs[0].token_ids for i, p in enumerate(PROMPTS)]
    engine = Engine(llm.loaded, config(name, tight=True, max_num_seqs=6, block_size=4, steps_in_flight=2))
    for i, prompt in enumerate(PROMPTS):
        engine.add(i, request(prompt, replace(params, seed=i), i))
    out: dict[int, list[int]] = {}
    preempted: dict[int, int] = {}
    while len(engine):
        for event in engine.step():
            out.setdefault(event.request, []).extend(event.tokens)
            preempted[event.request] = event.num_preempted
    assert [out[i] for i in range(len(PROMPTS))] == wanted
    stats = engine.stats()
    assert stats.preempted_recompute == sum(preempted.values()) > 0
    times = stats.page_times
    assert times is not None and sum(times.lifetime.counts) == sum(times.idle.counts) > 0


def test_a_stuck_scheduler_is_an_error_and_no_endless_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(loaded("llama_gqa").loaded, config("llama_gqa"))
    engine.add(0, request(PROMPTS[0], REQUESTS[0], 0))
    monkeypatch.setattr(engine._scheduler, "schedule", lambda: None)
    with pytest.raises(RuntimeError, match="nothing can run"):
        engine.step()
