"""Outputs that are captured by name equal those of transformers' modules and hidden states, and capturing changes no
result.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from oracle.build import build
from oracle.families import CASES
from oracle.ours import SPECS, random_weights
from ridgeline.nn import Capture, Model, PassingModel, output_names
from ridgeline.ops import open_table
from ridgeline.runtime.load import LoadOptions, load_model
from ridgeline.runtime.step import DenseStep

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3]]
# Models with a plain residual stream, norms after the branches, parallel branches, recurrent layers and experts. For
# each, the names that transformers gives to the list of layers, the mixer and the MLP.
FAMILIES = {
    "llama": ("model.layers", "self_attn", "mlp"),
    "gemma2": ("model.layers", "self_attn", "mlp"),
    "gpt_neox": ("gpt_neox.layers", "attention", "mlp"),
    "mamba": ("backbone.layers", "mixer", None),
    "qwen3_moe": ("model.layers", "self_attn", "mlp"),
}


def transformers_outputs(model: torch.nn.Module, path: tuple[str, str, str | None]) -> dict[str, np.ndarray]:
    """Return outputs by our names, from forward hooks and `output_hidden_states` in runs of single prompts."""
    layers = model.get_submodule(path[0])
    found: dict[str, list[Any]] = {}

    def keep(name: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            found.setdefault(name, []).append(first.reshape(-1, first.shape[-1]))

        return hook

    for i, layer in enumerate(layers):
        for ours, theirs in (("mixer", path[1]), ("mlp", path[2])):
            if theirs is not None:
                layer.get_submodule(theirs).register_forward_hook(keep(f"layers.{i}.{ours}"))
        layer.register_forward_hook(keep(f"layers.{i}"))
    with torch.no_grad():
        for prompt in PROMPTS:
            hidden = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
            # The first of Mamba's hidden states is after the first layer.
            first = model.get_input_embeddings()(torch.tensor([prompt])) if path[2] is None else hidden[0]
            found.setdefault("embed", []).append(first[0])
            found.setdefault("norm", []).append(hidden[-1][0])
    return {name: torch.cat(parts).numpy() for name, parts in found.items()}


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_captured_outputs_are_those_of_transformers(family: str, device: str, tmp_path: Any) -> None:
    case = CASES[family]
    wanted = transformers_outputs(build(case, tmp_path), FAMILIES[family])
    loaded = load_model(str(tmp_path), LoadOptions(device=device))
    assert set(wanted) == set(output_names(loaded.spec))
    step = DenseStep.build(PROMPTS, loaded.table.memory)
    capture = Capture(loaded.spec, wanted)
    captured_logits = loaded.model.logits(loaded.model.forward(step, capture))
    assert set(capture.outputs) == set(wanted)
    for name, output in wanted.items():
        found = loaded.table.memory.get(capture.outputs[name])
        assert np.abs(found - output).max() < 2e-5 * np.abs(output).max(), name
    assert np.array_equal(loaded.table.memory.get(captured_logits), loaded.table.memory.get(loaded.model(step)))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("kind", [Model, PassingModel])
def test_only_named_outputs_are_captured(name: str, kind: type[Model]) -> None:
    spec, table = SPECS[name], open_table("cpu")
    model = kind(spec, random_weights(spec), table, 64)
    step = DenseStep.build(PROMPTS, table.memory)
    names = list(output_names(spec))
    whole, some = Capture(spec, names), Capture(spec, names[1::3])
    model.forward(step, whole)
    model.forward(step, some)
    assert list(whole.outputs) == names
    assert list(some.outputs) == names[1::3]
    assert all(np.array_equal(x, whole.outputs[n]) for n, x in some.outputs.items())  # type: ignore[arg-type]


def test_outputs_that_are_not_named_are_not_computed() -> None:
    spec = SPECS["cla2"]

    def fail() -> Any:
        raise AssertionError("an output was computed")

    Capture(spec, ["norm"]).put("layers.0", fail)


@pytest.mark.parametrize("name", ["layers.6", "layers.0.mixer.q", "logits", ""])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"no output '{name}': its 6 layers have outputs such as embed, layers.0.mixer"
    ):
        Capture(SPECS["cla2"], ["embed", name])
