"""List what a corpus consists of, so that it can be rebuilt: its files with hashes and sides, and its license."""

from __future__ import annotations

import hashlib
import json
import platform
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from ridgeline.errors import DataError
from ridgeline.train.data.corpus import Corpus, Document
from ridgeline.train.data.held_out import Split

TRAIN, HELD_OUT = "train", "held-out"
_SHOWN = 5  # number of documents that an error names


@dataclass(frozen=True, slots=True)
class Entry:
    """A document as it is used, after functions were cut out of it: its size and hash in UTF-8, and its side."""

    name: str
    num_bytes: int
    sha256: str
    side: str


@dataclass(frozen=True)
class Manifest:
    """The documents of a corpus. entries: sorted by name. python: version that parsed the files. skipped: counts by
    reason.
    """

    source: str
    license: str
    python: str
    num_cut: int
    skipped: dict[str, int]
    entries: tuple[Entry, ...]

    @classmethod
    def build(cls, corpus: Corpus, parts: Split) -> Manifest:
        entries = [
            *(_entry(document, TRAIN) for document in parts.train),
            *(_entry(document, HELD_OUT) for document in parts.held_out),
        ]
        skipped = Counter(s.reason for s in corpus.skipped)
        if parts.dropped:
            skipped["nothing left after cuts"] = len(parts.dropped)
        return cls(
            corpus.source,
            corpus.license,
            platform.python_version(),
            parts.num_cut,
            dict(sorted(skipped.items())),
            tuple(sorted(entries, key=lambda e: e.name)),
        )

    @cached_property
    def hash(self) -> str:
        """Return the SHA-256 over names, contents and sides only.

        So equal training and held-out texts have equal hashes.
        """
        whole = hashlib.sha256()
        for entry in self.entries:
            whole.update(json.dumps([entry.name, entry.sha256, entry.side]).encode() + b"\n")
        return whole.hexdigest()

    def totals(self) -> dict[str, dict[str, int]]:
        """Return the number of documents and bytes of each side."""
        sides = {side: [e.num_bytes for e in self.entries if e.side == side] for side in (TRAIN, HELD_OUT)}
        return {side: {"documents": len(sizes), "bytes": sum(sizes)} for side, sizes in sides.items()}

    def to_json(self) -> str:
        """Return JSON with the hash and the totals first, and then a line for each document."""
        head = {name: value for name, value in asdict(self).items() if name != "entries"}
        text = json.dumps({"hash": self.hash, **head, "totals": self.totals(), "entries": []}, indent=1)
        lines = ",\n".join(json.dumps(asdict(entry)) for entry in self.entries)
        return text.removesuffix("[]\n}") + f"[\n{lines}\n]\n}}\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read what `to_json` wrote. Raises DataError for invalid JSON, and for a manifest that was changed since."""
        try:
            data: dict[str, Any] = json.loads(text)
            claimed = data.pop("hash")
            totals = data.pop("totals")
            manifest = cls(**{**data, "entries": tuple(Entry(**entry) for entry in data["entries"])})
            intact = manifest.hash == claimed and manifest.totals() == totals
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            raise DataError(f"this is not a manifest ({e}); build it again") from None
        if not intact:
            raise DataError("the manifest was edited: its entries do not match its hash and totals; build it again")
        return manifest

    def verify(self, pinned: Manifest | str) -> None:
        """Raise DataError unless this is the pinned corpus. Given a whole manifest, the error names the first documents
        that differ.

        pinned: a manifest, or only its hash.
        """
        if isinstance(pinned, str):
            if pinned != self.hash:
                raise DataError(
                    f"the corpus ({self.source}) has the hash {self.hash}, not the pinned {pinned}; use the pinned "
                    "version, or compare it with the whole manifest to see the differences"
                )
            return
        if pinned.hash == self.hash:
            return
        changes = list(_differences(self, pinned))
        more = f" and {len(changes) - _SHOWN:,} more" if len(changes) > _SHOWN else ""
        raise DataError(
            f"the corpus ({self.source}) is not the pinned one ({pinned.source}): {'; '.join(changes[:_SHOWN])}{more}; "
            "use the pinned version, or pin this one"
        )


def _entry(document: Document, side: str) -> Entry:
    data = document.text.encode()
    return Entry(document.name, len(data), hashlib.sha256(data).hexdigest(), side)


def _differences(ours: Manifest, pinned: Manifest) -> Iterator[str]:
    """Yield a phrase for each document that differs, sorted by name."""
    here, there = ({e.name: e for e in manifest.entries} for manifest in (ours, pinned))
    for name in sorted({*here, *there}):
        one, other = here.get(name), there.get(name)
        if one is None:
            yield f"{name} is missing"
        elif other is None:
            yield f"{name} is new"
        elif one.sha256 != other.sha256:
            yield f"{name} has another text"
        elif one.side != other.side:
            yield f"{name} is {one.side}, not {other.side}"
