"""Define the options that several commands share, with vLLM's names and meanings."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from ridgeline.errors import RequestError

DEFAULT_MODEL = "pocket"  # the model of `generate`
_MODEL = "Model"
_ENGINE = "Engine"


class Cache(StrEnum):
    """The values of --cache."""

    on = "on"
    off = "off"


class Batching(StrEnum):
    """The values of --batching."""

    continuous = "continuous"
    static = "static"


COMMAND_LORA = "lora"  # name of the adapter of a command


def _model(*names: str, help: str) -> object:
    return typer.Option(*names, help=help, rich_help_panel=_MODEL)


def _engine(*names: str, help: str) -> object:
    return typer.Option(*names, help=help, rich_help_panel=_ENGINE)


Model = Annotated[
    str,
    _model(
        "--model", "-m", help="A checkpoint folder, a GGUF file, a Hugging Face hub id, or pocket, the built-in model."
    ),
]
TokenizerName = Annotated[
    str | None, _model("--tokenizer", help="Folder or hub id of the tokenizer. Default: the model's.")
]
SkipTokenizer = Annotated[
    bool, _model("--skip-tokenizer-init", help="Do not load the tokenizer: prompts and answers are token ids.")
]
Device = Annotated[str, _model("--device", help="Device: auto, cpu, reference, cuda or cuda:N.")]
Lora = Annotated[
    str | None,
    _model(
        "--lora",
        help="Adapter that peft wrote (LoRA, rsLoRA or DoRA): a folder or a hub id. Its terms are computed beside the "
        "weights, which stay as they are. Default: none.",
    ),
]
JsonReport = Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")]
Threads = Annotated[
    int | None, _model("--threads", help="Number of CPU threads for kernels. Default: the number of physical cores.")
]
DType = Annotated[str, _model("--dtype", help="Data type of the weight matrices: auto, float32, bfloat16 or float16.")]
WeightFormat = Annotated[
    str,
    _model(
        "--weights",
        help="Quantize the weight matrices, round to nearest: int8, int4, int3, int2 (groups of 32) or fp8; int4-128 "
        "has groups of 128, int4-asym zero points. auto: as stored. The cost in accuracy is printed.",
    ),
]
Activations = Annotated[
    str | None,
    _model(
        "--activations",
        help="How inputs of products are taken: bf16 (rounded to bfloat16, for any weights; faster where a matrix unit "
        "serves bfloat16) or, with quantized weights, exact (float32), int8 (rounded for each token; faster), outliers "
        "(int8, but 6 and more exact) or fp8. Default: exact, or the quantized format's own.",
    ),
]
MaxModelLen = Annotated[
    int | None,
    _model("--max-model-len", help="Longest context in tokens. Default: the model's, or less if memory is short."),
]
TensorParallelSize = Annotated[
    int,
    _model(
        "--tensor-parallel-size",
        "-tp",
        help="Number of processes (ranks) on this machine that compute the model together, a part of each matrix each. "
        "Tokens stay the same. One process is faster where its threads reach all cores. Default: 1.",
    ),
]
DiffusionBlock = Annotated[
    int | None,
    _model(
        "--diffusion-block",
        help="Tokens of a block of a block diffusion model. Lower it for answers closer to the left-to-right ones, if "
        "the model was trained for that. Default: as its config says.",
    ),
]
BlockCache = Annotated[
    str | None,
    _model(
        "--block-cache",
        help="Keys and values that the passes over a block keep from its first pass, in LLaDA and Dream: none; prefix "
        "for those before the block; dual for those after it too. Caches are faster but approximate; the loss is "
        "printed.",
    ),
]
LoadFormat = Annotated[
    str,
    _model(
        "--load-format",
        help="Where weights come from: auto and safetensors read the checkpoint's files; dummy makes random weights, "
        "to measure a model that has only a config.",
    ),
]
Revision = Annotated[str | None, _model("--revision", help="Branch, tag or commit on the hub. Default: main.")]
Ops = Annotated[
    list[str] | None,
    _model(
        "--ops",
        help="Backend for an op, as OP=BACKEND, for diagnosis; `ridgeline doctor` lists them. May be given several "
        "times. Default: the first that serves the op.",
    ),
]

MaxNumSeqs = Annotated[
    int | None,
    _engine(
        "--max-num-seqs",
        help="Largest number of sequences in a batch. Default: chosen from model and memory; explain shows it.",
    ),
]
MaxNumBatchedTokens = Annotated[
    int | None,
    _engine(
        "--max-num-batched-tokens",
        help="Largest number of tokens in a step. Default: 512, or chosen from the calibration; explain shows it. "
        "Raise it to compute long prompts in fewer steps; lower it for shorter pauses of running answers.",
    ),
]
KVCacheDType = Annotated[
    str,
    _engine(
        "--kv-cache-dtype",
        help="Data type of the KV cache: auto, float32, bfloat16, float16, int8 or fp8. auto is float16 for weights of "
        "16 bits or fewer, and float32 for others.",
    ),
]
Attention = Annotated[
    str,
    _engine(
        "--attention",
        help="Arithmetic of attention: exact (float32), or bf16: queries, keys, values and weights are rounded to "
        "bfloat16. bf16 is faster for prompts on CPUs with AVX-512 BF16, and needs a KV cache of 16 bits. The cost in "
        "accuracy is printed.",
    ),
]
BlockSize = Annotated[
    int | None, _engine("--block-size", help="Number of tokens in a page of the KV cache. Default: 16.")
]
CheckpointTokens = Annotated[
    int | None,
    _engine(
        "--state-snapshot-tokens",
        help="Number of tokens between state snapshots of recurrent layers. Default: chosen; explain shows it.",
    ),
]
KVCacheMemoryBytes = Annotated[
    int | None,
    _engine(
        "--kv-cache-memory-bytes",
        help="Bytes of memory for pages. Default: chosen from the free memory; explain shows it.",
    ),
]
SwapSpaceBytes = Annotated[
    int | None,
    _engine(
        "--swap-space-bytes",
        help="Bytes of host memory for the pages of preempted sequences. Default: chosen; explain shows it.",
    ),
]
StepsInFlight = Annotated[
    int | None,
    _engine(
        "--steps-in-flight",
        help="Number of steps that are submitted before the oldest one is read. 1: a step is planned after the one "
        "before it has ended. 2: it is planned while that one runs. Default: 1 on a CPU, 2 on a GPU.",
    ),
]
NumSpeculativeTokens = Annotated[
    int | None,
    _engine(
        "--num-speculative-tokens",
        help="Most draft tokens that a sequence verifies in a step. Default: 4 with a proposer, which --speculative "
        "names or chooses, otherwise 0. Without a proposer, a number above 0 is refused.",
    ),
]
Speculative = Annotated[
    str | None,
    _engine(
        "--speculative",
        help="Chooses what proposes draft tokens, of which one step verifies several. ngram proposes the tokens that "
        "followed the last ones where they occurred before, in the sequence or in earlier answers. The folder or "
        "hub id of a draft model with the same tokenizer, or of a head for this model (Medusa, EAGLE-1, EAGLE-2, "
        "EAGLE-3), lets it propose them; pocket-draft is the draft of pocket. off proposes none. auto is ngram where "
        "this machine is calibrated and looking drafts up takes a small share of a step, otherwise off; explain says "
        "why. The answers are the same. Default: auto. Take ngram where answers repeat text, such as edits of code; "
        "elsewhere take a head, or a draft model that takes at most a tenth of the model's time.",
    ),
]
DraftDepth = Annotated[
    str | None,
    _engine(
        "--draft-depth",
        help="How many draft tokens a sequence verifies in a step. chosen: as many as give tokens faster, by the times "
        "and the acceptance that are measured while the model runs, at most --num-speculative-tokens, and none if none "
        "do. fixed: always --num-speculative-tokens, to measure with. Default: chosen.",
    ),
]
DraftAcceptance = Annotated[
    str | None,
    _engine(
        "--draft-acceptance",
        help="When a draft token is accepted. same: if the model samples it, so that drafts change no token. "
        "rejection: by rejection sampling; sampled answers have the model's distribution, but other tokens than "
        "without drafts, and slightly more drafts are accepted. typical: if it is likely enough; this is lossy, as it "
        "changes the distribution of answers. Default: same.",
    ),
]
DraftTree = Annotated[
    int | None,
    _engine(
        "--draft-tree",
        help="Number of tokens that a Medusa or EAGLE head proposes after each draft, so that drafts are a tree: the "
        "best --num-speculative-tokens of them are verified together. 1, the default: a chain. Set 4, and "
        "--num-speculative-tokens 16 or more, where verifying many tokens costs little, as on a GPU.",
    ),
]
CacheMode = Annotated[
    Cache,
    _engine("--cache", help="on: keep state in pages. off: compute the whole history for every token, a baseline."),
]
BatchingMode = Annotated[
    Batching,
    _engine(
        "--batching",
        help="continuous: sequences join and leave at every step. static: whole batches with room for the "
        "longest context, a baseline.",
    ),
]

Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print the engine's settings and their reasons to stderr.")
]

Seed = Annotated[
    int,
    typer.Option("--seed", help="Random seed for sampling and for dummy weights.", rich_help_panel="Sampling"),
]


def adapter_of(lora: str | None) -> dict[str, Any]:
    """Return the arguments of LLM for an adapter of a command; none for None."""
    return {} if lora is None else {"lora_modules": {COMMAND_LORA: lora}}


def parse_ops(ops: list[str] | None) -> dict[str, str]:
    """Return `OP=BACKEND` pairs as a dict. Raises RequestError for anything else."""
    out = {}
    for item in ops or []:
        name, sign, backend = item.partition("=")
        if not (name and sign and backend):
            raise RequestError(f"--ops {item}: write OP=BACKEND, as in --ops attention=reference")
        out[name] = backend
    return out
