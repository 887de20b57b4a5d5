"""The least that a model's work can cost: bytes that must be read, operations that must be done, and no overhead.

The roofline (Williams et al., CACM 2009): no pass over a model takes less time than reading its weights and the state
of its sequences once, nor less than its multiplications; whatever else a machine does could overlap. Norms, rotations,
sampling, and writing are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ridgeline.measure.machine import Roof
from ridgeline.spec import ModelSpec, MoE
from ridgeline.spec.storage import EXACT, Storage, state_bytes


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes to read, operations to do (a product and its sum are two); costs add up."""

    bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.flops + other.flops)

    def seconds(self, roof: Roof) -> float:
        """The least time: reading and computing may overlap."""
        return max(self.bytes / roof.read_bytes_per_s, self.flops / roof.flops_per_s)


class Costs:
    """What passes over one model cost.

    matrix_bytes: of an element of a matrix. storage: of the rows of attention. longest: sequence to come, in tokens.
    """

    def __init__(self, spec: ModelSpec, *, matrix_bytes: float, storage: Storage = EXACT, longest: int) -> None:
        self._spec, self._matrix_bytes = spec, matrix_bytes
        weights = {w.name: w for w in spec.weights()}
        tables = sum(weights[name].num_params for name in ("embed.weight", "position_embed.weight") if name in weights)
        own_head = sum(w.num_params for name, w in weights.items() if name.startswith("head."))
        self._head = own_head or weights["embed.weight"].num_params
        self._body = spec.num_active_params() - tables - own_head  # parameters that each token is multiplied with
        vectors = sum(w.num_params for name, w in weights.items() if not w.is_matrix and ".experts." not in name)
        self._dense_bytes = 4 * vectors + matrix_bytes * (self._body + self._head - vectors - sum(self._routed(1.0)))
        kinds = [(layer.mixer, n) for layer, n in Counter(spec.layers).items() if layer.mixer]
        # Up to each length: multiplications of a token with the tokens before it, if it comes alone or, which may cost
        # less, with all of them; and bytes of state that it reads.
        lengths = range(1, longest + 1)
        alone = (sum(n * mixer.work(1, length) for mixer, n in kinds) for length in lengths)
        together = (sum(n * mixer.work(length, length) // length for mixer, n in kinds) for length in lengths)
        state = (
            sum(n * state_bytes(mixer.state(), storage, length) for mixer, n in kinds) for length in range(longest)
        )
        self._alone, self._together = [0, *accumulate(alone)], [0, *accumulate(together)]
        self._state = [0, *accumulate(state)]

    def weights(self, tokens: float) -> float:
        """Bytes of the weights that a pass of so many tokens reads: of the experts, those that tokens which choose
        evenly would be expected to meet."""
        rows = tokens * self._spec.hidden_size  # of the embedding
        return self._dense_bytes + self._matrix_bytes * (rows + sum(self._routed(tokens)))

    def tokens(self, start: int, stop: int, *, sampled: int = 0) -> Cost:
        """Tokens [start, stop) of one sequence, but for reading the weights, and the logits of some of them."""
        return self._products(start, stop, sampled, self._together)

    def _products(self, start: int, stop: int, sampled: int, work: Sequence[int]) -> Cost:
        products = self._body * (stop - start) + work[stop] - work[start] + self._head * sampled
        return Cost(flops=2.0 * products)

    def decode(self, start: int, stop: int) -> Cost:
        """The same, one token at a time, each of which reads the state of all before it and gives logits."""
        state = self._state[stop] - self._state[start]
        return Cost(bytes=state) + self._products(start, stop, stop - start, self._alone)

    def prefill(self, batch: int, length: int) -> Cost:
        """All prompts of a batch, in one pass."""
        one = self.tokens(0, length, sampled=1)
        return Cost(self.weights(batch * length), batch * one.flops)

    def step(self, batch: int, position: int) -> Cost:
        """One token for each sequence of a batch, all of which hold `position` tokens."""
        one = self.decode(position, position + 1)
        return Cost(self.weights(batch) + batch * one.bytes, batch * one.flops)

    def all(self, requests: Iterable[tuple[int, int, int]], *, max_seqs: int) -> Cost:
        """Any number of requests (cached tokens of the prompt, prompt tokens, new tokens), packed as well as can be.

        There are at least as many passes as the longest answer has tokens, and as all answers have together over
        `max_seqs`. Prompts are computed beside the answers of others.
        """
        total, longest, new, computed = Cost(), 0, 0, 0
        for cached, prompt, output in requests:
            total += self.tokens(cached, prompt, sampled=1) + self.decode(prompt, prompt + output - 1)
            longest, new, computed = max(longest, output), new + output, computed + prompt - cached + output - 1
        passes = max(longest, -(-new // max_seqs))
        return total + Cost(bytes=passes * self.weights(computed / passes)) if passes else total

    def _routed(self, tokens: float) -> Iterable[float]:
        """Of each layer with experts, the parameters that so many tokens meet."""
        for layer in self._spec.layers:
            if isinstance(mlp := layer.mlp, MoE):
                experts = sum(w.num_params for w in mlp.weights(self._spec.hidden_size) if w.name.startswith("experts"))
                yield experts * (1 - (1 - mlp.num_experts_per_tok / mlp.num_experts) ** tokens)
