"""Read the tokenizer files of a Hugging Face model folder as transformers 5 does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from ridgeline.errors import CheckpointError, TokenizerError
from ridgeline.load.growth import check_growth
from ridgeline.spec.folders import read_text

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_OTHER_FORMATS = ("tokenizer.model", "tekken.json", "vocab.json", "tiktoken.model")
MAX_TOKENIZER_BYTES = 128 << 20  # largest tokenizer.json; published ones have up to 35 MB
MAX_OBJECT_BYTES = 16 << 20  # largest of the other JSON files
MAX_TEMPLATE_BYTES = 1 << 20
_Config = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class FolderFiles:
    """A tokenizer with its added tokens, the named special tokens, and the chat templates."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    templates: dict[str, str]


def read_folder(folder: Path) -> FolderFiles:
    """Return the content of the tokenizer files in `folder`; only tokenizer.json is required.

    Raises TokenizerError if it is missing, or if a file is unreadable, damaged or contradicts another.
    """
    if not folder.is_dir():
        raise TokenizerError(f"{folder} is not a folder; give the folder that contains tokenizer.json")
    backend = _backend(folder)
    config = _object(folder / "tokenizer_config.json")
    declared = config.get("added_tokens_decoder")
    if declared is None:  # an old folder without added_tokens_decoder, where special_tokens_map.json has priority
        config.update(_object(folder / "special_tokens_map.json"))
        declared = {index: token for token, index in _object(folder / "added_tokens.json").items()}
    named, extra = _special(config)
    _add_declared(backend, declared, {*named.values(), *extra}, folder)
    present = {name: token for name, token in named.items() if backend.token_to_id(token) is not None}
    marked = [token for token in (*present.values(), *extra) if backend.token_to_id(token) is not None]
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in marked])
    return FolderFiles(backend, present, _templates(folder, config))


def _backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        other = next((name for name in _OTHER_FORMATS if (folder / name).exists()), None)
        if other is None:
            raise TokenizerError(f"{folder} has no tokenizer.json; download it with the model")
        raise TokenizerError(
            f"{folder} has {other} but no tokenizer.json; convert it once with transformers "
            "(AutoTokenizer.from_pretrained(folder).save_pretrained(folder))"
        )
    text = _text(path, MAX_TOKENIZER_BYTES)
    check_growth(text, str(path))
    return guarded(lambda: tokenizers.Tokenizer.from_str(text), str(path))


def guarded(action: Callable[[], T], what: str) -> T:
    """Return the result of `action`, a call into the tokenizers library.

    Raises TokenizerError, which names `what` as damaged, for any error: the library raises bare Exceptions, and for
    some inconsistent files its Rust code panics, which raises an unnamed BaseException.
    """
    try:
        return action()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        reason = " ".join(str(error).split())
        raise TokenizerError(f"{what} is damaged or too new ({reason}); download it again") from error


def _special(config: _Config) -> tuple[dict[str, str], list[str]]:
    """Return the special tokens that have a name, and those that are only listed."""
    named = {}
    for key, value in config.items():
        if key in _NAMED or key.endswith("_token"):
            token = _content(value)
            if token is not None:
                named[key] = token
            elif key in _NAMED and value is not None:
                raise TokenizerError(f"tokenizer_config.json: {key} is {value!r}; it must be a token or null")
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        named.update({key: token for key, value in extra.items() if (token := _content(value)) is not None})
        extra = []
    if not isinstance(extra, list):
        raise TokenizerError(f"tokenizer_config.json: extra_special_tokens is {extra!r}; it must be a list")
    return named, [token for value in extra if (token := _content(value)) is not None]


def _content(value: object) -> str | None:
    """Return a token given as a string or as an AddedToken object; None for anything else."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _add_declared(backend: tokenizers.Tokenizer, declared: object, special: set[str], folder: Path) -> None:
    """Add the tokens that tokenizer_config.json declares and tokenizer.json lacks, each with its own id."""
    if not isinstance(declared, dict):
        raise TokenizerError(f"{folder / 'tokenizer_config.json'}: added_tokens_decoder must be an object")
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    added = [item for item in sorted(_tokens(declared, special, folder)) if item[1].content not in known]
    backend.add_tokens([token for _, token in added])  # in one call, because each call reads all added tokens again
    for index, token in added:
        if (got := backend.token_to_id(token.content)) != index:
            raise TokenizerError(
                f"{folder / 'tokenizer_config.json'} declares {token.content!r} as id {index}, "
                f"but after tokenizer.json it would be {got}; the two files belong to different models"
            )


def _tokens(declared: _Config, special: set[str], folder: Path) -> Iterator[tuple[int, tokenizers.AddedToken]]:
    for index, value in declared.items():
        content = _content(value)
        if content is None or not str(index).isdecimal():
            raise TokenizerError(f"{folder / 'tokenizer_config.json'}: added token {index!r}: {value!r} is not valid")
        flags = {"special": content in special, "normalized": content not in special}
        if isinstance(value, dict):
            flags = {name: bool(value[name]) for name in _FLAGS if name in value}
        yield int(index), tokenizers.AddedToken(content, **flags)


def _templates(folder: Path, config: _Config) -> dict[str, str]:
    """Return the chat templates by name. Template files have priority over entries in tokenizer_config.json."""
    templates = _named_templates(config.get("chat_template"), folder / "tokenizer_config.json")
    path = folder / "chat_template.json"
    templates.update(_named_templates(_object(path).get("chat_template"), path))
    if (path := folder / "chat_template.jinja").exists():
        templates["default"] = _text(path, MAX_TEMPLATE_BYTES)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _text(path, MAX_TEMPLATE_BYTES)
    return templates


def _named_templates(value: object, path: Path) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    templates = {}
    for entry in value if isinstance(value, list) else [value]:
        name, text = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(text, str):
            raise TokenizerError(f"{path}: chat_template must be a string or a list of {{name, template}} objects")
        templates[name] = text
    return templates


def _object(path: Path) -> _Config:
    """Return the JSON object in `path`, or an empty one if there is no such file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(_text(path, MAX_OBJECT_BYTES))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} contains a {type(value).__name__}, not an object; download it again")
    return value


def _text(path: Path, most_bytes: int) -> str:
    try:
        return read_text(path, most_bytes)
    except CheckpointError as error:
        raise TokenizerError(str(error)) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise TokenizerError(f"{path} cannot be read ({reason}); check or download it again") from error
