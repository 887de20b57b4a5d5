"""Measure a small Python model and its draft: python bench/pocket.py [--target FOLDER] [--draft FOLDER]

Without folders, it measures the built-in pair. Texts are the held-out documents of the running Python's standard
library, from the split that the pair was trained with: functions that training saw are removed. Everything is seeded.

    bits         bits per byte of either model on the held-out documents, windows of 1024 tokens, 512 apart, beside
                 `xz -9e` on the same documents: each alone, and all concatenated. The gate: the tokens decode to the
                 texts, byte for byte, and so does the output of xz.
    acceptance   tokens per greedy verification of 4 drafts: the target continues held-out contexts of 64 to 256
                 tokens, and the draft is replayed over the continuations. The gate: both tokenizers read these tokens
                 as the same text, and the target as its own draft has all drafts accepted, which proves that the
                 continuations are greedy. If two tokens are equally likely in float32, rounding may exchange them
                 between a cached step and a whole pass; that may cost 1 % of the figure, which is printed.
    completions  held-out function headers, each different one once: 128 tokens at temperature 0.2, and the share that
                 passes the criterion of `ridgeline.evals.judge`, with Wilson's 95 % interval. The gate: each has an
                 answer.
    startup      seconds of a process from its start to 48 tokens: the median of 5, after one that warms the page
                 cache. The gate: it writes 48 tokens.
    cost         parameters, and operations per token: 2 for each parameter that is multiplied, without attention over
                 the context. The gate: every token is the same text for both models.

--out FILE appends the lines to a file too, and the completions go to FILE with the ending .completions.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import lzma
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from common import emit, median_seconds

import ridgeline
from ridgeline import LLM, SamplingParams
from ridgeline.errors import RequestError
from ridgeline.evals import (
    Document,
    Estimate,
    Proportion,
    check_same_tokens,
    encode_texts,
    function_headers,
    judge,
    measure_acceptance,
    measure_perplexity,
)
from ridgeline.evals.documents import Text
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.spec import ModelSpec
from ridgeline.train import Corpus, split

HELD_OUT, SEED = 0.05, 0
CONTEXT, STRIDE = 1024, 512
DRAFTS, LEAST_PROMPT, MOST_PROMPT, ANSWER = 4, 64, 256, 128
TEMPERATURE = 0.2
OWN_DRAFT = 0.99  # the least share of the k + 1 tokens of a verification
STARTUP = ["def __init__(self, path):", "--max-tokens", "48", "--temperature", "0", "--ignore-eos"]
STARTUP_TOKENS, STARTUP_ROUNDS = 48, 5
LEAST_RATIO = 6.0  # target's operations per token over those of the draft
PROGRESS_S = 10.0


@dataclass
class Bench:
    """Holds the pair, the texts, and the output. Models are opened once, when a case needs them."""

    folders: dict[str, Path]
    options: argparse.Namespace
    texts: list[Text]
    opened: dict[str, LLM] = field(default_factory=dict)

    def llm(self, which: str) -> LLM:
        if which not in self.opened:
            self.opened[which] = LLM(str(self.folders[which]))
        return self.opened[which]

    def tokenizer(self, which: str) -> Tokenizer:
        found = self.llm(which).tokenizer
        if found is None:
            sys.exit(f"{self.folders[which]} has no tokenizer")
        return found

    def report(self, case: str, gate: bool, **values: Any) -> None:
        """Print the line that every benchmark writes, and append it to --out."""
        written = io.StringIO()
        with contextlib.redirect_stdout(written):
            emit(f"pocket: {case}", gate, **values)
        print(written.getvalue(), end="", flush=True)
        if self.options.out:
            with self.options.out.open("a", encoding="utf-8") as file:
                file.write(written.getvalue())


def progress(what: str, total: int) -> Callable[[int], None]:
    """Return a function that counts work and prints from time to time to stderr how much is done."""
    begin = last = time.perf_counter()
    done = 0

    def advance(count: int) -> None:
        nonlocal done, last
        done += count
        now = time.perf_counter()
        if now - last >= PROGRESS_S or done == total:
            last = now
            print(f"{what}: {done:,} of {total:,}, {now - begin:.0f} s", file=sys.stderr, flush=True)

    return advance


def figure(estimate: Estimate | None) -> dict[str, float | None]:
    error = estimate.standard_error if estimate else None
    return {
        "value": round(estimate.value, 4) if estimate else None,
        "standard_error": None if error is None else round(error, 4),
    }


# ---- bits per byte --------------------------------------------------------------------------------------------------


def bits(bench: Bench) -> None:
    for which in ("target", "draft"):
        llm, tokenizer = bench.llm(which), bench.tokenizer(which)
        documents = encode_texts(bench.texts, tokenizer)
        same = all(
            tokenizer.decode(tokenizer.encode(t.text), skip_special_tokens=True) == t.text for t in bench.texts
        )  # fmt: skip
        context = min(CONTEXT, llm.max_model_len)
        found = measure_perplexity(
            llm.loaded, documents, context=context, stride=min(STRIDE, context // 2),
            on_tokens=progress(f"bits per byte, {which}", sum(d.num_scored for d in documents)),
        )  # fmt: skip
        bench.report(
            f"bits per byte, {which}", same and found.bits_per_byte is not None, **figure(found.bits_per_byte),
            documents=found.num_documents, bytes=found.num_bytes, tokens=found.num_tokens, context=found.context,
            stride=found.stride, perplexity=round(found.perplexity.value, 3), seconds=round(found.seconds, 1),
        )  # fmt: skip
    data = [t.text.encode() for t in bench.texts]
    for case, parts in (("each alone", data), ("concatenated", [b"".join(data)])):
        packed = [lzma.compress(part, preset=9 | lzma.PRESET_EXTREME) for part in parts]
        size = sum(map(len, parts))
        bench.report(
            f"bits per byte, xz -9e, {case}", [lzma.decompress(p) for p in packed] == parts,
            value=round(8 * sum(map(len, packed)) / size, 4), documents=len(data), bytes=size,
        )  # fmt: skip


# ---- tokens per verification ----------------------------------------------------------------------------------------


def contexts(bench: Bench, count: int) -> list[list[int]]:
    """Return tokens before random positions of held-out documents that are long enough."""
    tokenizer, rng = bench.tokenizer("target"), random.Random(SEED)
    usable = [ids for t in bench.texts if len(ids := tokenizer.encode(t.text)) > LEAST_PROMPT]
    if not usable:
        sys.exit(f"no held-out document has more than {LEAST_PROMPT} tokens")
    rng.shuffle(usable)
    found = []
    for i in range(count):
        ids = usable[i % len(usable)]
        end = rng.randrange(LEAST_PROMPT, len(ids))
        found.append(ids[end - rng.randint(LEAST_PROMPT, min(MOST_PROMPT, end)) : end])
    return found


def acceptance(bench: Bench) -> None:
    target, draft = bench.llm("target"), bench.llm("draft")
    prompts = contexts(bench, bench.options.prompts)
    params = SamplingParams(max_tokens=ANSWER, temperature=0)
    advance = progress("continuations", len(prompts))
    outputs = target.generate(prompts, params, on_done=lambda index, output: advance(1))
    sequences = [(p, o.outputs[0].token_ids) for p, o in zip(prompts, outputs, strict=True)]
    documents = [Document([*prompt, *answer]) for prompt, answer in sequences]
    own = measure_acceptance(target.loaded, sequences, DRAFTS).tokens_per_verification.value
    found = measure_acceptance(draft.loaded, sequences, DRAFTS)
    gate = same_text(documents, bench) and own >= OWN_DRAFT * (DRAFTS + 1)
    bench.report(
        f"tokens per verification, {DRAFTS} drafts", gate, **figure(found.tokens_per_verification),
        prompts=len(prompts), sequences=found.num_sequences, verifications=found.num_verifications,
        tokens=found.num_tokens, accepted_shares=[round(share, 4) for share in found.accepted_shares],
        target_as_its_own_draft=round(own, 4),
    )  # fmt: skip


def same_text(documents: Sequence[Document], bench: Bench) -> bool:
    """Return whether each token is the same text for both tokenizers."""
    try:
        check_same_tokens(documents, bench.tokenizer("target"), bench.tokenizer("draft"))
    except RequestError as e:
        print(e, file=sys.stderr)
        return False
    return True


# ---- completions ----------------------------------------------------------------------------------------------------


def completions(bench: Bench) -> None:
    """Measure completions with the model's generation_config.json, and with the temperature alone."""
    defaults = bench.llm("target").checkpoint.sampling_defaults
    _completions(bench, f"completions, temperature {TEMPERATURE}, the model's defaults", defaults, keep=True)
    _completions(bench, f"completions, temperature {TEMPERATURE}, nothing else", {}, keep=False)


