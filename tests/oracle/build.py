"""Build the oracle's models with transformers, and run them in the simplest way.

Every sequence runs alone, without a cache, padding or a batch, with eager attention; greedy decoding computes the whole
history again for every token. Such a run is hard to get wrong, so it can judge an engine that uses all of these
techniques.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from oracle.case import SPECIAL_TOKENS, Case, greedy_prompt, prompts

logging.disable_progress_bar()  # saving a model shows a bar, and a test run saves dozens of models


# No fused attention and no grouped matrix products: one plain matmul after the other.
PLAIN = {"attn_implementation": "eager", "experts_implementation": "eager"}


# Standard deviation of a matrix, relative to a variance-preserving draw: sharp attention reveals mistakes.
GAIN = 1.5
# Prefixes of the class names of norms that multiply by 1 + weight.
FROM_ONE = (
    "GemmaRMSNorm", "Gemma2", "Gemma3", "VaultGemma", "Qwen3NextRMSNorm", "Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm",
    "NemotronLayerNorm1P", "RecurrentGemmaRMSNorm",
)  # fmt: skip


# Stored buffers that follow from the config or are constants: tables of MiniMax's decays, numbers of Apertus.
DERIVED = ("slope_rate", "query_decay", "key_decay", "diagonal_decay", "act_fn.beta", "act_fn.eps")


# Building ---------------------------------------------------------------------------------------------


def make_model(case: Case, **changes: Any) -> nn.Module:
    """Return the case's model with transformers' initial weights; `changes` override config arguments."""
    kwargs = copy.deepcopy({**case.kwargs, **changes})  # configs modify the dicts that they get
    config = getattr(transformers, case.config_class)(**kwargs)
    return class_for(config.model_type).from_config(config, **PLAIN).to(torch.float32).eval()


def class_for(model_type: str) -> Any:
    """Return transformers' class that builds a model of a type: for text, or for images and text."""
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return transformers.AutoModelForCausalLM
    return transformers.AutoModelForImageTextToText


def redraw(model: nn.Module, seed: int) -> None:
    """Draw every parameter again, so large that no part of the model is a rounding error.

    The usual initialization (std 0.02, norms at 1, biases at 0) makes the layers nearly the identity: a Gemma 2 without
    its softcap then differs from one with it by only 3e-7, and no test could distinguish them.
    """
    generator = torch.Generator().manual_seed(seed)
    tied = bool(model.config.tie_word_embeddings)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            _draw(module, name, parameter.data, tied, generator)
    stored = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in stored and not name.endswith(DERIVED):
            if name.endswith("layer_scalar"):  # a factor of the stream
                buffer.uniform_(0.5, 1.5, generator=generator)
                continue
            # The bias of DeepSeek-V3's choice: a small part of the spread of the scores.
            buffer.normal_(0.0, 0.2, generator=generator)
    model.tie_weights()


def _draw(module: nn.Module, name: str, value: torch.Tensor, tied: bool, generator: torch.Generator) -> None:
    """Fill one parameter, whose kind follows from its shape, its name and the class that owns it."""
    if name == "A_log":  # decays from fast to slow
        value.uniform_(-2.0, 1.5, generator=generator)
    elif name == "recurrent_param":
        value.uniform_(-3.0, 1.0, generator=generator)
    elif name == "recurrent_gate_weight":  # no gate is nearly closed, where transformers' float32 loses 1 - a^2
        value.normal_(0.0, 0.5 * value.shape[-2] ** -0.5, generator=generator)
    elif name.endswith("bias") and name != "dt_bias":  # dt_bias sets the length of steps
        value.normal_(0.0, 0.5, generator=generator)
    elif name in ("weight", "scale", "per_expert_scale") and value.ndim == 1:  # a norm, or factors of Gemma 4's router
        kind = type(module).__name__
        low = -0.5 if kind.startswith(FROM_ONE) and not kind.endswith("Gated") else 0.5
        value.uniform_(low, low + 1.0, generator=generator)
    elif isinstance(module, nn.Embedding):
        # A tied embedding is the output head too. Gemma's lookup multiplies by embed_scale, which is undone here,
        # because otherwise the embedding would dominate the layers.
        std = (
            GAIN * value.shape[-1] ** -0.5
            if tied
            else 1.0 / (getattr(module, "scalar_embed_scale", getattr(module, "embed_scale", 1.0)) or 1.0)
        )
        value.normal_(0.0, std, generator=generator)
    elif value.ndim >= 2:  # a matrix, or a stack of experts; these classes store [in, out]
        transposed = isinstance(module, Conv1D) or type(module).__name__ in ("GptOssExperts", "Llama4TextExperts")
        fan_in = value.shape[-2 if transposed else -1]
        value.normal_(0.0, GAIN * max(fan_in, 1) ** -0.5, generator=generator)
    else:
        value.normal_(0.0, 1.0, generator=generator)


