"""List the flags of `vllm serve` that Ridgeline does not have: what it does instead, or why not and what to do.

A flag that can be honored is accepted, and one line says what Ridgeline does. A flag or a value that cannot be honored
is an error of one line. docs/serve.md has the same list; tests/pure/test_vllm_flags.py compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ridgeline.cli.flags.vllm_speculative import speculative_flags


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of vLLM.

    names: the flag and its short forms. takes_value: a value follows. accepts: the accepted values; None: all. between:
    the smallest and the largest accepted number. says: a note on Ridgeline's behavior instead; empty: the flag is never
    accepted. becomes: flags of Ridgeline that replace it. scale: the value, times this, follows `becomes`. translate:
    returns the flags that replace it from its value. refuses: advice to the user if the flag or its value is not
    accepted.
    """

    names: tuple[str, ...]
    says: str = ""
    refuses: str = ""
    takes_value: bool = False
    accepts: tuple[str, ...] | None = None
    between: tuple[float, float] | None = None
    becomes: tuple[str, ...] = ()
    scale: int = 0
    translate: Callable[[str], tuple[str, ...]] | None = None


_NO_STAGES = "Ridgeline does not divide the layers of a model among devices"
_PARTS = f"{_NO_STAGES}; --tensor-parallel-size divides each matrix among processes of one machine"
# Formats that only a checkpoint can have: the flag says nothing that the files do not say.
_STORED = ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "modelopt", "modelopt_fp4", "gguf")
_BY_MODEL = "every server has /v1/embeddings, and generates text if the model is a decoder"
_NO_CODE = "Ridgeline never runs code from a checkpoint; its supported architectures are built in"
_NOTHING_COMPILED = "Ridgeline does not compile models, so there is nothing to turn off"


def _on(*names: str, says: str) -> Flag:
    return Flag(names, says)


def _off(*names: str, refuses: str) -> Flag:
    return Flag(names, refuses=refuses)


def _replicas(count: str) -> tuple[str, ...]:
    """Return the flags of a number of copies; the command checks the number."""
    return ("--replicas", count)


def _value(*names: str, says: str, accepts: tuple[str, ...] | None = None, refuses: str = "") -> Flag:
    return Flag(names, says, refuses, takes_value=True, accepts=accepts)


