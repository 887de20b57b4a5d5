"""Let the target continue prompts, once for all drafts: what it says is what they learn.

The token ids lie in a folder whose name has the hash of everything that determines them: the target, the texts and the
options. They are written in parts, so that an interrupted run continues after the last complete one. Every second
continuation is greedy, and the others are sampled, so that a draft learns what both kinds of requests give.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.errors import DataError, RequestError
from ridgeline.llm import LLM
from ridgeline.load.fingerprint import model_fingerprint
from ridgeline.load.hub import MODEL_FILES, find_model
from ridgeline.spec.request import SamplingParams
from ridgeline.train.data.corpus import Corpus
from ridgeline.train.drafts.prompts import cut_texts, draw_prompts

TEMPERATURES = (0.0, 0.7, 0.0, 1.0)  # of continuations 0, 1, 2, 3, and so on in turn
MOST_PROMPT_TOKENS = 128
PART = 256  # prompts of a part
HELD_OUT = "held-out.npz"
HELD_OUT_LEN = 128  # tokens of a held-out continuation


@dataclass(frozen=True, slots=True)
class Continuation:
    """A prompt with what the target said. ids: tokens of both. prompt: number of tokens of the prompt."""

    ids: np.ndarray[Any, np.dtype[np.int64]]
    prompt: int


@dataclass(frozen=True, slots=True)
class Continuations:
    """All continuations. held_out: greedy ones, of prompts from held-out text. folder: where they are."""

    train: tuple[Continuation, ...]
    held_out: tuple[Continuation, ...]
    folder: Path

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that the target wrote to train on."""
        return sum(len(one.ids) - one.prompt for one in self.train)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which continuations to make. tokens: number of tokens to train on. output_len: longest one. held_out: share of
    each text. held_out_prompts: number of prompts from it.
    """

    tokens: int
    output_len: int
    held_out: float
    held_out_prompts: int
    seed: int


def continuations_key(folder: Path, prompts: Sequence[str], held_out: Sequence[str], wanted: Wanted) -> str:
    """Return a hash of the target's files, the prompts and the options. folder: the target's, or its GGUF file."""
    texts = hashlib.sha256(json.dumps([prompts, held_out]).encode()).hexdigest()
    facts = {name: getattr(wanted, name) for name in wanted.__slots__}
    return model_fingerprint(folder, MODEL_FILES, size=8, texts=texts, temperatures=TEMPERATURES, part=PART, **facts)


def make_continuations(
    model: str, device: str, corpus: Corpus, wanted: Wanted, beside: Path,
    on_tokens: Callable[[int], None] = lambda tokens: None,
) -> Continuations:  # fmt: skip
    """Return what a model says after prompts from a corpus; what earlier runs made is read.

    device: where the engine runs. beside: the folder that gets the folder of continuations. on_tokens: called with the
    number of new tokens of each answer. Raises RequestError for a model without a tokenizer or with a context of a few
    tokens, and DataError for a damaged part.
    """
    writer: _Writer | None = None

    def open_writer() -> _Writer:
        nonlocal writer
        writer = writer or _Writer(model, device, wanted)
        return writer

    train_texts, held_texts = cut_texts(corpus.documents, wanted.held_out)
    prompts = draw_prompts(train_texts, -(-wanted.tokens // wanted.output_len), wanted.seed)
    asked = draw_prompts(held_texts, wanted.held_out_prompts, wanted.seed + 1)
    folder = beside / f"continuations-{continuations_key(find_model(model), prompts, asked, wanted)}"
    found: list[Continuation] = []
    for start in range(0, len(prompts), PART):
        path, part = folder / f"part-{start // PART:05d}.npz", prompts[start : start + PART]
        if not path.exists():
            temperatures = [TEMPERATURES[i % len(TEMPERATURES)] for i in range(start, start + len(part))]
            _write(path, open_writer().answer(part, temperatures, wanted.output_len, start, on_tokens))
        found += _read(path)
    path = folder / HELD_OUT
    if not path.exists():
        greedy = [0.0] * len(asked)
        _write(path, open_writer().answer(asked, greedy, min(HELD_OUT_LEN, wanted.output_len), 0, on_tokens))
    return Continuations(tuple(found), tuple(_read(path)), folder)


class _Writer:
    """The target in the engine, which writes the continuations."""

    def __init__(self, model: str, device: str, wanted: Wanted) -> None:
        self._llm = LLM(model, device=device)
        if self._llm.tokenizer is None:
            raise RequestError(
                f"{model} has no tokenizer ({self._llm.no_tokenizer}), which --data needs; add tokenizer.json"
            )
        room = self._llm.max_model_len
        if room < 4:
            raise RequestError(f"{model} has a context of {room} tokens; a draft needs at least 4")
        self._longest = min(wanted.output_len, room - room // 4)
        self._most_prompt = min(MOST_PROMPT_TOKENS, room - self._longest)

    def answer(
        self, prompts: Sequence[str], temperatures: Sequence[float], output_len: int, first: int,
        on_tokens: Callable[[int], None],
    ) -> list[Continuation]:  # fmt: skip
        """Return the prompts with their answers. first: number of the first prompt, from which noise derives."""
        longest = min(output_len, self._longest)
        ids = [self._llm.encode(text)[: self._most_prompt] for text in prompts]
        params = [SamplingParams(temperature=t, max_tokens=longest) for t in temperatures]
        outputs = self._llm.generate(
            [{"prompt_token_ids": some} for some in ids], params, indices=range(first, first + len(ids)),
            on_done=lambda index, found: on_tokens(len(found.outputs[0].token_ids)),
        )  # fmt: skip
        for found in outputs:
            if found.outputs[0].finish_reason == "error":
                raise RequestError(f"the model could not continue a prompt: {found.outputs[0].error}")
        return [
            Continuation(np.array([*some, *found.outputs[0].token_ids], np.int64), len(some))
            for some, found in zip(ids, outputs, strict=True)
        ]


def _write(path: Path, part: Sequence[Continuation]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        np.savez(
            file, ids=np.concatenate([one.ids for one in part]), lengths=np.array([len(one.ids) for one in part]),
            prompts=np.array([one.prompt for one in part]),
        )  # fmt: skip
    partial.replace(path)


def _read(path: Path) -> list[Continuation]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            ids, lengths, prompts = (arrays[name].astype(np.int64) for name in ("ids", "lengths", "prompts"))
        pieces = np.split(ids, np.cumsum(lengths)[:-1])
        if not all(0 < p < len(piece) for p, piece in zip(prompts, pieces, strict=True)) or lengths.sum() != len(ids):
            raise ValueError("its lengths do not fit its tokens")
    except (OSError, ValueError, KeyError, EOFError, IndexError):
        raise DataError(f"{path} is damaged or incomplete; remove it to make these continuations again") from None
    return [Continuation(piece, int(p)) for piece, p in zip(pieces, prompts, strict=True)]
