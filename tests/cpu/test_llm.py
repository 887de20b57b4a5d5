"""LLM: the exact answers of the reference models, batches that change nothing, and errors that say what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers, processors

from oracle.build import build, make_model, oracle_greedy, oracle_logits, redraw
from oracle.case import prompts
from oracle.data import shared_data
from oracle.families import CASES
from ridgeline import LLM, RequestOutput, SamplingParams
from ridgeline.errors import CheckpointError, RequestError, RidgelineError, TokenizerError
from ridgeline.runtime import naive

CONTEXT = 64
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"


def save_tokenizer(folder: Path) -> int:
    """Write a tokenizer with three special tokens and one token for each byte; return its size."""
    alphabet = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.add_special_tokens(alphabet[:3])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return len(alphabet)


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random model that reads and writes bytes: most of its answers are invalid UTF-8."""
    folder = tmp_path_factory.mktemp("tiny")
    model = make_model(CASES["llama_gqa"], vocab_size=save_tokenizer(folder), max_position_embeddings=CONTEXT)
    redraw(model, 3)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


@pytest.fixture(scope="module")
def tiny(tiny_folder: Path) -> LLM:
    return LLM(str(tiny_folder))


def with_files(source: Path, target: Path, **contents: object) -> Path:
    """Return a copy of a model folder with additional JSON files, given by their names without the suffix."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    for name, value in contents.items():
        (target / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return target


def answers(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


def refusal(kind: type[RidgelineError], call: Callable[[], object]) -> str:
    """Return the message of an error, which must be one line."""
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


# The reference models ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["stories260K", "babyllama105", "llama2xs"])
def test_real_models_continue_as_published(name: str) -> None:
    folder = shared_data() / "models" / name
    reference = json.loads((folder / "reference_greedy.json").read_text())
    llm = LLM(str(folder))
    params = SamplingParams(temperature=0, max_tokens=len(reference["greedy_ids"]))
    (output,) = llm.generate(reference["prompt"], params)
    assert output.prompt_token_ids == reference["prompt_ids"]
    assert output.outputs[0].token_ids == reference["greedy_ids"]
    assert output.prompt == reference["prompt"]
    assert reference["prompt"] + output.outputs[0].text == reference["text"]
    assert output.outputs[0].finish_reason == "length"
    best = llm.logits([reference["prompt_ids"]])[0][-1]
    for token, value in reference["first_logits_top5"]:
        assert best[token] == pytest.approx(value, abs=1e-4)


@pytest.mark.parametrize("name", ["stories260K", "babyllama105", "llama2xs"])
def test_real_models_answer_a_batch_as_they_answer_alone(name: str) -> None:
    llm = LLM(str(shared_data() / "models" / name))
    texts = ["Once upon a time", "Lily", "The cat sat on the mat and", "One day, a boy", "a"]
    greedy = SamplingParams(temperature=0, max_tokens=20)
    sampled = [SamplingParams(temperature=0.9, top_p=0.95, max_tokens=20, seed=i) for i in range(len(texts))]
    together, drawn = llm.generate(texts, greedy), llm.generate(texts, sampled)
    for i, text in enumerate(texts):
        assert answers(llm.generate(text, greedy)) == answers(together[i : i + 1])
        assert answers(llm.generate(text, sampled[i])) == answers(drawn[i : i + 1])
        assert together[i].outputs[0].text == llm.generate(text, greedy)[0].outputs[0].text
    assert answers(together) != answers(drawn)


# Greedy and sampled, one and many ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama_gqa", "gemma2", "gpt2", "qwen3_moe"])
def test_logits_and_greedy_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = build(case, tmp_path)
    llm = LLM(str(tmp_path))
    sequences = [*prompts(case), [5], [9, 9, 9]]
    found, expected = llm.logits(sequences), oracle_logits(model, sequences)
    assert [rows.shape for rows in found] == [rows.shape for rows in expected]
    assert max(float(np.abs(a - b).max()) for a, b in zip(found, expected, strict=True)) < 1e-4
    history = prompts(case)[1]
    (output,) = llm.generate([history], GREEDY)
    assert output.outputs[0].token_ids == oracle_greedy(model, history, GREEDY.max_tokens or 0)[0]


def many(count: int = 9) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, 259, size=1 + 5 * i).tolist() for i in range(count)]


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(seed=5, n=2, top_k=50, max_tokens=12)], ids=["greedy", "n=2"]
)
def test_a_batch_answers_as_each_prompt_alone(params: SamplingParams, tiny: LLM) -> None:
    together = answers(tiny.generate(many(), params))
    assert together == [answers(tiny.generate([prompt], params))[0] for prompt in many()]
    assert together[::-1] == answers(tiny.generate(many()[::-1], params))
    assert len({tuple(ids) for choices in together for ids in choices}) == len(together) * params.n


def test_a_full_step_makes_others_wait_and_changes_nothing(
    tiny: LLM, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive sampling limits a batch to the tokens of a step, counted with each answer at its longest."""
    params = SamplingParams(seed=5, n=3, max_tokens=10)
    together = answers(tiny.generate(many(), params))
    llm = LLM(str(tiny_folder), cache="off")
    sizes: list[int] = []
    forward = type(llm.loaded.model).forward

    def spy(model: Any, step: Any, *args: Any) -> Any:
        sizes.append(sum(step.lengths) if len(step.lengths) > 1 else 0)
        return forward(model, step, *args)

    monkeypatch.setattr(type(llm.loaded.model), "forward", spy)
    monkeypatch.setattr(naive, "MAX_STEP_TOKENS", 60)
    assert answers(llm.generate(many(), params)) == together
    assert 0 < max(sizes) <= 60
    assert len(sizes) > 30  # some requests waited: 27 answers of 10 tokens in one batch would take 10 steps


