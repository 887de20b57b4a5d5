"""Where an answer ends: stop strings at any token borders, stop tokens, min_tokens."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oracle.data import shared_data
from ridgeline import LLM, RequestOutput, SamplingParams
from ridgeline.cli.main import main
from ridgeline.errors import RequestError
from ridgeline.sample.stop import StopStrings

PROMPT = "Once upon a time"


def first_match(text: str, stops: Sequence[str], unarmed: int = 0) -> tuple[int, str] | None:
    """Return the end of the first match and the stop string, found by a check at every position. No match may end
    within the first `unarmed` characters.
    """
    for end in range(unarmed + 1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return end, max(found, key=len)
    return None


_STOPS = st.lists(st.text("ab", min_size=1, max_size=6) | st.text("abc\u00e9", min_size=1, max_size=3), max_size=4)


@settings(max_examples=500, deadline=None, derandomize=True, database=None)
@given(
    pieces=st.lists(st.text("abc\u00e9", max_size=7)), stops=_STOPS, unarmed=st.integers(0, 4), include=st.booleans()
)
@example(pieces=["aab", "aaa", "b"], stops=["aabaaab"], unarmed=0, include=False)
@example(pieces=["ab", "c"], stops=["b", "bc", "abc"], unarmed=1, include=False)
@example(pieces=["xab", "ab"], stops=["abab", "ab"], unarmed=1, include=True)
def test_a_match_is_found_wherever_the_text_is_cut(
    pieces: list[str], stops: list[str], unarmed: int, include: bool
) -> None:
    search, out, match = StopStrings(stops, include), "", None
    for i, piece in enumerate(pieces):
        emitted, found = search.push(piece, armed=i >= unarmed)
        assert match is None or (emitted, found) == ("", None)  # there is no text after a match
        out, match = out + emitted, match or found
        if match is None:
            # The search holds back exactly the text that may still become a match.
            text = "".join(pieces[: i + 1])
            held = max((n for s in stops for n in range(len(s)) if text.endswith(s[:n])), default=0)
            assert out == text[: len(text) - held]
    out += search.flush()
    text = "".join(pieces)
    expected = first_match(text, stops, len("".join(pieces[:unarmed])))
    if expected is None:
        assert (out, match) == (text, None)
    else:
        end, stop = expected
        assert match == stop
        assert out == text[: end if include else end - len(stop)]


def test_without_stop_strings_no_text_is_held_back() -> None:
    search = StopStrings([])
    assert [search.push("ab"), search.push(""), search.push("c")] == [("ab", None), ("", None), ("c", None)]
    assert search.flush() == ""


def test_the_longest_of_those_that_end_together() -> None:
    assert StopStrings(["b", "ab"]).push("xab") == ("x", "ab")
    assert StopStrings(["abc", "b"]).push("abc") == ("a", "b")  # the stop string that is complete first


def test_a_long_text_that_always_nearly_matches() -> None:
    """The time is linear in the text, however repetitive; a naive search would compare 1.5 billion characters."""
    search = StopStrings(["a" * 5000 + "b"])
    sent = sum(len(search.push("a" * 1000)[0]) for _ in range(300))
    assert sent == 300_000 - 5000
    assert search.push("b") == ("", "a" * 5000 + "b")


# A whole model -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stories() -> LLM:
    return LLM(str(shared_data() / "models" / "stories260K"))


def answer(llm: LLM, **kwargs: Any) -> RequestOutput:
    kwargs = {"temperature": 0, "max_tokens": 60} | kwargs
    return llm.generate(PROMPT, SamplingParams(**kwargs))[0]


@pytest.fixture(scope="module")
def free(stories: LLM) -> tuple[list[int], str]:
    output = answer(stories).outputs[0]
    return output.token_ids, output.text


def ends_of_tokens(llm: LLM, ids: Sequence[int]) -> list[int]:
    """Return the length of the text after each token."""
    assert llm.tokenizer is not None
    stream = llm.tokenizer.detokenizer(True, llm.encode(PROMPT))
    lengths, total = [], 0
    for token in ids:
        total += len(stream.push(token))
        lengths.append(total)
    return lengths


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("length", [1, 2, 5, 11, 30])
def test_every_substring_of_an_answer_stops_it(
    length: int, include: bool, stories: LLM, free: tuple[list[int], str]
) -> None:
    """A match may cross token borders: the text ends before it, and the tokens end with the one that completed it."""
    ids, text = free
    ends = ends_of_tokens(stories, ids)
    stops = [text[i : i + length] for i in range(0, len(text) - length, 7)]
    params = [
        SamplingParams(temperature=0, max_tokens=60, stop=[stop], include_stop_str_in_output=include)  # type: ignore[arg-type]
        for stop in stops
    ]
    across = 0
    for stop, output in zip(stops, stories.generate([PROMPT] * len(stops), params), strict=True):
        (choice,) = output.outputs
        start = text.index(stop)
        assert choice.text == text[: start + (length if include else 0)]
        count = next(i for i, end in enumerate(ends, 1) if end >= start + length)
        assert choice.token_ids == ids[:count]
        assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
        across += count > 1 and ends[count - 2] > start
    assert across > 3 or length == 1


def test_streamed_text_never_passes_a_stop_string(stories: LLM, free: tuple[list[int], str]) -> None:
    _, text = free
    stop = text[40:60]
    streamed: list[str] = []
    params = SamplingParams(temperature=0, max_tokens=60, stop=(text[70:75], stop))
    (output,) = stories.generate(PROMPT, params, on_text=lambda request, choice, piece: streamed.append(piece))
    assert "".join(streamed) == output.outputs[0].text == text[: text.index(stop)]
    almost = SamplingParams(temperature=0, max_tokens=60, stop=(stop[:-1] + "#", text[-3:] + "#"))
    streamed.clear()
    (output,) = stories.generate(PROMPT, almost, on_text=lambda request, choice, piece: streamed.append(piece))
    assert "".join(streamed) == output.outputs[0].text == text  # the last piece contains the text that was held back
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("length", None)


def test_choices_stop_each_on_their_own(stories: LLM) -> None:
    plain = answer(stories, n=4, temperature=1, seed=3).outputs
    stopped = answer(stories, n=4, temperature=1, seed=3, stop=["."]).outputs
    for before, after in zip(plain, stopped, strict=True):
        assert after.text == before.text.split(".")[0]
        assert after.stop_reason == ("." if "." in before.text else None)
        assert after.token_ids == before.token_ids[: len(after.token_ids)]


def test_min_tokens_holds_off_every_kind_of_end(stories: LLM, free: tuple[list[int], str]) -> None:
    ids, text = free
    ends = ends_of_tokens(stories, ids)
    stop = text[ends[3] : ends[5]]  # tokens 5 and 6 complete the stop string
    assert text.index(stop) == ends[3]
    assert answer(stories, stop=stop, min_tokens=5).outputs[0].token_ids == ids[:6]
    assert answer(stories, stop=stop, min_tokens=5).outputs[0].text == text[: ends[3]]
    later = answer(stories, stop=stop, min_tokens=6).outputs[0]
    following = text.find(stop, ends[3] + 1)
    assert later.text == (text if following < 0 else text[:following])
    for kwargs in ({"stop_token_ids": [ids[5]]}, {"logit_bias": {2: 100.0}}):
        held = answer(stories, min_tokens=20, **kwargs).outputs[0]
        end = ids[5] if "stop_token_ids" in kwargs else 2
        assert len(held.token_ids) >= 20
        assert end not in held.token_ids[:20]
    assert answer(stories, logit_bias={2: 100.0}, min_tokens=20).outputs[0].token_ids[20:] == [2]


def test_the_reason_why_an_answer_ended(stories: LLM, free: tuple[list[int], str]) -> None:
    ids, _ = free
    token = answer(stories, stop_token_ids=[ids[4]]).outputs[0]
    assert (token.finish_reason, token.stop_reason) == ("stop", ids[4])
    end = answer(stories, logit_bias={2: 100.0}).outputs[0]
    assert (end.token_ids, end.finish_reason, end.stop_reason) == ([2], "stop", None)
    both = answer(stories, logit_bias={2: 100.0}, stop_token_ids=[2], ignore_eos=True).outputs[0]
    assert (both.token_ids, both.stop_reason) == ([2], 2)


def test_the_requirements_of_stop(stories: LLM) -> None:
    without = LLM(str(shared_data() / "models" / "stories260K"), skip_tokenizer_init=True)
    with pytest.raises(RequestError, match=r"stop needs a tokenizer.*stop_token_ids"):
        without.generate([[5]], SamplingParams(stop=("a",)))
    with pytest.raises(RequestError, match=r"min_tokens 600 exceed the context of 512; lower min_tokens to 511"):
        stories.generate([[5]], SamplingParams(min_tokens=600, max_tokens=None))


# The command line --------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: str) -> tuple[int, str, str]:
    model = shared_data() / "models" / "stories260K"
    monkeypatch.setattr(sys, "argv", ["ridgeline", "generate", "-m", str(model), PROMPT, *args])
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(SystemExit) as caught:
        main()
    captured = capsys.readouterr()
    return int(caught.value.code or 0), captured.out, captured.err


def test_options_reach_the_parameters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, stories: LLM
) -> None:
    status, out, _ = run(
        capsys, monkeypatch, "--json", "--temperature", "0.9", "--seed", "4", "--max-tokens", "30", "--stop", "the",
        "--stop", ".", "--include-stop-str-in-output", "--min-tokens", "4", "--presence-penalty", "0.5",
        "--frequency-penalty", "-0.5", "--typical-p", "0.9", "--logit-bias", "300=2.5", "--logit-bias", "301=-1",
        "--bad-token-ids", "400", "--bad-token-ids", "401", "--logprobs", "2", "--logprobs-mode", "processed",
        "--prompt-logprobs", "1",
    )  # fmt: skip
    params = SamplingParams(
        temperature=0.9, max_tokens=30, stop=("the", "."), include_stop_str_in_output=True, min_tokens=4,
        presence_penalty=0.5, frequency_penalty=-0.5, typical_p=0.9, logit_bias=((300, 2.5), (301, -1.0)),
        bad_token_ids=(400, 401), logprobs=2, logprobs_mode="processed", prompt_logprobs=1,
    )  # fmt: skip
    seeded = LLM(str(stories.checkpoint.folder), seed=4)
    expected = seeded.generate(PROMPT, params)[0].to_json()
    found = json.loads(out)
    assert status == 0
    (choice,), (same,) = found["choices"], expected["choices"]
    for key in ("text", "token_ids", "finish_reason", "stop_reason"):
        assert choice[key] == same[key]
    entries = [*choice["logprobs"], *found["prompt_logprobs"][1:]]
    for entry, other in zip(entries, [*same["logprobs"], *expected["prompt_logprobs"][1:]], strict=True):
        assert entry["token_id"] == other["token_id"]
        assert [top["token_id"] for top in entry["top_logprobs"]] == [top["token_id"] for top in other["top_logprobs"]]
        assert entry["logprob"] == pytest.approx(other["logprob"], abs=1e-5)
    assert found["prompt_logprobs"][0] is None
    status, out, _ = run(capsys, monkeypatch, "--allowed-token-ids", "77", "--min-tokens", "130", "--json")
    assert json.loads(out)["choices"][0]["token_ids"] == [77] * 130  # the default length is not applied


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (("--logit-bias", "5"), "ID=BIAS"), (("--logit-bias", "a=5"), "ID=BIAS"), (("--logit-bias", "5=nan"), "nan"),
        (("--logit-bias", "512=1"), "0..511"), (("--stop", ""), "stop"), (("--min-tokens", "600"), "600"),
        (("--min-tokens", "-1"), "min_tokens"), (("--presence-penalty", "2.5"), "presence_penalty"),
        (("--typical-p", "0"), "typical_p"), (("--logprobs-mode", "cooked"), "raw or processed"),
        (("--prompt-logprobs", "21"), "20"), (("--allowed-token-ids", "-3"), "allowed_token_ids"),
        (("--allowed-token-ids", "3", "--bad-token-ids", "3"), "bad_token_ids"),
        (("--allowed-token-ids", "2", "--min-tokens", "3"), "leave no token"),
    ],
    ids=str,
)  # fmt: skip
def test_options_out_of_range(
    args: tuple[str, ...], part: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, out, err = run(capsys, monkeypatch, *args)
    assert status == 2
    assert out.strip() == ""
    assert part in err
    assert err.splitlines()[-1].startswith("ridgeline: ")
