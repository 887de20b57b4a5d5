"""A checkpoint's tensors become the spec's weights: with strict names, exact values, and without a second copy."""

from __future__ import annotations

import copy
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from oracle.build import DERIVED, build, class_for, oracle_logits
from oracle.case import VOCAB, Case, prompts
from oracle.families import CASES
from ridgeline.errors import CheckpointError, RequestError
from ridgeline.llm import LLM
from ridgeline.load.checkpoint import open_checkpoint
from ridgeline.load.safetensors import SINGLE, TensorFiles
from ridgeline.load.weights import RandomWeights, load_weights
from ridgeline.ops import open_table
from ridgeline.ops.api import DType
from ridgeline.spec.request import SamplingParams
from shares import daily

Tensors = dict[str, torch.Tensor]
TOLERANCE = 1e-4
# One case of every family: the simplest one with layers of each kind.
ONE_EACH = {case.model_type: name for name, case in reversed(CASES.items()) if case.greedy_tokens}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folders of the cases, each built once."""

    @functools.cache
    def folder(name: str) -> Path:
        path = tmp_path_factory.mktemp(name)
        build(CASES[name], path)
        return path

    return folder


def altered(source: Path, target: Path, change: Callable[[Tensors], object]) -> Path:
    """Return a copy of a model folder whose tensors `change` has edited in place."""
    tensors = load_file(source / SINGLE)
    change(tensors)
    target.mkdir(exist_ok=True)
    shutil.copy(source / "config.json", target)
    save_file({key: value.contiguous() for key, value in tensors.items()}, target / SINGLE)
    return target


def load(folder: Path, dtype: DType | None = None, files: TensorFiles | None = None) -> Tensors:
    """Return our weights of a folder, as torch tensors."""
    checkpoint = open_checkpoint(folder)
    found = files or TensorFiles(folder)
    return load_weights(
        checkpoint.spec, checkpoint.family.names, found, open_table("reference").memory, dtype, lambda done: None
    )


def refusal(folder: Path) -> str:
    """Return the message with which the weights of a folder are refused, which must be one line."""
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def logits(folder: Path, case: Case, **options: Any) -> list[np.ndarray]:
    llm = LLM(str(folder), skip_tokenizer_init=True, max_model_len=case.max_model_len, **options)
    return llm.logits(prompts(case))


def largest_difference(left: list[np.ndarray], right: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(left, right, strict=True))


# Strict names ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("llama", "model.layers.2.mlp.up_proj.weight"),
        ("llama", "model.norm.weight"),
        ("llama", "lm_head.weight"),
        ("qwen2", "model.layers.0.self_attn.k_proj.bias"),
        ("qwen3_moe", "model.layers.1.mlp.experts.4.down_proj.weight"),
        ("gpt2", "transformer.wpe.weight"),
        ("deepseek_v2", "model.layers.1.self_attn.kv_b_proj.weight"),
        ("deepseek_v2", "model.layers.1.self_attn.q_a_layernorm.weight"),
        ("deepseek_v3", "model.layers.3.mlp.gate.e_score_correction_bias"),
        ("deepseek_v3", "model.layers.2.mlp.shared_experts.up_proj.weight"),
        ("qwen3_next", "model.layers.0.linear_attn.in_proj_ba.weight"),
        ("qwen3_next", "model.layers.2.linear_attn.dt_bias"),
        ("qwen3_next", "model.layers.2.mlp.shared_expert_gate.weight"),
        ("qwen3_5_text", "model.layers.3.linear_attn.in_proj_z.weight"),
        ("kimi_linear", "model.layers.2.self_attn.A_log"),
        ("kimi_linear", "model.layers.0.block_sparse_moe.up_proj.weight"),
        ("kimi_linear", "model.layers.1.block_sparse_moe.gate.e_score_correction_bias"),
        ("granitemoehybrid", "model.layers.3.block_sparse_moe.input_linear.weight"),
        ("granitemoehybrid", "model.layers.0.shared_mlp.input_linear.weight"),
        ("granitemoehybrid", "model.layers.2.mamba.dt_bias"),
        ("nemotron_h_moe", "backbone.layers.1.mixer.experts.11.up_proj.weight"),
        ("nemotron_h_moe", "backbone.layers.5.norm.weight"),
        ("nemotron_h_latent", "backbone.layers.3.mixer.fc1_latent_proj.weight"),
        ("lfm2_moe", "model.layers.1.feed_forward.expert_bias"),
    ],
)
def test_a_missing_tensor_is_named(name: str, key: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    message = refusal(altered(saved(name), tmp_path, lambda tensors: tensors.pop(key)))
    assert key.removeprefix("transformer.") in message
    assert "lacks" in message


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("llama", "model.layers.0.self_attn.q_proj.bias"),  # a bias of another model must not be ignored
        ("llama", "model.layers.4.mlp.up_proj.weight"),  # there is one layer more than config.json says
        ("llama", "extra"),
        ("qwen3_moe", "model.layers.1.mlp.experts.6.down_proj.weight"),
        ("gpt2", "transformer.h.0.attn.bias.extra"),
        ("gpt_neox", "gpt_neox.layers.0.attention.bias_k"),
        ("qwen3", "mtp.fc.weight"),  # only other families ignore multi-token prediction
        ("kimi_linear", "mtp.fc.weight"),
        ("qwen3_next", "model.mtp.fc.weight"),
        ("qwen3_next", "model.visual.pos_embed.weight"),
        ("qwen3_next", "model.layers.1.linear_attn.A_log"),  # this layer has attention
        ("granitemoehybrid", "model.layers.0.self_attn.q_proj.weight"),  # a Mamba-2 layer
        ("nemotron_h_moe", "backbone.layers.1.mixer.q_proj.weight"),  # experts
        ("nemotron_h_moe", "backbone.layers.1.mixer.experts.0.gate_proj.weight"),
        ("nemotron_h_moe", "backbone.layers.5.mixer.A_log"),  # an MLP
    ],
)
def test_an_unknown_tensor_is_named(name: str, key: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    message = refusal(altered(saved(name), tmp_path, lambda tensors: tensors.update({key: torch.ones(2)})))
    assert key in message
    assert "model does not have" in message


def halves_of_kv_b(tensors: Tensors) -> None:
    """Split kv_b into two matrices, for keys and for values, as converters to other programs do."""
    for i in range(4):
        at = f"model.layers.{i}.self_attn."
        whole = tensors.pop(f"{at}kv_b_proj.weight").unflatten(0, (4, 36))
        tensors[f"{at}k_b_proj.weight"], tensors[f"{at}v_b_proj.weight"] = (
            half.flatten(0, 1).contiguous() for half in whole.split((16, 20), 1)
        )


def test_a_split_kv_b_is_named(saved: Callable[[str], Path], tmp_path: Path) -> None:
    message = refusal(altered(saved("deepseek_v2"), tmp_path, halves_of_kv_b))
    assert "lacks model.layers.0.self_attn.kv_b_proj.weight" in message


def test_an_unsplit_kv_b_is_named(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """In our own format, kv_b is one matrix per head."""
    from ridgeline.spec import to_json

    spec, weights = open_checkpoint(saved("deepseek_v2")).spec, load(saved("deepseek_v2"))
    weights["layers.2.mixer.kv_b.weight"] = weights["layers.2.mixer.kv_b.weight"].flatten(0, 1)
    save_file({name: w.contiguous() for name, w in weights.items()}, tmp_path / SINGLE)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "ridgeline", "spec": to_json(spec)}))
    assert "layers.2.mixer.kv_b.weight has shape [144, 32], but config.json requires [4, 36, 32]" in refusal(tmp_path)


def test_the_layer_that_predicts_a_second_token_is_left_alone(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """DeepSeek-V3's files contain one more layer than the model; those of other families may not."""

    def add(tensors: Tensors) -> None:
        for name in ("eh_proj", "self_attn.kv_b_proj", "shared_head.head"):
            tensors[f"model.layers.4.{name}.weight"] = torch.ones(3, 2)

    case = CASES["deepseek_v3"]
    plain, more = (
        logits(f, case) for f in (saved("deepseek_v3"), altered(saved("deepseek_v3"), tmp_path / "more", add))
    )
    assert all(np.array_equal(a, b) for a, b in zip(plain, more, strict=True))
    assert "model.layers.4" in refusal(altered(saved("deepseek_v2"), tmp_path / "v2", add))

    def beyond(tensors: Tensors) -> None:
        tensors["model.layers.5.eh_proj.weight"] = torch.ones(3, 2)

    assert "model.layers.5" in refusal(altered(saved("deepseek_v3"), tmp_path / "beyond", beyond))


