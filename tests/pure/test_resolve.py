"""The settings of the planner: a start fails only if no smaller setting fits, and never takes more memory than was
counted.
"""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from itertools import product
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from published import PUBLISHED
from test_spec import specs

from ridgeline.archs import spec_from_config
from ridgeline.cost.memory import BOOKKEEPING_BYTES, Workspace
from ridgeline.errors import RequestError
from ridgeline.settings import EngineConfig, EngineOptions, PreemptCost, resolve
from ridgeline.settings.fit import LEAST_SNAPSHOT, PREFIX_TOKENS, snapshot_grid
from ridgeline.spec import ModelSpec
from ridgeline.spec.groups import state_groups
from ridgeline.spec.text import num_bytes

SPECS = {name: spec_from_config(PUBLISHED[name][0]) for name in list(PUBLISHED)[::3]}
BLOCKS = next(spec for spec in SPECS.values() if spec.diffusion)
GIB = 1 << 30
LLAMA = spec_from_config(PUBLISHED["meta-llama/Llama-3.1-8B-Instruct"][0])


def logarithmic(top: int) -> st.SearchStrategy[int]:
    """Draw whole numbers from 1 to 2**top, with every order of magnitude equally likely."""
    return st.integers(0, top).flatmap(lambda k: st.integers(max(1, 2**k // 2), 2**k))


OPTIONS = st.builds(
    EngineOptions,
    max_num_seqs=st.none() | logarithmic(14),
    max_num_batched_tokens=st.none() | logarithmic(16),
    block_size=st.none() | st.sampled_from([1, 3, 16, 64, 256]),
    state_snapshot_tokens=st.none() | st.just(768),
    kv_cache_memory_bytes=st.none() | logarithmic(42),
    steps_in_flight=st.none() | st.integers(1, 2),
    swap_space_bytes=st.none() | st.just(0) | logarithmic(36),
    num_speculative_tokens=st.sampled_from([None, 0, 1, 4]),
)


@st.composite
def questions(draw: st.DrawFn) -> dict[str, Any]:
    """Draw arguments of `resolve`."""
    spec = draw(st.sampled_from(list(SPECS.values())) | specs())
    on_host = draw(st.booleans())
    return {
        "spec": spec,
        "max_model_len": draw(logarithmic(21).map(lambda n: min(n, spec.max_position_embeddings))),
        "options": draw(OPTIONS),
        "free_bytes": draw(st.just(-GIB) | logarithmic(46)),
        "fixed_len": draw(st.booleans()),
        "fraction": draw(st.sampled_from([0.5, 0.9])),
        "device_is_host": on_host,
        "host_free_bytes": None if on_host else draw(st.none() | logarithmic(40)),
    }


def limit_of(q: dict[str, Any]) -> int:
    """Return the bytes for pages, workspace and, on the host, swap space."""
    return q["free_bytes"] if q["options"].kv_cache_memory_bytes else int(q["free_bytes"] * q["fraction"])


def drafts_of(q: dict[str, Any]) -> int:
    """Return the tokens of a sequence in a step that have logits beside its last one: a whole block, or drafts."""
    return q["spec"].block if q["spec"].diffusion else q["options"].num_speculative_tokens or 0


def anything_fits(q: dict[str, Any]) -> bool:
    """Return whether any of many settings fits, by trying each of them."""
    options, spec = q["options"], q["spec"]
    if spec.diffusion and (options.steps_in_flight == 2 or options.num_speculative_tokens):
        return False  # settings that such a model never has
    swap, kv = options.swap_space_bytes or 0, options.kv_cache_memory_bytes
    limit = limit_of(q) - (swap if q["device_is_host"] else 0)
    lengths = [q["max_model_len"]] if q["fixed_len"] else [1, 16, q["max_model_len"]]
    for size in [options.block_size] if options.block_size else (1, 2, 4, 8, 16):
        snapshot = options.state_snapshot_tokens or snapshot_grid(size, 0)
        groups = state_groups(spec, page_tokens=size, state_snapshot_tokens=snapshot)
        count = Workspace(spec, groups, on_cpu=q["device_is_host"], drafts=drafts_of(q))
        for tokens, seqs, length in product(
            [options.max_num_batched_tokens] if options.max_num_batched_tokens else (1, 2, 8, 64, 512),
            [options.max_num_seqs] if options.max_num_seqs else (1, 2, 16, 256),
            lengths,
        ):
            if tokens < spec.block:
                continue
            pages = [(g.most_pages(length) + 1, g.page_bytes) for g in groups]
            state = sum(n * b for n, b in pages)
            workspace = count.bytes(tokens, seqs, length, swap)
            bookkeeping = BOOKKEEPING_BYTES * sum(n for n, _ in pages)
            if (kv is None or (state <= kv and kv + workspace <= limit)) and state + bookkeeping + workspace <= limit:
                return True
    return False


@settings(max_examples=150, deadline=None)
@given(questions())
@example({
    "spec": LLAMA, "max_model_len": 131072, "options": EngineOptions(), "free_bytes": 64 << 20, "fixed_len": False,
    "fraction": 0.9, "device_is_host": True, "host_free_bytes": None,
})  # fmt: skip
@example({
    "spec": replace(LLAMA, vocab_size=600_000), "max_model_len": 1, "options": EngineOptions(),
    "free_bytes": 50_000_000, "fixed_len": False, "fraction": 0.9, "device_is_host": False, "host_free_bytes": 10**9,
})  # fmt: skip
@example({
    "spec": BLOCKS, "max_model_len": 16, "options": EngineOptions(max_num_batched_tokens=1),
    "free_bytes": GIB, "fixed_len": True, "fraction": 0.9, "device_is_host": True, "host_free_bytes": None,
})  # fmt: skip
def test_settings_that_fit_are_used_and_counted(q: dict[str, Any]) -> None:
    try:
        config = resolve(**q)
    except RequestError as error:
        if "the host has" not in str(error):
            assert not anything_fits(q)
        check_remedies(q, str(error))
    else:
        check_config(q, config)


def check_config(q: dict[str, Any], config: EngineConfig) -> None:
    options, given_swap = q["options"], q["options"].swap_space_bytes
    on_host = config.swap_bytes if q["device_is_host"] else 0
    assert config.state_bytes + config.workspace_bytes + on_host <= limit_of(q)
    count = Workspace(q["spec"], config.groups, on_cpu=q["device_is_host"], drafts=drafts_of(q))
    least = count.bytes(config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len, given_swap or 0)
    assert config.workspace_bytes >= least + BOOKKEEPING_BYTES * sum(config.num_pages)
    full = [g.most_pages(config.max_model_len) for g in config.groups]
    assert all(n + 1 <= pages for n, pages in zip(full, config.num_pages, strict=True))
    for group, pages in zip(config.groups, config.num_pages, strict=True):
        snapshots = PREFIX_TOKENS // group.page_tokens if group.snapshot else 0
        most = group.most_pages(config.max_model_len) + snapshots
        assert pages <= most * config.max_num_seqs + 1
        assert not group.snapshot or group.page_tokens == config.state_snapshot_tokens
    assert config.max_model_len == q["max_model_len"] or (not q["fixed_len"] and config.max_model_len >= 1)
    assert config.max_model_len <= q["max_model_len"]
    for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "state_snapshot_tokens", "steps_in_flight"):
        assert getattr(options, name) in (None, getattr(config, name))
    assert config.state_bytes <= (options.kv_cache_memory_bytes or config.state_bytes)
    if given_swap is not None:
        assert config.swap_bytes <= given_swap
    elif q["host_free_bytes"] is None:
        assert config.swap_bytes == 0
    assert len(config.num_host_pages) == len(config.groups)
    assert min(config.num_host_pages) > 1 or max(config.num_host_pages) == 0
    names = {*asdict(options), "max_model_len", "kv_cache_dtype", "attention"}
    assert set(config.reasons) == names
    assert all(config.reasons.values())
    assert names <= {setting.name for setting in config.settings()}
    assert {"weights", "workspace", "left free"} <= dict(config.memory(1000, on_host=q["device_is_host"])).keys()


def check_remedies(q: dict[str, Any], message: str) -> None:
    """Check that each remedy that an error names works alone."""
    for name, value in re.findall(r"set --(\S+) to (\d+)", message):
        changed = replace(q["options"], **{name.replace("-", "_"): int(value)})
        resolve(**{**q, "options": changed})
    for value in re.findall(r"lower --max-model-len to (\d+)", message):
        resolve(**{**q, "max_model_len": int(value)})
    if names := re.search(r"leave out (--.+)", message):
        opened = dict.fromkeys(name.strip("-").replace("-", "_") for name in names[1].split(" and "))
        fixed_len = q["fixed_len"] and "max_model_len" not in opened
        opened.pop("max_model_len", None)
        resolve(**{**q, "fixed_len": fixed_len, "options": replace(q["options"], **opened)})


@settings(max_examples=100, deadline=None)
@given(specs() | st.sampled_from(list(SPECS.values())), st.data())
def test_smaller_settings_never_take_more(spec: ModelSpec, data: st.DataObject) -> None:
    groups = state_groups(spec, page_tokens=data.draw(st.sampled_from([1, 16, 100])))
    count = Workspace(spec, groups, on_cpu=data.draw(st.booleans()))
    sizes = st.tuples(logarithmic(14), logarithmic(12), logarithmic(20), logarithmic(30))
    few, more = data.draw(sizes), data.draw(sizes)
    assert count.bytes(*map(min, few, more)) <= count.bytes(*few)  # type: ignore[arg-type]


@settings(max_examples=100, deadline=None)
@given(questions(), logarithmic(40))
def test_more_memory_never_makes_a_start_fail(q: dict[str, Any], more: int) -> None:
    try:
        resolve(**q)
    except RequestError:
        return
    resolve(**{**q, "free_bytes": q["free_bytes"] + more})


def ask(free_bytes: int, fixed_len: bool = False, length: int = 131072, **options: int | None) -> EngineConfig:
    return resolve(LLAMA, length, EngineOptions(**options), free_bytes=free_bytes, fixed_len=fixed_len)


def test_the_order_in_which_settings_are_reduced() -> None:
    """A step's tokens and sequences are reduced first, then the length, unless the user has set it."""
    plenty, less, little = ask(200 * GIB), ask(2 * GIB), ask(GIB // 8)
    assert (plenty.max_model_len, plenty.max_num_seqs, plenty.max_num_batched_tokens) == (131072, 256, 512)
    assert plenty.reasons["max_model_len"] == "the model's longest context"
    assert less.max_model_len < 131072
    assert "lowered from the model's 131072" in less.reasons["max_model_len"]
    assert little.max_num_batched_tokens < less.max_num_batched_tokens <= 512
    assert "lowered from 512" in little.reasons["max_num_batched_tokens"]
    fixed = ask(GIB // 8, fixed_len=True, length=64)
    assert fixed.max_model_len == 64
    assert fixed.reasons["max_model_len"] == "as given"


@pytest.mark.parametrize(
    ("free", "options", "message"),
    [
        (GIB, {"max_num_seqs": 1300}, "max_num_seqs is 1300; lower --max-model-len to"),
        (GIB, {"max_num_seqs": 1300}, "or set --max-num-seqs to"),
        (GIB, {"max_num_batched_tokens": 1 << 16}, "max_num_batched_tokens is 65536; set --max-num-batched-tokens to"),
        (
            GIB,
            {"kv_cache_memory_bytes": 2 * GIB},
            "1 GiB are available, kv_cache_memory_bytes is 2147483648; set --kv-",
        ),
        (GIB, {"swap_space_bytes": GIB}, "set --swap-space-bytes to 0"),
        (GIB, {"block_size": 1 << 14}, "set --block-size to 16"),
        (
            GIB,
            {"max_num_seqs": 1 << 20, "max_num_batched_tokens": 1 << 16},
            "leave out --max-num-seqs and --max-num-batched",
        ),
        (1000, {}, "use a smaller model"),
        (GIB, {"steps_in_flight": 3}, "from 1 to 2"),
        (GIB, {"swap_space_bytes": -1}, "of at least 0"),
    ],
)
def test_an_error_names_the_value_the_limit_and_the_remedy(free: int, options: dict[str, int], message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        ask(free, fixed_len=True, length=1024, **options)


JAMBA = spec_from_config(PUBLISHED["ai21labs/Jamba-v0.1"][0])
MAMBA = spec_from_config(PUBLISHED["state-spaces/mamba-2.8b-hf"][0])


@pytest.mark.parametrize("spec", [MAMBA, JAMBA], ids=["mamba", "jamba"])
def test_snapshots_where_two_shares_are_least_together(spec: ModelSpec) -> None:
    """The sum of two shares is least: pages for snapshots, and tokens of a prefix that are recomputed."""
    found = []
    for room in (4 * GIB, 60 * GIB, 4000 * GIB):
        config = resolve(
            spec, 8192, EngineOptions(max_num_seqs=64), free_bytes=room, fixed_len=True, device_is_host=False
        )
        state = sum(g.page_bytes for g in config.groups if g.snapshot)
        assert state == sum(4 * layer.mixer.state().elements for layer in spec.layers if layer.mixer.state().snapshot)

        def both(tokens: float, state: int = state, room: int = room) -> float:
            return 64 * PREFIX_TOKENS / tokens * state / (0.9 * room) + tokens / 2 / PREFIX_TOKENS

        chosen = config.state_snapshot_tokens
        assert both(chosen) <= 1.1 * min(both(LEAST_SNAPSHOT * 2**i) for i in range(8))
        reason = config.reasons["state_snapshot_tokens"]
        assert f"a snapshot takes {num_bytes(state)}; those of 64 prefixes of 2048 tokens" in reason
        found.append(chosen)
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1] == LEAST_SNAPSHOT


def test_snapshots_are_as_given_and_where_attention_can_begin() -> None:
    options = EngineOptions(state_snapshot_tokens=100)
    config = resolve(MAMBA, 8192, options, free_bytes=60 * GIB, fixed_len=True)
    assert (config.state_snapshot_tokens, config.reasons["state_snapshot_tokens"]) == (100, "as given")
    with pytest.raises(RequestError, match=r"state_snapshot_tokens is 100, not a multiple of block_size 16.*to 112"):
        resolve(JAMBA, 8192, options, free_bytes=60 * GIB, fixed_len=True)
    assert ask(8 * GIB).reasons["state_snapshot_tokens"] == "without effect: no layer is recurrent"
    with pytest.raises(RequestError, match="state_snapshot_tokens is 0; it must be a whole number of at least 1"):
        ask(8 * GIB, state_snapshot_tokens=0)


def test_swap_space() -> None:
    """There is none if the device is the host; elsewhere it is a share of the host's memory, divided like the pages."""
    assert ask(8 * GIB).num_host_pages == (0,)
    gemma = spec_from_config(PUBLISHED["google/gemma-2-2b"][0])

    def on_gpu(host_free: int | None, swap: int | None = None) -> EngineConfig:
        options = EngineOptions(swap_space_bytes=swap)
        return resolve(
            gemma, 8192, options, free_bytes=8 * GIB, fixed_len=False, device_is_host=False, host_free_bytes=host_free
        )

    config = on_gpu(20 * GIB)
    assert 1.9 * GIB < config.swap_bytes <= 2 * GIB
    shares = [h / n for h, n in zip(config.num_host_pages, config.num_pages, strict=True)]
    assert max(shares) < 1.01 * min(shares)
    assert on_gpu(1000 * GIB).swap_bytes <= 4 * GIB
    assert on_gpu(None).swap_bytes == on_gpu(None, 1000).swap_bytes == 0
    assert "too few for a page" in on_gpu(None, 1000).reasons["swap_space_bytes"]
    assert 2.9 * GIB < on_gpu(4 * GIB, 3 * GIB).swap_bytes <= 3 * GIB
    with pytest.raises(RequestError, match="lower --swap-space-bytes"):
        on_gpu(GIB, 3 * GIB)


def test_the_cheaper_way_to_preempt() -> None:
    """Preemption swaps if copying out and in takes less time than recomputing."""
    cost = PreemptCost(seconds_per_token=1e-3, seconds_per_byte=1e-9)
    assert cost(100, 49_000_000) == "swap"  # 98 ms, compared with 100 ms
    assert cost(100, 51_000_000) == "recompute"
    assert cost(0, 0) == "recompute"
