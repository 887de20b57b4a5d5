"""Write the model card (README.md) of a trained model for the Hugging Face hub: what it is, its data, quality and
limits.

The front matter follows github.com/huggingface/hub-docs, modelcard.md. Unknown facts get no row.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ridgeline.spec import ModelSpec
from ridgeline.train.data.manifest import HELD_OUT, TRAIN, Manifest
from ridgeline.train.loop import TrainOptions
from ridgeline.train.optimizer import BETAS

Row = tuple[str, str]
# Licenses that the hub lists and that models or texts commonly have; any other one becomes "other" plus its name.
HUB_LICENSES = frozenset(
    (
        "apache-2.0 mit bsd-2-clause bsd-3-clause cc0-1.0 cc-by-4.0 cc-by-sa-4.0 cc-by-nc-4.0 cc-by-nc-sa-4.0 gpl-2.0 "
        "gpl-3.0 agpl-3.0 lgpl-2.1 lgpl-3.0 mpl-2.0 isc unlicense openrail odbl postgresql zlib"
    ).split()
)
_OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon for the layers' matrices, AdamW for everything else"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """The facts of a model card. Each text is put on one line. No text may contain a local path, because cards are
    published.

    name: name of the model, of its folder and of its hub repository. summary: one sentence about the model. license:
    license of the weights, an SPDX or hub name. language: "code" or ISO 639. in_transformers: whether transformers
    loads the model. dtype: type of the stored weights. prompt: prompt of the usage examples.
    train_tokens, held_out_tokens: tokens in the shards. held_out_share: 0 to 1, share of the documents. split_seed:
    seed of the split.
    steps: number of steps that ran. kept_step: step of these weights, if it is not the last one. tokens_seen: number of
    tokens, repetitions included. start: description of the initial weights, if they were not random. flops: total
    operations. seconds: time of all steps. peak_flops_per_s: measured peak. utilization: 0 to 1, share of that peak
    (MFU).
    Errors are standard errors. evaluated_tokens: scored tokens of the held-out side. eval_context, eval_stride: in
    tokens. training_rows, evaluation_rows: further (name, value) rows. curve: file name of a picture beside the card,
    such as "loss.png".
    """

    name: str
    summary: str
    spec: ModelSpec
    manifest: Manifest
    train_tokens: int
    options: TrainOptions
    steps: int
    tokens_seen: int
    license: str | None = None
    language: str | None = None
    tags: tuple[str, ...] = ()
    in_transformers: bool = False
    dtype: str | None = None
    prompt: str = "def "
    held_out_tokens: int | None = None
    held_out_share: float | None = None
    split_seed: int | None = None
    start: str | None = None
    kept_step: int | None = None
    flops: float | None = None
    seconds: float | None = None
    machine: str | None = None
    peak_flops_per_s: float | None = None
    utilization: float | None = None
    training_rows: tuple[Row, ...] = ()
    bits_per_byte: float | None = None
    bits_per_byte_error: float | None = None
    perplexity: float | None = None
    perplexity_error: float | None = None
    evaluated_tokens: int | None = None
    eval_context: int | None = None
    eval_stride: int | None = None
    evaluation_rows: tuple[Row, ...] = ()
    curve: str | None = None
    limits: tuple[str, ...] = ()


def model_card(facts: CardFacts) -> str:
    """Return the card as Markdown with YAML front matter."""
    parts = [
        f"{_front_matter(facts)}\n\n# {card_text(facts.name)}\n\n{card_text(facts.summary)}",
        _usage(facts),
        table("Architecture", _architecture(facts)),
        table("Data", _data(facts)),
        table("Training", [*_training(facts), *_cost(facts), *facts.training_rows]),
        f"![loss]({card_text(facts.curve)})" if facts.curve else "",
        table("Evaluation", [*_evaluation(facts), *facts.evaluation_rows]),
        "\n".join(["## Limits\n", *(f"- {card_text(limit)}" for limit in facts.limits)]) if facts.limits else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(facts: CardFacts) -> str:
    return front_matter(facts.license, facts.tags, facts.language, facts.in_transformers)


def front_matter(
    license: str | None, tags: Iterable[str], language: str | None = None, in_transformers: bool = False,
    accepted_shares: Sequence[float] = (), rank_accuracies: Sequence[Sequence[float]] = (),
) -> str:  # fmt: skip
    """Return the YAML front matter of a card. license: as `CardFacts` has it. tags: besides `ridgeline`.

    accepted_shares: for a draft, the shares of verifications in which at least the first 1, 2, ... drafts are accepted;
    the planner reads them (spec/cards.py). rank_accuracies: for each Medusa head, the shares of positions at which its
    token of each rank is right; the engine reads them.
    """
    lines = []
    if license:
        name = re.sub(r"[^a-z0-9.-]+", "-", license.lower()).strip("-")
        lines += [f'license: "{name}"'] if name in HUB_LICENSES else ['license: "other"', f'license_name: "{name}"']
    if language:
        lines.append(f"language: {_yaml(language)}")
    lines.append(f'library_name: "{"transformers" if in_transformers else "ridgeline"}"')
    lines.append('pipeline_tag: "text-generation"')
    lines += ["tags:", *(f"- {_yaml(tag)}" for tag in dict.fromkeys(("ridgeline", *tags)))]
    if accepted_shares:
        lines.append(f"accepted_shares: [{_numbers(accepted_shares)}]")
    if rank_accuracies:
        lines.append(f"rank_accuracies: [{', '.join(f'[{_numbers(row)}]' for row in rank_accuracies)}]")
    return "\n".join(["---", *lines, "---"])


def _numbers(shares: Sequence[float]) -> str:
    return ", ".join(f"{share:.3f}" for share in shares)


def _usage(facts: CardFacts) -> str:
    name, prompt = _yaml(facts.name), json.dumps(facts.prompt, ensure_ascii=False)  # valid Python strings, too
    ours = (
        "from ridgeline import LLM, SamplingParams\n\n"
        f"llm = LLM({name})\n"
        f"print(llm.generate({prompt}, SamplingParams(max_tokens=64, temperature=0))[0].outputs[0].text)"
    )
    theirs = (
        "from transformers import pipeline\n\n"
        f'generate = pipeline("text-generation", model={name})\n'
        f'print(generate({prompt}, max_new_tokens=64, do_sample=False)[0]["generated_text"])'
    )
    blocks = [ours, theirs] if facts.in_transformers else [ours]
    return "\n\n".join(["## Usage", *(f"```python\n{block}\n```" for block in blocks)])


def _architecture(facts: CardFacts) -> Iterator[Row]:
    spec = facts.spec
    yield "Family", spec.family
    yield "Parameters", f"{spec.num_params():,}"
    if spec.num_active_params() != spec.num_params():
        yield "Parameters used per token", f"{spec.num_active_params():,}"
    yield "Layers", f"{len(spec.layers):,}"
    yield "Hidden size", f"{spec.hidden_size:,}"
    mixers = spec.attentions(shared=True)
    heads = _distinct(f"{m.num_heads} / {m.num_kv_heads} of {m.head_dim}" for m in mixers)
    if heads:
        yield "Query heads / KV heads", heads
    sizes = _distinct(
        f"{m.intermediate_size:,}"
        + (f" in each of {m.num_experts} experts, {m.num_experts_per_tok} used per token" if m.num_experts else "")
        for m in (layer.mlp for layer in spec.layers)
        if m
    )
    if sizes:
        yield "MLP size", sizes
    tied = ", one matrix for embedding and output head" if spec.tie_word_embeddings else ""
    yield "Vocabulary", f"{spec.vocab_size:,} tokens{tied}"
    yield "Context", f"{spec.max_position_embeddings:,} tokens"
    if facts.dtype:
        yield "Weights stored as", facts.dtype


def _data(facts: CardFacts) -> Iterator[Row]:
    manifest, totals = facts.manifest, facts.manifest.totals()
    yield "Source", manifest.source
    yield "License of the texts", manifest.license
    for side, name, tokens in (
        (TRAIN, "Training texts", facts.train_tokens),
        (HELD_OUT, "Held-out texts", facts.held_out_tokens),
    ):
        documents, num_bytes = totals[side]["documents"], totals[side]["bytes"]
        if documents:
            counted = f", {tokens:,} tokens" if tokens is not None else ""
            yield name, f"{documents:,} document{'s' * (documents != 1)}, {num_bytes:,} bytes{counted}"
    if totals[HELD_OUT]["documents"]:
        yield "Split", _split(facts)
    if manifest.skipped:
        yield "Left out", "; ".join(f"{count:,} ({reason})" for reason, count in manifest.skipped.items())
    yield "Manifest", f"SHA-256 {manifest.hash}, files read by Python {manifest.python}"


def _split(facts: CardFacts) -> str:
    about = (
        f"about {100 * facts.held_out_share:.4g} % of the documents are" if facts.held_out_share else "documents are"
    )
    seed = f" and seed {facts.split_seed}" if facts.split_seed is not None else ""
    text = f"{about} held out as a whole, chosen by a hash of the name{seed}"
    cut = facts.manifest.num_cut
    return f"{text}; {cut:,} functions that also occur in training texts were removed from them" if cut else text


def _training(facts: CardFacts) -> Iterator[Row]:
    o = facts.options
    if facts.start:
        yield "Start", facts.start
    clipped = f"gradients clipped to a norm of {o.clip:g}" if o.clip else "gradients not clipped"
    betas = f"AdamW's betas {BETAS[0]:g}, {BETAS[1]:g}"
    yield "Optimizer", f"{_OPTIMIZERS[o.optimizer]}; {betas}; weight decay {o.weight_decay:g} on matrices; {clipped}"
    yield "Learning rate", _schedule(o)
    yield "Batch", f"{o.batch_tokens:,} tokens in rows of {o.context:,}; attention does not cross documents"
    planned = f" of {o.steps:,} planned" if facts.steps != o.steps else ""
    kept = facts.kept_step
    better = f"; the weights are from step {kept:,}, the best on held-out texts" if kept and kept != facts.steps else ""
    yield "Steps", f"{facts.steps:,}{planned}{better}"
    yield "Tokens seen", f"{facts.tokens_seen:,}, {facts.tokens_seen / facts.train_tokens:.3g} epochs"
    whole = "" if o.precision == "float32" else " products; weights, sums and optimizer state in float32"
    yield "Precision", o.precision + whole
    yield "Dropout", f"{o.dropout:g}"
    yield "Seed", str(o.seed)


def _schedule(o: TrainOptions) -> str:
    decay, last = math.ceil(o.decay_share * o.steps), o.final_rate * o.learning_rate
    warm_up = f", after a linear warm-up over {o.warmup_steps:,} steps" if o.warmup_steps else ""
    fall = f"; falls linearly to {last:g} over the last {decay:,} of {o.steps:,} steps" if decay else ""
    return f"peak {o.learning_rate:g}{warm_up}{fall}"


def _cost(facts: CardFacts) -> Iterator[Row]:
    if facts.flops is not None:
        yield "FLOPs", f"{facts.flops:.3g}, counted: 6 per token and weight that it is multiplied with, plus attention"
    if facts.seconds is not None:
        yield "Hours", f"{facts.seconds / 3600:.3g}"
    if facts.machine:
        yield "Machine", facts.machine
    if facts.utilization is not None:
        peak = facts.peak_flops_per_s
        of = f" of {peak / 1e9:,.4g} GFLOP/s, the measured rate of a large matrix product there" if peak else ""
        yield "Model FLOPs utilization", f"{100 * facts.utilization:.1f} %{of}"


def _evaluation(facts: CardFacts) -> Iterator[Row]:
    if facts.bits_per_byte is not None:
        yield "Bits per byte", _measured(facts.bits_per_byte, facts.bits_per_byte_error)
    if facts.perplexity is not None:
        yield "Perplexity per token", _measured(facts.perplexity, facts.perplexity_error)
    if facts.evaluated_tokens is not None:
        yield "Scored", f"{facts.evaluated_tokens:,} held-out tokens"
    if facts.eval_context is not None:
        stride = f", each {facts.eval_stride:,} after the one before" if facts.eval_stride is not None else ""
        yield "Context and stride", f"windows of {facts.eval_context:,} tokens{stride}"


def _measured(value: float, error: float | None) -> str:
    """Format a value with as many decimals as show two digits of its error."""
    if error is None or not 0 < error < math.inf:
        return f"{value:.5g}"
    decimals = max(0, 1 - math.floor(math.log10(error)))
    return f"{value:,.{decimals}f} ± {error:,.{decimals}f} (standard error)"


def table(title: str, rows: Iterable[Row]) -> str:
    """Return a Markdown table with a heading, or an empty string if there are no rows."""
    lines = [f"| {_cell(name)} | {_cell(value)} |" for name, value in rows]
    return "\n".join([f"## {title}\n", "| | |", "|---|---|", *lines]) if lines else ""


def _distinct(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(texts))


def _cell(text: str) -> str:
    return card_text(text).replace("|", r"\|")


def _yaml(text: str) -> str:
    """Return the text as a JSON string, which YAML reads the same way."""
    return json.dumps(card_text(text), ensure_ascii=False)


def card_text(text: str) -> str:
    """Return the text on one line, without characters that cannot be printed."""
    return "".join(c for c in " ".join(text.split()) if c.isprintable())