def build(case: Case, folder: Path | str | None = None, seed: int | None = None) -> nn.Module:
    """Return the case's model with redrawn weights in float32, saved into `folder` if one is given."""
    model = make_model(case)
    redraw(model, case.seed if seed is None else seed)
    # Frequencies that depend on the length are computed at the first use of that length. This run computes them in
    # float32, as other programs do, so that a float64 copy does not have better frequencies.
    oracle_logits(model, [[3] * max(case.lengths)])
    if folder is not None:
        model.save_pretrained(folder)
    return model


def variant(case: Case, model: nn.Module, changes: Mapping[str, Any]) -> nn.Module:
    """Return the case's model with equal weights and a changed config, as if a field had been misread."""
    other = make_model(case, **changes)
    other.load_state_dict(model.state_dict())
    return other


# Running ----------------------------------------------------------------------------------------------


class Float64(TorchFunctionMode):
    """Replace every request for float32 by float64.

    `model.double()` alone is not a float64 run, because norms, softmax, rotary angles and routers request float32 by
    name. In this mode they compute in float64, so that nothing is rounded to float32. The rotary frequencies keep their
    float32 values, which define the model.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        if func is torch.full and isinstance(args[1], float):  # XGLM fills a new number with the lowest of a type
            kwargs = {"dtype": torch.float64, **(kwargs or {})}
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {key: torch.float64 if arg is torch.float32 else arg for key, arg in (kwargs or {}).items()}
        return func(*args, **kwargs)


def double(model: nn.Module) -> nn.Module:
    """Return a copy in float64; the functions below compute all of it in float64 but the rotary frequencies."""
    own = copy.deepcopy(model).double()
    for module in own.modules():
        if hasattr(module, "rope_init_fn"):
            module.rope_init_fn = _single_frequencies(module.rope_init_fn)
    return own


def _single_frequencies(frequencies: Callable[..., tuple[torch.Tensor, float]]) -> Callable[..., Any]:
    """Return a function of a rotary class that computes float32 numbers where `Float64` is active, too.

    Classes that call it in each pass (dynamic NTK, LongRoPE, PhiMoE) would otherwise get other frequencies than those
    that define the model. An angle of position 100 then differs by 6e-6, and sharp attention makes that 2e-5 in logits.
    """

    def compute(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, float]:
        with torch._C.DisableTorchFunction():
            inverse, factor = frequencies(*args, **kwargs)
        return inverse.double(), factor

    return compute


@torch.no_grad()
def _forward(model: nn.Module, tokens: Sequence[int], **kwargs: Any) -> Any:
    input_ids = torch.tensor([list(tokens)], dtype=torch.int64)
    if next(model.parameters()).dtype is torch.float64:
        with Float64():
            return model(input_ids=input_ids, use_cache=False, **kwargs)
    return model(input_ids=input_ids, use_cache=False, **kwargs)


def oracle_logits(model: nn.Module, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Return the logits [length, vocabulary] of each sequence, run alone and without a cache, in the model's dtype."""
    return [_forward(model, tokens).logits[0].numpy() for tokens in sequences]


def oracle_greedy(model: nn.Module, prompt: Sequence[int], n: int) -> tuple[list[int], float]:
    """Return `n` greedy tokens, each computed from the whole history, and the smallest lead of a best token over the
    second.

    End-of-sequence tokens do not stop it.
    """
    ids: list[int] = []
    margin = float("inf")
    for _ in range(n):
        top = _forward(model, [*prompt, *ids]).logits[0, -1].topk(2)
        margin = min(margin, float(top.values[0] - top.values[1]))
        ids.append(int(top.indices[0]))
    return ids, margin


