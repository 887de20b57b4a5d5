"""POST /infill, GET /props and /slots of llama.cpp's server."""

from __future__ import annotations

from typing import Any

from ridgeline import __version__
from ridgeline.serve.dialects import llama_cpp_types as t
from ridgeline.serve.dialects.llama_cpp import LlamaCompletion, joined
from ridgeline.serve.http.errors import APIError
from ridgeline.serve.service import Service
from ridgeline.spec.sight import BEYOND

# Tokens of models that fill gaps: before the text, before what follows the gap, before the answer.
GAPS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, Gemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    tuple(f"<\uff5cfim\u2581{part}\uff5c>" for part in ("begin", "hole", "end")),  # DeepSeek
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # Code Llama
)
FILE = ("<|file_sep|>", "<file_sep>")  # before each file


async def infill(service: Service, body: t.InfillBody) -> LlamaCompletion:
    """Return the work of a request to /infill. Raises APIError for a model that fills no gaps."""
    extra, tokenizer = body.input_extra or [], service.frontend.tokenizer()
    before = "".join(f"{one.text}\n" for one in extra) + body.input_prefix
    if service.ready.spec.block >= BEYOND:
        return LlamaCompletion(service, body, [before + (body.prompt or "")], True, body.input_suffix)
    known = [[tokenizer.token_id(name) for name in names] for names in GAPS]
    marks = next((ids for ids in known if None not in ids), None)
    if marks is None:
        raise APIError(400, "this model fills no gaps: its vocabulary has no tokens for one", code="not_supported")
    file = next((found for name in FILE if (found := tokenizer.token_id(name)) is not None), None)
    files: list[Any] = []
    if file is not None and extra:
        before = body.input_prefix
        for one in extra:
            files += [file, f"{one.filename or 'file'}\n{one.text}\n"]
        files.append(file)
    pre, suf, mid = marks
    parts = [*tokenizer.around[0], *files, pre, before, suf, body.input_suffix, mid, body.prompt or ""]
    return LlamaCompletion(service, body, [await joined(service, [one for one in parts if one != ""])], True)


def props(service: Service) -> dict[str, Any]:
    """Describe the server and its model."""
    tokenizer = service.tokenizer
    special = tokenizer.special_tokens if tokenizer else {}
    template = tokenizer.chat_template.source if tokenizer and tokenizer.chat_template else ""
    params = {**service.defaults(), "seed": service.options.seed, "n_predict": -1}
    return {
        "default_generation_settings": {"n_ctx": service.max_model_len, "params": params},
        "total_slots": service.gate.running, "model_alias": service.name, "model_path": service.name,
        "modalities": {"vision": False, "audio": False}, "chat_template": template,
        "bos_token": special.get("bos_token") or "", "eos_token": special.get("eos_token") or "",
        "build_info": f"ridgeline {__version__}", "is_sleeping": service.asleep,
    }  # fmt: skip


def slots(service: Service) -> list[dict[str, Any]]:
    """List the sequences that may run at once: the first ones are those that run or are about to."""
    drafts = service.ready.config.num_speculative_tokens > 0
    return [
        {"id": i, "n_ctx": service.max_model_len, "speculative": drafts, "is_processing": i < service.gate.open}
        for i in range(service.gate.running)
    ]
