"""Choose the optimizer and the learning rate of each parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import nn

OptimizerName = Literal["adamw", "muon"]
BETAS = (0.9, 0.95)
EPS = 1e-8


class Optimizer:
    """AdamW (arXiv:1711.05101) for vectors and embeddings; AdamW or Muon (Jordan et al. 2024) for all other matrices.

    Muon's update is scaled to the size of AdamW's, so both use the same rate. Weight decay applies to matrices only.
    The decays and step sizes of a state space do not count as matrices, whatever their shape.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], name: OptimizerName, weight_decay: float) -> None:
        matrices = {n: p for n, p in parameters.items() if p.dim() > 1 and n.endswith(".weight")}
        hidden = {n: p for n, p in matrices.items() if p.dim() == 2 and not n.startswith(("embed.", "head"))}
        self._parameters = parameters
        by_muon = hidden if name == "muon" else {}
        rest = {n: p for n, p in parameters.items() if n not in by_muon}
        decayed = [p for n, p in rest.items() if n in matrices]
        plain = [p for n, p in rest.items() if n not in matrices]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self._parts: list[torch.optim.Optimizer] = []
        if by_adam := [g for g in groups if g["params"]]:
            self._parts.append(torch.optim.AdamW(by_adam, lr=0.0, betas=BETAS, eps=EPS))
        if by_muon:
            self._parts.append(
                torch.optim.Muon(
                    list(by_muon.values()), lr=0.0, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
                )
            )

    def step(self, rate: float, clip: float) -> float:
        """Update once with the current gradients, clipped to a norm of `clip` (0: not clipped). Returns their norm
        before clipping.
        """
        parameters = list(self._parameters.values())
        norm = torch.nn.utils.clip_grad_norm_(parameters, clip or math.inf)
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
            part.zero_grad(set_to_none=True)
        return float(norm)

    def state(self) -> dict[str, torch.Tensor]:
        """Return every tensor of the optimizers' state, by parameter and kind."""
        return {
            f"{name}:{kind}": torch.as_tensor(value)
            for name, parameter in self._parameters.items()
            for part in self._parts
            for kind, value in part.state.get(parameter, {}).items()
        }

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore what `state` returned."""
        for part in self._parts:
            for group in part.param_groups:
                for parameter in group["params"]:
                    name = next(n for n, p in self._parameters.items() if p is parameter)
                    kinds = {k.removeprefix(f"{name}:"): v for k, v in state.items() if k.startswith(f"{name}:")}
                    part.state[parameter] = {k: v.to(parameter.device) if v.dim() else v for k, v in kinds.items()}


def learning_rate(step: int, steps: int, peak: float, warmup: int, decay: int, floor: float) -> float:
    """Return the rate of a step: linear warm-up over `warmup` steps, then the peak, then linear decay to `floor` x peak
    over the last `decay` steps.

    The constant middle allows the length of a run to be decided late (arXiv:2405.18392).
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    left = steps - step
    return peak if left > decay else peak * (floor + (1 - floor) * left / max(1, decay))
