"""Describe a tokenizer as the metadata of a GGUF file.

The whole tokenizer.json is stored under `tokenizer.huggingface.json`, a key of the GGUF specification that our reader
prefers. For llama.cpp, `tokenizer.ggml.*` describes the same vocabulary, if one of llama.cpp's rules splits texts in
the same way. This is tried with texts, because equal rules are written in different ways.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ridgeline.errors import TokenizerError
from ridgeline.load.gguf.splits import SPLITS
from ridgeline.load.gguf.vocab import HUGGING_FACE, build_vocab
from ridgeline.load.tokenizer import Tokenizer

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 3, 4, 5, 6
_IDS = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
        "pad_token": "padding_token_id"}  # fmt: skip
# Texts that different rules split differently: contractions, numbers, spaces, lines, scripts, marks, symbols.
_PROBES = (
    "It's we're I'LL they'd 'sam can't y'all O'Neil's", "1 12 123 1234 12345 3.14 1,000,000 x86_64 2024-01-31",
    "  two  spaces\ttab \n\n lines\r\nand  \n  more   ", "def f(x):\n    return x**2  # note\n\n\nclass A: pass",
    "Füße naïve café Ελληνικά русский 中文字符 日本語テスト 한국어 עברית العربية हिन्दी ไทย", "a/b//c\\d http://x.y/z?q=1&r=2#s",
    "HelloWorld camelCase XMLHttp iPhone ALLCAPS mixedCASEword", "!!! ... --- $100 €5 50% @user #tag (a) [b] {c} <d>",
    "🦙🦙 👍🏽 e\u0301 \u200d ½ ² Ⅷ", " leading", "trailing ", "\n", " ",
)  # fmt: skip


def vocab_fields(
    tokenizer: Tokenizer | None, vocab_size: int, config: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the metadata of a tokenizer, and notes. vocab_size: rows of the embedding; missing tokens are padding.

    config: the model's config.json, for the ids after which generation ends.
    """
    if tokenizer is None:
        return {"tokenizer.ggml.model": "none", **_ids(config)}, ("the file has no tokenizer",)
    described = json.loads(tokenizer.to_json())
    fields: dict[str, Any] = {HUGGING_FACE: tokenizer.to_json(), **_templates(tokenizer)}
    named = {_IDS[name]: tokenizer.token_id(token) for name, token in tokenizer.special_tokens.items() if name in _IDS}
    ids = {**_ids(config), **{f"tokenizer.ggml.{k}": v for k, v in named.items() if v is not None and v < vocab_size}}
    ids |= _flags(tokenizer)
    for candidate in _candidates(described, tokenizer, vocab_size):
        if _is_same(tokenizer, {**candidate, **ids}):
            return {**fields, **candidate, **ids}, ()
    note = "llama.cpp has no rule for this tokenizer, so that it can run the file with token ids only"
    return {**fields, "tokenizer.ggml.model": "none", **ids}, (note,)


def _ids(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ids of special tokens in a config; a second end of generation is the end of a turn."""
    ends = config.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = {"bos_token_id": config.get("bos_token_id"), **dict(zip(names, ends, strict=False))}
    return {f"tokenizer.ggml.{name}": value for name, value in found.items() if type(value) is int and value >= 0}


def _flags(tokenizer: Tokenizer) -> dict[str, bool]:
    """Return whether BOS and EOS are put around a text; nothing if other tokens are."""
    before, after = tokenizer.around
    if before not in ([], [tokenizer.bos_token_id]) or after not in ([], [tokenizer.eos_token_id]):
        return {}
    return {"tokenizer.ggml.add_bos_token": bool(before), "tokenizer.ggml.add_eos_token": bool(after)}


def _templates(tokenizer: Tokenizer) -> dict[str, str]:
    names = {"default": "tokenizer.chat_template"}
    return {names.get(name, f"tokenizer.chat_template.{name}"): text for name, text in tokenizer.template_texts.items()}


def _candidates(described: Mapping[str, Any], tokenizer: Tokenizer, size: int) -> list[dict[str, Any]]:
    """Return descriptions to try: SentencePiece's for a vocabulary with bytes as tokens, else one for each rule."""
    model = described["model"]
    if model["type"] != "BPE":
        return []
    tokens, types = _tokens(described, tokenizer, size)
    common = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ", 1)) for m in model["merges"]]
    if model.get("byte_fallback"):
        first: dict[str, int] = {}
        for rank, (left, right) in enumerate(merges):
            first.setdefault(left + right, rank)
        scores = [-float(first.get(token, len(merges))) for token in tokens]
        whole = {**common, "tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores}
        return [{**whole, "tokenizer.ggml.add_space_prefix": flag} for flag in (True, False)]
    if not merges or any(" " in part for pair in merges for part in pair):
        return []
    whole = {**common, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": [" ".join(pair) for pair in merges]}
    return [{**whole, "tokenizer.ggml.pre": name} for name in sorted(SPLITS, key=lambda name: _likely(described, name))]


def _likely(described: Mapping[str, Any], rule: str) -> tuple[bool, int]:
    """Return a sort key that puts the rules first whose patterns the tokenizer has literally."""
    text, patterns = json.dumps(described.get("pre_tokenizer")), SPLITS[rule].patterns
    return any(json.dumps(pattern)[1:-1] not in text for pattern in patterns), -len(patterns)


def _tokens(described: Mapping[str, Any], tokenizer: Tokenizer, size: int) -> tuple[list[str], list[int]]:
    """Return the token and its type for each row of the embedding."""
    tokens = [tokenizer.token_name(i) or f"[PAD{i}]" for i in range(size)]
    types = [_NORMAL if tokenizer.token_name(i) else _UNUSED for i in range(size)]
    is_bytes = bool(described["model"].get("byte_fallback"))
    for i, token in enumerate(tokens):
        if is_bytes and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            types[i] = _BYTE
    for added in described["added_tokens"]:
        if added["id"] < size:
            types[added["id"]] = _CONTROL if added["special"] else _USER_DEFINED
    return tokens, types


def _is_same(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> bool:
    """Return whether llama.cpp's description gives the ids of the tokenizer for all probes."""
    try:
        vocab = build_vocab(metadata)
    except TokenizerError:
        return False
    other = Tokenizer(vocab.backend, special_tokens=vocab.special_tokens, around=vocab.around)
    return all(tokenizer.encode(text) == other.encode(text) for text in _PROBES)