def _completions(bench: Bench, name: str, sampling: Mapping[str, float], *, keep: bool) -> None:
    known = sorted({h for t in bench.texts if t.name.endswith(".py") for h in function_headers(t.text)})
    headers = random.Random(SEED).sample(known, min(bench.options.headers, len(known)))
    # The sampling noise depends on the LLM's seed and on the index of the prompt.
    params = SamplingParams(**{**sampling, "max_tokens": ANSWER, "temperature": TEMPERATURE})
    advance = progress("completions", len(headers))
    outputs = bench.llm("target").generate(headers, params, on_done=lambda index, output: advance(1))
    answers = [output.outputs[0] for output in outputs]
    verdicts = [judge(header, answer.text) for header, answer in zip(headers, answers, strict=True)]
    share = Proportion.of(sum(v.passed for v in verdicts), len(verdicts))
    bench.report(
        name, all(a.error is None for a in answers), value=round(share.value, 4),
        interval_95=[round(share.low, 4), round(share.high, 4)], headers=len(headers), of_headers=len(known),
        tokens=sum(len(a.token_ids) for a in answers),
        mean_statements=round(fmean(v.num_statements for v in verdicts), 2),
        mean_covered=round(fmean(v.covered for v in verdicts), 4),
    )  # fmt: skip
    if bench.options.out and keep:
        path, rows = bench.options.out.with_suffix(".completions.jsonl"), []
        for header, answer, verdict in zip(headers, answers, verdicts, strict=True):
            judged = {"passed": verdict.passed, **asdict(verdict), "finish_reason": answer.finish_reason}
            rows.append(json.dumps({"header": header, "completion": answer.text, **judged}) + "\n")
        path.write_text("".join(rows), encoding="utf-8")


