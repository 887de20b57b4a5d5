"""Write the commands that start a layout of plan/ask.py: `ridgeline serve`, and the same for vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ridgeline.plan.ask import Layout

WIDTH = 80
_KV_TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


@dataclass(frozen=True, slots=True)
class Start:
    """How to start a layout.

    replicas: engines. max_model_len: most tokens of a sequence. prefill, decode: engines for prompts and for answers; 0
    if each engine computes both.
    """

    name: str
    layout: Layout
    replicas: int
    max_model_len: int
    prefill: int = 0
    decode: int = 0

    @property
    def rounded(self) -> str:
        """Return the type of the weights if a change rounds them; an empty text for those of the checkpoint."""
        return self.layout.deployment.precision.weights if "weights=" in self.layout.changed else ""

    @property
    def state(self) -> str:
        """Return the type of keys and values if it was chosen; an empty text otherwise."""
        precision = self.layout.deployment.precision
        return precision.state if precision.is_state_chosen else ""


def serve_command(start: Start) -> str:
    """Return the command of one replica. Comments have the parts that `ridgeline serve` does not do yet."""
    d, words = start.layout.deployment, list(_words("ridgeline serve", start))
    if d.hardware.kind == "gpu":
        words.insert(1, "--device cuda")
    if start.rounded:
        words.append(f"--weights {start.rounded}")
    if start.state:
        words.append(f"--kv-cache-dtype {start.state}")
    if d.draft is not None and d.speculation is not None:
        words += [f"--speculative {d.draft.name}", f"--num-speculative-tokens {d.speculation.depth}"]
    notes = list(_copies(start))
    if start.prefill:
        notes.append("Not served yet: engines for prompts or answers only; this engine computes both.")
    if d.scheme.tp > 1:
        notes.append(f"Not served yet: --tensor-parallel-size {d.scheme.tp}; this command uses one device.")
    return _block(notes, words)


def vllm_command(start: Start) -> str:
    """Return the command of one replica for vLLM."""
    d, words, notes = start.layout.deployment, list(_words("vllm serve", start)), list(_copies(start))
    if d.scheme.tp > 1:
        words.insert(1, f"--tensor-parallel-size {d.scheme.tp}")
    if start.rounded == "fp8":
        words.append("--quantization fp8")
    elif start.rounded:
        notes.append(f"Name a checkpoint that is quantized to {start.rounded} (AWQ or GPTQ) instead.")
    if start.state == "fp8":
        words.append("--kv-cache-dtype fp8")
    if d.draft is not None and d.speculation is not None:
        drafts = {"method": "ngram"} if d.draft.spec is None else {"model": d.draft.name}
        words.append(f"--speculative-config '{_json(drafts | {'num_speculative_tokens': d.speculation.depth})}'")
    if start.prefill:
        words.append(f"--kv-transfer-config '{_json(_KV_TRANSFER)}'")
    return _block(notes, words)


def _copies(start: Start) -> Iterator[str]:
    """Yield how many engines to start."""
    if start.prefill:
        yield f"Start {start.prefill} engines for prompts and {start.decode} for answers behind a router for both."
    elif start.replicas > 1:
        yield f"Start it {start.replicas} times behind a proxy that asks the least busy one."


def _words(program: str, start: Start) -> Iterator[str]:
    yield f"{program} {start.name}"
    yield f"--max-num-seqs {start.layout.batch}"
    yield f"--max-num-batched-tokens {max(start.layout.deployment.chunk, start.layout.batch)}"
    yield f"--max-model-len {start.max_model_len}"


def _json(value: Mapping[str, object]) -> str:
    return json.dumps(value, separators=(",", ":"))


def _block(notes: Sequence[str], words: Sequence[str]) -> str:
    """Return comments, and a command over several lines that a shell joins."""
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) + 3 <= WIDTH:
            lines[-1] += f" {word}"
        else:
            lines.append(f"    {word}")
    return "\n".join([*(f"# {note}" for note in notes), " \\\n".join(lines)])
