"""A model's tokenizer: text to ids and back, with exactly one BOS, and its chat templates.

The files are those of a Hugging Face model folder and mean what transformers 5 makes of them. There,
tokenizer.json alone decides which ids are put around a text: `add_bos_token` and `add_eos_token` of
tokenizer_config.json are not looked at when there is a tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from ridgeline.errors import RequestError, TokenizerError
from ridgeline.load.detokenize import Detokenizer, TokenText
from ridgeline.load.gguf import read_header
from ridgeline.load.gguf_vocab import build_vocab
from ridgeline.load.lengths import characters_per_token, least_tokens
from ridgeline.load.tokenizer_files import guarded, read_folder
from ridgeline.spec.prompt import Side, truncated

if TYPE_CHECKING:
    from ridgeline.load.chat import ChatTemplate, Message

_PROBES = 100  # vocabulary entries tried for one that encodes to something


class Tokenizer:
    """Encodes and decodes for one model; safe to share between threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        templates: Mapping[str, str] | None = None,
        around: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> None:
        """Wrap `backend`, whose truncation and padding are switched off.

        `special_tokens` maps names such as "bos_token" to tokens; `templates` maps names to chat templates;
        `around` gives the ids to put before and after a text, by default those of the post-processor.
        Raises TokenizerError for a decoder that cannot be streamed; for a template that is not valid when it is first
        asked for, since to read templates takes longer than all the rest.
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
        """Return the tokenizer of a Hugging Face model folder.

        Raises TokenizerError when tokenizer.json is absent, or when a file is unreadable, damaged or
        contradicts another.
        """
        files = read_folder(folder)
        return cls(files.backend, special_tokens=files.special_tokens, templates=files.templates)

    @classmethod
    def from_gguf(cls, path: Path) -> Tokenizer:
        """Return the tokenizer in the metadata of a GGUF file.

        Raises CheckpointError when the file is damaged, TokenizerError when its vocabulary is of a kind that
        is not known.
        """
        vocab = build_vocab(read_header(path).metadata)
        around = (vocab.prefix, vocab.suffix)
        return cls(vocab.backend, special_tokens=vocab.special_tokens, templates=vocab.templates, around=around)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None,
        truncation_side: Side = "left",
    ) -> list[int]:  # fmt: skip
        """Return the ids of `text`; with `add_special_tokens` those the model expects around it included.

        Text that already begins with one of the leading tokens (a rendered chat, say) gets no second one, and
        a BOS that is written repeatedly is kept once. Without `add_special_tokens` the text is encoded as it
        stands. With `max_tokens` ids of the text are dropped, at `truncation_side`, until there are no more in all,
        as by transformers; the added tokens stay. Raises RequestError for text that is not valid Unicode.
        """
        ids = self._encode(text)
        if not add_special_tokens:
            return [*truncated(ids, max_tokens, truncation_side)]
        return self._cut([*self._with_prefix(ids), *self._suffix], len(self._suffix), max_tokens, truncation_side)

    def encode_rendered(
        self, text: str, add_special_tokens: bool | None = None, *, max_tokens: int | None = None,
        truncation_side: Side = "left",
    ) -> list[int]:  # fmt: skip
        """Return the ids of a chat that `render_chat` has written; max_tokens and truncation_side as in `encode`.

        add_special_tokens: True adds all tokens that the model expects around a text, False none; None adds a BOS where
        the model uses one and the template writes none. There is never a second BOS.
        """
        if add_special_tokens is None:
            return self._cut(self._with_prefix(self._encode(text)), 0, max_tokens, truncation_side)
        return self.encode(
            text, add_special_tokens=add_special_tokens, max_tokens=max_tokens, truncation_side=truncation_side
        )

    def _cut(self, ids: list[int], last: int, most: int | None, side: Side) -> list[int]:
        """Drop ids until there are at most `most`, but keep the leading tokens and the `last` ones.

        Raises RequestError where there is no room for these.
        """
        if most is None or len(ids) <= most:
            return ids
        first = len(self._prefix) if ids[: len(self._prefix)] == self._prefix else 0
        if (room := most - first - last) < 0:
            raise RequestError(
                f"truncate_prompt_tokens is {most}, but the model adds {first + last} tokens to a text; raise it to "
                f"{first + last} at least"
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

        `template` names one of `chat_templates`; by default it is "tool_use" when there are tools and such a
        template, else "default". Raises TokenizerError when the model has no such template, and RequestError
        when the template rejects the messages.
        """
        text = self.render_chat(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, template=template, **variables
        )
        return self.encode_rendered(text)

    @property
    def longest_token(self) -> int:
        """Characters of the longest token, as far as is known."""
        return self.characters_per_token or max(1, self._text.longest)

    def least_tokens(self, text: str) -> int:
        """Return the least tokens that `text` can have, by arithmetic; 0 where the tokenizer may delete characters."""
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
        """Return the text of `messages` in the model's chat format; arguments and errors of `encode_chat`."""
        return self.template_for(template, tools is not None).render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            **{**self.special_tokens, **variables},
        )

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; one outside the vocabulary (a padded embedding has some) adds nothing."""
        stream = self.detokenizer(skip_special_tokens)
        return "".join([*map(stream.push, ids), stream.flush()])

    def detokenizer(self, skip_special_tokens: bool = True, prompt: Sequence[int] = ()) -> Detokenizer:
        """Return a Detokenizer that goes on after `prompt`, whose own text it does not return."""
        return Detokenizer(self._text, self.special_ids if skip_special_tokens else frozenset(), prompt)

    def token_name(self, token_id: int) -> str:
        """Return how a token is spelled where it is no part of a text, such as "</s>"; "" for an unknown id."""
        return self._backend.id_to_token(token_id) or "" if 0 <= token_id < self.vocab_size else ""

    @cached_property
    def chat_templates(self) -> dict[str, ChatTemplate]:
        """By name. Raises TokenizerError for one that is not valid."""
        return _compiled(self._templates) if self._templates else {}

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The one that is used where none is named."""
        return self.chat_templates.get("default")

    def set_chat_template(self, source: str) -> None:
        """Use another chat template than the model's. Raises TokenizerError for one that is not valid."""
        self.chat_templates = _compiled({"default": source})

    def to_json(self) -> str:
        """Return the vocabulary and its rules as a tokenizer.json holds them."""
        return str(self._backend.to_str())

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    def _encode(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise RequestError(f"the text to encode is a {type(text).__name__}; it must be a string")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text has the lone surrogate {text[error.start]!r} at {error.start}; send valid Unicode"
            ) from error
        # Not `encode`, which keeps all other threads of the process waiting until it is done.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return encoding.ids

    def _with_prefix(self, ids: list[int]) -> list[int]:
        """Put the leading tokens before `ids` unless the text wrote them itself; keep one BOS of several."""
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
        """Return the chat template of that name, or the one for conversations with or without tools.

        Raises TokenizerError when there is none.
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
