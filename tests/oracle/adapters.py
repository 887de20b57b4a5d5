"""Write adapters of drawn numbers for pocket with peft."""

from __future__ import annotations

from pathlib import Path

import peft
import torch
from transformers import AutoModelForCausalLM

from ridgeline.load.hub import find_model


def write_adapter(folder: Path, seed: int) -> str:
    """Write an adapter of rank 4, large enough to change answers. Return its folder."""
    model = AutoModelForCausalLM.from_pretrained(find_model("pocket"))
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj", "down_proj"]))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    return str(folder)