def oracle_margins(model: nn.Module, prompt: Sequence[int], ids: Sequence[int]) -> np.ndarray:
    """Return by how much each of `ids` leads every other token, in one run over prompt and ids; negative: it does not
    lead.

    With a float64 model, this shows how safe a float32 greedy run is, for one forward pass or two.
    """
    tokens = [*prompt, *ids[:-1]]
    logits = oracle_logits(model, [tokens])[0]
    # A model with two sets of frequencies gives the tokens up to here from the shorter sequence.
    end = getattr(model.config, "original_max_position_embeddings", None)
    if end is not None and end < len(tokens):
        logits[:end] = oracle_logits(model, [tokens[:end]])[0]
    logits = logits[-len(ids) :]
    rows = np.arange(len(ids))
    chosen = logits[rows, ids]
    logits[rows, ids] = -np.inf
    return chosen - logits.max(axis=1)


def router_gap(model: nn.Module, sequences: Sequence[Sequence[int]]) -> float:
    """Return the smallest gap between the last chosen and the first rejected expert, or group of experts; inf if there
    is none.

    Routing is discontinuous: if the gap is as small as float32 noise, two correct programs may disagree. The gap is in
    logits, or in scores if logits alone do not decide.
    """
    gap = float("inf")
    for tokens in sequences if _num_chosen(model.config) else ():
        ends = ("e_score_correction_bias", "expert_bias")
        stored = (*model.named_buffers(), *model.named_parameters())
        biases = [b.flatten() for name, b in stored if name.endswith(ends)]
        found = _forward(model, tokens, output_router_logits=True).router_logits
        for i, logits in enumerate(found):
            logits = logits.log() if model.config.model_type == "gemma4_text" else logits  # it returns probabilities
            softmax = model.config.model_type in ("ernie4_5_moe", "longcat_flash")
            score = logits.softmax(-1) if softmax else logits.sigmoid()
            rated = score + biases[i] if biases else logits
            gap = min(gap, *_choice_gaps(model.config, rated))
    return gap


def _num_chosen(config: Any) -> int:
    """Return the number of experts of a token; 0 without experts."""
    own = getattr(getattr(config, "ffn_config", None), "moe_top_k", None)
    return own or getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None) or 0


def _choice_gaps(config: Any, rated: torch.Tensor) -> Iterator[float]:
    """Yield the gaps between the worst chosen and the best rejected of [tokens, experts], and of groups if they limit
    the choice.
    """

    def gap(values: torch.Tensor, count: int) -> float:
        best = values.topk(count + 1).values
        return float((best[:, -2] - best[:, -1]).min())

    two_best = config.model_type in ("deepseek_v3", "deepseek_v32", "kimi_linear", "nemotron_h", "beam")
    limited = two_best or getattr(config, "topk_method", "") == "group_limited_greedy"
    if limited and config.topk_group < config.n_group:
        groups = rated.unflatten(-1, (config.n_group, -1))
        score = groups.topk(2 if two_best else 1).values.sum(-1)
        yield gap(score, config.topk_group)
        closed = torch.ones_like(score).scatter(-1, score.topk(config.topk_group).indices, 0.0)
        rated = groups.masked_fill(closed[..., None].bool(), -torch.inf).flatten(-2)
    yield gap(rated, _num_chosen(config))


# Model types that transformers 4 does not have.
NEW_ONLY = (
    "gemma4_text", "gemma4", "gemma4_unified_text", "gemma4_unified", "mellum", "ministral3", "mistral3", "cohere2_moe",
    "cohere_compass_text", "lfm3", "laguna", "beam",
)  # fmt: skip

# The spelling of transformers 4 -----------------------------------------------------------------------


