"""A ModelSpec as a trainable torch module: the modules that serve it, with parameters as weights and a loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ridgeline.nn import Model
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
LOSS_ELEMENTS = 2**26  # logits in memory at once; more are computed in blocks, and again in the backward pass


class LanguageModel(nn.Module):
    """Parameters with Ridgeline's names, trained through `ridgeline.nn.Model` and the reference ops in float32.

    dropout: rate for the embedding and for the output of each layer's last branch during training. checkpointing: keep
    only the residual stream between layers for the backward pass, and compute everything else again.
    """

    def __init__(
        self, spec: ModelSpec, table: OpsTable, max_len: int, *, seed: int = 0, dropout: float = 0.0,
        checkpointing: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.spec, self.dropout, self._memory = spec, dropout, table.memory
        generator = torch.Generator().manual_seed(seed)
        self._by_name: dict[str, nn.Parameter] = {}
        for weight in spec.weights():
            initial = _initial(weight, spec, generator).to(torch_device(table.memory.device))
            parameter = nn.Parameter(initial, requires_grad=not weight.name.endswith(UNTRAINED))
            self.register_parameter(weight.name.replace(".", "/"), parameter)  # torch forbids dots in names
            self._by_name[weight.name] = parameter
        self._model = _TrainedModel(spec, self._by_name, table, max_len, self, checkpointing)

    def weights(self) -> Mapping[str, nn.Parameter]:
        """Return all parameters by the spec's names."""
        return self._by_name

    def forward(self, token_ids: Tensor, positions: Tensor, lengths: tuple[int, ...], targets: Tensor) -> Tensor:
        """Return the sum of -log p over targets [T] (negative: none), in nats. The tokens are sequences of `lengths`,
        end to end.
        """
        stream = self._model.forward(DenseStep(token_ids, positions, lengths, self._memory))
        rows = (targets >= 0).nonzero().squeeze(1)
        block = max(1, LOSS_ELEMENTS // self.spec.vocab_size)
        if len(rows) <= block:
            return self._nll(stream, rows, targets)
        parts = [checkpoint(self._nll, stream, r, targets, use_reentrant=False) for r in torch.split(rows, block)]
        return torch.stack(parts).sum()

    def logits(self, token_ids: Tensor, positions: Tensor, lengths: tuple[int, ...], rows: Tensor) -> Tensor:
        """Return the logits [n, vocabulary] of the given rows among the T tokens."""
        return self.project(self.stream(DenseStep(token_ids, positions, lengths, self._memory)), rows)

    def stream(self, step: DenseStep) -> Stream:
        """Return the stream after the last layer."""
        return self._model.forward(step)

    def project(self, stream: Stream, rows: Tensor) -> Tensor:
        """Return the logits [n, vocabulary] of the given rows of a stream."""
        out: Any = self._model.logits(stream, rows)
        return cast("Tensor", out)

    def _nll(self, stream: Stream, rows: Tensor, targets: Tensor) -> Tensor:
        logits: Any = self._model.logits(stream, rows)
        return F.cross_entropy(logits.float(), targets[rows], reduction="sum")


class _TrainedModel(Model):
    """The model that is served, with dropout between its layers and, if requested, recomputation."""

    def __init__(
        self, spec: ModelSpec, weights: Mapping[str, Any], table: OpsTable, max_len: int, owner: LanguageModel,
        checkpointing: bool,
    ) -> None:  # fmt: skip
        super().__init__(spec, weights, table, max_len)
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
        return Stream(found.residual, delta, found.shared)

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
