"""Define the settings of an engine: the options that a user may set, and the resolved configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ridgeline.settings.preempt import PreemptCost
from ridgeline.spec.groups import StateGroup
from ridgeline.spec.storage import StateDType
from ridgeline.spec.text import num_bytes


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options that a user may set, with vLLM's names. None: `resolve` chooses the value.

    Args:
        max_num_seqs: Sequences that run at once.
        max_num_batched_tokens: Tokens of one step.
        block_size: Tokens of a page.
        state_snapshot_tokens: Tokens between two snapshots of the state of recurrent layers, from which a later request
            can continue. A multiple of block_size if the model also has attention.
        kv_cache_memory_bytes: Bytes of the pages of all groups.
        steps_in_flight: 1 or 2.
        swap_space_bytes: Host memory for the pages of preempted sequences; without it they are recomputed.
    """

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    state_snapshot_tokens: int | None = None
    kv_cache_memory_bytes: int | None = None
    steps_in_flight: int | None = None
    swap_space_bytes: int | None = None
    num_speculative_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of an engine as it is shown. override: the option that sets it."""

    name: str
    value: str
    reason: str
    override: str


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings of an engine, frozen.

    block_size: tokens in a page of keys and values. state_snapshot_tokens: tokens between two kept recurrent states.
    kv_cache_dtype: the type of keys and values; the states of recurrent layers are float32. num_pages: pages in each
    group, with the null page. num_host_pages: pages in host memory for swapping; 0 where there is none.
    workspace_bytes: peak memory of a step and of the page tables. free_bytes: memory that was free on the device for
    all of this. reasons: one line for each option, by its name, whether it was given, chosen or cut.
    num_speculative_tokens: draft tokens that a sequence may have in a step. threads: threads of the kernels, None where
    the device has its own.
    preempt: the cost of preemption where there are host pages, None if it is measured at the start.
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
    threads: int | None = None
    preempt: PreemptCost | None = None

    @property
    def state_bytes(self) -> int:
        """Bytes of all pages."""
        return sum(n * g.page_bytes for n, g in zip(self.num_pages, self.groups, strict=True))

    @property
    def swap_bytes(self) -> int:
        """Bytes of all pages on the host."""
        return sum(n * g.page_bytes for n, g in zip(self.num_host_pages, self.groups, strict=True))

    def memory(self, weight_bytes: int, *, on_host: bool = True) -> tuple[tuple[str, int], ...]:
        """Return the uses of memory and their bytes.

        On_host: whether the device computes in host memory, like swap space.
        """
        left = self.free_bytes - self.state_bytes - self.workspace_bytes - (self.swap_bytes if on_host else 0)
        return (
            ("weights", weight_bytes),
            ("state pages", self.state_bytes),
            ("workspace", self.workspace_bytes),
            ("swap space on the host", self.swap_bytes),
            ("left free", left),
        )

    def settings(self) -> tuple[Setting, ...]:
        """Return each setting with its reason and its option, for `explain`, `generate --verbose` and `serve`."""
        values = {
            "max_model_len": f"{self.max_model_len}",
            "max_num_seqs": f"{self.max_num_seqs}",
            "max_num_batched_tokens": f"{self.max_num_batched_tokens}",
            "block_size": f"{self.block_size}",
            "state_snapshot_tokens": f"{self.state_snapshot_tokens}",
            "kv_cache_dtype": self.kv_cache_dtype,
            "kv_cache_memory_bytes": num_bytes(self.state_bytes),
            "steps_in_flight": f"{self.steps_in_flight}",
            "swap_space_bytes": num_bytes(self.swap_bytes),
            "num_speculative_tokens": f"{self.num_speculative_tokens}",
        }
        if self.threads is not None:
            values["threads"] = f"{self.threads}"
        found = [Setting(n, v, self.reasons[n], f"--{n.replace('_', '-')}") for n, v in values.items()]
        if self.preempt and any(self.num_host_pages):
            size = sum(g.most_pages(self.max_model_len) * g.page_bytes for g in self.groups)
            how: str = self.preempt(self.max_model_len, size)
            found.append(Setting("preemption", how, self.reasons["preemption"], "--swap-space-bytes 0: recompute"))
        pages = " + ".join(f"{n - 1:,}" for n in self.num_pages)
        why = (
            "by group, from kv_cache_memory_bytes: for max_num_seqs sequences of max_model_len, or fewer by one factor"
        )
        return (*found, Setting("num_pages", pages, why, "--kv-cache-memory-bytes"))
