"""A ModelSpec as a trainable torch module: the modules that serve it, with parameters as weights and a loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ridgeline.errors import RequestError
from ridgeline.nn import Capture, Model
from ridgeline.nn.step import Stream
from ridgeline.ops import OpsTable
from ridgeline.ops.reference.backend import torch_device
from ridgeline.runtime.step import DenseStep
from ridgeline.spec import ModelSpec, RMSNorm, Weight
from ridgeline.train import state_space

INIT_STD = 0.02  # for matrices; writers to the residual stream divide it by sqrt(2 x layers) (GPT-2)
RESIDUAL = ("mixer.o.weight", "mixer.out.weight", "mlp.down.weight")
DECAYS = (".A_log", ".dt.bias", ".dt_bias")
UNTRAINED = "mlp.choice.bias"  # only selects experts, so it has no gradient
DOWN, UP = ".down", ".up"  # behind the name of a matrix: the two matrices of its adapter
LOSS_ELEMENTS = 2**26  # logits in memory at once; more are computed in blocks, and again in the backward pass


class LanguageModel(nn.Module):
    """Parameters with Ridgeline's names, trained through `ridgeline.nn.Model` and the reference ops in float32.

    dropout: rate for the embedding and for the output of each layer's last branch during training. checkpointing: keep
    only the residual stream between layers for the backward pass, and compute everything else again. adapters: rank of
    terms that are added to the matrices of layers and train instead of all weights (LoRA, arXiv:2106.09685); 0: none.
    """

    def __init__(
        self, spec: ModelSpec, table: OpsTable, max_len: int, *, seed: int = 0, dropout: float = 0.0,
        checkpointing: bool = False, adapters: int = 0,
    ) -> None:  # fmt: skip
        if spec.canvas:
            raise RequestError(f"{spec.family} fills a canvas of {spec.canvas} tokens, for which there is no training")
        super().__init__()
        self.spec, self.table, self.dropout, self._memory = spec, table, dropout, table.memory
        self._max_len, self._checkpointing = max_len, checkpointing
        generator = torch.Generator().manual_seed(seed)
        self._by_name: dict[str, nn.Parameter] = {}
        for weight in spec.weights():
            self._add(weight.name, _initial(weight, spec, generator), not adapters)
        for weight in spec.weights() if adapters else ():
            if weight.name.startswith("layers.") and weight.is_matrix and len(weight.shape) == 2:
                rows, columns = weight.shape
                down = torch.randn((adapters, columns), generator=generator) * columns**-0.5
                self._add(weight.name + DOWN, down)
                self._add(weight.name + UP, torch.zeros((rows, adapters)))
        self._model = self.variant(spec, table)

    def variant(self, spec: ModelSpec, table: OpsTable) -> Model:
        """Return a model with these weights, and another spec or other kernels. spec: with weights of equal names."""
        return _TrainedModel(spec, self._by_name, table, self._max_len, self, self._checkpointing)

    def _add(self, name: str, initial: Tensor, trains: bool = True) -> None:
        where = torch_device(self._memory.device)
        parameter = nn.Parameter(initial.to(where), requires_grad=trains and not name.endswith(UNTRAINED))
        self.register_parameter(name.replace(".", "/"), parameter)  # torch forbids dots in names
        self._by_name[name] = parameter

    def weights(self) -> Mapping[str, nn.Parameter]:
        """Return all parameters: weights by the spec's names, and adapters by the names of their matrices with DOWN and
        UP behind them.
        """
        return self._by_name

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights by the spec's names; adapters stay as they are."""
        for weight in self.spec.weights():
            self._by_name[weight.name].copy_(weights[weight.name])

    def merged(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return weights by the spec's names, with the adapters of `tensors` added to their matrices."""
        found = {w.name: tensors[w.name] for w in self.spec.weights()}
        for name in found:
            if name + UP in tensors:
                found[name] = found[name] + tensors[name + UP] @ tensors[name + DOWN]
        return found

    def forward(self, token_ids: Tensor, positions: Tensor, lengths: tuple[int, ...], targets: Tensor) -> Tensor:
        """Return the sum of -log p over targets [T] (negative: none), in nats. The tokens are sequences of `lengths`,
        end to end.
        """
        stream = self.stream(self.step(token_ids, positions, lengths))
        rows = (targets >= 0).nonzero().squeeze(1)
        return sum_in_blocks(lambda some: self._nll(stream, some, targets), rows, self.spec.vocab_size)

    def step(self, token_ids: Tensor, positions: Tensor, lengths: tuple[int, ...]) -> DenseStep:
        """Return the step that reads sequences of `lengths`, end to end."""
        return DenseStep(token_ids, positions, lengths, self._memory)

    def logits(self, token_ids: Tensor, positions: Tensor, lengths: tuple[int, ...], rows: Tensor) -> Tensor:
        """Return the logits [n, vocabulary] of the given rows among the T tokens."""
        return self.project(self.stream(self.step(token_ids, positions, lengths)), rows)

    def stream(self, step: DenseStep, capture: Capture | None = None) -> Stream:
        """Return the stream after the last layer. capture: receives the outputs that it asks for."""
        return self._model.forward(step, capture)

    def run_apart(self, step: DenseStep, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the stream [T, hidden_size] after each layer, where each one reads its own of the given `inputs`."""
        given: Any = inputs
        return list(cast("Iterator[Tensor]", self._model.run_apart(step, given)))

    def project(self, stream: Stream, rows: Tensor) -> Tensor:
        """Return the logits [n, vocabulary] of the given rows of a stream."""
        out: Any = self._model.logits(stream, rows)
        return cast("Tensor", out)

    def _nll(self, stream: Stream, rows: Tensor, targets: Tensor) -> Tensor:
        logits: Any = self._model.logits(stream, rows)
        return F.cross_entropy(logits.float(), targets[rows], reduction="sum")


def sum_in_blocks(loss: Callable[[Tensor], Tensor], rows: Tensor, vocab_size: int) -> Tensor:
    """Return the sum of `loss` over rows [n], each of which needs `vocab_size` logits.

    Logits of at most LOSS_ELEMENTS numbers are in memory at once; more are computed again in the backward pass.
    """
    block = max(1, LOSS_ELEMENTS // vocab_size)
    if len(rows) <= block:
        return loss(rows)
    return torch.stack([checkpoint(loss, some, use_reentrant=False) for some in torch.split(rows, block)]).sum()


class _TrainedModel(Model):
    """The model that is served, with dropout between its layers and, if requested, recomputation."""

    def __init__(
        self, spec: ModelSpec, weights: Mapping[str, Any], table: OpsTable, max_len: int, owner: LanguageModel,
        checkpointing: bool,
    ) -> None:  # fmt: skip
        terms: Any = {
            name: (weights[name + DOWN], weights[name + UP]) for name in weights if name + UP in weights
        }  # fmt: skip
        super().__init__(spec, weights, table, max_len, low_rank=terms)
        self._mode = [owner]  # in a list, so that torch does not register the owner as a submodule
        self._checkpointing = checkpointing

    def embed(self, step: Any) -> Any:
        return self._drop(super().embed(step))

    def run_block(self, block: Any, stream: Stream, step: Any, rotaries: Any) -> Stream:
        if self._checkpointing and torch.is_grad_enabled():
            found = checkpoint(super().run_block, block, stream, step, rotaries, use_reentrant=False)
        else:
            found = super().run_block(block, stream, step, rotaries)
        delta = None if found.delta is None else self._drop(found.delta)
        kept: Stream = found._replace(delta=delta)
        return kept

    def _drop(self, x: Any) -> Any:
        owner = self._mode[0]
        return F.dropout(x, owner.dropout, owner.training) if owner.dropout else x


def _initial(weight: Weight, spec: ModelSpec, generator: torch.Generator) -> Tensor:
    if weight.name.startswith("layers.") and ".mixer." in weight.name:
        mixer = spec.layers[int(weight.name.split(".")[1])].mixer
        kind = mixer.initial_state_matrix if mixer else None
        own = state_space.initial(kind, weight, generator) if kind else None
        if own is not None:
            return own
    if weight.is_matrix:
        std = INIT_STD / math.sqrt(2 * len(spec.layers)) if weight.name.endswith(RESIDUAL) else INIT_STD
        return torch.randn(weight.shape, generator=generator) * std
    if weight.name.endswith(DECAYS):
        return _decay(weight, generator)
    if weight.name.endswith((".bias", ".sinks")):
        return torch.zeros(weight.shape)
    return torch.full(weight.shape, 1.0 - _offset(weight.name, spec))


def _decay(weight: Weight, generator: torch.Generator) -> Tensor:
    """Return initial decays or step sizes: A = -1, -2, ... along the last axis, and steps from 1e-3 to 1e-1, uniform in
    their logarithm (arXiv:2312.00752, 3.6).
    """
    if weight.name.endswith("A_log"):
        return torch.arange(1, weight.shape[-1] + 1).float().log().expand(weight.shape).clone()
    steps = 1e-3 * 100 ** torch.rand(weight.shape, generator=generator)
    return steps + torch.log(-torch.expm1(-steps))  # the inverse of softplus


def _offset(name: str, spec: ModelSpec) -> float:
    """Return what a norm adds to its weight: a norm that adds 1 starts at 0. A mixer may have its own kind of norm."""
    _, index, part, *_ = (*name.split("."), "", "")
    if part != "mixer":
        return spec.norm.offset if isinstance(spec.norm, RMSNorm) else 0.0
    own = spec.attention(int(index)) or spec.layers[int(index)].mixer
    assert own is not None  # the weight belongs to it
    norms = [value for f in fields(own) if isinstance(value := getattr(own, f.name), RMSNorm)]
    return norms[0].offset if norms else 0.0
