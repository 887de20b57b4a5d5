"""State space models without attention: Mamba, FalconMamba, Mamba-2. A layer is only a mixer."""

from __future__ import annotations

import math

from ridgeline.archs.config import Config
from ridgeline.archs.family import Family
from ridgeline.archs.names import Names
from ridgeline.spec import Layer, Mamba, Mamba2, ModelSpec, RMSNorm

# State and positions set no limit to the length, but the spec needs one.
LONGEST = 1 << 20
UNLIMITED = ({"__float__": "Infinity"}, "Infinity")  # spellings of infinity in JSON

NAMES = Names(
    root={"embed": "backbone.embeddings", "norm": "backbone.norm_f", "head": "lm_head"},
    layer="backbone.layers.{i}.",
    parts={
        "mixer_norm": "norm",
        "mixer": "mixer",
        "mixer.in": "mixer.in_proj",
        "mixer.conv": "mixer.conv1d",
        "mixer.x": "mixer.x_proj",
        "mixer.dt": "mixer.dt_proj",
        "mixer.gate_norm": "mixer.norm",
        "mixer.out": "mixer.out_proj",
    },
)
# The initialization of weights, float32 residuals (always used here), the choice of an implementation, and other names
# for the same sizes in the original Mamba configs.
HARMLESS = (
    "time_step_min", "time_step_max", "time_step_scale", "time_step_floor", "time_step_init_scheme",
    "rescale_prenorm_residual", "residual_in_fp32", "use_mambapy", "use_associative_scan", "use_falcon_mambapy",
    "chunk_size", "d_model", "n_layer", "fused_add_norm", "pad_vocab_size_multiple", "norm_before_gate", "layer_types",
)  # fmt: skip


def mamba(c: Config) -> ModelSpec:
    """Mamba (arXiv:2312.00752)."""
    return _model(c, _mamba_mixer(c, None))


def falcon_mamba(c: Config) -> ModelSpec:
    """FalconMamba: Mamba with norms of dt, B and C that have no weights (arXiv:2410.05355)."""
    return _model(c, _mamba_mixer(c, RMSNorm(c.get_eps("mixer_rms_eps", 1e-6))))


def mamba2(c: Config) -> ModelSpec:
    """Mamba-2 (arXiv:2405.21060)."""
    heads, head_dim = c.get_size("num_heads", 128), c.get_size("head_dim", 64)
    inner = c.get_size("expand", 2) * c.get_size("hidden_size")
    if inner != heads * head_dim:
        raise c.error("expand", f"gives {inner} channels, but num_heads x head_dim is {heads * head_dim}")
    least, most = step_limits(c)
    groups = c.get_size("n_groups", 8)
    c.divide("num_heads", heads, "n_groups", groups)
    mixer = Mamba2(
        num_heads=heads, head_dim=head_dim, state_size=c.get_size("state_size", 128),
        num_groups=groups, conv_size=c.get_size("conv_kernel", 4), norm=_norm(c),
        activation=c.get_activation("hidden_act", "silu"),
        bias=c.get_bool("use_bias", False), conv_bias=c.get_bool("use_conv_bias", True),
        dt_least=least, dt_most=most,
    )  # fmt: skip
    return _model(c, mixer, tied=False)


def step_limits(c: Config) -> tuple[float, float | None]:
    """Return the smallest and the largest step of a Mamba-2 layer; None if there is no largest one."""
    limit = [math.inf if x in UNLIMITED else x for x in c.get_list("time_step_limit", [0.0, math.inf])]
    if len(limit) != 2 or not all(type(x) in (int, float) for x in limit) or not 0 <= limit[0] <= limit[1]:
        raise c.error("time_step_limit", f"is {limit!r:.100}; it must be a smallest and a largest step")
    return float(limit[0]), float(limit[1]) if math.isfinite(limit[1]) else None


def _mamba_mixer(c: Config, inner_norm: RMSNorm | None) -> Mamba:
    hidden = c.get_size("hidden_size")
    # FalconMamba's published config has an expand of 16, but its weights have 8,192 channels.
    inner = c.get_size("intermediate_size", c.get_size("expand", 2) * hidden)
    if c.get_int("d_inner", inner) != inner:
        raise c.error("d_inner", f"is {c.get_int('d_inner')}, but intermediate_size is {inner}; both must be equal")
    rank = c.get_auto("time_step_rank", math.ceil(hidden / 16))
    c.expect("ssm_cfg", {})
    return Mamba(
        inner_size=inner, state_size=c.get_size("state_size", 16), conv_size=c.get_size("conv_kernel", 4), dt_rank=rank,
        activation=c.get_activation("hidden_act", "silu"), bias=c.get_bool("use_bias", False),
        conv_bias=c.get_bool("use_conv_bias", True), inner_norm=inner_norm,
    )  # fmt: skip


def _norm(c: Config) -> RMSNorm:
    return RMSNorm(c.get_eps("layer_norm_epsilon", 1e-5))


def _model(c: Config, mixer: Mamba | Mamba2, tied: bool = True) -> ModelSpec:
    norm = _norm(c)
    c.expect("rms_norm", True)
    return ModelSpec(
        family=c.model_type, vocab_size=c.get_size("vocab_size"), hidden_size=c.get_size("hidden_size"),
        max_position_embeddings=LONGEST, layers=(Layer(mixer, None, norm),) * c.get_layer_count(), norm=norm,
        tie_word_embeddings=c.get_bool("tie_word_embeddings", tied),
    )  # fmt: skip


FAMILIES = (
    Family("mamba", mamba, NAMES, HARMLESS),
    Family("falcon_mamba", falcon_mamba, NAMES, HARMLESS),
    Family("mamba2", mamba2, NAMES, (*HARMLESS, "time_step_rank")),  # time_step_rank remains from Mamba
)
