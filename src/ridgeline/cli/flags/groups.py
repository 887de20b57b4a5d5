"""Groups of options: a command names a group in its signature, and the command line has each option of the group.

A group is a dataclass whose fields are typer options, or a `SamplingFlags` in an annotation. Nobody compares or prints
a group, so its dataclass leaves out the methods for that: writing them takes time whenever a command starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from functools import cache, partial
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from ridgeline.cli.flags import options as o
from ridgeline.cli.flags.sampling import SamplingFlags

if TYPE_CHECKING:
    from ridgeline.settings import EngineOptions

Make = Callable[[dict[str, Any]], Any]  # from the values of a group's options to the group


@dataclass(eq=False, repr=False)
class LoadFlags:
    """How a model is loaded: the arguments of LLM by the same names."""

    device: o.Device = "auto"
    dtype: o.DType = "auto"
    weights: o.WeightFormat = "auto"
    activations: o.Activations = None
    max_model_len: o.MaxModelLen = None
    load_format: o.LoadFormat = "auto"
    revision: o.Revision = None
    ops: o.Ops = None
    threads: o.Threads = None
    tensor_parallel_size: o.TensorParallelSize = 1
    diffusion_block: o.DiffusionBlock = None
    block_cache: o.BlockCache = None
    kv_cache_dtype: o.KVCacheDType = "auto"
    attention: o.Attention = "exact"


@dataclass(eq=False, repr=False)
class StorageFlags:
    """Types and lengths that memory depends on."""

    dtype: o.DType = "auto"
    weights: o.WeightFormat = "auto"
    activations: o.Activations = None
    kv_cache_dtype: o.KVCacheDType = "auto"
    attention: o.Attention = "exact"
    max_model_len: o.MaxModelLen = None


@dataclass(eq=False, repr=False)
class EngineFlags:
    """Settings of the engine: the fields of EngineOptions."""

    max_num_seqs: o.MaxNumSeqs = None
    max_num_batched_tokens: o.MaxNumBatchedTokens = None
    block_size: o.BlockSize = None
    state_snapshot_tokens: o.CheckpointTokens = None
    kv_cache_memory_bytes: o.KVCacheMemoryBytes = None
    swap_space_bytes: o.SwapSpaceBytes = None
    steps_in_flight: o.StepsInFlight = None
    speculative: o.Speculative = None
    num_speculative_tokens: o.NumSpeculativeTokens = None
    draft_depth: o.DraftDepth = None
    draft_acceptance: o.DraftAcceptance = None
    draft_tree: o.DraftTree = None

    def options(self) -> EngineOptions:
        """Return the settings as the engine takes them."""
        from ridgeline.settings import EngineOptions

        return EngineOptions(**asdict(self))


def llm_arguments(load: LoadFlags, engine: EngineFlags, **more: Any) -> dict[str, Any]:
    """Return the keyword arguments of LLM. more: arguments besides those of the groups."""
    return {**asdict(load), "ops": o.parse_ops(load.ops), "engine": engine.options(), **more}


def values_of(*groups: Any, **more: Any) -> dict[str, Any]:
    """Return the values of the options of groups, by name. more: values of options that are in no group."""
    return {name: value for group in groups for name, value in asdict(group).items()} | more


def with_arguments(
    run: Callable[..., Any], command: Callable[..., Any], arguments: list[Parameter]
) -> Callable[..., Any]:
    """Return `run` as typer should see it: with the name and the text of `command`, and with these arguments."""
    run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
    vars(run)["__signature__"] = Signature(arguments)  # typer reads it in place of run's own
    return run


def grouped(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a typer command with the options of `command`'s groups in place of the groups."""
    arguments: list[Parameter] = []
    groups: dict[str, tuple[list[str], Make]] = {}
    make: Make
    for one in signature(command, eval_str=True).parameters.values():
        group: Any = one.annotation
        flags = next((m for m in get_args(group)[1:] if isinstance(m, SamplingFlags)), None)
        if flags is not None:
            members, make = flags.arguments(), flags.given
        elif isinstance(group, type) and is_dataclass(group):
            members, make = _members(group), partial(_make, group)
        else:
            arguments.append(one.replace(kind=Parameter.KEYWORD_ONLY))
            continue
        arguments += members
        groups[one.name] = ([member.name for member in members], make)

    def run(**given: Any) -> Any:
        for name, (members, make) in groups.items():
            given[name] = make({member: given.pop(member) for member in members})
        return command(**given)

    return with_arguments(run, command, arguments)


@cache
def _members(group: Any) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(
            one.name, Parameter.KEYWORD_ONLY, annotation=hints[one.name],
            default=Parameter.empty if one.default is MISSING else one.default,
        )
        for one in fields(group)
    ]  # fmt: skip


def _make(group: Any, values: dict[str, Any]) -> Any:
    return group(**values)
