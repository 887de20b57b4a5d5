"""GET /api/tags and /api/ps, POST /api/show: facts about the model in the format of Ollama's API."""

from __future__ import annotations

import hashlib
from typing import Any

from ridgeline.serve.dialects.ollama import LATEST, known, now
from ridgeline.serve.service import Service

NEVER = "9999-12-31T23:59:59Z"


def tags(service: Service) -> dict[str, Any]:
    """List the names of the model."""
    return {"models": [_named(service, name) for name in service.options.names]}


def ps(service: Service) -> dict[str, Any]:
    """Describe the model in memory under its first name."""
    found, ready = _named(service, service.name), service.ready
    del found["modified_at"]
    on_gpu = 0 if ready.on_host else ready.weight_bytes
    more = {"size_vram": on_gpu, "expires_at": NEVER, "context_length": service.max_model_len}
    return {"models": [{**found, **more}]}


def show(service: Service, name: str) -> dict[str, Any]:
    """Describe the model. Raises APIError for a name that it does not have."""
    service.check_model(known(service, name))
    spec, tokenizer = service.ready.spec, service.tokenizer
    template = tokenizer.chat_template.source if tokenizer and tokenizer.chat_template else ""
    info = {
        "general.architecture": spec.family, "general.parameter_count": spec.num_params(),
        f"{spec.family}.context_length": spec.max_position_embeddings,
        f"{spec.family}.embedding_length": spec.hidden_size, f"{spec.family}.block_count": len(spec.layers),
        f"{spec.family}.vocab_size": spec.vocab_size,
    }  # fmt: skip
    return {
        "modelfile": f"FROM {service.name}\n",
        "parameters": "\n".join(f"{key} {value}" for key, value in service.defaults().items()),
        "template": template, "details": _details(service), "model_info": info,
        "capabilities": _capabilities(service), "modified_at": now(service.created),
    }  # fmt: skip


def _named(service: Service, name: str) -> dict[str, Any]:
    full = name if ":" in name else name + LATEST
    about = f"{full} {service.fingerprint} {service.ready.spec!r}"
    return {
        "name": full, "model": full, "modified_at": now(service.created), "size": service.ready.weight_bytes,
        "digest": hashlib.sha256(about.encode()).hexdigest(), "details": _details(service),
    }  # fmt: skip


def _details(service: Service) -> dict[str, Any]:
    spec, ready = service.ready.spec, service.ready
    form = "gguf" if ready.tokenizer and ready.tokenizer.suffix == ".gguf" else "safetensors"
    bits = round(8 * ready.weight_bytes / spec.num_params())
    return {
        "parent_model": "", "format": form, "family": spec.family, "families": [spec.family],
        "parameter_size": _short(spec.num_params()), "quantization_level": f"{bits} bits",
    }  # fmt: skip


def _short(count: int) -> str:
    """Return a number of parameters as Ollama writes it: 1.2B."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def _capabilities(service: Service) -> list[str]:
    spec = service.ready.spec
    if spec.encoder:
        return ["embedding"]
    found = ["completion", *(["tools"] if service.tool_parser else [])]
    return found + (["thinking"] if service.reasoning_parser else []) + (["insert"] if spec.diffusion else [])
