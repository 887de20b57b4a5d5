"""Test adapters against peft: reading them, merging them, and errors for those that cannot be served."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.numpy import load_file, save_file

from oracle.adapters import write_adapter
from oracle.build import build, oracle_logits
from oracle.case import Case, prompts
from oracle.families import CASES
from ridgeline import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from ridgeline.compress.merge import merge
from ridgeline.errors import RidgelineError
from ridgeline.load.adapter import find_adapter, read_adapter
from ridgeline.load.checkpoint import open_checkpoint
from ridgeline.settings import EngineOptions

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # peft's own
TOLERANCE = 1e-4
LLAMA = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}
# Cases of the oracle, and how their adapters are made.
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"r": 4, "lora_alpha": 6, **LLAMA}),
    "rooted": ("qwen3", {"r": 4, "use_rslora": True, "rank_pattern": {"q_proj": 2}, **LLAMA}),
    "alphas": ("gemma3", {"r": 3, "alpha_pattern": {"layers.1.mlp.up_proj": 20}, **LLAMA}),
    "dora": ("qwen2", {"r": 4, "use_dora": True, **LLAMA}),
    "fused": ("phi3", {"r": 4, "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}),
    "conv1d": (
        "gpt2",
        {"r": 4, "use_dora": True, "bias": "lora_only", "fan_in_fan_out": True, "target_modules": ["c_attn", "c_proj"]},
    ),
    "heads": ("gpt_neox", {"r": 4, "lora_bias": True, "target_modules": ["query_key_value", "dense_h_to_4h"]}),
    "recurrent": ("mamba2", {"r": 4, "target_modules": ["in_proj"]}),
    "bias": ("gpt2", {"r": 4, "bias": "all", "fan_in_fan_out": True, "target_modules": ["c_fc"]}),
}


@lru_cache
def _model(case: str) -> tuple[torch.nn.Module, Path]:
    import tempfile

    folder = Path(tempfile.mkdtemp())
    return build(CASES[case], folder), folder


def make(case: str, folder: Path, seed: int = 0, **config: Any) -> torch.nn.Module:
    """Write an adapter of drawn numbers for a case's model with peft; return peft's model."""
    import copy

    model = peft.get_peft_model(copy.deepcopy(_model(case)[0]), peft.LoraConfig(**config))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_magnitude" in name:
            parameter.data *= 1 + 0.3 * torch.rand(parameter.shape, generator=generator)
        elif "lora_" in name or parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    return model.eval()


def _close(ours: Path, wanted: torch.nn.Module, case: Case) -> None:
    llm = LLM(str(ours), device="cpu", skip_tokenizer_init=True, max_model_len=case.max_model_len)
    rows = prompts(case)[1:3]
    for mine, theirs in zip(llm.logits(rows), oracle_logits(wanted, rows), strict=True):
        assert np.abs(mine - theirs).max() < TOLERANCE * max(1.0, np.abs(theirs).max())


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_merged_adapter_computes_what_peft_computes(name: str, tmp_path: Path) -> None:
    case, config = ADAPTERS[name]
    model = make(case, tmp_path / "adapter", **config)
    base = oracle_logits(_model(case)[0], prompts(CASES[case])[1:2])[0]
    merge(str(_model(case)[1]), str(tmp_path / "adapter"), str(tmp_path / "out"))
    whole = model.merge_and_unload()
    changed = oracle_logits(whole, prompts(CASES[case])[1:2])[0]
    assert np.abs(base - changed).max() > 0.1, "the adapter changes nothing"
    _close(tmp_path / "out", whole, CASES[case])
    assert not list(tmp_path.glob(".*partial")), "something half-written is left"


def test_embeddings_and_heads_are_merged(tmp_path: Path) -> None:
    case = next(n for n in ("llama", "mistral", "qwen3", "olmo2") if not CASES[n].tied)
    for i, more in enumerate(({"use_dora": True}, {"modules_to_save": ["norm"]})):
        config = {"r": 4, "target_modules": ["embed_tokens", "lm_head", "q_proj"], **more}
        model = make(case, tmp_path / f"adapter{i}", **config)
        merge(str(_model(case)[1]), str(tmp_path / f"adapter{i}"), str(tmp_path / f"out{i}"))
        _close(tmp_path / f"out{i}", model.merge_and_unload(), CASES[case])


def _change_config(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def _change_tensor(folder: Path, part: str, change: Callable[[np.ndarray], np.ndarray], rename: str = "") -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    key = next(key for key in tensors if part in key)
    tensors[rename or key] = change(tensors.pop(key))
    save_file(tensors, path)


def _drop(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(b"")


def _truncate(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


PREFIX = "base_model.model.model.layers.0."
BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "another method": (lambda f: _change_config(f, peft_type="IA3"), "peft_type is 'IA3'; only LORA"),
    "a start that changes the model": (lambda f: _change_config(f, init_lora_weights="pissa"), "init_lora_weights"),
    "an unknown field": (lambda f: _change_config(f, new_trick=3), "new_trick is 3; it changes the result"),
    "parameters": (lambda f: _change_config(f, target_parameters=["experts.w"]), "target_parameters is"),
    "a bad rank": (lambda f: _change_config(f, r=0), "r is 0; it must be a whole number from 1 to 512"),
    "a bad alpha": (lambda f: _change_config(f, lora_alpha="x"), "lora_alpha is 'x'; it must be a finite number"),
    "a regular expression": (lambda f: _change_config(f, alpha_pattern={"(a+)+$": 1}), "without other regular"),
    "another rank": (lambda f: _change_config(f, r=3), "but the config says rank 3"),
    "no magnitudes": (lambda f: _change_config(f, use_dora=True), "has magnitudes, or lacks them"),
    "no tensors": (_drop, "has no adapter_model.safetensors (adapter_model.bin can run code"),
    "a short file": (_truncate, "not a readable safetensors file"),
    "another width": (lambda f: _change_tensor(f, "lora_A", lambda a: a[:, 1:].copy()), "of another model"),
    "other rows": (lambda f: _change_tensor(f, "lora_B", lambda a: a[1:].copy()), "of another model"),
    "an unknown module": (
        lambda f: _change_tensor(f, "lora_A", lambda a: a, PREFIX + "cross_attn.q_proj.lora_A.weight"),
        "changes a module that the model does not have",
    ),
    "a single half": (
        lambda f: _change_tensor(f, "q_proj.lora_A", lambda a: a, PREFIX + "mlp.up_proj.lora_A.weight"),
        "beside it",
    ),
    "NaN": (lambda f: _change_tensor(f, "lora_B", lambda a: a * np.float32("nan")), "are not finite"),
    "infinity": (lambda f: _change_tensor(f, "lora_A", lambda a: a + np.float32("inf")), "are not finite"),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "good"
    make("llama", folder, r=4, target_modules=["q_proj", "v_proj"])
    return folder


@pytest.mark.parametrize("name", BAD)
def test_bad_adapters_are_refused_by_one_line(name: str, good: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    shutil.copytree(good, folder)
    change, text = BAD[name]
    change(folder)
    with pytest.raises(RidgelineError) as error:
        merge(str(_model("llama")[1]), str(folder), str(tmp_path / "out"))
    assert text in str(error.value) and "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["bad"], "something is left on disk"


def test_ranks_above_the_limit_are_refused(good: Path) -> None:
    checkpoint = open_checkpoint(_model("llama")[1])
    with pytest.raises(RidgelineError, match=r"has rank 4; the limit \(--max-lora-rank\) is 3"):
        read_adapter(find_adapter(str(good)), checkpoint.spec, checkpoint.family.names, 3)


# Adapters beside the weights ------------------------------------------------------------------------------------

APART = {name: ADAPTERS[name] for name in ("plain", "rooted", "alphas", "dora", "fused", "heads", "recurrent")} | {
    "conv1d": (
        "gpt2",
        {"r": 4, "use_dora": True, "bias": "lora_only", "fan_in_fan_out": True, "target_modules": ["attn.c_attn"]},
    ),
}


def _open(case: str, adapters: dict[str, Path], **more: Any) -> LLM:
    names = {name: str(folder) for name, folder in adapters.items()}
    return LLM(
        str(_model(case)[1]), skip_tokenizer_init=True, max_model_len=CASES[case].max_model_len, lora_modules=names,
        **{"device": "cpu", **more},
    )  # fmt: skip


def _tokens(llm: LLM, rows: list[list[int]], names: list[str], length: int = 6, **params: Any) -> list[Any]:
    asked = SamplingParams(max_tokens=length, temperature=0.0, logprobs=2, ignore_eos=True, **params)
    outputs = llm.generate([{"prompt_token_ids": row} for row in rows], asked, lora=names)
    return [[(c.token_ids, c.logprobs) for c in output.outputs] for output in outputs]


@pytest.mark.parametrize("name", APART)
def test_an_adapter_beside_the_weights_gives_the_tokens_of_peft(name: str, tmp_path: Path) -> None:
    case, config = APART[name]
    one, two = (make(case, tmp_path / f"a{i}", seed=i, **config) for i in range(2))
    llm = _open(case, {"one": tmp_path / "a0", "two": tmp_path / "a1"})
    row = prompts(CASES[case])[1]
    names = ["", "one", "two", "one"]
    together = _tokens(llm, [row] * 4, names)
    for model, name_, found in zip((_model(case)[0], one, two), names[:3], together[:3], strict=True):
        ids, logprobs = found[0]
        logits = oracle_logits(model, [[*row, *ids]])[0][len(row) - 1 : -1]
        assert list(ids) == logits.argmax(-1).tolist(), name_
        wanted = torch.log_softmax(torch.from_numpy(logits), -1).numpy()
        for token, entry, wide in zip(ids, logprobs, wanted, strict=True):
            assert abs(entry.logprob - wide[token]) < TOLERANCE
    fresh = _open(case, {"one": tmp_path / "a0", "two": tmp_path / "a1"})
    for i, name_ in enumerate(names):  # alone = in any company, to the bit
        assert _tokens(fresh, [row], [name_]) == [together[i]], name_


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pair")
    for i, name in enumerate(("one", "two")):
        make("llama", folder / name, seed=i, r=4, **LLAMA)
    return {name: folder / name for name in ("one", "two")}


HOW: dict[str, dict[str, Any]] = {
    "drafts": {"engine": EngineOptions(speculative="ngram", num_speculative_tokens=3)},
    "few pages": {"engine": EngineOptions(block_size=4, kv_cache_memory_bytes=540 * 2**10)},
    "chunks": {"engine": EngineOptions(max_num_batched_tokens=16)},
    "static": {"batching": "static"},
}


@pytest.mark.parametrize("how", HOW)
def test_no_setting_changes_the_answer_of_an_adapter(how: str, pair: dict[str, Path]) -> None:
    row = prompts(CASES["llama"])[2][:20]
    names = ["one", "", "two", "one", "two", ""]
    alone = _open("llama", pair)
    wanted = {name: _tokens(alone, [row], [name], 40)[0] for name in names[:3]}
    assert len({str(one) for one in wanted.values()}) == 3
    llm = _open("llama", pair, **HOW[how])
    assert _tokens(llm, [row] * 6, names, 40) == [wanted[name] for name in names]
    stats = llm.stats()
    assert how != "few pages" or (stats is not None and stats.preempted_recompute + stats.preempted_swap > 0)


def test_several_answers_and_beams_have_the_adapter(pair: dict[str, Path]) -> None:
    row, llm = prompts(CASES["llama"])[1], _open("llama", pair)
    (single,) = _tokens(llm, [row], ["one"], 8)
    (several,) = _tokens(llm, [row], ["one"], 8, n=3)
    assert several == single * 3
    beams = BeamSearchParams(beam_width=2, max_tokens=6)
    alone, other = (_open("llama", {"x": pair[name]}) for name in ("one", "two"))
    found = llm.generate([{"prompt_token_ids": row}] * 2, beams, lora=["one", "two"])
    for output, one in zip(found, (alone, other), strict=True):
        (wanted,) = one.generate([{"prompt_token_ids": row}], beams, lora="x")
        assert [c.token_ids for c in output.outputs] == [c.token_ids for c in wanted.outputs]


def test_prefixes_are_shared_within_an_adapter_only(pair: dict[str, Path]) -> None:
    llm = _open("llama", pair, engine=EngineOptions(block_size=4))
    row = prompts(CASES["llama"])[2]
    cached = [
        llm.generate([{"prompt_token_ids": row}], SamplingParams(max_tokens=1), lora=name)[0].num_cached_tokens
        for name in ("", "one", "two", "one", "")
    ]
    assert cached[:3] == [0, 0, 0] and min(cached[3:]) > 0
    llm.unload_lora("one")
    llm.load_lora("one", str(pair["two"]))
    (again,) = llm.generate([{"prompt_token_ids": row}], SamplingParams(max_tokens=1), lora="one")
    assert again.num_cached_tokens == 0, "an adapter of the same name has the pages of another one"


def test_streams_chats_and_other_threads_have_the_adapter(adapter_of_pocket: str) -> None:
    llm, params = LLM("pocket", lora_modules={"one": adapter_of_pocket}), SamplingParams(max_tokens=8, temperature=0.0)
    llm.frontend.tokenizer().set_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    prompt, messages = "def add(a, b):", [{"role": "user", "content": "def add(a, b):"}]
    base, one = (output.outputs[0].text for output in llm.generate([prompt] * 2, params, lora=["", "one"]))
    assert base != one
    assert "".join(chunk.text for chunk in llm.stream(prompt, params, lora="one")) == one
    assert [llm.chat(messages, params, lora=name)[0].outputs[0].text for name in ("", "one")] == [base, one]
    with pytest.raises(RidgelineError, match="no adapter 'two' is loaded"):
        llm.stream(prompt, params, lora="two")

    async def elsewhere() -> tuple[str, str]:
        async with AsyncLLM("pocket", lora_modules={"one": adapter_of_pocket}) as other:
            found = await asyncio.gather(*(other.answer(prompt, params, lora=name) for name in ("", "one")))
            with pytest.raises(RidgelineError, match="no adapter 'two' is loaded"):
                await other.answer(prompt, params, lora="two")
        return found[0].outputs[0].text, found[1].outputs[0].text

    assert asyncio.run(elsewhere()) == (base, one)


@pytest.fixture
def adapter_of_pocket(tmp_path: Path) -> str:
    return write_adapter(tmp_path, 1)


def test_quantized_weights_take_adapters(pair: dict[str, Path]) -> None:
    row = prompts(CASES["llama"])[1]
    llm = _open("llama", pair, weights="int8", speculative="off")
    one, base = _tokens(llm, [row] * 2, ["one", ""])
    assert [one, base] == [_tokens(llm, [row], [name])[0] for name in ("one", "")] and one != base


def test_adapters_are_loaded_and_dropped(pair: dict[str, Path]) -> None:
    row = prompts(CASES["llama"])[1]
    llm = _open("llama", pair, max_loras=2)
    for name, source, text in (
        ("one", pair["one"], "is loaded already"), ("three", pair["one"], "2 adapters are loaded, and max_loras"),
        ("", pair["one"], "1 to 200 printable characters"),
    ):  # fmt: skip
        with pytest.raises(RidgelineError, match=text):
            llm.load_lora(name, str(source))
    with pytest.raises(RidgelineError, match="no adapter 'none' is loaded; loaded are one, two"):
        _tokens(llm, [row], ["none"])
    first = _tokens(llm, [row], ["one"])
    llm.unload_lora("two")
    llm.load_lora("three", str(pair["one"]))
    assert _tokens(llm, [row], ["three"]) == first
    with pytest.raises(RidgelineError, match="no adapter 'two'"):
        llm.unload_lora("two")
    with pytest.raises(RidgelineError, match="adapters need the engine"):
        _open("llama", pair, cache="off")
    with pytest.raises(RidgelineError, match="max_loras"):
        _open("llama", {}).load_lora("one", str(pair["one"]))
    with pytest.raises(RidgelineError, match="max_lora_rank"):
        _open("llama", pair, max_lora_rank=0)
    with pytest.raises(RidgelineError, match=r"has rank 4; the limit \(--max-lora-rank\) is 3"):
        _open("llama", pair, max_lora_rank=3)