def test_choices_of_one_prompt(tiny: LLM) -> None:
    params = SamplingParams(n=4, seed=8, max_tokens=10, ignore_eos=True)
    (output,) = tiny.generate("abc", params)
    assert [choice.index for choice in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(choice.token_ids) for choice in output.outputs}) == 4
    (alone,) = tiny.generate("abc", SamplingParams(seed=8, max_tokens=10, ignore_eos=True))
    assert alone.outputs[0].token_ids == output.outputs[0].token_ids
    assert output.to_json()["usage"] == {"prompt_tokens": 4, "cached_tokens": 0, "completion_tokens": 40}


def test_without_a_seed_a_run_repeats_and_prompts_differ(tiny: LLM, tiny_folder: Path) -> None:
    """The noise depends on the model's seed and the index of the prompt."""
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    first = answers(tiny.generate(["abc"] * 3, params))
    assert first == answers(tiny.generate(["abc"] * 3, params))
    assert len({str(choices) for choices in first}) == 3
    other = answers(LLM(str(tiny_folder), seed=1).generate(["abc"] * 3, params))
    assert not {str(choices) for choices in other} & {str(choices) for choices in first}
    largest = answers(LLM(str(tiny_folder), seed=2**63 - 1).generate(["abc"] * 3, params))
    assert len({str(choices) for choices in largest}) == 3


def test_params_for_each_prompt(tiny: LLM) -> None:
    each = [GREEDY, SamplingParams(seed=1, max_tokens=3), SamplingParams(temperature=0, max_tokens=7, n=2)]
    outputs = tiny.generate(["a", "b", "c"], each)
    assert answers(outputs) == [answers(tiny.generate([p], q))[0] for p, q in zip(["a", "b", "c"], each, strict=True)]
    assert [len(o.outputs[0].token_ids) for o in outputs] == [12, 3, 7]
    assert [len(o.outputs) for o in outputs] == [1, 1, 2]
    message = refusal(RequestError, lambda: tiny.generate(["a", "b"], each))
    assert "2 prompts" in message
    assert "3 sampling_params" in message


def test_no_prompts_no_answers(tiny: LLM) -> None:
    assert tiny.generate([]) == []
    assert tiny.logits([]) == []


def test_logprobs_are_those_of_the_logits(tiny: LLM) -> None:
    params = SamplingParams(seed=4, temperature=2.0, top_k=40, max_tokens=6, logprobs=3, ignore_eos=True)
    (output,) = tiny.generate([[5, 6, 7]], params)
    ids, found = output.outputs[0].token_ids, output.outputs[0].logprobs
    rows = torch.from_numpy(tiny.logits([[5, 6, 7, *ids]])[0]).double().log_softmax(-1).numpy()[2:]
    assert found is not None
    assert [p.token_id for p in found] == ids
    for entry, row in zip(found, rows[:-1], strict=True):
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=1e-4)
        assert [t for t, _ in entry.top] == np.argsort(-row, kind="stable")[:3].tolist()
        assert [v for _, v in entry.top] == pytest.approx(np.sort(row)[::-1][:3], abs=1e-4)


