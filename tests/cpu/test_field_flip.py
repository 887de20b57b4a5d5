"""Every field of a loaded ModelSpec matters: if it changes and the weights stay, the logits move far.

The comparison with transformers checks a field only where misreading it would have shown. Here each field of each part,
alone, in the first and the last layer of its kind, must move some logit by 100 times that comparison's tolerance, in
every case of the oracle. Exceptions are listed with their reasons: fields that cannot change with the same weights, and
fields without any effect. All other fields that `ridgeline.spec` exports are changed in some case.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

import ridgeline.spec
from oracle.build import build
from oracle.case import WINDOW, Case, prompts
from oracle.families import CASES
from ridgeline.archs import spec_from_config
from ridgeline.load.checkpoint import open_checkpoint
from ridgeline.load.safetensors import TensorFiles
from ridgeline.load.weights import load_weights
from ridgeline.nn import Model
from ridgeline.ops import OpsTable, open_table
from ridgeline.runtime.step import DenseStep
from ridgeline.spec import (
    MLP,
    AnyLayer,
    Attention,
    DeepNormLayer,
    DynamicNTKScaling,
    ExpertGroups,
    FirstTokens,
    GatedMLP,
    LatentAttention,
    Layer,
    LayerNorm,
    LinearScaling,
    LongRopeScaling,
    Mamba2,
    ModelSpec,
    MoE,
    PairedMLP,
    ParallelLayer,
    QueryGrowth,
    RMSNorm,
    Rope,
    SharedAttention,
    YarnScaling,
)
from shares import ONE_OF_EACH, daily

# gemma2_tied is left out: its softcaps are the published 50 and 30, which are too high for these scores.
NAMES = [name for name in CASES if name != "gemma2_tied"]
FAR = 100 * 1e-4

# Fields that cannot change without changing the shapes of the weights.
SHAPED = {
    "Attention.num_heads": "rows of q",
    "Attention.num_kv_heads": "rows of k and v",
    "Attention.head_dim": "rows of q, k and v",
    "Attention.qk_norm_over": "length of the norm's weight",
    "Attention.gate_over": "rows of the gate",
    "LatentAttention.num_heads": "rows of q",
    "LatentAttention.kv_lora_rank": "rows of kv_a",
    "LatentAttention.qk_nope_head_dim": "rows of kv_b",
    "LatentAttention.qk_rope_head_dim": "rows of kv_a",
    "LatentAttention.v_head_dim": "rows of kv_b",
    "LatentAttention.q_lora_rank": "rows of q_a",
    "Indexer.num_heads": "rows of index_q",
    "Indexer.head_dim": "rows of index_q",
    "MLP.intermediate_size": "rows of up",
    "GatedMLP.intermediate_size": "rows of gate and up",
    "MoE.intermediate_size": "rows of gate and up",
    "MoE.num_experts": "rows of the router",
    "MoE.latent_size": "columns of the experts",
    "IdentityExperts.count": "rows of the router",
    "EmbeddingBranch.size": "rows of the gate",
    "LayerEmbeddings.size": "columns of the table",
    "LayerEmbeddings.vocab_size": "rows of the table",
    "Mamba.inner_size": "rows of in",
    "Mamba.state_size": "columns of A_log",
    "Mamba.conv_size": "columns of the filters",
    "Mamba.dt_rank": "rows of x",
    "Mamba2.num_heads": "length of D",
    "Mamba2.head_dim": "rows of in",
    "Mamba2.state_size": "rows of in",
    "Mamba2.num_groups": "rows of in",
    "Mamba2.conv_size": "columns of the filters",
    "GatedDelta.num_heads": "length of A_log",
    "GatedDelta.num_key_heads": "rows of in_q",
    "GatedDelta.key_dim": "rows of in_q",
    "GatedDelta.head_dim": "rows of in_v",
    "GatedDelta.conv_size": "columns of the filters",
    "KimiDelta.num_heads": "length of A_log",
    "KimiDelta.head_dim": "rows of in_v",
    "KimiDelta.conv_size": "columns of the filters",
    "KimiDelta.rank": "rows of decay_a",
    "GatedLRU.channels": "rows of in",
    "GatedLRU.num_blocks": "blocks of the gates",
    "GatedLRU.conv_size": "columns of the filters",
    "ShortConvolution.channels": "rows of in",
    "ShortConvolution.conv_size": "columns of the filters",
    "LightningAttention.num_heads": "rows of qkv",
    "LightningAttention.head_dim": "rows of qkv",
    "TaylorAttention.num_heads": "rows of q",
    "TaylorAttention.head_dim": "rows of v",
    "TaylorAttention.feature_dim": "rows of q and k",
    "ModelSpec.vocab_size": "rows of the embedding",
    "ModelSpec.hidden_size": "columns of everything",
    "ModelSpec.num_unwritten": "rows of the embedding",
}
# Fields that weights of the same shapes allow to change in one direction only; another case covers the other direction.
ONE_WAY = {
    "ModelSpec.num_position_embeddings": "a table that most models do not have",
    "ModelSpec.tie_word_embeddings": "a head that tied models do not have",
    "ModelSpec.sinusoids": "a table that such models do not have",
    "Attention.values_are_keys": "a matrix of values that such layers do not have",
    "ParallelLayer.one_norm": "a second norm that such layers do not have",
    "Attention.gate_bias": "a bias of each number of the gate, where q, k and v have biases",
    "Layer.beside": "a norm that such layers do not have",
    "Mamba2.norm": "a weight that such layers do not have",
    "Mamba2.out_bias": "a bias that such layers do not have",
    "RMSNorm.weight": "a weight that such norms do not have",
    "LayerNorm.weight": "a weight that such norms do not have",
}
# Fields that are off in a case and add weights when they are switched on.
ABSENT = {"qkv_bias", "out_bias", "bias", "router_bias", "sinks", "qk_norm", "pre_norm", "post_norm"}
ABSENT |= {"latent_bias", "q_lora_rank", "conv_bias"}
ABSENT |= {"choice_bias", "shared", "groups"}  # the possible number of groups differs in every case
ABSENT |= {"layer_embeddings", "embedded", "out_scale", "expert_scale"}
ABSENT |= {"mlp_post_norm", "identity", "out_bias", "norm"}
ABSENT |= {"inner_norm_weights", "mlp", "mixer", "latent_size", "out_gate", "shared_gate", "head_bias", "embed_norm"}
ABSENT |= {"mlp_pre_norm", "gate_bias", "head_transform"}
# Yarn rounds numbers that follow from these fields to whole pairs of a head. There are few pairs, so only one of
# several values must move the logits.
ROUNDED = {"beta_fast", "beta_slow", "original_max_position_embeddings"}
# Fields that change no logit, with the reason.
SILENT = {
    "ModelSpec.family": "a name in messages",
    "ModelSpec.max_position_embeddings": "a limit that is enforced before the model runs",
}
# Case -> fields that only matter at lengths beyond the case's max_model_len; other cases cover them.
ASLEEP = {
    "phimoe_longrope": {"LongRopeScaling.long_factor"},
    "llama_dynamic": {"DynamicNTKScaling.factor", "Rope.scaling"},
}
# Parts that no family of transformers has, with the tests that cover them.
OURS = {
    **dict.fromkeys(("FirstTokens", "Dilated", "Strided", "S4", "S4D", "GatedConvolution"), "test_ours.py"),
    **dict.fromkeys(("Causal", "Blocks", "WholeSequence"), "test_sight.py"),
    "MaskedDiffusion": "test_denoise.py",
    "CanvasDiffusion": "test_canvas.py",
    **dict.fromkeys(("Encoder", "LabelHead"), "test_encoders.py"),
}
# Fields that make another kind of model, so that no other field stays as it is, with the tests that cover them.
ELSEWHERE = {
    "Attention.sight": "test_sight.py",
    "TaylorAttention.features": "test_ours.py",
    "ModelSpec.diffusion": "test_denoise.py",
    "Layer.canvas_scale": "test_canvas.py",
    "ModelSpec.encoder": "test_encoders.py",
    **dict.fromkeys(("ModelSpec.rank", "ModelSpec.ranks"), "test_slices.py"),
}
# Exported types that are not part of a ModelSpec, with the reason.
DERIVED = {
    "State": "an answer of a mixer", "Weight": "an answer of every part", "Regimes": "an answer of a model",
}  # fmt: skip


def changed(part: Any, field: str) -> Any:
    """Return another value for a field: the double of a number, the opposite of a flag, or a value that is easily
    confused.
    """
    value = getattr(part, field)
    if value is None and field == "rope":
        return Rope(part.qk_rope_head_dim if isinstance(part, LatentAttention) else part.head_dim)
    if value is None:  # switched on, at a size that affects the sequences
        caps = dict.fromkeys(("softcap", "logit_softcap"), 2.0)
        return {
            **caps, "window": WINDOW, "scaling": LinearScaling(2.0), "pattern": FirstTokens(4), "dt_most": 0.5,
            "inner_norm": RMSNorm(1e-2), "value_eps": 1.0, "alibi": 8.0, "growth": QueryGrowth(0.4, 20), "clip": 0.5,
            "mlp_scale": 2.0, "input_scales": (2.0, 1.0, 1.0, 1.0, 1.0),
        }[field]  # fmt: skip
    match field:
        case "weight":
            return not value
        case "eps" | "value_eps":
            return 1.0  # the mean square of the stream is about one in the last layers
        case "dt_least" | "slope_scale":
            return value + 0.5  # published slopes end at almost zero
        case "offset":
            return 1.0 - value
        case "activation":
            return "relu" if value == "silu" else "silu"  # the two gelus differ too little
        case "dim":
            return value - 2
        case "num_unwritten":
            return value + 1
        case "reach":
            return 3.0 - value  # 1 and 2
        case "ahead":
            return value + 1
        case "source":
            return value - 2  # another layer of the same kind
        case "window":
            return value + 1  # a frequent mistake
        case "num_experts_per_tok":
            return value - 1
        case "family":
            return value + "?"
        case "num_kv_heads":
            return 1 if value > 1 else part.num_heads
        case "num_groups" | "num_key_heads":
            return 1 if value > 1 else part.num_heads
        case "num_position_embeddings":
            return 0 if value else 256
        case "position_offset":
            return value + 1
        case "input_scales":
            return tuple(2 * x for x in value)
        case "short_factor" | "long_factor":
            return tuple(2 * x for x in value)  # their number depends on RoPE's size
        case "scores":
            return "sigmoid" if value == "softmax" else "softmax"
        case "score":
            return "best" if value == "best_two" else "best_two"
        case "count":
            return value // 2
        case "chosen":
            return value - 1
        case "gate_over":
            return "head" if value == "number" else "number"
        case "by":
            return "power" if value == "log" else "log"
        case "gate_act":
            return "softplus" if value == "sigmoid" else "sigmoid"
        case "qk_norm_over":
            return "all_heads" if value == "head" else "head"
    return not value if isinstance(value, bool) else value * 2


def several(part: Any, field: str) -> tuple[Any, ...]:
    """Return several values, of which one must move the logits, for fields where a single step may have no effect."""
    value = getattr(part, field)
    if isinstance(part, YarnScaling) and part.truncate and field in ROUNDED:
        return tuple(type(value)(value * x) for x in (2, 1 / 2, 1 / 16))
    if isinstance(part, DynamicNTKScaling | LongRopeScaling) and field == "original_max_position_embeddings":
        return value * 4, value // 8  # one of them is in the other regime
    return (changed(part, field),)


def flips(part: Any) -> Iterator[tuple[str, Any]]:
    """Yield (Type.field.Type.field..., the part with its last field changed), through all nested parts."""
    for f in fields(part):
        name, value = f"{type(part).__name__}.{f.name}", getattr(part, f.name)
        if f.name == "layers" or (f.name in ABSENT and not value):
            continue
        if f"{type(part).__name__}.{f.name}" in ELSEWHERE:
            continue
        if name in ("EmbeddingBranch.size", "LayerEmbeddings.size"):
            continue  # they must be equal
        if f.name == "pattern" and part.window is None:
            continue  # keys outside a window that does not exist
        if f.name in ("position_offset", "sinusoids") and not part.num_position_embeddings:
            continue  # a row of a table that does not exist
        if f.name == "qk_norm_over" and (not part.qk_norm or part.norms_rotated):
            continue  # a norm over something that does not exist, or that must be one of each head
        if f.name in ("gate_over", "gate_act") and not part.out_gate:
            continue  # a gate that does not exist
        if f.name == "norms_rotated" and not _order_matters(part):
            continue
        if f.name == "offset" and not part.weight:
            continue  # the factor of a norm without weights is one
        if isinstance(part, QueryGrowth) and part.by == "power":
            continue  # Beam's growth, which no config changes, is small in short sequences; test_primitives.py has it
        if f.name == "num_unwritten" and not value:
            continue  # rows that most models do not have
        if f.name == "tie_word_embeddings" and part.num_unwritten:
            continue  # the head has fewer rows than the embedding
        if f.name == "rates_logits" and not value:
            continue  # other families choose by scores, of which a bias is a small part
        if f.name == "shared_scale" and not part.shared:
            continue  # a factor on nothing
        if (f.name == "mlp_scale" and not part.mlp) or (f.name == "beside" and not part.mixer):
            continue  # the layer does not have the part
        if is_dataclass(value):
            for inner, other in flips(value):
                if isinstance(part, LatentAttention) and inner == "Rope.dim":
                    continue  # it equals qk_rope_head_dim
                if isinstance(part, MoE) and isinstance(other, ExpertGroups) and not _has_room(part, other):
                    continue  # the chosen groups would have too few experts
                if isinstance(part, Layer) and part.mlp_pre_norm and inner in ("MoE.scale", "MoE.normalize"):
                    continue  # one factor for each token, which the norm after Beam's experts undoes
                if isinstance(part, PairedMLP) and inner == "MoE.scale":
                    continue  # the norm of the experts' result undoes it
                if isinstance(part, SharedAttention) and inner in ("Attention.value_eps", "Attention.values_are_keys"):
                    continue  # the values are those of another layer
                yield f"{name}.{inner}", replace(part, **{f.name: other})
            yield from ((name, with_field(part, f.name, other)) for other in other_kinds(part, f.name))
        else:
            yield from ((name, with_field(part, f.name, other)) for other in several(part, f.name))


def _has_room(moe: MoE, groups: ExpertGroups) -> bool:
    """Return whether experts can be chosen from these groups."""
    room = moe.num_experts // groups.count * groups.chosen if groups.chosen <= groups.count else 0
    return room >= moe.num_experts_per_tok


def _order_matters(part: Attention) -> bool:
    """Return whether a norm before a rotation differs from one after it."""
    norm = part.qk_norm
    return norm is not None and norm.weight and part.rope is not None and part.qk_norm_over == "head"


def with_field(part: Any, field: str, value: Any) -> Any:
    """Return the part with one field changed, together with fields that must have the same length."""
    if field == "dim" and isinstance(s := part.scaling, LongRopeScaling):
        pairs = value // 2
        cut = replace(s, short_factor=s.short_factor[:pairs], long_factor=s.long_factor[:pairs])
        return replace(part, dim=value, scaling=cut)
    if field == "out_gate":
        return replace(part, out_gate=value, gate_over="number", gate_act="sigmoid", gate_bias=False)
    if field == "shared" and value is None and part.shared_gate:
        return replace(part, shared=None, shared_gate=False)
    if field == "qk_rope_head_dim" and part.rope:
        return replace(part, qk_rope_head_dim=value, rope=replace(part.rope, dim=value))
    return replace(part, **{field: value})


def other_kinds(part: Any, field: str) -> Iterator[Any]:
    """Return replacements for a nested part that need the same weights: nothing, or the simpler kind."""
    value = getattr(part, field)
    names = {"qk_norm", "post_norm", "mlp_post_norm", "embed_norm", "rope", "scaling", "groups", "shared", "pattern"}
    if field in names or (field, type(part)) in (("pre_norm", Layer), ("norm", Mamba2)):
        yield None
    if isinstance(value, LayerNorm):
        yield RMSNorm(value.eps, value.offset, value.weight)
    if isinstance(value, GatedMLP) and field == "mlp":
        yield MLP(value.intermediate_size, value.activation, value.bias)


def reordered(layer: AnyLayer) -> Iterator[tuple[str, AnyLayer]]:
    """Return the layer with its branches in the other arrangement, which has the same weights."""
    if isinstance(layer, ParallelLayer):
        if not layer.one_norm:  # no other arrangement has one norm for both branches
            yield "ParallelLayer", Layer(layer.mixer, layer.mlp, layer.pre_norm)
    elif isinstance(layer, DeepNormLayer):
        yield "DeepNormLayer", Layer(layer.mixer, layer.mlp, layer.pre_norm)
    elif isinstance(layer, Layer) and layer.beside:
        return  # in the other arrangement, it would have a norm of its own
    elif isinstance(layer, Layer) and layer.mixer and layer.mlp and layer.pre_norm and not layer.post_norm:
        yield "Layer", ParallelLayer(layer.mixer, layer.mlp, layer.pre_norm)


def model_flips(spec: ModelSpec) -> Iterator[tuple[str, ModelSpec]]:
    """Yield (the changed field, the model with that change)."""
    yield from flips(spec)
    layers = spec.layers
    chosen = sorted({i for x in set(layers) for i in (layers.index(x), len(layers) - 1 - layers[::-1].index(x))})
    for i in chosen:
        for name, other in (*flips(layers[i]), *reordered(layers[i])):
            if name == "Layer.out_scale" and i == len(layers) - 1:
                continue  # the last norm undoes it
            with suppress(ValueError):  # layers that share keys and values must agree
                yield f"ModelSpec.layers[{i}].{name}", replace(spec, layers=(*layers[:i], other, *layers[i + 1 :]))
    for i in range(len(layers) - 1):
        if layers[i] != layers[i + 1]:
            order = (*layers[:i], layers[i + 1], layers[i], *layers[i + 2 :])
            with suppress(ValueError):
                yield f"ModelSpec.layers[{i}] and [{i + 1}] exchanged", replace(spec, layers=order)


def shapes_of(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    return {w.name: w.shape for w in spec.weights()}


def fits(spec: ModelSpec, shapes: dict[str, tuple[int, ...]]) -> bool:
    """Return whether weights of these shapes fit the spec."""
    return shapes_of(spec).items() <= shapes.items()


def fields_of(label: str) -> list[str]:
    """Return every Type.field on the path of a label, the last one last."""
    return re.findall(r"[A-Z]\w*\.[a-z]\w*", label)


class Subject:
    """A loaded model of a case, which runs other specs with the same weights."""

    def __init__(self, name: str, folder: Path) -> None:
        case = CASES[name]
        build(case, folder)
        checkpoint = open_checkpoint(folder)
        self.spec, self.table = checkpoint.spec, open_table("reference")
        self._length, self._step = case.max_model_len, DenseStep.build(prompts(case), self.table.memory)
        self._weights = load_weights(
            self.spec, checkpoint.family.names, TensorFiles(folder), self.table.memory, "float32", lambda done: None
        )
        self._base = self._run(self.spec, self.table)

    def movement(self, spec: ModelSpec) -> float:
        return float(np.abs(self._run(spec, open_table("reference")) - self._base).max())

    def _run(self, spec: ModelSpec, table: OpsTable) -> np.ndarray:
        used = {w.name: self._weights[w.name] for w in spec.weights()}
        return table.memory.get(Model(spec, used, table, self._length)(self._step))


@pytest.mark.parametrize("name", daily(NAMES, [name for name in NAMES if name in ONE_OF_EACH]))
def test_every_field_moves_the_logits(name: str, tmp_path: Path) -> None:
    subject = Subject(name, tmp_path)
    movement: dict[str, float] = {}
    shapes = shapes_of(subject.spec)
    for label, spec in model_flips(subject.spec):
        assert spec != subject.spec, label
        if fits(spec, shapes):
            movement[label] = max(subject.movement(spec), movement.get(label, 0.0))
        else:
            named = fields_of(label)[-1] in SHAPED | ONE_WAY or "exchanged" in label
            assert named, f"{label} needs other weights"
    still = {*SILENT, *ASLEEP.get(name, ())}
    silent = {label: moved for label, moved in movement.items() if fields_of(label)[-1] in still}
    assert set(silent.values()) == {0.0}
    assert len(movement) > 20
    weak = [f"{label}: {moved:.1e}" for label, moved in movement.items() if label not in silent and moved <= FAR]
    assert not weak, "\n".join(weak)


def test_every_exported_field_is_changed_in_some_case() -> None:
    """Over all cases, the test above changes everything except the exceptions, and every exception is needed."""
    moved: set[str] = set()
    for name in NAMES:
        spec = described(CASES[name])
        shapes = shapes_of(spec)
        for label, other in model_flips(spec):
            path = fields_of(label)
            if fits(other, shapes) and path[-1] not in {*SILENT, *ASLEEP.get(name, ())}:
                moved.update(path)
    exported = [getattr(ridgeline.spec, name) for name in ridgeline.spec.__all__]
    parts = {part.__name__: part for part in exported if is_dataclass(part)}  # TokenMixer is an alias
    assert set(DERIVED) < set(parts)
    ours = {*DERIVED, *OURS}
    everything = {f"{name}.{f.name}" for name, part in parts.items() if name not in ours for f in fields(part)}
    assert moved == everything - set(SHAPED) - set(SILENT) - set(ELSEWHERE)
    assert set(ONE_WAY) <= moved
    assert set(SHAPED) | set(SILENT) | set(ELSEWHERE) <= everything


def described(case: Case) -> ModelSpec:
    """Return the spec of a case, from its config alone."""
    config = getattr(transformers, case.config_class)(**deepcopy(case.kwargs))
    return spec_from_config(json.loads(config.to_json_string(use_diff=False)))