FLAGS: tuple[Flag, ...] = (
    # Memory and the cache.
    Flag(("--gpu-memory-utilization",), "the value is not used: Ridgeline takes 90 % of the memory that the weights "
         "leave free on a GPU, and half of the free memory on a CPU; --kv-cache-memory-bytes sets the cache's size",
         "it must be above 0 and at most 1",
         takes_value=True, between=(1e-9, 1.0)),
    Flag(("--swap-space",), "it sets --swap-space-bytes", "it must be a number of GiB, at least 0",
         takes_value=True, between=(0.0, 1e6), becomes=("--swap-space-bytes",), scale=2**30),
    _value("--cpu-offload-gb", says="no weights are moved to the host", accepts=("0", "0.0"),
           refuses="Ridgeline keeps all weights on one device; use --weights int8 or int4 to make them smaller"),
    _off("--num-gpu-blocks-override", refuses="set the size of the cache with --kv-cache-memory-bytes"),
    _on("--enable-prefix-caching", says="prefixes are always shared between requests with the same cache_salt"),
    _off("--no-enable-prefix-caching", refuses="prefix caching is always on; a request with a unique cache_salt shares "
         "no prefix"),
    _value("--prefix-caching-hash-algo", says="Ridgeline uses its own hash, which starts from the cache_salt"),
    _value("--preemption-mode", says="Ridgeline swaps or recomputes, whichever is faster",
           accepts=("swap", "recompute"), refuses="it must be swap or recompute"),
    _on("--calculate-kv-scales", says="an int8 cache computes its scales, and an fp8 cache has the checkpoint's"),
    # The step.
    _on("--enforce-eager", says=f"{_NOTHING_COMPILED}; answers are the same with and without CUDA graphs"),
    _on("--enable-chunked-prefill", says="prompts are always computed in chunks, of --max-num-batched-tokens at most"),
    _off("--no-enable-chunked-prefill", refuses="prompts are always computed in chunks; set --max-num-batched-tokens "
         "to --max-model-len to compute each prompt in one chunk"),
    Flag(("--async-scheduling",), "it sets --steps-in-flight 2", becomes=("--steps-in-flight", "2")),
    Flag(("--no-async-scheduling",), "it sets --steps-in-flight 1", becomes=("--steps-in-flight", "1")),
    _value("--scheduling-policy", says="requests run by priority, and by arrival among equal priorities",
           accepts=("fcfs", "priority"), refuses="it must be fcfs or priority"),
    _value("--max-seq-len-to-capture", says=_NOTHING_COMPILED),
    _value("--compilation-config", "-cc", says=_NOTHING_COMPILED),
    _on("-O0", "-O1", "-O2", "-O3", says=_NOTHING_COMPILED),
    # Devices.
    _value("--pipeline-parallel-size", "-pp", says=_NO_STAGES, accepts=("1",), refuses=_PARTS),
    Flag(("--data-parallel-size", "-dp"), "it sets --replicas", takes_value=True, translate=_replicas),
    _on("--enable-expert-parallel", says="with --tensor-parallel-size each rank has a share of the neurons of every "
        "expert, and otherwise one process has all experts"),
    _value("--distributed-executor-backend",
           says="Ridgeline starts its own processes, on this machine or with --ray on several"),
    _on("--disable-custom-all-reduce", says="the parts of ranks are always added in the order of the ranks"),
    _on("--disable-frontend-multiprocessing", says="the HTTP server and the engine are always separate processes"),
    # The model and its tokenizer.
    _on("--trust-remote-code", says=_NO_CODE),
    _value("--model-impl", says="Ridgeline has one implementation of each architecture", accepts=("auto", "vllm"),
           refuses="Ridgeline does not run transformers' modules; leave the flag out"),
    _value("--runner", says=_BY_MODEL, accepts=("auto", "generate"), refuses=f"leave the flag out; {_BY_MODEL}"),
    _value("--task", says=_BY_MODEL, accepts=("auto", "generate"), refuses=f"leave the flag out; {_BY_MODEL}"),
    _value("--quantization", says="the format of the weights is read from the checkpoint",
           accepts=("auto", "fp8", "mxfp4", "gpt_oss_mxfp4", *_STORED),
           refuses="leave the flag out: quantized checkpoints are read in their own format, and --weights int8 or int4 "
           "quantizes the weights at load time"),
    _value("--tokenizer-mode", says="the tokenizer is read from tokenizer.json", accepts=("auto", "hf"),
           refuses="only tokenizer.json and the vocabulary of a GGUF file are read; leave the flag out"),
    _value("--generation-config", says="default sampling parameters come from the model's generation_config.json",
           accepts=("auto",), refuses="send the sampling parameters with each request"),
    _off("--override-generation-config", refuses="send the sampling parameters with each request"),
    _off("--download-dir", refuses="set HF_HUB_CACHE in the environment"),
    _off("--hf-token", refuses="set HF_TOKEN in the environment"),
    _on("--enable-lora", says="adapters are served with --lora-modules or --max-loras"),
    Flag(("--speculative-config",), "its method, model and num_speculative_tokens set --speculative and "
         "--num-speculative-tokens", takes_value=True, translate=speculative_flags),
    # The API.
    _on("--enable-auto-tool-choice", says="tool calls work with every chat template in a supported format"),
    _value("--response-role", says="answers have the role assistant", accepts=("assistant",),
           refuses="answers have the role assistant"),
    _value("--chat-template-content-format", says="content may be a string or a list of parts",
           accepts=("auto", "string", "openai"), refuses="it must be auto, string or openai"),
    _value("--structured-outputs-config.backend", "--guided-decoding-backend",
           says="structured outputs are compiled by llguidance"),
    Flag(("--max-logprobs",), "a request may ask for up to 20 logprobs", "a request may ask for up to 20 logprobs",
         takes_value=True, between=(0, 20)),
    # The log.
    Flag(("--enable-log-requests",), "it sets --log-requests", becomes=("--log-requests",)),
    _on("--no-enable-log-requests", "--disable-log-requests", says="prompts are logged only with --log-requests"),
    _on("--disable-log-stats", says="statistics are never logged; they are at /metrics"),
    Flag(("--disable-uvicorn-access-log",), "it sets --quiet", becomes=("--quiet",)),
    _value("--uvicorn-log-level", says="the server logs warnings, and a line for each request unless --quiet"),
)  # fmt: skip

KNOWN: dict[str, Flag] = {name: flag for flag in FLAGS for name in flag.names}
