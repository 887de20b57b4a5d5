"""Flags of `vllm serve` that Ridgeline does not have, as data: what happens instead, or why not and what to do.

A flag that can be honored is accepted, and one line says what Ridgeline does. A flag or a value that cannot be honored
is an error of one line. docs/serve.md has the same list; tests/pure/test_vllm_flags.py compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of vLLM's.

    names: it and its short forms. takes_value: a value follows. accepts: the values that are honored; None: all are.
    between: the smallest and the largest number that is honored. says: what Ridgeline does instead; empty: the flag is
    never honored. becomes: flags of ours that stand in its place. scale: the value, times this, follows `becomes`.
    refuses: what to do where the flag or its value cannot be honored.
    """

    names: tuple[str, ...]
    says: str = ""
    refuses: str = ""
    takes_value: bool = False
    accepts: tuple[str, ...] | None = None
    between: tuple[float, float] | None = None
    becomes: tuple[str, ...] = ()
    scale: int = 0


_ONE_DEVICE = "Ridgeline serves a model on one device"
_PLAN = f"{_ONE_DEVICE}; `ridgeline plan MODEL --tp 2` says what more devices would give"
_COPIES = f"{_ONE_DEVICE}; start one server for each copy, and put a proxy before them"
_NO_CODE = "Ridgeline never runs code from a checkpoint; it knows its architectures itself"
_NOTHING_COMPILED = "Ridgeline compiles no models, so there is nothing to turn off"


def _on(*names: str, says: str) -> Flag:
    return Flag(names, says)


def _off(*names: str, refuses: str) -> Flag:
    return Flag(names, refuses=refuses)


def _value(*names: str, says: str, accepts: tuple[str, ...] | None = None, refuses: str = "") -> Flag:
    return Flag(names, says, refuses, takes_value=True, accepts=accepts)


