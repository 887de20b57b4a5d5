"""Compare state and decode time of architectures against context: python bench/architectures.py [--plots FOLDER]

All models have one hidden size and depth, float32 and random weights; only the way that layers mix tokens differs
(ARCHITECTURES). The state of a sequence is counted twice: in bytes by the formulas of the spec, and in the pages that
the real scheduler gives it. The time of a token is the median of some steps of the whole engine with one sequence.
The least time beside it is the bytes of weights and state over the measured read bandwidth. A long context is not
computed: its prompt goes through a model without layers, which allocates its pages, and the pages are filled with
random numbers (`Filled`).

    python bench/architectures.py > lines.jsonl                         # all models, contexts of 256 to 16,384 tokens
    python bench/architectures.py --read lines.jsonl --plots docs/images --markdown     # draw and print them again

The gates: after a computed prompt of 256 tokens, each greedy token is the best one of the dense pass, to 1e-3; the
number of a sequence's pages is that of the formula, to a page of each group (two states of a recurrent one).
`filled_over_computed` is the time of a token over filled pages divided by the time over computed ones, both at the
shortest context.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import architectures_report
import numpy as np
import torch
from common import emit

from ridgeline import LLM, SamplingParams
from ridgeline.engine import Engine
from ridgeline.measure import measure_roof
from ridgeline.ops import open_table
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.sample.sampler import NoiseKey
from ridgeline.settings import EngineOptions, resolve
from ridgeline.spec import (
    Attention,
    GatedConvolution,
    GatedMLP,
    LatentAttention,
    Layer,
    LightningAttention,
    Mamba,
    ModelSpec,
    RMSNorm,
    Rope,
    SharedAttention,
    TaylorAttention,
    TokenMixer,
    to_json,
)

WIDTH, LAYERS, VOCAB = 512, 12, 512
HEADS, HEAD_DIM, WINDOW = 32, 32, 512
CONTEXTS = (256, 512, 1024, 2048, 4096, 8192, 16384)
CHUNK, PAGE, STEPS, FLOAT = 512, 16, 9, 4
SPARE = 64  # positions beyond the longest context, for the tokens that are timed
NORM, MLP, ROPE = RMSNorm(1e-5), GatedMLP(1024), Rope(HEAD_DIM)

MHA = Attention(HEADS, HEADS, HEAD_DIM, HEAD_DIM**-0.5, ROPE)
GQA = Attention(HEADS, 8, HEAD_DIM, HEAD_DIM**-0.5, ROPE)
MQA = Attention(HEADS, 1, HEAD_DIM, HEAD_DIM**-0.5, ROPE)
LOCAL = Attention(HEADS, 8, HEAD_DIM, HEAD_DIM**-0.5, ROPE, window=WINDOW)
MLA = LatentAttention(HEADS, 128, HEAD_DIM, HEAD_DIM, HEAD_DIM, (2 * HEAD_DIM) ** -0.5, NORM, rope=ROPE)
MAMBA = Mamba(inner_size=2 * WIDTH, state_size=16, conv_size=4, dt_rank=WIDTH // 16)
TAYLOR = TaylorAttention(num_heads=16, head_dim=32, feature_dim=16)
NEAR = Attention(HEADS, 8, HEAD_DIM, HEAD_DIM**-0.5, ROPE, window=64)
CONVOLUTION = GatedConvolution(2 * WIDTH, 3)
LIGHTNING = LightningAttention(num_heads=16, head_dim=32, norm=NORM)


def repeated(*mixers: TokenMixer) -> list[TokenMixer]:
    """Return layers of these kinds, repeated in order."""
    return [mixers[i % len(mixers)] for i in range(LAYERS)]


# Name -> the mixers of all layers. One more architecture is one more line.
ARCHITECTURES: Mapping[str, Sequence[TokenMixer]] = {
    "MHA": repeated(MHA),
    "GQA-8": repeated(GQA),
    "CLA-2": [SharedAttention(i - 1, GQA) if i % 2 else GQA for i in range(LAYERS)],
    "MLA": repeated(MLA),
    "window 1:5": repeated(*[LOCAL] * 5, GQA),
    "Jamba-like 1:5": repeated(*[MAMBA] * 5, GQA),
    "MQA": repeated(MQA),
    "BASED": repeated(CONVOLUTION, TAYLOR, NEAR),
    "lightning": repeated(LIGHTNING),
    "Mamba": repeated(MAMBA),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES), metavar="NAME")
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS, metavar="TOKENS")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=STEPS, help="number of tokens that are timed at each context")
    parser.add_argument("--read", type=Path, help="read the lines of an earlier run instead of measuring")
    parser.add_argument(
        "--plots", type=Path, help="draw architectures-state.png and architectures-decode.png in this folder"
    )
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/architectures.md")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    if options.read:
        lines = [json.loads(line) for line in options.read.read_text().splitlines()]
    else:
        bandwidth = measure_roof(open_table(options.device)).read_bytes_per_s
        contexts = sorted(options.contexts)
        lines = [
            line for name in options.only for line in run(name, contexts, options.device, options.steps, bandwidth)
        ]
    if options.plots:
        architectures_report.plot(lines, options.plots)
    if options.markdown:
        print(architectures_report.markdown(lines))


def run(name: str, contexts: Sequence[int], device: str, steps: int, bandwidth: float) -> Iterator[dict[str, Any]]:
    """Print the lines of one architecture as they are measured. bandwidth: readable bytes per second."""
    spec = spec_of(name, contexts[-1] + SPARE)
    with tempfile.TemporaryDirectory() as folder:
        config = {"model_type": "ridgeline", "spec": to_json(spec)}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, cache="off", device=device)
    bench = Filled(llm, steps)
    exact, computed_s = bench.computed(contexts[0])
    for context in contexts:
        state, seconds, pages_agree = bench.filled(context)
        read = spec.num_params() * FLOAT - VOCAB * WIDTH * FLOAT + spec.state_elements(context) * FLOAT
        line = {
            "architecture": name, "device": device, "context": context, "state_bytes": state,
            "state_bytes_by_formula": spec.state_elements(context) * FLOAT, "read_bytes": read,
            "ms": round(1e3 * seconds, 3), "floor_ms": round(1e3 * read / bandwidth, 3),
        }  # fmt: skip
        if context == contexts[0]:
            line["filled_over_computed"] = round(seconds / computed_s, 3)
        emit(f"architectures: {name}, {context} tokens", exact and pages_agree, **line)
        yield line


def spec_of(name: str, longest: int) -> ModelSpec:
    layers = tuple(Layer(mixer, MLP, NORM) for mixer in ARCHITECTURES[name])
    return ModelSpec(name, VOCAB, WIDTH, longest, layers, NORM)


class Filled:
    """Runs one sequence at a time in the whole engine, over a computed or a filled context."""

    def __init__(self, llm: LLM, steps: int) -> None:
        self._llm, self._steps, self._spec = llm, steps, llm.loaded.spec
        options = EngineOptions(max_num_seqs=1, max_num_batched_tokens=CHUNK, steps_in_flight=1, block_size=PAGE)
        longest = self._spec.max_position_embeddings
        room = 2 * FLOAT * self._spec.state_elements(longest) + (1 << 30)
        self._config = resolve(
            self._spec, longest, options, free_bytes=room, fixed_len=True, kv_cache_dtype=llm.loaded.storage.dtype,
            float_bytes=llm.loaded.table.memory.float_bytes,
        )  # fmt: skip
        self._rng = np.random.default_rng(0)

    def computed(self, context: int) -> tuple[bool, float]:
        """Return whether each token after a prompt is the best one of the dense pass, and seconds for one token."""
        engine, prompt = Engine(self._llm.loaded, self._config), self._prompt(context)
        tokens = self._prefill(engine, prompt)
        seconds, more = self._decode(engine)
        tokens += more
        (logits,) = self._llm.logits([[*prompt, *tokens[:-1]]])
        last = logits[-len(tokens) :]
        return bool((last.max(1) - last[np.arange(len(tokens)), tokens]).max() < 1e-3), seconds

    def filled(self, context: int) -> tuple[int, float, bool]:
        """Return the bytes of a sequence's pages, seconds for a token, and whether the number of pages is right."""
        engine = Engine(self._llm.loaded, self._config)
        with self._without_layers():
            self._prefill(engine, self._prompt(context))
        self._fill(engine)
        used = [group.used_pages for group in engine.stats().groups]
        seconds, _ = self._decode(engine)
        state = sum(n * group.page_bytes for n, group in zip(used, self._config.groups, strict=True))
        exact = FLOAT * self._spec.state_elements(context)
        # A sequence holds whole pages. A window may touch one page more, and a snapshot exists twice while a step makes
        # the next one.
        return state, seconds, exact <= state <= exact + sum(2 * group.page_bytes for group in self._config.groups)

    def _prompt(self, length: int) -> list[int]:
        found: list[int] = self._rng.integers(0, VOCAB, length).tolist()
        return found

    def _prefill(self, engine: Engine, prompt: list[int]) -> list[int]:
        """Compute the prompt and return its first answer."""
        params = SamplingParams(max_tokens=self._steps + 2, temperature=0, ignore_eos=True)
        engine.add(0, GenerationRequest(prompt, params, (NoiseKey(0, 0),)))
        while True:
            if events := engine.step():
                return [token for event in events for token in event.tokens]

    def _decode(self, engine: Engine) -> tuple[float, list[int]]:
        """Return the median seconds for a token, and all tokens."""
        times, tokens = [], []
        while len(engine):
            start = time.perf_counter()
            events = engine.step()
            times.append(time.perf_counter() - start)
            tokens += [token for event in events for token in event.tokens]
        return statistics.median(times[1:]), tokens

    @contextmanager
    def _without_layers(self) -> Iterator[None]:
        with self._llm.loaded.model.without_layers():
            yield

    def _fill(self, engine: Engine) -> None:
        """Write random numbers to the pages that the sequence holds."""
        (choice,) = engine._choices.values()
        memory = self._llm.loaded.table.memory
        for pages, table in zip(engine._runner.arena.pages, choice.sequence.tables, strict=True):
            for page in sorted({page for page in table if page}):
                noise = self._rng.normal(0.0, 0.5, (1, pages.shape[1] // 4)).astype(np.float32)
                memory.pages_in(pages, [page], noise.view(np.uint8))


if __name__ == "__main__":
    main()