def test_timing_adds_up(tiny: LLM) -> None:
    one, more = tiny.generate(["a", "a"], [SamplingParams(max_tokens=1), GREEDY])
    assert one.timing.tpot_s is None
    assert 0 < more.timing.ttft_s < more.timing.total_s
    assert more.timing.tpot_s is not None
    assert more.timing.ttft_s + 11 * more.timing.tpot_s == pytest.approx(more.timing.total_s)
    assert more.timing.tokens_per_s == pytest.approx(12 / more.timing.total_s)


# Ends of answers ---------------------------------------------------------------------------------------


def test_stop_tokens_end_an_answer(tiny: LLM) -> None:
    (free,) = tiny.generate("abc", GREEDY)
    ids = free.outputs[0].token_ids
    stop = ids[5]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=(258, stop))
    (output,) = tiny.generate("abc", params)
    assert output.outputs[0].token_ids == ids[: ids.index(stop) + 1]  # the stop token itself is part of the answer
    assert output.outputs[0].finish_reason == "stop"
    unused = next(t for t in range(3, 259) if t not in ids)
    (other,) = tiny.generate("abc", SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(unused,)))
    assert other.outputs[0].token_ids == ids
    assert other.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("as_list", [False, True], ids=["one eos", "a list"])
def test_eos_ends_an_answer_unless_it_is_ignored(as_list: bool, tiny: LLM, tiny_folder: Path, tmp_path: Path) -> None:
    """eos_token_id of generation_config.json has priority over that of config.json, which is 2."""
    ids = tiny.generate("abc", GREEDY)[0].outputs[0].token_ids
    eos = ids[4]
    unused = next(t for t in range(3, 259) if t not in ids)
    folder = with_files(
        tiny_folder, tmp_path, generation_config={"eos_token_id": [unused, eos] if as_list else eos, "bos_token_id": 1}
    )
    llm = LLM(str(folder))
    (output,) = llm.generate("abc", SamplingParams(temperature=0, max_tokens=12))
    assert output.outputs[0].token_ids == ids[: ids.index(eos) + 1]
    assert output.outputs[0].finish_reason == "stop"
    (further,) = llm.generate("abc", GREEDY)
    assert further.outputs[0].token_ids == ids
    assert further.outputs[0].finish_reason == "length"


def test_no_max_tokens_runs_to_the_end_of_the_context(tiny: LLM, tiny_folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    short = LLM(str(tiny_folder), max_model_len=20)
    for llm, length in ((tiny, CONTEXT), (short, 20)):
        assert llm.max_model_len == length
        (output,) = llm.generate([[7] * 9], params)
        assert len(output.outputs[0].token_ids) == length - 9
        assert output.outputs[0].finish_reason == "length"
    (last,) = short.generate([[7] * 19], params)
    assert len(last.outputs[0].token_ids) == 1


def test_recommended_parameters_are_the_default(tiny_folder: Path, tmp_path: Path) -> None:
    advice = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2}
    rest = {"do_sample": True, "max_length": 5, "transformers_version": "4.40.0"}
    llm = LLM(str(with_files(tiny_folder, tmp_path, generation_config={**advice, **rest})))
    fields = llm.default_sampling_fields()
    assert fields == advice
    assert answers(llm.generate("abc")) == answers(llm.generate("abc", SamplingParams(**fields)))
    assert answers(llm.generate("abc")) != answers(llm.generate("abc", SamplingParams()))


# Text --------------------------------------------------------------------------------------------------


def test_streamed_pieces_are_the_text(tiny: LLM) -> None:
    pieces: dict[tuple[int, int], list[str]] = {}
    done: list[int] = []

    def on_text(request: int, choice: int, text: str) -> None:
        assert request not in done
        assert text
        pieces.setdefault((request, choice), []).append(text)

    params = SamplingParams(n=2, seed=3, max_tokens=30, ignore_eos=True)
    outputs = tiny.generate(
        ["a", "é🦙", "xyz" * 8], params, on_text=on_text, on_done=lambda index, output: done.append(index)
    )
    assert sorted(done) == [0, 1, 2]
    assert tiny.tokenizer is not None
    for i, output in enumerate(outputs):
        for choice in output.outputs:
            assert "".join(pieces[i, choice.index]) == choice.text
            assert choice.text == tiny.tokenizer.decode(choice.token_ids)
            assert len(pieces[i, choice.index]) > 3  # the text arrives in pieces, not only at the end


