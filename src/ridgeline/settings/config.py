"""Define the settings of an engine: the options that a user may set, and the resolved configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ridgeline.settings.preempt import PreemptCost
from ridgeline.spec.acceptance import Acceptance
from ridgeline.spec.groups import StateGroup
from ridgeline.spec.storage import StateDType
from ridgeline.spec.text import num_bytes

DraftDepth = Literal["chosen", "fixed"]
CHAINS_ONLY = "the model has recurrent layers, whose states follow a single chain"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options that a user may set, with vLLM's names. `resolve` chooses the value of each option that is None.

    Args:
        max_num_seqs: Largest number of sequences in one step.
        max_num_batched_tokens: Largest number of tokens in one step.
        block_size: Tokens of a page.
        state_snapshot_tokens: Tokens between two snapshots of the state of recurrent layers, from which a later request
            can continue. A multiple of block_size if the model also has attention.
        kv_cache_memory_bytes: Bytes of the pages of all groups.
        steps_in_flight: 1 or 2. With 2, a step is submitted before the results of the one before it are there.
        swap_space_bytes: Bytes of host memory for the pages of preempted sequences. With 0 they are recomputed.
        num_speculative_tokens: Largest number of draft tokens of a sequence in one step. Above 0 it needs a proposer.
        speculative: What proposes draft tokens: "ngram" looks up the last tokens of a sequence in its own tokens and in
            earlier answers; a folder or hub id names a draft model or a head; "off": nothing, unless the engine is
            given a proposer. "auto" or None: "ngram" on a calibrated machine where that costs little, otherwise "off".
        draft_depth: "chosen": each step verifies as many drafts as give tokens faster, by measured times and
            acceptance, at most num_speculative_tokens, and none if none do; "fixed": always num_speculative_tokens.
        draft_acceptance: When a draft token is accepted. "same": if the model samples it, so that drafts change no
            token; "rejection": by rejection sampling, which keeps the distribution of answers, not their tokens;
            "typical": if it is likely enough, which is lossy.
        draft_tree: With a Medusa or EAGLE head, drafts are a tree that has the best tokens after a draft, at most so
            many; num_speculative_tokens is the size of the tree. 1: a chain.
    """

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    state_snapshot_tokens: int | None = None
    kv_cache_memory_bytes: int | None = None
    steps_in_flight: int | None = None
    swap_space_bytes: int | None = None
    num_speculative_tokens: int | None = None
    speculative: str | None = None
    draft_depth: DraftDepth | None = None
    draft_acceptance: Acceptance | None = None
    draft_tree: int | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of an engine as it is shown. override: the option that sets it."""

    name: str
    value: str
    reason: str
    override: str


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Holds all settings of an engine. They never change.

    block_size: tokens in a page of keys and values. state_snapshot_tokens: tokens between two kept recurrent states.
    kv_cache_dtype: the type of keys and values; the states of recurrent layers are float32. num_pages: pages in each
    group, with the null page. num_host_pages: pages of each group in host memory; 0 without swap space.
    workspace_bytes: peak memory of a step and of the page tables. free_bytes: device memory that was free before pages
    and workspace were allocated. reasons: one line for each setting, by its name; it says whether the user gave the
    value, or why it was chosen or lowered. num_speculative_tokens: most draft tokens of a sequence in a step.
    speculative: the name of their proposer. draft_depth: how many drafts a step verifies. draft_acceptance: when a
    draft is accepted. draft_tree: as in EngineOptions. threads: number of threads of the kernels; None on a device
    without them. attention: "exact", or "bf16" for attention that is rounded to bfloat16. preempt: the cost of
    preemption with host pages; None if it is measured at the start.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    state_snapshot_tokens: int
    kv_cache_dtype: StateDType
    steps_in_flight: int
    groups: tuple[StateGroup, ...]
    num_pages: tuple[int, ...]
    num_host_pages: tuple[int, ...]
    workspace_bytes: int
    free_bytes: int
    reasons: Mapping[str, str]
    num_speculative_tokens: int = 0
    speculative: str = "off"
    draft_depth: DraftDepth = "fixed"
    draft_acceptance: Acceptance = "same"
    draft_tree: int = 1
    threads: int | None = None
    attention: str = "exact"
    preempt: PreemptCost | None = None

    @property
    def state_bytes(self) -> int:
        """Return the bytes of all pages."""
        return self.bytes_of(self.num_pages)

    @property
    def swap_bytes(self) -> int:
        """Return the bytes of all pages on the host."""
        return self.bytes_of(self.num_host_pages)

    def bytes_of(self, pages: Sequence[int]) -> int:
        """Return the bytes of so many pages of each group."""
        return sum(n * g.page_bytes for n, g in zip(pages, self.groups, strict=True))

    @property
    def untreed(self) -> str | None:
        """Return why drafts are chains although draft_tree is above 1; None if they are not."""
        return CHAINS_ONLY if self.draft_tree > 1 and any(group.snapshot for group in self.groups) else None

    def memory(
        self, weight_bytes: int, *, on_host: bool = True, program_bytes: int | None = None
    ) -> tuple[tuple[str, int], ...]:
        """Return the uses of memory and the most bytes that each can take.

        Args:
            on_host: Whether the device computes in host memory, where swap space is too.
            program_bytes: Memory of the process besides these uses, if it is to be counted: imports, and the tokenizer.
        """
        engine = self.state_bytes + self.workspace_bytes + (self.swap_bytes if on_host else 0)
        uses = [
            ("weights", weight_bytes), ("state pages", self.state_bytes), ("workspace", self.workspace_bytes),
            ("swap space on the host", self.swap_bytes),
        ]  # fmt: skip
        if program_bytes is not None:
            uses = [("program", program_bytes), *uses, ("process", program_bytes + weight_bytes + engine)]
        return (*uses, ("left free", self.free_bytes - engine))

    def settings(self) -> tuple[Setting, ...]:
        """Return each setting that has an effect, its reason and its option, for `explain`, `generate --verbose` and
        `serve`.
        """
        values = {
            "max_model_len": f"{self.max_model_len}",
            "max_num_seqs": f"{self.max_num_seqs}",
            "max_num_batched_tokens": f"{self.max_num_batched_tokens}",
            "block_size": f"{self.block_size}",
            "state_snapshot_tokens": f"{self.state_snapshot_tokens}",
            "kv_cache_dtype": self.kv_cache_dtype,
            "attention": self.attention,
            "kv_cache_memory_bytes": num_bytes(self.state_bytes),
            "steps_in_flight": f"{self.steps_in_flight}",
            "swap_space_bytes": num_bytes(self.swap_bytes),
            "speculative": self.speculative,
            "num_speculative_tokens": f"{self.num_speculative_tokens}",
            "draft_depth": self.draft_depth,
            "draft_acceptance": self.draft_acceptance,
            "draft_tree": f"{self.draft_tree}" if self.untreed is None else "1",
        }
        if not self.groups:  # an encoder
            values = {name: values[name] for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens")}
        if self.threads is not None:
            values["threads"] = f"{self.threads}"
        reasons = dict(self.reasons)
        if self.untreed is not None:
            reasons["draft_tree"] = f"a chain instead of {self.draft_tree}: {self.untreed}"
        found = [Setting(n, v, reasons[n], f"--{n.replace('_', '-')}") for n, v in values.items()]
        if self.preempt and any(self.num_host_pages):
            size = sum(g.most_pages(self.max_model_len) * g.page_bytes for g in self.groups)
            how: str = self.preempt(self.max_model_len, size)
            found.append(Setting("preemption", how, self.reasons["preemption"], "--swap-space-bytes 0: recompute"))
        if not self.groups:
            return tuple(found)
        pages = " + ".join(f"{n - 1:,}" for n in self.num_pages)
        why = (
            "pages of each group of layers: enough for max_num_seqs sequences of max_model_len tokens, as far as "
            "kv_cache_memory_bytes allows"
        )
        return (*found, Setting("num_pages", pages, why, "--kv-cache-memory-bytes"))