def to_v4_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a config.json of transformers 5 to the spelling of transformers 4, which most published models have.

    `rope_parameters` becomes `rope_theta` and `rope_scaling`, `dtype` becomes `torch_dtype`, and fields that
    transformers 4 derived or assumed are left out.
    """
    old = {key: value for key, value in config.items() if not key.startswith("_")}
    old["transformers_version"] = "4.40.0"
    old["torch_dtype"] = old.pop("dtype")
    if "num_local_experts" in old and old["model_type"] == "qwen3_moe":
        old["num_experts"] = old.pop("num_local_experts")
    if old["model_type"] == "gemma3":
        old["text_config"] = to_v4_config({**old["text_config"], "dtype": old["torch_dtype"]})
    rope = None if old["model_type"] in NEW_ONLY else old.pop("rope_parameters", None)
    if rope is not None:
        old.update(_v4_rope(old["model_type"], rope))
    _drop_derived(old)
    return old


def _v4_rope(model_type: str, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the old fields of RoPE, by the family's names."""
    fields: dict[str, Any] = {}
    if "full_attention" in rope:
        if model_type == "gemma3_text":
            fields["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        if model_type == "modernbert-decoder":
            return {"rope_scaling": None, "global_rope_theta": rope["full_attention"]["rope_theta"],
                    "local_rope_theta": rope["sliding_attention"]["rope_theta"]}  # fmt: skip
        rope = rope["full_attention"]
    scaling = dict(rope)
    neox = model_type in ("gpt_neox", "gpt_neox_japanese")
    fields["rotary_emb_base" if neox else "rope_theta"] = scaling.pop("rope_theta")
    if "partial_rotary_factor" in scaling:
        fields["rotary_pct" if neox else "partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
    if model_type == "phi3":  # its older name of the kind, with the original length at the top level
        scaling["type"] = scaling.pop("rope_type")
        scaling.pop("original_max_position_embeddings", None)
    kind = scaling.get("type", scaling.get("rope_type"))
    # A null means no scaling, except where the class then uses its own.
    fields["rope_scaling"] = (
        None if kind == "default" and model_type not in ("gpt_oss", "apertus", "apertus1p5_text") else scaling
    )
    return fields


def _drop_derived(old: dict[str, Any]) -> None:
    """Remove fields that old files lack because the family's rule or default gives them."""
    model_type, layers = old["model_type"], old.get("num_hidden_layers", 0)
    full_at: dict[str, Callable[[int], bool]] = {
        "gemma2": lambda i: i % 2 == 1,
        "gemma3_text": lambda i: i % 6 == 5,
        "qwen2": lambda i: not old["use_sliding_window"] or i < old["max_window_layers"],
        "qwen3": lambda i: not old["use_sliding_window"] or i < old["max_window_layers"],
    }
    if model_type in full_at:
        full = [full_at[model_type](i) for i in range(layers)]
        if old["layer_types"] == ["full_attention" if f else "sliding_attention" for f in full]:
            del old["layer_types"]
            if model_type == "gemma3_text":
                old["sliding_window_pattern"] = 6
    if model_type.startswith(("gemma", "gpt2")) and old["tie_word_embeddings"]:
        del old["tie_word_embeddings"]  # true was the default of transformers 4
    if model_type in ("llama", "mistral", "mixtral"):
        if old["head_dim"] in (None, old["hidden_size"] // old["num_attention_heads"]):
            del old["head_dim"]
        if model_type == "llama" and old["num_key_value_heads"] == old["num_attention_heads"]:
            del old["num_key_value_heads"]


def respell(folder: Path, target: Path) -> Path:
    """Copy a saved model with its config.json in the spelling of transformers 4."""
    shutil.copytree(folder, target)
    path = target / "config.json"
    path.write_text(json.dumps(to_v4_config(json.loads(path.read_text())), indent=2))
    return target


# Measuring --------------------------------------------------------------------------------------------


def measure(case: Case, seed: int | None = None) -> dict[str, float]:
    """Measure the quality of the oracle itself: margins, noise of float32, size and spread of the logits."""
    model = build(case, seed=seed)
    precise = double(model)
    sequences = prompts(case)
    single, exact = oracle_logits(model, sequences), oracle_logits(precise, sequences)
    prompt = greedy_prompt(case)
    ids, _ = oracle_greedy(model, prompt, case.greedy_tokens)
    margins = oracle_margins(precise, prompt, ids) if ids else np.array([np.inf])
    return {
        "layers": model.config.get_text_config().num_hidden_layers,
        "params": sum(p.numel() for p in model.parameters()),
        "std": float(np.std(exact[-1])),
        "noise": max(float(np.abs(a - b).max()) for a, b in zip(single, exact, strict=True)),
        "margin": float(margins.min()),
        "distinct": len(set(ids)),
        "special": sum(token in SPECIAL_TOKENS for token in ids),
        "gap": router_gap(precise, [*sequences, [*prompt, *ids]]),
    }


def print_table(cases: Mapping[str, Case]) -> None:
    """Print one line for each case, as it is measured now."""
    columns = ("layers", "params", "std", "noise", "margin", "distinct", "gap")
    print(f"{'case':20}" + "".join(f"{column:>9}" for column in columns))
    for name, case in cases.items():
        m = measure(case)
        print(
            f"{name:20}{m['layers']:9d}{m['params']:9d}{m['std']:9.2f}{m['noise']:9.1e}"
            f"{m['margin']:9.1e}{m['distinct']:6d}/{case.greedy_tokens:<2d}{m['gap']:9.1e}"
        )