def test_on_done_is_called_when_a_prompt_is_complete(tiny: LLM) -> None:
    done: list[int] = []
    each = [SamplingParams(max_tokens=n, ignore_eos=True, n=2) for n in (9, 3, 6)]
    tiny.generate(["a", "b", "c"], each, on_done=lambda index, output: done.append(index))
    assert done == [1, 2, 0]


def test_prompts_in_every_form(tiny: LLM) -> None:
    assert tiny.tokenizer is not None
    ids = tiny.tokenizer.encode("hello")
    assert ids[0] == 1
    forms: list[Any] = ["hello", ids, {"prompt": "hello"}, {"prompt_token_ids": ids}]
    expected = answers(tiny.generate("hello", GREEDY))
    for form in forms:
        assert answers(tiny.generate(form, GREEDY)) == expected
    assert answers(tiny.generate((form for form in forms), GREEDY)) == expected * 4
    outputs = tiny.generate(forms, GREEDY)
    assert answers(outputs) == expected * 4
    assert [o.prompt_token_ids for o in outputs] == [ids] * 4
    assert [o.prompt for o in outputs] == ["hello", None, "hello", None]


def test_messages_need_a_template(tiny: LLM, tiny_folder: Path, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    assert "template" in refusal(TokenizerError, lambda: tiny.generate(chat, GREEDY))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    llm = LLM(str(with_files(tiny_folder, tmp_path, tokenizer_config=config)))
    assert answers(llm.generate(chat, GREEDY)) == answers(tiny.generate("[user]hi", GREEDY))


def test_special_tokens_show_only_on_demand(tiny_folder: Path, tmp_path: Path) -> None:
    """A head of zeros makes all tokens equal: the answer consists of <pad>, the lowest id."""
    folder = with_files(tiny_folder, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"].zero_()
    save_file(tensors, folder / "model.safetensors")
    llm = LLM(str(folder))
    kept = SamplingParams(temperature=0, max_tokens=3, skip_special_tokens=False)
    assert llm.generate("abc", GREEDY)[0].outputs[0].text == ""
    assert llm.generate("abc", kept)[0].outputs[0].text == "<pad>" * 3


def test_another_folders_tokenizer(tiny: LLM, tiny_folder: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_folder / name, bare)
    llm = LLM(str(bare), tokenizer=str(tiny_folder))
    assert llm.generate("abc", GREEDY)[0].outputs[0].text == tiny.generate("abc", GREEDY)[0].outputs[0].text
    refusal(CheckpointError, lambda: LLM(str(bare), tokenizer=str(tmp_path / "absent")))
    without = LLM(str(bare))
    assert str(bare) in refusal(TokenizerError, lambda: without.generate("abc"))
    assert "prompt_token_ids" in refusal(TokenizerError, lambda: without.generate("abc"))
    (output,) = without.generate([[5, 6]], GREEDY)
    assert len(output.outputs[0].token_ids) == 12
    assert output.outputs[0].text == ""


# Errors ------------------------------------------------------------------------------------------------


def test_a_prompt_as_long_as_the_context(tiny: LLM, tiny_folder: Path) -> None:
    message = refusal(RequestError, lambda: tiny.generate([[5], [7] * CONTEXT], GREEDY))
    assert f"has {CONTEXT} tokens" in message
    assert "shorten" in message
    assert "max-model-len" not in message  # the limit cannot be raised, so the message does not suggest it
    short = LLM(str(tiny_folder), max_model_len=20)
    message = refusal(RequestError, lambda: short.generate([[7] * 33], GREEDY))
    assert all(part in message for part in ("33 tokens", "20", f"--max-model-len (up to {CONTEXT})"))


def test_an_answer_that_does_not_fit_is_not_cut(tiny: LLM) -> None:
    ids = [7] * 50
    message = refusal(RequestError, lambda: tiny.generate([ids], SamplingParams(max_tokens=15)))
    assert all(part in message for part in ("50 tokens", "max_tokens 15", str(CONTEXT), "lower max_tokens to 14"))
    (output,) = tiny.generate([ids], SamplingParams(max_tokens=14, ignore_eos=True))  # the remedy works
    assert len(output.outputs[0].token_ids) == 14


def test_nothing_runs_when_one_prompt_is_bad(tiny: LLM) -> None:
    heard: list[object] = []
    refusal(
        RequestError,
        lambda: tiny.generate(
            ["a", ""], GREEDY, on_text=lambda *a: heard.append(a), on_done=lambda *a: heard.append(a)
        ),
    )
    assert heard == []


@pytest.mark.parametrize("prompt", ["", [[]], {"prompt": ""}, {"prompt_token_ids": []}], ids=str)
def test_empty_prompts(prompt: Any, tiny: LLM) -> None:
    assert "empty" in refusal(RequestError, lambda: tiny.generate(prompt, GREEDY))


@pytest.mark.parametrize("token", [-1, 259, 2**70, True, 1.0, "a", None])
def test_token_ids_out_of_range(token: Any, tiny: LLM) -> None:
    message = refusal(RequestError, lambda: tiny.generate({"prompt_token_ids": [5, token]}, GREEDY))
    assert repr(token) in message
    assert "0..258" in message
    if type(token) is int:
        assert "0..258" in refusal(RequestError, lambda: tiny.logits([[5], [token]]))


@pytest.mark.parametrize(
    "prompt",
    [
        {}, {"text": "a"}, {"prompt": "a", "messages": []}, {"prompt": 3}, {"prompt": ["a"]}, {"prompt": None},
        {"prompt_token_ids": "ab"}, {"prompt_token_ids": None}, {"prompt_token_ids": 3}, ["a", None], ["a", 5],
        [5, "a"], [None], None, 5,
    ],
    ids=str,
)  # fmt: skip
def test_prompts_that_are_not_understood(prompt: Any, tiny: LLM) -> None:
    refusal(RequestError, lambda: tiny.generate(prompt, GREEDY))


def test_a_sequence_longer_than_the_context_has_no_logits(tiny: LLM) -> None:
    assert len(tiny.logits([[5] * CONTEXT])[0]) == CONTEXT
    message = refusal(RequestError, lambda: tiny.logits([[5] * (CONTEXT + 1)]))
    assert str(CONTEXT) in message
    assert "empty" in refusal(RequestError, lambda: tiny.logits([[5], []]))


def test_an_unknown_option(tiny_folder: Path) -> None:
    message = refusal(TypeError, lambda: LLM(str(tiny_folder), max_len=5))
    assert "max_len" in message


@pytest.mark.parametrize("length", [0, -5, CONTEXT + 1, 2**70, True, 8.5, float("nan"), "8"])
def test_max_model_len_out_of_range(length: Any, tiny_folder: Path) -> None:
    message = refusal(RequestError, lambda: LLM(str(tiny_folder), max_model_len=length))
    assert "max-model-len" in message
    assert f"1..{CONTEXT}" in message


def test_a_tokenizer_that_is_larger_than_the_model(tiny_folder: Path, tmp_path: Path) -> None:
    build(CASES["llama"], tmp_path)
    assert len(LLM(str(tmp_path)).generate([[5]], GREEDY)) == 1
    save_tokenizer(tmp_path)
    message = refusal(TokenizerError, lambda: LLM(str(tmp_path)))
    assert "259" in message
    assert "257" in message
    assert len(LLM(str(tmp_path), skip_tokenizer_init=True).generate([[5]], GREEDY)) == 1


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model": {"type": "Unknown"}}', "\x00" * 9])
def test_a_corrupt_tokenizer(content: str, tiny_folder: Path, tmp_path: Path) -> None:
    folder = with_files(tiny_folder, tmp_path, tokenizer=content)
    assert "tokenizer.json" in refusal(TokenizerError, lambda: LLM(str(folder)))
    assert LLM(str(folder), skip_tokenizer_init=True).tokenizer is None


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ({"temperature": "hot"}, "temperature"), ({"top_k": True}, "top_k"), ({"eos_token_id": "2"}, "eos_token_id"),
        ({"eos_token_id": [2, 1.5]}, "eos_token_id"), ("[]", "generation_config.json"), ("{", "generation_config.json"),
        ({"top_k": 20.5}, "top_k"), ({"temperature": 10**400}, "temperature"), ('{"temperature": NaN}', "temperature"),
        ('{"top_k": NaN}', "top_k"), ('{"top_k": Infinity}', "top_k"), ('{"top_p": -1}', "top_p"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_bad_generation_config(content: Any, part: str, tiny_folder: Path, tmp_path: Path) -> None:
    folder = with_files(tiny_folder, tmp_path, generation_config=content)
    assert part in refusal(RidgelineError, lambda: LLM(str(folder)).generate("abc"))