def test_many_missing_tensors_stay_one_short_line(saved: Callable[[str], Path], tmp_path: Path) -> None:
    message = refusal(altered(saved("llama"), tmp_path, lambda tensors: tensors.clear()))
    count = len(load_file(saved("llama") / SINGLE))
    assert f"and {count - 5} more" in message
    assert len(message) < 300


@pytest.mark.parametrize(
    ("name", "key", "shape", "wanted"),
    [
        ("llama", "model.layers.1.self_attn.q_proj.weight", (64, 63), (64, 64)),
        ("llama", "model.layers.1.mlp.down_proj.weight", (88, 64), (64, 88)),  # transposed
        ("llama", "model.norm.weight", (1, 64), (64,)),
        ("llama", "model.embed_tokens.weight", (VOCAB + 7, 64), (VOCAB, 64)),
        ("gpt2", "transformer.h.0.mlp.c_fc.weight", (256, 64), (64, 256)),  # as nn.Linear would store it
        ("gpt2", "transformer.h.0.attn.c_attn.weight", (64, 193), (64, 192)),
        ("phi3", "model.layers.0.self_attn.qkv_proj.weight", (193, 64), (192, 64)),
        ("phi3", "model.layers.0.mlp.gate_up_proj.weight", (178, 64), (176, 64)),
        ("phi3", "model.layers.0.mlp.gate_up_proj.weight", (174, 64), (176, 64)),
        ("glm", "model.layers.0.mlp.gate_up_proj.weight", (178, 64), (176, 64)),
        ("gpt_neox", "gpt_neox.layers.0.attention.query_key_value.weight", (360, 96), (288, 96)),
        ("gpt_neox", "gpt_neox.layers.0.attention.query_key_value.bias", (291,), (288,)),
        ("qwen3_moe", "model.layers.0.mlp.experts.3.up_proj.weight", (41, 64), (40, 64)),
        ("deepseek_v2", "model.layers.0.self_attn.kv_b_proj.weight", (4, 36, 32), (144, 32)),
        ("deepseek_v2", "model.layers.0.self_attn.kv_b_proj.weight", (32, 144), (144, 32)),
        ("deepseek_v3", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight", (32, 64), (40, 64)),
        ("qwen3_next", "model.layers.0.linear_attn.in_proj_qkvz.weight", (290, 64), (288, 64)),
        ("qwen3_next", "model.layers.1.self_attn.q_proj.weight", (96, 64), (192, 64)),
        ("qwen3_5_text", "model.layers.0.linear_attn.conv1d.weight", (168, 3), (168, 1, 3)),
        ("kimi_linear", "model.layers.0.self_attn.A_log", (3,), (1, 1, 3, 1)),
    ],
)
def test_a_misshaped_tensor_is_refused_with_both_shapes(
    name: str, key: str, shape: tuple[int, ...], wanted: tuple[int, ...], saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """This matters most for fused tensors: cutting the needed rows out of a larger tensor would go unnoticed."""
    assert tuple(load_file(saved(name) / SINGLE)[key].shape) == wanted
    message = refusal(altered(saved(name), tmp_path, lambda tensors: tensors.update({key: torch.ones(shape)})))
    assert all(part in message for part in (key, str(list(shape)), str(list(wanted))))


def test_a_tied_head_may_be_stored_if_it_is_equal(saved: Callable[[str], Path], tmp_path: Path) -> None:
    name = "llama_tied"
    assert "lm_head.weight" not in load_file(saved(name) / SINGLE)

    def store(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    folder = altered(saved(name), tmp_path, store)
    plain, stored = logits(saved(name), CASES[name]), logits(folder, CASES[name])
    assert all(np.array_equal(a, b) for a, b in zip(plain, stored, strict=True))


def test_a_tied_head_that_differs_is_an_error(saved: Callable[[str], Path], tmp_path: Path) -> None:
    def store(tensors: Tensors) -> None:
        head = tensors["model.embed_tokens.weight"].clone()
        head[-1, -1] += 1e-3
        tensors["lm_head.weight"] = head

    message = refusal(altered(saved("llama_tied"), tmp_path, store))
    assert "lm_head.weight" in message
    assert "tie_word_embeddings" in message  # the remedy


# Buffers and prefixes ----------------------------------------------------------------------------------


def hub_gpt2(tensors: Tensors) -> None:
    """Make a file like the first GPT-2 files on the hub: no prefix, causal masks stored as weights, no head."""
    for key in list(tensors):
        tensors[key.removeprefix("transformer.")] = tensors.pop(key)
    for i in range(4):
        tensors[f"h.{i}.attn.bias"] = torch.ones(1, 1, 256, 256).tril().to(torch.uint8)
        tensors[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)


def neox_buffers(tensors: Tensors) -> None:
    for i in range(4):
        at = f"gpt_neox.layers.{i}.attention."
        tensors[f"{at}bias"] = torch.ones(1, 1, 256, 256, dtype=torch.bool).tril()
        tensors[f"{at}masked_bias"] = torch.tensor(-1e9)
        tensors[f"{at}rotary_emb.inv_freq"] = torch.ones(3)


def llama_buffers(tensors: Tensors) -> None:
    for i in range(4):
        tensors[f"model.layers.{i}.self_attn.rotary_emb.inv_freq"] = torch.ones(8)


@pytest.mark.parametrize(
    ("name", "change"),
    [("llama", llama_buffers), ("gpt2_tied", hub_gpt2), ("gpt_neox", neox_buffers)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_derived_buffers_change_nothing(
    name: str, change: Callable[[Tensors], None], saved: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = altered(saved(name), tmp_path, change)
    plain, with_buffers = logits(saved(name), CASES[name]), logits(folder, CASES[name])
    assert all(np.array_equal(a, b) for a, b in zip(plain, with_buffers, strict=True))


def test_a_tensor_with_and_without_the_prefix_is_ambiguous(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """One of the two would be left over, and which one would depend on their order."""

    def twice(tensors: Tensors) -> None:
        tensors["h.0.ln_1.weight"] = tensors["transformer.h.0.ln_1.weight"] + 1

    assert "h.0.ln_1.weight" in refusal(altered(saved("gpt2"), tmp_path, twice))


# Types -------------------------------------------------------------------------------------------------


def narrowed(dtype: torch.dtype) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors.update({key: value.to(dtype) for key, value in tensors.items()})

    return change


HALF = [(model_type, dtype) for model_type in ONE_EACH for dtype in (torch.bfloat16, torch.float16)]


@pytest.mark.parametrize(
    ("model_type", "dtype"), daily(HALF, [x for x in HALF if x[1] == torch.bfloat16 or x[0] == "llama"], slow=False)
)
def test_half_precision_checkpoints_are_computed_in_float32(
    model_type: str, dtype: torch.dtype, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """The logits equal those of transformers in float32 with the rounded weights, so nothing else is rounded."""
    case = CASES[ONE_EACH[model_type]]
    source = saved(ONE_EACH[model_type])
    reference = (
        class_for(case.model_type)
        .from_pretrained(source, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager")
        .eval()
    )
    exact = oracle_logits(reference, prompts(case))
    with torch.no_grad():
        # transformers does not list the biases of a choice as parameters
        for name, stored in reference.state_dict().items():
            if not name.endswith(DERIVED):  # computed from the config, not read from a file
                stored.copy_(stored.to(dtype).float())
    rounded = oracle_logits(reference, prompts(case))
    found = logits(altered(source, tmp_path, narrowed(dtype)), case)
    assert largest_difference(found, rounded) < TOLERANCE
    assert largest_difference(found, exact) > 3 * TOLERANCE  # so that the comparison notices the rounding


def test_auto_keeps_the_type_of_matrices_and_widens_vectors(saved: Callable[[str], Path], tmp_path: Path) -> None:
    folder = altered(saved("qwen2"), tmp_path, narrowed(torch.bfloat16))
    spec = open_checkpoint(folder).spec
    kept, wide, source = load(folder), load(folder, "float32"), load_file(folder / SINGLE)
    for w in spec.weights():
        assert kept[w.name].dtype is (torch.bfloat16 if w.is_matrix else torch.float32), w.name
        assert wide[w.name].dtype is torch.float32
        assert torch.equal(wide[w.name], kept[w.name].float())  # the conversion is exact
    assert sum(not w.is_matrix for w in spec.weights()) > 4
    assert torch.equal(wide["embed.weight"], source["model.embed_tokens.weight"].float())
    assert torch.equal(kept["layers.1.mixer.q.bias"], source["model.layers.1.self_attn.q_proj.bias"].float())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrowing_rounds_matrices_only(dtype: DType, saved: Callable[[str], Path]) -> None:
    wide, narrow = load(saved("llama")), load(saved("llama"), dtype)
    for w in open_checkpoint(saved("llama")).spec.weights():
        expected = wide[w.name].to(getattr(torch, dtype)) if w.is_matrix else wide[w.name]
        assert narrow[w.name].dtype is expected.dtype
        assert torch.equal(narrow[w.name], expected)


@pytest.mark.parametrize(
    ("option", "same"), [("float32", "float"), ("float16", "half"), ("auto", "float32")], ids=lambda value: value
)
def test_names_of_types(option: str, same: str, saved: Callable[[str], Path]) -> None:
    case = CASES["llama"]
    left, right = (logits(saved("llama"), case, dtype=name) for name in (option, same))
    assert all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def test_tensors_of_different_types_in_one_checkpoint(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """Each matrix keeps its own type; a float32 copy of all of them gives equal results."""

    def mix(tensors: Tensors) -> None:
        types = (torch.float32, torch.bfloat16, torch.float16)
        tensors.update({key: value.to(types[i % 3]) for i, (key, value) in enumerate(sorted(tensors.items()))})

    folder = altered(saved("llama_biases"), tmp_path / "mixed", mix)
    wide = altered(folder, tmp_path / "wide", narrowed(torch.float32))
    matrices = {w.name for w in open_checkpoint(folder).spec.weights() if w.is_matrix}
    assert len({value.dtype for name, value in load(folder).items() if name in matrices}) == 3
    case = CASES["llama_biases"]
    assert largest_difference(logits(folder, case), logits(wide, case)) < 1e-5


def test_experts_of_different_types_are_refused(saved: Callable[[str], Path], tmp_path: Path) -> None:
    key = "model.layers.0.mlp.experts.1.up_proj.weight"

    def change(tensors: Tensors) -> None:
        tensors[key] = tensors[key].half()

    assert "layers.0.mlp.experts.up.weight" in refusal(altered(saved("qwen3_moe"), tmp_path, change))


def test_an_unsupported_type_is_refused_by_name(saved: Callable[[str], Path], tmp_path: Path) -> None:
    message = refusal(altered(saved("llama"), tmp_path, narrowed(torch.float64)))
    assert "F64" in message
    assert "F32" in message


# Memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_matrix_stays_a_view_of_the_mapped_file(
    dtype: torch.dtype, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = altered(saved("llama"), tmp_path, narrowed(dtype))
    files = TensorFiles(folder)
    weights = load(folder, files=files)
    for ours, theirs in {
        "embed.weight": "model.embed_tokens.weight",
        "head.weight": "lm_head.weight",
        "layers.3.mlp.down.weight": "model.layers.3.mlp.down_proj.weight",
    }.items():
        assert weights[ours].data_ptr() == files.read(theirs).data.ctypes.data, ours


def test_a_part_of_a_fused_matrix_is_a_view_too(saved: Callable[[str], Path]) -> None:
    files = TensorFiles(saved("phi3"))
    weights = load(saved("phi3"), files=files)
    fused = files.read("model.layers.0.self_attn.qkv_proj.weight").data
    for i, name in enumerate("qkv"):
        assert weights[f"layers.0.mixer.{name}.weight"].data_ptr() == fused[64 * i :].ctypes.data


def test_progress_adds_up_to_the_bytes_of_the_files(saved: Callable[[str], Path]) -> None:
    for name in ("llama", "phi3", "gpt2", "gpt_neox", "qwen3_moe"):
        checkpoint, files = open_checkpoint(saved(name)), TensorFiles(saved(name))
        done: list[int] = []
        load_weights(checkpoint.spec, checkpoint.family.names, files, open_table("reference").memory, None, done.append)
        assert sum(done) == files.num_bytes(), name


# Random weights ----------------------------------------------------------------------------------------


def config_only(case: Case, folder: Path) -> Path:
    getattr(transformers, case.config_class)(**copy.deepcopy(case.kwargs)).save_pretrained(folder)
    return folder


def random(folder: Path, seed: int, dtype: DType = "float32") -> Tensors:
    return dict(
        RandomWeights(open_checkpoint(folder).spec, open_table("reference").memory, dtype, seed, lambda done: None)
    )


@pytest.mark.parametrize("name", CASES)
def test_dummy_weights_give_finite_logits(name: str, tmp_path: Path) -> None:
    found = logits(config_only(CASES[name], tmp_path), CASES[name], load_format="dummy")
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix != ".json") == []
    assert all(np.isfinite(rows).all() for rows in found)
    assert all(0.01 < float(np.std(rows)) < 100 for rows in found)


def test_dummy_weights_follow_the_seed(tmp_path: Path) -> None:
    folder = config_only(CASES["qwen3_moe_mixed"], tmp_path)
    first, again, other = random(folder, 5), random(folder, 5), random(folder, 6)
    spec = open_checkpoint(folder).spec
    for w in spec.weights():
        assert tuple(first[w.name].shape) == w.shape
        assert torch.equal(first[w.name], again[w.name])
        assert torch.equal(first[w.name], other[w.name]) is not w.is_matrix
    # Weights of one shape are not copies of each other.
    assert not torch.equal(first["layers.0.mixer.q.weight"], first["layers.2.mixer.q.weight"])
    assert not torch.equal(first["layers.0.mixer.k.weight"], first["layers.0.mixer.v.weight"])
    assert float(first["embed.weight"].std()) == pytest.approx(64**-0.5, rel=0.05)
    assert random(folder, 5, "bfloat16")["embed.weight"].dtype is torch.bfloat16


def test_dummy_models_answer_prompt_ids(tmp_path: Path) -> None:
    folder = config_only(CASES["gemma2"], tmp_path)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    answers = []
    for seed in (0, 0, 1):
        llm = LLM(str(folder), load_format="dummy", seed=seed)
        (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, params)
        answers.append(output.outputs[0].token_ids)
    assert len(answers[0]) == 5
    assert answers[0] == answers[1] != answers[2]


def test_without_dummy_a_config_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="dummy"):
        LLM(str(config_only(CASES["llama"], tmp_path)))


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"dtype": "int8"}, ("dtype", "int8", "bfloat16")),
        ({"load_format": "pt"}, ("load-format", "pt", "safetensors")),
        ({"seed": -1}, ("seed", "-1")),
        ({"seed": True}, ("seed", "True")),
        ({"seed": 2**63}, ("seed", str(2**63))),
    ],
)
def test_load_options_out_of_range(options: dict[str, Any], parts: tuple[str, ...], tmp_path: Path) -> None:
    folder = config_only(CASES["llama"], tmp_path)
    with pytest.raises(RequestError) as caught:
        LLM(str(folder), **{"load_format": "dummy", **options})
    assert all(part in str(caught.value) for part in parts)
