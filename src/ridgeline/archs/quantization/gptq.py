"""Read the config of GPTQ checkpoints (arXiv:2210.17323), as AutoGPTQ and GPTQModel write it."""

from __future__ import annotations

from typing import Any

from ridgeline.archs.config import Config
from ridgeline.archs.quantization.scheme import Gptq, GptqRule, check_rules, group_size

BITS = (2, 3, 4, 8)
# The tensors show the order of columns and which modules are quantized; the others choose kernels, or describe how the
# file was made.
HARMLESS = frozenset(
    "quant_method method meta lm_head desc_act static_groups true_sequential damp_percent damp_auto_increment "
    "act_group_aware model_name_or_path model_file_base_name batch_size block_name_to_quantize cache_block_outputs "
    "dataset exllama_config max_input_length module_name_preceding_first_block modules_in_block_to_quantize "
    "pad_token_id tokenizer use_cuda_fp16 use_exllama disable_exllama backend mse offload_to_disk iters lr "
    "autoround_version enable_quanted_input enable_minmax_tuning seqlen nsamples amp minmax_lr low_gpu_mem_usage "
    "gradient_accumulate_steps scale_dtype".split()
)
_RULE_HARMLESS = ("desc_act", "mse", "damp_percent", "act_group_aware", "static_groups")


def read(c: Config) -> Gptq:
    """Return the scheme. Raises ConfigError for other bits than BITS and for other layouts than v1 and v2."""
    bits, group, symmetric = _bits(c), group_size(c), c.get_bool("sym", True)
    for name in ("format", "checkpoint_format"):
        c.expect(name, "gptq", "gptq_v2")
    version = c.raw("checkpoint_format") or c.raw("format") or "gptq"
    c.expect("is_marlin_format", False)
    c.expect("pack_dtype", "int32")
    for name in ("rotation", "activation", "adapter"):  # these change the function of the model
        c.expect(name)
    dynamic = _rules(c)
    quantizer = str((c.fields("meta") if isinstance(c.raw("meta"), dict) else {}).get("quantizer", "")).lower()
    c.finish(HARMLESS)
    return Gptq(
        bits=bits, group=group, symmetric=symmetric, stored_less_one=version == "gptq",
        whole_words="gptqmodel" in quantizer, dynamic=dynamic,
    )  # fmt: skip


def _bits(c: Config) -> int:
    bits = c.get_int("bits")
    if bits not in BITS:
        raise c.error("bits", f"is {bits}; GPTQ is read with {', '.join(map(str, BITS))} bits")
    return bits


def _rules(c: Config) -> tuple[GptqRule, ...]:
    """Return the rules of `dynamic`: a regular expression with "+:" or without a prefix, or with "-:" for modules that
    are not quantized.
    """
    found: list[GptqRule] = []
    raw: Any = c.raw("dynamic")
    if raw is None:
        return ()
    inside = c.sub("dynamic")
    assert inside is not None
    check_rules(c, "dynamic", list(raw))
    for key in raw:
        pattern = key.removeprefix("+:").removeprefix("-:")
        if key.startswith("-:"):
            found.append(GptqRule(pattern, skip=True))
            continue
        rule = inside.sub(key)
        if rule is None:
            raise inside.error(key, "is null; it must be an object")
        found.append(
            GptqRule(
                pattern,
                bits=_bits(rule) if rule.present("bits") else None,
                group=group_size(rule) if rule.present("group_size") else None,
                symmetric=rule.get_bool("sym", True) if rule.present("sym") else None,
            )
        )
        rule.finish(_RULE_HARMLESS)
    return tuple(found)
