"""EAGLE-3 heads that the speculators package wrote have its logits here, and it reads those that we write."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oracle import heads
from oracle.heads import AUX, CASES, DRAFT_VOCAB, LAYER, Given
from oracle.test_heads import STEPS, TOLERANCE, built, given_to, paged
from ridgeline.load.heads import read_head, write_head

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def speculators() -> Any:
    """Return the modules of speculators 0.9; it asks for an older transformers, and runs with this one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        why = "pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0, which the dev extra leaves out"
        return pytest.importorskip("speculators.models.eagle3.core", reason=why)


def make(core: Any, kind: str, **flags: Any) -> Any:
    """Return a random model of the package."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig, Qwen3Config

    fields = {k: v for k, v in LAYER.items() if k not in ("model_type", "rope_theta")}
    layer = (LlamaConfig if kind == "llama" else Qwen3Config)(
        **fields, rope_parameters={"rope_type": "default", "rope_theta": 3000.0}
    )
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=DRAFT_VOCAB, **{AUX: [2, 4, 6]}, **flags,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3", proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy", verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )  # fmt: skip
    model = core.Eagle3DraftModel(config).eval()
    drawn = heads.draw(CASES["speculators"])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, x in model.named_parameters():
            spread = 0.3 if x.ndim == 1 else 1.0 if "embed" in name else 1.5 * x.shape[1] ** -0.5
            x.copy_(float(x.ndim == 1) + spread * torch.randn(x.shape, generator=generator))
        model.d2t.copy_(torch.from_numpy(drawn["d2t"]))
        model.t2d.copy_(torch.from_numpy(drawn["t2d"]))
    return model


def logits_of(core: Any, model: Any, given: Given) -> np.ndarray:
    """Return the package's logits of the rows with the target's features."""
    rows = len(given.streams[0])
    found: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, args, output: found.append(output.detach()))
    joined = torch.cat(given.streams, -1).float()[None]
    with torch.no_grad():
        model(joined, torch.tensor([given.tokens[:rows]]), torch.zeros(1, rows, dtype=torch.long), ttt_steps=1)
    return found[0][0].numpy()


def read(core: Any, folder: Path) -> Any:
    """Return the package's model of a folder. Its own loader also wants the target, which these heads do not have."""
    from safetensors.torch import load_file

    config = core.Eagle3DraftModel.config_class.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = core.Eagle3DraftModel(config).eval()
    missing, unexpected = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not unexpected
    assert set(missing) == {"verifier_norm.weight", "verifier_lm_head.weight"}
    return model


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("flags", [
    {}, {"norm_before_residual": True}, {"norm_before_fc": True, "norm_output": True}, {"fc_norm": True},
], ids=lambda flags: "+".join(flags) or "plain")  # fmt: skip
def test_logits_are_those_of_the_package(speculators: Any, kind: str, flags: dict[str, bool], tmp_path: Path) -> None:
    given = given_to(CASES["speculators"])
    theirs = make(speculators, kind, **flags)
    theirs.save_pretrained(tmp_path / "theirs")
    wanted = logits_of(speculators, theirs, given)
    assert 0.5 < float(wanted.std()) < 5.0
    file = read_head(tmp_path / "theirs")
    assert file.format == "speculators"
    assert file.depth == STEPS
    found = paged(built(file, "cpu"), given, "cpu")[: len(wanted)]
    assert np.abs(found - wanted).max() < TOLERANCE
    write_head(tmp_path / "ours", file, "speculators")
    again = read(speculators, tmp_path / "ours")
    assert np.abs(logits_of(speculators, again, given) - wanted).max() < TOLERANCE
