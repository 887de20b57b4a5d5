"""LLM.capture: layers' outputs and matrices' inputs are those of transformers, in passes of a few tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oracle.build import build
from oracle.families import CASES
from oracle.ours import SPECS, write
from ridgeline import LLM
from ridgeline.errors import RequestError
from ridgeline.nn import Capture, Model, input_names, output_names
from ridgeline.runtime.step import DenseStep

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3], [2, 7, 1, 8, 2, 8, 1, 8], [6, 6]]
# Where a family's modules are, and the module of each matrix by our name; a fused one has several of our names.
LLAMA = {
    "mixer.q": "self_attn.q_proj", "mixer.k": "self_attn.k_proj", "mixer.v": "self_attn.v_proj",
    "mixer.o": "self_attn.o_proj", "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
}  # fmt: skip
NEOX = {
    **dict.fromkeys(("mixer.q", "mixer.k", "mixer.v"), "attention.query_key_value"), "mixer.o": "attention.dense",
    "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h",
}  # fmt: skip
FAMILIES = {"llama": ("model.layers", LLAMA), "gemma2": ("model.layers", LLAMA), "gpt_neox": ("gpt_neox.layers", NEOX)}
Rows = dict[str, dict[int, Any]]  # by name and prompt


def captured(llm: LLM, names: list[str], batch_tokens: int = 2048) -> Rows:
    found: Rows = {}

    def receive(name: str, indices: tuple[int, ...], rows: Any) -> None:
        starts = np.cumsum([len(PROMPTS[i]) for i in indices])[:-1]
        found.setdefault(name, {}).update(zip(indices, np.split(rows, starts), strict=True))

    llm.capture(PROMPTS, names, receive, batch_tokens=batch_tokens)
    return found


def transformers_rows(model: torch.nn.Module, path: str, modules: dict[str, str]) -> Rows:
    """Return the inputs of matrices by hooks, and the hidden states between layers, from runs of single prompts."""
    found: Rows = {}
    for prompt, ids in enumerate(PROMPTS):
        handles = []
        for i, layer in enumerate(model.get_submodule(path)):
            for ours, theirs in modules.items():

                def hook(module: Any, args: Any, name: str = f"layers.{i}.{ours}.input", prompt: int = prompt) -> None:
                    found.setdefault(name, {})[prompt] = args[0].reshape(-1, args[0].shape[-1]).numpy()

                handles.append(layer.get_submodule(theirs).register_forward_pre_hook(hook))
        with torch.no_grad():
            hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        for name, state in zip(
            ["embed", *(f"layers.{i}" for i in range(len(hidden) - 2)), "norm"], hidden, strict=True
        ):
            found.setdefault(name, {})[prompt] = state[0].numpy()
        for handle in handles:
            handle.remove()
    return found


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_and_hidden_states_are_those_of_transformers(family: str, device: str, tmp_path: Path) -> None:
    wanted = transformers_rows(build(CASES[family], tmp_path), *FAMILIES[family])
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, device=device, cache="off")
    assert {name for name in wanted if name.endswith(".input")} == set(input_names(llm.loaded.spec))
    found = captured(llm, list(wanted), batch_tokens=9)
    assert found.keys() == wanted.keys()
    for name, prompts in wanted.items():
        for prompt, rows in prompts.items():
            assert np.abs(found[name][prompt] - rows).max() < 2e-5 * np.abs(rows).max(), (name, prompt)


def test_an_expert_gets_the_tokens_that_are_sent_to_it(tmp_path: Path) -> None:
    """Each expert's input follows from the router's, by torch; the input of `down` from that and the weights."""
    build(CASES["qwen3_moe"], tmp_path)
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, cache="off")
    found: dict[str, Any] = {}
    names = [name for name in input_names(llm.loaded.spec) if name.startswith("layers.1.mlp.")]
    llm.capture(PROMPTS[0], names, lambda name, indices, rows: found.update({name: rows}))
    weights, moe = llm.loaded.model.weights, llm.loaded.spec.layers[1].mlp
    gate, up, router = (
        torch.tensor(np.asarray(llm.loaded.table.memory.get(weights[f"layers.1.mlp.{name}.weight"]), np.float32))
        for name in ("experts.gate", "experts.up", "router")
    )
    x = torch.tensor(found["layers.1.mlp.router.input"])
    assert moe is not None
    chosen = (x @ router.T).topk(moe.num_experts_per_tok).indices
    used = set(chosen.flatten().tolist())
    assert {int(name.split(".")[4]) for name in found if ".experts." in name} == used
    for e in used:
        mine = x[(chosen == e).any(1)]
        prefix = f"layers.1.mlp.experts.{e}"
        np.testing.assert_allclose(found[f"{prefix}.up.input"], mine, atol=1e-5)
        np.testing.assert_allclose(found[f"{prefix}.gate.input"], mine, atol=1e-5)
        inner = torch.nn.functional.silu(mine @ gate[e].T) * (mine @ up[e].T)
        np.testing.assert_allclose(found[f"{prefix}.down.input"], inner, atol=1e-5)


@pytest.mark.parametrize("name", SPECS)
def test_every_kind_of_mixer_gives_the_inputs_of_its_matrices(name: str, tmp_path: Path) -> None:
    """They have the matrix's columns and no padding, and outputs are those of the fused model, in any batches."""
    write(SPECS[name], tmp_path)
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, cache="off")
    spec = llm.loaded.spec
    inputs, outputs = list(input_names(spec)), list(output_names(spec))
    whole, parts = captured(llm, inputs + outputs), captured(llm, inputs + outputs, 1)
    plain = captured(llm, outputs)
    shapes = {w.name: w.shape for w in spec.weights()}
    experts = [n for n in inputs if ".experts." in n]
    assert set(inputs) - set(experts) | set(outputs) <= whole.keys() == parts.keys()
    for each in whole:
        for i, rows in whole[each].items():
            if each in plain:
                assert np.abs(rows - plain[each][i]).max() <= 1e-4 * np.abs(rows).max()
            if each not in experts:
                assert len(rows) == len(PROMPTS[i]) and np.allclose(rows, parts[each][i], rtol=1e-3, atol=1e-4)
            if each in inputs and each not in experts:
                assert rows.shape[1] == shapes[each.removesuffix("input") + "weight"][1]


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next", "nemotron_h_moe"])
def test_no_matrix_is_left_out(family: str, tmp_path: Path) -> None:
    """Latent attention, recurrent layers, experts: every matrix has an input, except those of idle experts."""
    build(CASES[family], tmp_path)
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, cache="off")
    names, found = set(input_names(llm.loaded.spec)), set[str]()
    llm.capture(PROMPTS, names, lambda name, indices, rows: found.add(name))
    assert all(".experts." in name for name in names - found) and found


