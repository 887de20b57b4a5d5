"""Read the config of AWQ checkpoints (AutoAWQ, arXiv:2306.00978)."""

from __future__ import annotations

from ridgeline.archs.config import Config
from ridgeline.archs.quantization.scheme import Awq, group_size

# The tensors show which modules are quantized; the others choose kernels, or describe how the file was made.
HARMLESS = (
    "quant_method", "modules_to_not_convert", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config",
    "backend", "lm_head", "meta", "true_sequential", "desc_act", "damp_percent", "pack_dtype", "method", "format",
    "checkpoint_format", "sym", "dynamic", "rotation", "activation",
)  # fmt: skip


def read(c: Config) -> Awq:
    """Return the scheme. Raises ConfigError for layouts other than "gemm", and for other bits than 4."""
    c.expect("bits", 4, null=False)
    for name in ("version", "format", "checkpoint_format"):
        if isinstance(c.raw(name), str):
            c.expect(name, "gemm", "GEMM")
    c.expect("zero_point", True)
    c.expect("sym", False)
    c.expect("pack_dtype", "int32")
    c.expect("dynamic", {})
    group = group_size(c)
    c.finish(HARMLESS)
    return Awq(group=group)
