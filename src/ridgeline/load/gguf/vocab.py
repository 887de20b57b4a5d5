"""Build a tokenizer from the metadata of a GGUF file (`tokenizer.ggml.*`, keys as llama.cpp writes them).

A file may contain a whole tokenizer.json, which then is the tokenizer. Otherwise there are two kinds. "gpt2" is
byte-level BPE with explicit merges and a word pattern named by `pre`. "llama" is SentencePiece BPE, which has scores
instead of merges: of all neighbors, the pair whose union has the highest score is joined first. So the merges are all
cuts of every piece into two parts, best score first. Only normal pieces take part, as in llama.cpp's and Hugging Face's
conversions of the same vocabularies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from ridgeline.errors import TokenizerError
from ridgeline.load.gguf.header import GgufValue
from ridgeline.load.gguf.splits import SPLITS, Split
from ridgeline.load.growth import check_growth
from ridgeline.load.tokenizer_files import guarded

Metadata = Mapping[str, GgufValue]
T = TypeVar("T", str, int, float, bool)

HUGGING_FACE = "tokenizer.huggingface.json"  # the whole tokenizer.json, a key of the GGUF specification
_PREFIX = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "\u2581"
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # spelled like this in the format
    "pad_token": "padding_token_id",
}
_LLAMA_IDS = {"bos_token": 1, "eos_token": 2, "unk_token": 0}  # SentencePiece's defaults, if the file has none


@dataclass(frozen=True)
class GgufVocab:
    """A tokenizer, its named special tokens, the ids before and after a text (None: those of its post-processor), and
    the chat templates by name.
    """

    backend: Tokenizer
    special_tokens: dict[str, str]
    around: tuple[list[int], list[int]] | None
    templates: dict[str, str]


def has_vocab(metadata: Metadata) -> bool:
    """Return whether the file says that it has a tokenizer."""
    return HUGGING_FACE in metadata or metadata.get(f"{_PREFIX}model", "none") != "none"


def build_vocab(metadata: Metadata) -> GgufVocab:
    """Return the tokenizer that `metadata` describes.

    Raises TokenizerError if a key is missing, has the wrong type or contradicts another, or if the model or the
    pre-tokenizer has an unknown name.
    """
    if HUGGING_FACE in metadata:
        return _whole(metadata)
    kind = _get(metadata, "model", str)
    if kind not in ("gpt2", "llama"):
        raise TokenizerError(f"tokenizer.ggml.model is {kind!r}; supported: 'gpt2' and 'llama'")
    tokens = _tokens(metadata)
    types = _list(metadata, "token_type", int, len(tokens)) if _has(metadata, "token_type") else [_NORMAL] * len(tokens)
    split = _split(metadata) if kind == "gpt2" else None
    named = _named(metadata, tokens, {} if split else _LLAMA_IDS)
    if split:
        backend = _byte_level(metadata, tokens, split)
    else:
        backend = _sentencepiece(metadata, tokens, types, named.get("unk_token"))
    _add_tokens(backend, tokens, types)
    return GgufVocab(
        backend,
        {name: tokens[index] for name, index in named.items()},
        _around(metadata, named, split.add_bos if split else True),
        _templates(metadata),
    )


def _whole(metadata: Metadata) -> GgufVocab:
    """Return the tokenizer of a tokenizer.json that the file contains."""
    text = metadata[HUGGING_FACE]
    if not isinstance(text, str):
        raise TokenizerError(f"{HUGGING_FACE} is a {type(text).__name__}; it must be a string")
    check_growth(text, HUGGING_FACE)
    backend = guarded(lambda: Tokenizer.from_str(text), HUGGING_FACE)
    ids = {name: _get(metadata, key, int) for name, key in _NAMED.items() if _has(metadata, key)}
    named = {name: backend.id_to_token(index) for name, index in ids.items() if index >= 0}
    around = None
    if _has(metadata, "add_bos_token") or _has(metadata, "add_eos_token"):
        around = _around(metadata, ids, False)
    return GgufVocab(backend, {name: token for name, token in named.items() if token}, around, _templates(metadata))


def _around(metadata: Metadata, named: Mapping[str, int], bos: bool) -> tuple[list[int], list[int]]:
    """Return the ids before and after a text. bos: whether BOS is added if the file does not say."""
    add_bos, add_eos = _flag(metadata, "add_bos_token", bos), _flag(metadata, "add_eos_token", False)
    return (
        [named["bos_token"]] if add_bos and "bos_token" in named else [],
        [named["eos_token"]] if add_eos and "eos_token" in named else [],
    )


def _byte_level(metadata: Metadata, tokens: list[str], split: Split) -> Tokenizer:
    merges = [_merge(text) for text in _list(metadata, "merges", str)]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(_bpe(vocab, merges, ignore_merges=split.ignore_merges))
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, spell])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: Metadata, tokens: list[str], types: list[int], unknown: int | None) -> Tokenizer:
    scores = _list(metadata, "scores", float, len(tokens))
    vocab = {token: index for index, token in enumerate(tokens)}
    pieces = {token: index for token, index in vocab.items() if types[index] == _NORMAL}
    backend = Tokenizer(
        _bpe(
            vocab,
            _merges_by_score(pieces, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space = _flag(metadata, "add_space_prefix", True)
    escape = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), escape]) if space else escape
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if space else steps)
    return backend


def _merges_by_score(pieces: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    ranked = []
    for piece, index in pieces.items():
        for cut in range(1, len(piece)):
            left, right = pieces.get(piece[:cut]), pieces.get(piece[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[index], index, left, right, piece[:cut], piece[cut:]))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], **options: object) -> BPE:
    try:
        return BPE(vocab=vocab, merges=merges, **options)
    except Exception as error:  # tokenizers raises bare Exceptions
        raise TokenizerError(f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens ({error})") from error


def _merge(text: str) -> tuple[str, str]:
    cut = text.find(" ", 1)  # not at 0: a merge's left side is never empty
    if cut < 0 or cut == len(text) - 1:
        raise TokenizerError(f"tokenizer.ggml.merges contains {text!r}; a merge is two tokens with a space between")
    return text[:cut], text[cut + 1 :]


def _add_tokens(backend: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Add control and user-defined tokens, which are matched as a whole; only control tokens are special."""
    chosen = [(token, kind) for token, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    backend.add_tokens(
        [AddedToken(token, special=kind == _CONTROL, normalized=False) for token, kind in chosen if token]
    )
    unknown = [token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN and token]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in unknown])