def test_inputs_need_a_model_that_is_built_for_them(tmp_path: Path) -> None:
    write(SPECS["cla2"], tmp_path)
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, cache="off")
    loaded = llm.loaded
    step = DenseStep.build(PROMPTS, loaded.table.memory)
    wanted = Capture(loaded.spec, ["layers.0.mlp.down.input"])
    with pytest.raises(ValueError, match=r"built for it: Model\(capture=...\)"):
        loaded.model.forward(step, wanted)
    model = Model(loaded.spec, loaded.model.weights, loaded.table, 64, capture=wanted)
    model.forward(step)
    assert list(wanted.outputs) == ["layers.0.mlp.down.input"]


def test_bad_requests_are_one_line(tmp_path: Path) -> None:
    write(SPECS["cla2"], tmp_path)
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, cache="off")
    for prompts, names, size, message in (
        ([1], ["layers.0.mlp.down"], 9, "no output 'layers.0.mlp.down'.*inputs of matrices such as layers"),
        ([], ["embed"], 9, "prompt is empty"), ([10**6], ["embed"], 9, "not in 0"),
        ([1], ["embed"], 0, "batch_tokens is 0; it must be a whole number of at least 1"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=message):
            llm.capture([{"prompt_token_ids": prompts}], names, lambda *_: None, batch_tokens=size)
