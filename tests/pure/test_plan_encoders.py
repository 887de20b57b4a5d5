"""Plans of encoders: the work of a pass by a closed form, its memory, and the command's output."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ridgeline.archs import spec_from_config
from ridgeline.catalog.machines import hardware
from ridgeline.cli.main import main
from ridgeline.cost.memory import pass_bytes
from ridgeline.cost.shard import Scheme
from ridgeline.errors import RequestError
from ridgeline.plan.encode import encode
from ridgeline.plan.planner import Deployment, Planner

MINILM: dict[str, Any] = {  # all-MiniLM-L6-v2
    "model_type": "bert", "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6,
    "num_attention_heads": 12, "vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2,
}  # fmt: skip
H100 = hardware("h100")


def test_its_parameters_are_the_published_ones() -> None:
    """22.7 M with the pooler [384, 384], which an embedding does not use."""
    assert spec_from_config(MINILM).num_params() + 384 * 385 == 22_713_216


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (3, 100), (7, 257)])
def test_the_work_of_a_pass_is_the_closed_form(batch: int, tokens: int) -> None:
    spec = spec_from_config(MINILM)
    found = encode(Planner(Deployment(spec, H100, scheme=Scheme(replicas=2))), batch, tokens)
    matrices, pairs = 6 * (4 * 384**2 + 2 * 384 * 1536), 6 * tokens * 384
    assert found.step.flops == pytest.approx(2 * batch * tokens * matrices + 4 * batch * tokens * pairs)
    assert found.texts_per_s == pytest.approx(2 * batch / found.step.seconds)
    assert found.workspace_bytes == pass_bytes(spec, batch * tokens, tokens, on_cpu=False)


def test_what_is_refused() -> None:
    planner = Planner(Deployment(spec_from_config(MINILM), H100))
    with pytest.raises(RequestError, match="512 positions"):
        encode(planner, 1, 513)
    with pytest.raises(RequestError, match="leave out tp"):
        encode(Planner(Deployment(spec_from_config(MINILM), H100, scheme=Scheme(tp=2))), 1, 5)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MINILM))

    def run(command: str, *more: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ridgeline", command, str(tmp_path), *more])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capsys.readouterr()

    status, out, _ = run("plan", "--hardware", "h100", "--batch", "4", "--context", "128")
    assert status == 0 and "an encoder" in out and "texts/s" in out and "none: a text is computed in one pass" in out
    status, out, _ = run("plan", "--hardware", "h100", "--json")
    assert json.loads(out)["load"] == {"batch": 1, "tokens": 256}
    status, _, err = run("plan", "--output", "3")
    assert status == 2 and "--output works with models that write text only" in err
    status, out, _ = run("inspect")
    assert status == 0 and "there is no output head" in out and "0 B per token" in out
