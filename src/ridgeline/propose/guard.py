"""Keeps a proposer from harming requests: after its first error it is not called again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import index
from typing import overload

from ridgeline.propose.proposer import Drafts, Proposer, Wanted
from ridgeline.spec.trees import as_parents


class ReadOnly(Sequence[int]):
    """Shows a list that changes elsewhere. A proposer that could change it would change the answer."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens)

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...

    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        return self._tokens[at]  # a slice of a list is a copy


class Guard:
    """Calls a proposer for an engine, checks its drafts, and gives up on it after an error.

    vocab_size: drafts must be ids below it. refusal: why the proposer is not used any more; None while it is.
    """

    def __init__(self, proposer: Proposer, vocab_size: int) -> None:
        self._proposer, self._vocab_size = proposer, vocab_size
        self.refusal: str | None = None

    def propose(self, wanted: Sequence[Wanted]) -> Mapping[int, Drafts]:
        """Return drafts by sequence id, at most as many as each sequence can take; none after an error."""
        most = {w.sequence: w.most for w in wanted}
        shown = [w._replace(tokens=ReadOnly(w.tokens)) for w in wanted]
        drafts: dict[int, Drafts] = {}

        def ask() -> None:
            for sequence, found in self._proposer.propose(shown).items():
                if sequence not in most:
                    raise ValueError(f"it proposed drafts for sequence {sequence}, which can take none")
                given = found if isinstance(found, Drafts) else Drafts(found)
                drafts[sequence] = self._checked(given, most[sequence])

        self._call(ask)
        return {} if self.refusal else drafts

    def commit(self, sequence: int, tokens: Sequence[int]) -> None:
        self._call(lambda: self._proposer.commit(sequence, tokens))

    def fork(self, parent: int, child: int) -> None:
        self._call(lambda: self._proposer.fork(parent, child))

    def preempt(self, sequence: int) -> None:
        self._call(lambda: self._proposer.preempt(sequence))

    def end(self, sequence: int) -> None:
        self._call(lambda: self._proposer.end(sequence))

    def reset(self) -> None:
        """Let the proposer forget all sequences, and try it again if it had failed."""
        self.refusal = None
        self._call(self._proposer.reset)

    def _checked(self, drafts: Drafts, most: int) -> Drafts:
        """Return at most `most` drafts as plain integers, with their distributions.

        Raises ValueError for what is no token of the model, and for a distribution that it was not drawn from.
        """
        found = tuple(index(token) for token in drafts.tokens[:most])
        parents = as_parents(drafts.parents, len(drafts.tokens))[:most]
        if wrong := [token for token in found if not 0 <= token < self._vocab_size]:
            raise ValueError(f"it proposed token {wrong[0]}; the vocabulary has {self._vocab_size}")
        if drafts.q is None:
            return Drafts(found, parents=parents)
        if len(drafts.q) != len(drafts.tokens):
            raise ValueError(f"it proposed {len(drafts.tokens)} tokens with {len(drafts.q)} distributions")
        for token, q in zip(found, drafts.q, strict=False):
            q.check(self._vocab_size)
            if not q.of(token) > 0:
                raise ValueError(f"it proposed token {token}, which its distribution does not have")
        return Drafts(found, tuple(drafts.q[: len(found)]), parents)

    def _call(self, call: Callable[[], None]) -> None:
        if self.refusal is not None:
            return
        try:
            call()
        except KeyboardInterrupt:
            raise
        except BaseException as e:  # sys.exit() and panics of extensions are no Exception, and would end the engine
            self.refusal = f"the proposer {type(self._proposer).__name__} failed with {type(e).__name__}: {e!s:.500}"
            logging.getLogger(__name__).exception("%s; answers continue without drafts", self.refusal)