FLAGS: tuple[Flag, ...] = (
    # Memory and the cache.
    Flag(("--gpu-memory-utilization",), "Ridgeline takes 90 % of what the weights leave on a GPU, and half of the free "
         "memory on a CPU; --kv-cache-memory-bytes sets the size of the cache", "it must be a share above 0, at most 1",
         takes_value=True, between=(1e-9, 1.0)),
    Flag(("--swap-space",), "it sets --swap-space-bytes", "it must be a number of GiB, at least 0",
         takes_value=True, between=(0.0, 1e6), becomes=("--swap-space-bytes",), scale=2**30),
    _value("--cpu-offload-gb", says="no weights are moved to the host", accepts=("0", "0.0"),
           refuses="Ridgeline keeps all weights on one device; take --weights int8 or int4"),
    _off("--num-gpu-blocks-override", refuses="set the size of the cache with --kv-cache-memory-bytes"),
    _on("--enable-prefix-caching", says="prefixes are always shared between requests with the same cache_salt"),
    _off("--no-enable-prefix-caching", refuses="prefixes are always shared; a request with a cache_salt of its own "
         "shares none"),
    _value("--prefix-caching-hash-algo", says="Ridgeline has a hash of its own, with the cache_salt at its root"),
    _value("--preemption-mode", says="Ridgeline swaps or computes again, whichever is faster",
           accepts=("swap", "recompute"), refuses="it must be swap or recompute"),
    _on("--calculate-kv-scales", says="the scales of an int8 cache are always computed"),
    # The step.
    _on("--enforce-eager", says=f"{_NOTHING_COMPILED}; answers are the same with and without recorded steps"),
    _on("--enable-chunked-prefill", says="prompts are always computed in chunks, of --max-num-batched-tokens at most"),
    _off("--no-enable-chunked-prefill", refuses="prompts are always computed in chunks; --max-num-batched-tokens as "
         "large as --max-model-len makes each prompt one chunk"),
    Flag(("--async-scheduling",), "it sets --steps-in-flight 2", becomes=("--steps-in-flight", "2")),
    Flag(("--no-async-scheduling",), "it sets --steps-in-flight 1", becomes=("--steps-in-flight", "1")),
    _value("--scheduling-policy", says="requests run by priority, and equal ones in the order of arrival",
           accepts=("fcfs", "priority"), refuses="it must be fcfs or priority"),
    _value("--max-seq-len-to-capture", says=_NOTHING_COMPILED),
    _value("--compilation-config", "-cc", says=_NOTHING_COMPILED),
    _on("-O0", "-O1", "-O2", "-O3", says=_NOTHING_COMPILED),
    # Devices.
    _value("--tensor-parallel-size", "-tp", says=_ONE_DEVICE, accepts=("1",), refuses=_PLAN),
    _value("--pipeline-parallel-size", "-pp", says=_ONE_DEVICE, accepts=("1",), refuses=_PLAN),
    _value("--data-parallel-size", "-dp", says=_ONE_DEVICE, accepts=("1",), refuses=_COPIES),
    _on("--enable-expert-parallel", says=f"{_ONE_DEVICE}, and its experts with it"),
    _value("--distributed-executor-backend", says=f"{_ONE_DEVICE}, in one process beside the HTTP process"),
    _on("--disable-custom-all-reduce", says=_ONE_DEVICE),
    _on("--disable-frontend-multiprocessing", says="HTTP and the engine always have a process each"),
    # The model and its tokenizer.
    _on("--trust-remote-code", says=_NO_CODE),
    _value("--model-impl", says="Ridgeline has one implementation of each architecture", accepts=("auto", "vllm"),
           refuses="Ridgeline does not run transformers' modules; leave the flag out"),
    _value("--runner", says="every server generates, and has /v1/embeddings", accepts=("auto", "generate"),
           refuses="leave it out: /v1/embeddings is on every server"),
    _value("--task", says="every server generates, and has /v1/embeddings", accepts=("auto", "generate"),
           refuses="leave it out: /v1/embeddings is on every server"),
    _value("--quantization", says="how the weights are stored is read from the checkpoint",
           accepts=("auto", "fp8", "mxfp4", "gpt_oss_mxfp4"),
           refuses="checkpoints are read in their own types, fp8 and mxfp4 among them; --weights int8 or int4 rounds"),
    _value("--tokenizer-mode", says="the tokenizer is read from tokenizer.json", accepts=("auto", "hf"),
           refuses="only tokenizer.json and the vocabulary of a GGUF file are read; leave the flag out"),
    _value("--generation-config", says="the defaults of sampling are those of the model's generation_config.json",
           accepts=("auto",), refuses="send the fields of sampling with each request"),
    _off("--override-generation-config", refuses="send the fields of sampling with each request"),
    _off("--download-dir", refuses="set HF_HUB_CACHE in the environment"),
    _off("--hf-token", refuses="set HF_TOKEN in the environment"),
    _off("--enable-lora", refuses="Ridgeline serves no LoRA adapters; merge the adapter into its model first"),
    _off("--speculative-config", refuses="the server does not speculate; leave the flag out"),
    # The API.
    _on("--enable-auto-tool-choice", says="tools work wherever the chat template has a known format"),
    _value("--response-role", says="answers have the role assistant", accepts=("assistant",),
           refuses="answers have the role assistant"),
    _value("--chat-template-content-format", says="content may be a text or a list of parts",
           accepts=("auto", "string", "openai"), refuses="it must be auto, string or openai"),
    _value("--structured-outputs-config.backend", "--guided-decoding-backend",
           says="structured outputs are compiled by llguidance"),
    Flag(("--max-logprobs",), "up to 20 log probabilities can be asked for", "a request may ask for 20 at most",
         takes_value=True, between=(0, 20)),
    # The log.
    Flag(("--enable-log-requests",), "it sets --log-requests", becomes=("--log-requests",)),
    _on("--no-enable-log-requests", "--disable-log-requests", says="prompts are not logged unless --log-requests asks"),
    _on("--disable-log-stats", says="no figures are logged; they are at /metrics"),
    Flag(("--disable-uvicorn-access-log",), "it sets --quiet", becomes=("--quiet",)),
    _value("--uvicorn-log-level", says="warnings are logged, and a line for each request unless --quiet"),
)  # fmt: skip

KNOWN: dict[str, Flag] = {name: flag for flag in FLAGS for name in flag.names}
