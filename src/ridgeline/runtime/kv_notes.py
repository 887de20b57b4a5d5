"""Say which scales a KV cache in fp8 has, and what a checkpoint asks for."""

from __future__ import annotations

from ridgeline.load.kv_scales import describe_scales
from ridgeline.runtime.load import LoadedModel
from ridgeline.spec.storage import num_row_layers


def scale_notes(loaded: LoadedModel) -> tuple[str, ...]:
    """Return remarks on the scales of a KV cache in fp8: those that are used, or would be."""
    layers, scales = num_row_layers(loaded.spec), loaded.model.kv_scales
    scheme, dtype = loaded.checkpoint.quantization, loaded.storage.dtype
    if not layers:
        return ()
    if dtype == "fp8":
        return (f"state in fp8: {describe_scales(scales, layers)}",)
    is_asked = scheme is not None and scheme.has_fp8_cache
    if not scales and not is_asked:
        return ()
    begin = "the checkpoint asks for an fp8 KV cache" if is_asked else "the checkpoint has scales of an fp8 KV cache"
    own = "with the checkpoint's scales" if scales else "with scale 1, because the checkpoint has no scales"
    return (f"{begin}, but state is stored in {dtype}; --kv-cache-dtype fp8 stores it in fp8, {own}",)
