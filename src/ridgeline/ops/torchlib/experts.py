"""All experts of a step by torch's `grouped_mm`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.ops.api import Weights
from ridgeline.ops.reference.primitives import activation
from ridgeline.spec import MoE


def refuses_case(case: MoE) -> str | None:
    """Return why `grouped_mm` does not serve these experts; None if it does."""
    if case.weighs_inputs:
        return "the inputs of experts are multiplied with their scores"
    return "grouped_mm has no experts without matrices" if case.identity else None


def refuses_experts(weights: Weights) -> str | None:
    """Return why `grouped_mm` does not multiply with the matrices of experts; None if it does."""
    for linear in (one for each in weights.experts.values() for one in each):
        data: Any = linear.data
        if linear.unfused is not None or linear.bias is not None:
            return f"experts {linear.unfused or 'have biases'}"
        if linear.format.is_lossy or data.dtype != torch.bfloat16:
            return "experts are multiplied in bfloat16, and these are stored in another type"
    return None


def expert_block(case: MoE, weights: Weights) -> Callable[..., Tensor]:
    """Return EXPERT_BLOCK. The number of tokens of each expert stays on the device. Results are bfloat16 numbers."""
    found: dict[str, Any] = {name: [one.data for one in each] for name, each in weights.experts.items()}
    stacks = {name: torch.stack(each).transpose(1, 2) for name, each in found.items()}  # [experts, in, out]
    activate = activation(case)

    def run(x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        chosen, order = ids.flatten().sort(stable=True)
        numbers = torch.arange(case.num_experts, device=x.device)
        ends = torch.searchsorted(chosen, numbers, right=True).int()  # of the rows of each expert

        def multiply(rows: Tensor, name: str) -> Tensor:
            return F.grouped_mm(rows.bfloat16(), stacks[name], offs=ends).float()

        rows = x[order // case.num_experts_per_tok]
        raised = multiply(rows, "up")
        inner = activate(multiply(rows, "gate"), raised) if "gate" in stacks else activate(raised)
        by_token = multiply(inner, "down")[order.argsort()].unflatten(0, ids.shape)
        return (by_token * scores[..., None]).sum(1).to(x.dtype)

    return run
