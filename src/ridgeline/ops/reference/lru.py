"""The real-gated linear recurrent unit in torch, one token after the other."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.ops.reference.recurrent import _steps
from ridgeline.spec import GatedLRU


def block_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    parts = x.unflatten(-1, (weight.shape[0], -1))
    return (torch.einsum("...gi,goi->...go", parts, weight.to(x.dtype)) + bias.to(x.dtype)).flatten(-2)


def gated_lru(case: GatedLRU):
    def scan(
        x: Tensor, into: Tensor, gate: Tensor, decay: Tensor, begun: Tensor, h: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(x.device.type, enabled=False):  # a sum over all tokens: none of its terms is rounded
            x, into, gate = (t.to(h.dtype) for t in (x, into, gate))
            logs = -case.rate * torch.sigmoid(gate) * F.softplus(decay)
            first = torch.zeros_like(x[:, :, :1], dtype=torch.bool)
            first[:, 0] = begun[:, :1] == 0
            size = torch.sqrt(-torch.expm1(2 * logs.masked_fill(first, -1.0))).masked_fill(first, 1.0)
            terms = _steps(size * torch.sigmoid(into) * x, lengths)
            outputs = []
            for a, term in zip(_steps(logs, lengths).exp().unbind(1), terms.unbind(1), strict=True):
                h = a * h + term
                outputs.append(h)
            return torch.stack(outputs, 1), torch.ones_like(begun), h

    return scan
