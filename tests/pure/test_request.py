"""SamplingParams refuses invalid values, in one line that names the value and the limit; outputs as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from typing import Any

import pytest

from ridgeline.errors import RequestError
from ridgeline.spec.breakers import TokenBreaker
from ridgeline.spec.request import CompletionOutput, RequestOutput, SamplingParams, Timing, TokenLogprobs

NAN, INF = math.nan, math.inf
HUGE = 10**400  # JSON has no largest number, and this one exceeds every float
WHOLE = (-2, 1.5, 2.0, NAN, INF, True, "3", [1])
FLOATS = (-0.1, NAN, INF, -INF, True, "0.5", None, HUGE, [0.5])
GIVEN = tuple(value for value in FLOATS if value is not None)  # where None is the default
BAD: dict[str, tuple[tuple[object, ...], str]] = {
    "n": ((*WHOLE, 0, None, 10**12), "1"),
    "max_tokens": ((*WHOLE, 0), "1"),
    "temperature": (FLOATS, "0"),
    "top_p": ((*FLOATS, 0, 0.0, 1.0000001, 2), "1"),
    "top_k": ((*WHOLE, None), "-1"),
    "min_p": ((*FLOATS, 1.0000001), "1"),
    "typical_p": ((*FLOATS, 0, 0.0, 1.0000001), "1"),
    "top_n_sigma": ((*FLOATS[1:], -1.1), "-1"),
    "xtc_probability": ((*FLOATS, 1.0000001), "1"),
    "xtc_threshold": ((*FLOATS, 1.0000001), "1"),
    "dry_multiplier": (FLOATS, "0"),
    "dry_base": ((*FLOATS, 0.99), "1"),
    "dry_allowed_length": ((*WHOLE, 0, None), "1"),
    "dry_penalty_last_n": ((*WHOLE, None), "-1"),
    "dry_sequence_breakers": ((5, None, "", ["a", ""], ["a", 5], ["a"] * 33, ["a" * 41]), ""),
    "dry_token_breakers": ((5, None, ["a"], [[3]], [TokenBreaker(frozenset(range(1 << 15)), (1,))]), ""),
    "presence_penalty": ((*FLOATS[1:], -2.0000001, 2.0000001), "2"),
    "frequency_penalty": ((*FLOATS[1:], -2.0000001, 2.0000001), "2"),
    "logit_bias": (
        (
            5,
            None,
            "ab",
            {3},
            [3],
            [(3, 1.0, 2)],
            {"3": 1.0},
            {3.0: 1.0},
            {True: 1.0},
            {-1: 1.0},
            {3: NAN},
            {3: None},
            {3: 100.1},
            {3: -100.1},
            {3: True},
            {3: HUGE},
            {3: "1"},
        ),
        "",
    ),
    "allowed_token_ids": ((5, "ab", {3}, (), [], (-1,), (1.0,), (True,), ("a",), (3, None)), ""),
    "bad_token_ids": ((5, None, "ab", {3}, (-1,), (1.0,), (True,), ("a",), (3, NAN)), ""),
    "bad_words": ((5, None, "", [""], [" "], ["a", 5], {"a"}, ["a"] * 1025, ["a" * 8193]), ""),
    "bad_token_sequences": (
        (5, None, "ab", {3}, [3], [()], [(-1,)], [(3, "a")], [(3,)] * 4097, [(3,) * (1 << 17), (3,)]),
        "",
    ),
    "min_tokens": ((*WHOLE, -1, None, 17), "at "),
    "stop": ((5, None, "", [""], ["a", ""], ["a", 5], [b"a"], {"a"}, {"a": 1}), "none of them empty"),
    "include_stop_str_in_output": ((1, "no", None), ""),
    "prompt_logprobs": ((*WHOLE, -1, 21, HUGE), "20"),
    "logprobs_mode": (("RAW", "", None, 1, ["raw"], "raw_logits"), "raw or processed"),
    "repetition_penalty": ((*FLOATS, 0, 0.0), "0"),
    "seed": ((*WHOLE, -1, 2**63, HUGE), str(2**63 - 1)),
    "stop_token_ids": (((-1,), (1.0,), (True,), (3, NAN), ("a",), ([1],)), "0"),
    "ignore_eos": ((1, "no", None), ""),
    "remasking": (("LOW", "", None, 1, ["random"]), "low_confidence, random, top_margin, entropy or origin"),
    "denoising_passes": ((*WHOLE, 0, -1), "1"),
    "confidence_threshold": ((*GIVEN, 1.0000001), "1"),
    "confidence_factor": (GIVEN, "0"),
    "entropy_bound": (GIVEN, "0"),
    "edit_threshold": ((*GIVEN, 1.0000001), "1"),
    "block_length": ((*WHOLE, 0, -1), "1"),
    "cfg_scale": (FLOATS, "0"),
    "suffix": ((5, None, [""], ["a", 5], ["a", "b"], {"a"}), ""),
    "suffix_token_ids": ((5, None, "ab", (-1,), (1.0,), (True,), ("a",)), ""),
    "num_speculative_tokens": ((*WHOLE, -1), "0"),
    "logprobs": ((*WHOLE, -1, 21, HUGE), "20"),
    "skip_special_tokens": ((0, "yes", None), ""),
    "structured_outputs": (
        (5, "json", {}, {"regex": 1}, {"regex": "a", "choice": ["b"]}, {"choice": []}, {"x": 1}),
        "",
    ),
}


def test_every_parameter_is_here() -> None:
    assert set(BAD) == {f.name for f in fields(SamplingParams)}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param(name, value, id=f"{name}={'huge' if value == HUGE else value!s:.40}")
        for name, (values, _) in BAD.items()
        for value in values
    ],
)
def test_out_of_range_is_refused_with_name_and_limit(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert name in message
    assert BAD[name][1] in message.lower()
    assert "\n" not in message


@pytest.mark.parametrize("value", [5, None, "ab", {3: 4}, {3}])
def test_stop_tokens_are_a_list(value: Any) -> None:
    with pytest.raises(RequestError, match=r"stop_token_ids is .*list"):
        SamplingParams(stop_token_ids=value)
    assert {SamplingParams(stop_token_ids=[3, 4])} == {SamplingParams(stop_token_ids=(3, 4))}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "good",
    [
        {"n": 1}, {"n": 64}, {"max_tokens": None}, {"max_tokens": 10**9}, {"temperature": 0}, {"temperature": 2},
        {"top_p": 1}, {"top_p": 1e-9}, {"top_k": -1}, {"top_k": 0}, {"top_k": 10**9}, {"min_p": 0}, {"min_p": 1},
        {"repetition_penalty": 0.5}, {"repetition_penalty": 2}, {"seed": 0}, {"seed": 2**63 - 1}, {"seed": None},
        {"stop_token_ids": ()}, {"stop_token_ids": (0, 5)}, {"logprobs": 0}, {"logprobs": 20}, {"ignore_eos": True},
        {"typical_p": 1}, {"typical_p": 1e-9}, {"presence_penalty": -2}, {"presence_penalty": 2},
        {"frequency_penalty": -2.0}, {"frequency_penalty": 2.0}, {"logit_bias": ((3, -100), (5, 100.0))},
        {"allowed_token_ids": (0,)}, {"allowed_token_ids": None}, {"bad_token_ids": (0, 7)}, {"min_tokens": 16},
        {"stop": ()}, {"stop": ("a", " ")}, {"prompt_logprobs": 0}, {"prompt_logprobs": 20},
        {"remasking": "entropy"}, {"denoising_passes": 1}, {"confidence_threshold": 1}, {"confidence_factor": 3.0},
        {"entropy_bound": 0}, {"edit_threshold": 1}, {"block_length": 1}, {"suffix": ("a",)},
        {"suffix_token_ids": (0,)}, {"cfg_scale": 0},
        {"logprobs_mode": "processed"}, {"include_stop_str_in_output": True}, {"top_n_sigma": -1}, {"dry_base": 1},
        {"xtc_probability": 1}, {"xtc_threshold": 1}, {"dry_allowed_length": 1}, {"dry_penalty_last_n": -1},
        {"dry_sequence_breakers": ()}, {"dry_sequence_breakers": ("a" * 40,) * 32},
        {"dry_token_breakers": (TokenBreaker(frozenset(range((1 << 15) - 1)), (1,)),)},
    ],
    ids=str,
)  # fmt: skip
def test_the_limits_themselves_are_allowed(good: dict[str, Any]) -> None:
    (name,) = good
    assert getattr(SamplingParams(**good), name) == good[name]


def test_lists_and_mappings_are_kept_as_tuples() -> None:
    """Lists and mappings become tuples, so that parameters stay hashable, and equal ones compare equal."""
    given: dict[str, Any] = {
        "stop": ["ab", "c"], "logit_bias": {7: -1.5, 3: 2}, "allowed_token_ids": [3, 4], "bad_token_ids": [4],
    }  # fmt: skip
    params = SamplingParams(**given)
    assert params.stop == ("ab", "c")
    assert params.logit_bias == ((3, 2), (7, -1.5))
    assert params.allowed_token_ids == (3, 4)
    assert {params} == {SamplingParams(**given)} == {replace(params)}
    assert SamplingParams(stop="ab").stop == ("ab",)  # type: ignore[arg-type]
    assert SamplingParams(logit_bias=[(3, 1.0)]).logit_bias == ((3, 1.0),)  # type: ignore[arg-type]


def test_limits_that_depend_on_each_other() -> None:
    with pytest.raises(RequestError, match="min_tokens is 5; it must be at most max_tokens, 4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=500, max_tokens=None).min_tokens == 500
    with pytest.raises(RequestError, match="allowed_token_ids"):
        SamplingParams(allowed_token_ids=(3, 4), bad_token_ids=(4, 3, 9))
    assert SamplingParams(allowed_token_ids=(3, 4), bad_token_ids=(3,))


@pytest.mark.parametrize("heads", [{}, [3], {-1}, {"a"}, set(), 5])
def test_a_breaker_has_heads(heads: Any) -> None:
    with pytest.raises(RequestError, match="heads"):
        TokenBreaker(heads)
    with pytest.raises(RequestError, match="tail"):
        TokenBreaker(frozenset({3}), 5)  # type: ignore[arg-type]


IDS = [
    "logit_bias",
    "allowed_token_ids",
    "bad_token_ids",
    "stop_token_ids",
    "bad_token_sequences",
    "dry_token_breakers",
]


@pytest.mark.parametrize("name", IDS)
def test_token_ids_that_a_model_does_not_have(name: str) -> None:
    given: dict[str, Any] = {
        "logit_bias": {9: 1.0, 99: 1.0}, "bad_token_sequences": [(9, 99)],
        "dry_token_breakers": [TokenBreaker(frozenset({9, 99}), (5,))],
    }  # fmt: skip
    value: Any = given.get(name, (99, 9))
    params = SamplingParams(**{name: value})
    params.check_vocabulary(100)
    with pytest.raises(RequestError, match=rf"{name} has 99; .*0\.\.98"):
        params.check_vocabulary(99)
    SamplingParams().check_vocabulary(1)


def test_output_as_json_has_the_requested_fields() -> None:
    entry = TokenLogprobs(3, -0.5, ((3, -0.5), (1, -1.0)))
    as_json = {
        "token_id": 3, "logprob": -0.5,
        "top_logprobs": [{"token_id": 3, "logprob": -0.5}, {"token_id": 1, "logprob": -1.0}],
    }  # fmt: skip
    timing = Timing(0.1, None, 0.2, 5.0)
    plain = RequestOutput("a", [1], [CompletionOutput(0, [3], "b", "length")], timing).to_json()
    assert list(plain) == ["choices", "usage", "timing"]
    assert plain["choices"] == [{"index": 0, "text": "b", "token_ids": [3], "finish_reason": "length"}]
    choices = [
        CompletionOutput(0, [3], "b", "stop", stop_reason="\n", logprobs=[entry]),
        CompletionOutput(1, [3], "b", "stop", stop_reason=0),
        CompletionOutput(2, [], "", "error", error="no token"),
    ]
    full = RequestOutput("a", [1, 3], choices, timing, prompt_logprobs=[None, entry]).to_json()
    assert full["prompt_logprobs"] == [None, as_json]
    assert full["choices"][0]["logprobs"] == [as_json]
    assert [c.get("stop_reason") for c in full["choices"]] == ["\n", 0, None]
    assert [c.get("error") for c in full["choices"]] == [None, None, "no token"]
    assert json.loads(json.dumps(full)) == full
