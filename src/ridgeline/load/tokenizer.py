"""A model's tokenizer: text to ids and back, with exactly one BOS, and its chat templates.

The files are those of a Hugging Face model folder, read as transformers 5 does. There, tokenizer.json alone decides
which ids are put around a text: `add_bos_token` and `add_eos_token` of tokenizer_config.json are ignored if there is a
tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from ridgeline.errors import RequestError, TokenizerError
from ridgeline.load.detokenize import Detokenizer, TokenText
from ridgeline.load.gguf.header import read_header
from ridgeline.load.gguf.paths import is_gguf
from ridgeline.load.gguf.vocab import build_vocab, has_vocab
from ridgeline.load.lengths import characters_per_token, least_tokens
from ridgeline.load.tokenizer_files import guarded, read_folder
from ridgeline.spec.prompt import Side, truncated

if TYPE_CHECKING:
    from ridgeline.load.chat import ChatTemplate, Message

_PROBES = 100  # vocabulary entries to try, to find one that encodes to at least one id


class Tokenizer:
    """Encodes and decodes text for one model. Threads can share an instance."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        templates: Mapping[str, str] | None = None,
        around: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> None:
        """Wrap `backend`, whose truncation and padding are turned off.

        special_tokens: names such as "bos_token" -> tokens. templates: names -> chat templates. around: ids to put
        before and after a text; by default those of the post-processor. Raises TokenizerError for a decoder that cannot
        be streamed. Templates are compiled at first use, because that takes longer than everything else, so an invalid
        one raises TokenizerError then.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        self._templates = dict(templates or {})
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self._text = TokenText(backend)
        self.vocab_size = self._text.size
        self.base_vocab_size = backend.get_vocab_size(with_added_tokens=False)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        prefix, suffix = around or guarded(lambda: _around(backend), "the post-processor of the tokenizer")
        self._prefix, self._suffix = list(prefix), list(suffix)
        self.characters_per_token = characters_per_token(backend, self._text.longest)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Return the tokenizer of a Hugging Face model folder, or of a GGUF file.

        Raises TokenizerError if tokenizer.json is missing, or if a file is unreadable, damaged or contradicts another.
        """
        if is_gguf(folder):
            return cls.from_gguf(folder)
        files = read_folder(folder)
        return cls(files.backend, special_tokens=files.special_tokens, templates=files.templates)

    @classmethod
    def from_gguf(cls, path: Path) -> Tokenizer:
        """Return the tokenizer in the metadata of a GGUF file.

        Raises CheckpointError if the file is damaged, and TokenizerError if the kind of its vocabulary is not
        supported.
        """
        vocab = build_vocab(read_header(path).metadata)
        return cls(vocab.backend, special_tokens=vocab.special_tokens, templates=vocab.templates, around=vocab.around)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None,
        truncation_side: Side = "left",
    ) -> list[int]:  # fmt: skip
        """Return the ids of `text`; with `add_special_tokens`, include those that the model expects around it.

        A text that already begins with one of the leading tokens (such as a rendered chat) gets no second one, and of
        several BOS one is kept. Without `add_special_tokens` the text is encoded unchanged. max_tokens: most ids in
        total; ids of the text are dropped at `truncation_side`, and the added tokens stay, as in transformers. Raises
        RequestError for text that is not valid Unicode.
        """
        ids = self._encode(text)
        if not add_special_tokens:
            return [*truncated(ids, max_tokens, truncation_side)]
        return self._cut([*self._with_prefix(ids), *self._suffix], len(self._suffix), max_tokens, truncation_side)

    def encode_pair(self, first: str, second: str, max_tokens: int | None = None) -> tuple[list[int], list[int]]:
        """Return the ids of two texts as the tokenizer joins them, and a type for each: that of its text.

        max_tokens: most ids; those of the second text are dropped from its end. Raises RequestError for text that is
        not valid Unicode, and if the first text alone leaves no room.
        """
        for text in (first, second):
            check_unicode(text)
        (found,) = self._backend.encode_batch_fast([(first, second)], add_special_tokens=True)
        ids, types = list(found.ids), list(found.type_ids)
        if max_tokens is None or len(ids) <= max_tokens:
            return ids, types
        own = [i for i, text in enumerate(found.sequence_ids) if text == 1]
        if len(ids) - len(own) >= max_tokens:
            raise RequestError(
                f"the query has {len(ids) - len(own)} tokens with those between the texts, which leaves no room for a "
                f"document in {max_tokens}; shorten it"
            )
        dropped = set(own[len(own) - (len(ids) - max_tokens) :])
        kept = [i for i in range(len(ids)) if i not in dropped]
        return [ids[i] for i in kept], [types[i] for i in kept]

    def encode_rendered(
        self, text: str, add_special_tokens: bool | None = None, *, max_tokens: int | None = None,
        truncation_side: Side = "left",
    ) -> list[int]:  # fmt: skip
        """Return the ids of a chat that `render_chat` has written. max_tokens and truncation_side work as in `encode`.

        add_special_tokens: True adds all tokens that the model expects around a text, False adds none. None adds a BOS
        if the model uses one and the template wrote none. There is never a second BOS.
        """
        if add_special_tokens is None:
            return self._cut(self._with_prefix(self._encode(text)), 0, max_tokens, truncation_side)
        return self.encode(
            text, add_special_tokens=add_special_tokens, max_tokens=max_tokens, truncation_side=truncation_side
        )

    def _cut(self, ids: list[int], last: int, most: int | None, side: Side) -> list[int]:
        """Drop ids until at most `most` are left, but keep the leading tokens and the `last` ones.

        Raises RequestError if there is no room for the kept ones.
        """
        if most is None or len(ids) <= most:
            return ids
        first = len(self._prefix) if ids[: len(self._prefix)] == self._prefix else 0
        if (room := most - first - last) < 0:
            raise RequestError(
                f"truncate_prompt_tokens is {most}, but the model adds {first + last} tokens to a text; use at least "
                f"{first + last}"
            )
        end = len(ids) - last
        return [*ids[:first], *truncated(ids[first:end], room, side), *ids[end:]]

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        **variables: Any,
    ) -> list[int]:
        """Return the ids of `messages` in the model's chat format, with one BOS if the model uses one.

        template: name of one of `chat_templates`; by default "tool_use" if there are tools and such a template,
        otherwise "default". Raises TokenizerError if the model has no such template, and RequestError if the template
        rejects the messages.
        """
        text = self.render_chat(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, template=template, **variables
        )
        return self.encode_rendered(text)

    @property
    def longest_token(self) -> int:
        """Return the number of characters that the longest token stands for, or of its name if that is not known."""
        return self.characters_per_token or max(1, self._text.longest)

    def least_tokens(self, text: str) -> int:
        """Return the least tokens that `text` can have, without tokenizing it; 0 if the tokenizer may delete
        characters.
        """
        if self.characters_per_token is None:
            return 0
        leading = [self._backend.id_to_token(token) or "" for token in self._prefix]
        return least_tokens(text, self.characters_per_token, leading)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """Return the text of `messages` in the model's chat format; the arguments and errors are those of
        `encode_chat`.
        """
        return self.template_for(template, tools is not None).render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            **{**self.special_tokens, **variables},
        )

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`. An id outside the vocabulary (from a padded embedding) adds nothing."""
        stream = self.detokenizer(skip_special_tokens)
        return "".join([*map(stream.push, ids), stream.flush()])

    def detokenizer(self, skip_special_tokens: bool = True, prompt: Sequence[int] = ()) -> Detokenizer:
        """Return a Detokenizer that continues after `prompt`, whose text it does not return."""
        return Detokenizer(self._text, self.special_ids if skip_special_tokens else frozenset(), prompt)

    def token_name(self, token_id: int) -> str:
        """Return a token's name, such as "</s>"; "" for an unknown id."""
        return self._backend.id_to_token(token_id) or "" if 0 <= token_id < self.vocab_size else ""

    def token_id(self, token: str) -> int | None:
        """Return the id of a token, or None."""
        return self._backend.token_to_id(token)

    @property
    def around(self) -> tuple[list[int], list[int]]:
        """Return the ids that are put before and after a text."""
        return list(self._prefix), list(self._suffix)

    @property
    def template_texts(self) -> dict[str, str]:
        """Return the sources of the chat templates by name."""
        return dict(self._templates)

    def token_texts(self) -> list[str]:
        """Return what each id adds to a text after another id; "" for special ids and parts of a character."""
        return [
            self._text.characters(token) if token not in self.special_ids else "" for token in range(self.vocab_size)
        ]

    @cached_property
    def chat_templates(self) -> dict[str, ChatTemplate]:
        """Return the chat templates by name. Raises TokenizerError for an invalid one."""
        return _compiled(self._templates) if self._templates else {}

    @property
    def chat_template(self) -> ChatTemplate | None:
        """Return the chat template that is used by default; None if there is none."""
        return self.chat_templates.get("default")

    def set_chat_template(self, source: str) -> None:
        """Replace the model's chat template. Raises TokenizerError for an invalid one."""
        self.chat_templates = _compiled({"default": source})

    def to_json(self) -> str:
        """Return the vocabulary and its rules in the format of tokenizer.json."""
        return str(self._backend.to_str())

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    def _encode(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise RequestError(f"the text to encode is a {type(text).__name__}; it must be a string")
        check_unicode(text)
        # `encode` is not used, because it blocks all other threads of the process until it is done.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return encoding.ids

    def _with_prefix(self, ids: list[int]) -> list[int]:
        """Put the leading tokens before `ids` unless the text already has them; keep one BOS of several."""
        if not self._prefix:
            return ids
        count = next((index for index, token in enumerate(ids) if token not in self._prefix), len(ids))
        written, rest = ids[:count], ids[count:]
        if self.bos_token_id not in self._prefix:
            return ids if written else self._prefix + rest
        if self.bos_token_id not in written:
            return self._prefix + rest
        first = written.index(self.bos_token_id) + 1
        return written[:first] + [token for token in written[first:] if token != self.bos_token_id] + rest

    def template_for(self, name: str | None, tools: bool) -> ChatTemplate:
        """Return the chat template with that name, or by default the one for conversations with or without tools.

        Raises TokenizerError if there is none.
        """
        if name is None:
            name = "tool_use" if tools and "tool_use" in self.chat_templates else "default"
        if name not in self.chat_templates:
            known = f"it has {', '.join(sorted(self.chat_templates))}" if self.chat_templates else "it has none"
            raise TokenizerError(
                f"the model has no chat template {name!r} ({known}); send a plain prompt, "
                "or put the model's chat_template.jinja into its folder"
            )
        return self.chat_templates[name]


def check_unicode(text: str) -> None:
    """Raise RequestError for text that is not valid Unicode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text has the lone surrogate {text[error.start]!r} at {error.start}; send valid Unicode"
        ) from error


def has_tokenizer(folder: Path) -> bool:
    """Return whether a model's folder or GGUF file has a tokenizer. Raises CheckpointError for a damaged file."""
    return has_vocab(read_header(folder).metadata) if is_gguf(folder) else any(folder.glob("tokenizer*"))


def _compiled(templates: Mapping[str, str]) -> dict[str, ChatTemplate]:
    from ridgeline.load.chat import ChatTemplate  # Jinja takes a while to import, and many models have no template

    return {name: ChatTemplate(text, name) for name, text in templates.items()}


def _around(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids that the post-processor puts before and after a text."""
    if backend.post_processor is None:
        return [], []
    for probe in ("a", *list(backend.get_vocab(with_added_tokens=True))[:_PROBES]):
        encoding = backend.encode(probe)
        inside = [index for index, sequence in enumerate(encoding.sequence_ids) if sequence is not None]
        if inside:
            return encoding.ids[: inside[0]], encoding.ids[inside[-1] + 1 :]
    return [], []