def _split(metadata: Metadata) -> Split:
    known = f"supported: {', '.join(sorted(SPLITS))}"
    if not _has(metadata, "pre"):
        raise TokenizerError(f"tokenizer.ggml.pre is missing; convert the model again ({known})")
    name = _get(metadata, "pre", str)
    if name not in SPLITS:
        raise TokenizerError(f"tokenizer.ggml.pre is {name!r}, which is not supported; {known}")
    return SPLITS[name]


def _named(metadata: Metadata, tokens: list[str], defaults: Mapping[str, int]) -> dict[str, int]:
    named = {name: index for name, index in defaults.items() if index < len(tokens)}
    for name, key in _NAMED.items():
        if not _has(metadata, key):
            continue
        index = _get(metadata, key, int)
        if not 0 <= index < len(tokens):
            raise TokenizerError(f"tokenizer.ggml.{key} is {index}; the vocabulary has the ids 0 to {len(tokens) - 1}")
        named[name] = index
    return named


def _tokens(metadata: Metadata) -> list[str]:
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(_list(metadata, "tokens", str))]
    if len(set(tokens)) != len(tokens):
        twice = next(token for token in tokens if tokens.count(token) > 1)
        raise TokenizerError(f"tokenizer.ggml.tokens contains {twice!r} twice; convert the model again")
    return tokens


def _templates(metadata: Metadata) -> dict[str, str]:
    """Return the templates by name; `tokenizer.chat_template` is the default, `tokenizer.chat_template.NAME` the
    others.
    """
    templates = {}
    for key, value in metadata.items():
        if key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template."):
            if not isinstance(value, str):
                raise TokenizerError(f"{key} is a {type(value).__name__}; it must be a string")
            templates[key.removeprefix("tokenizer.chat_template").removeprefix(".") or "default"] = value
    return templates


def _has(metadata: Metadata, key: str) -> bool:
    return _PREFIX + key in metadata


def _flag(metadata: Metadata, key: str, default: bool) -> bool:
    return _get(metadata, key, bool) if _has(metadata, key) else default


def _get(metadata: Metadata, key: str, kind: type[T]) -> T:
    value = metadata.get(_PREFIX + key)
    if value is None:
        raise TokenizerError(f"{_PREFIX}{key} is missing; the file has no usable tokenizer")
    if type(value) is not kind:
        raise TokenizerError(f"{_PREFIX}{key} is a {type(value).__name__}; it must be a {kind.__name__}")
    return value


def _list(metadata: Metadata, key: str, kind: type[T], length: int | None = None) -> list[T]:
    items = metadata.get(_PREFIX + key)
    if not isinstance(items, list):
        raise TokenizerError(f"{_PREFIX}{key} is missing or not an array; the file has no usable tokenizer")
    if length is not None and len(items) != length:
        raise TokenizerError(f"{_PREFIX}{key} has {len(items)} elements for {length} tokens; convert the model again")
    for item in items:
        if type(item) is not kind:
            raise TokenizerError(
                f"{_PREFIX}{key} contains a {type(item).__name__}; it must contain {kind.__name__} only"
            )
    return [item for item in items if isinstance(item, kind)]