# ---- start-up, cost -------------------------------------------------------------------------------------------------


def startup(bench: Bench) -> None:
    command = [sys.executable, "-m", "ridgeline", "generate", *STARTUP, "--model", str(bench.folders["target"])]
    first = json.loads(subprocess.run([*command, "--json"], check=True, stdout=subprocess.PIPE, text=True).stdout)

    def run() -> None:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    bench.report(
        f"process start to {STARTUP_TOKENS} tokens", first["usage"]["completion_tokens"] == STARTUP_TOKENS,
        seconds=round(median_seconds(run, STARTUP_ROUNDS), 3), rounds=STARTUP_ROUNDS,
        seconds_of_tokens=round(first["timing"]["total_s"], 3),
    )  # fmt: skip


def cost(bench: Bench) -> None:
    specs = [bench.llm(which).loaded.spec for which in ("target", "draft")]
    target, draft = map(flops_per_token, specs)
    every = Document(range(min(spec.vocab_size for spec in specs)))
    bench.report(
        "parameters and cost", specs[0].vocab_size == specs[1].vocab_size and same_text([every], bench),
        target_params=specs[0].num_params(), draft_params=specs[1].num_params(), target_flops_per_token=target,
        draft_flops_per_token=draft, ratio=round(target / draft, 3), least_ratio=LEAST_RATIO,
    )  # fmt: skip


def flops_per_token(spec: ModelSpec) -> int:
    """Return 2 operations for each parameter that a token is multiplied with; a lookup table has none."""
    looked_up = spec.num_position_embeddings + (0 if spec.tie_word_embeddings else spec.vocab_size)
    return 2 * (spec.num_active_params() - looked_up * spec.hidden_size)


CASES = {
    "bits": bits, "acceptance": acceptance, "completions": completions, "startup": startup, "cost": cost,
}  # fmt: skip


def main() -> None:
    built_in = Path(ridgeline.__file__).parent / "models"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=built_in / "pocket")
    parser.add_argument("--draft", type=Path, default=built_in / "pocket-draft")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default=",".join(CASES), help="cases, separated by commas; default: all")
    parser.add_argument("--prompts", type=int, default=100, help="number of prompts for acceptance; default: 100")
    parser.add_argument("--headers", type=int, default=200, help="number of headers for completions; default: 200")
    parser.add_argument(
        "--documents", type=int, help="use only this number of held-out documents, for a quick look; default: all"
    )
    options = parser.parse_args()
    chosen = options.only.split(",")
    if unknown := set(chosen) - set(CASES):
        parser.error(f"--only: {', '.join(sorted(unknown))} is no case; they are {', '.join(CASES)}")
    folders = {"target": options.target, "draft": options.draft}
    for which, folder in folders.items():
        if not folder.is_dir():
            parser.error(f"--{which}: there is no folder {folder}")
    texts: list[Text] = []
    if set(chosen) & {"bits", "acceptance", "completions"}:
        print("reading the standard library", file=sys.stderr, flush=True)
        held_out = split(Corpus.stdlib().documents, HELD_OUT, SEED).held_out
        texts = [Text(d.name, d.text) for d in held_out][: options.documents]
    bench = Bench(folders, options, texts)
    for name in dict.fromkeys(chosen):
        CASES[name](bench)


if __name__ == "__main__":
    main()
