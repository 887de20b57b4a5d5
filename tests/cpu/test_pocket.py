"""The built-in pair: its properties, that it needs no download, and that it is as good as its card says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from ridgeline import LLM, SamplingParams
from ridgeline.cli.main import app
from ridgeline.errors import CheckpointError
from ridgeline.evals import Document, measure_acceptance, measure_perplexity
from ridgeline.load.checkpoint import open_checkpoint
from ridgeline.load.hub import BUILT_IN, MODEL_FILES, find_model
from ridgeline.runtime.load import LoadOptions, load_model
from ridgeline.serve.api.example import example_of
from ridgeline.spec import Attention
from ridgeline.train.data.vocabulary import PLAIN_CHAT
from ridgeline.train.pocket.recipe import Recipe

# a file of the standard library; it may be in the training data or held out
TEXT = Path(re.__file__).parent / "_parser.py"


@pytest.fixture(scope="module")
def target() -> LLM:
    return LLM("pocket")


def test_its_sizes_are_within_their_limits() -> None:
    specs = {name: open_checkpoint(folder).spec for name, folder in BUILT_IN.items()}
    pocket, draft = specs["pocket"], specs["pocket-draft"]
    assert pocket.num_params() <= 8_000_000
    assert pocket.num_active_params() >= 6 * draft.num_active_params()
    for spec in specs.values():
        assert spec.tie_word_embeddings and 4096 <= spec.vocab_size <= 8192 and spec.max_position_embeddings >= 1024
        for layer in spec.layers:
            assert isinstance(layer.mixer, Attention) and layer.mixer.num_kv_heads < layer.mixer.num_heads
    tokenizers = [(folder / "tokenizer.json").read_bytes() for folder in BUILT_IN.values()]
    assert tokenizers[0] == tokenizers[1]
    files = [path for folder in BUILT_IN.values() for path in folder.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 20_000_000
    for folder in BUILT_IN.values():
        assert open_checkpoint(folder).config["dtype"] == "bfloat16"


def test_the_recipe_makes_these_models() -> None:
    recipe = Recipe.read("pocket")
    for name, config in (("pocket", recipe.target.config), ("pocket-draft", recipe.draft.config)):
        stored = open_checkpoint(BUILT_IN[name]).config
        assert {key: stored[key] for key in config} == dict(config)


def test_a_chat_is_the_text_of_its_messages(target: LLM) -> None:
    """There are no roles: the answer continues the lines of the messages, as in `generate`."""
    messages = [{"role": "user", "content": "import os"}, {"role": "assistant", "content": "import re"}]
    messages.append({"role": "user", "content": "def f("})
    params = SamplingParams(max_tokens=8, temperature=0)
    (said,) = target.chat(messages, params)
    (continued,) = target.generate("import os\nimport re\ndef f(", params)
    assert said.prompt_token_ids == continued.prompt_token_ids
    assert said.outputs[0].text == continued.outputs[0].text
    assert target.tokenizer is not None and target.tokenizer.chat_template is not None
    assert target.tokenizer.chat_template.source == PLAIN_CHAT


def test_the_hub_is_not_called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def ask(*args: object) -> Path:
        raise AssertionError("the hub was called")

    monkeypatch.setattr("ridgeline.load.hub._download", ask)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pocket").mkdir()  # a local folder with that name is ./pocket
    assert find_model("pocket", files=MODEL_FILES) == BUILT_IN["pocket"]
    assert find_model("./pocket") == Path("pocket")
    with pytest.raises(CheckpointError, match="ships with Ridgeline"):
        find_model("pocket", revision="main")


@pytest.mark.parametrize(("name", "count"), [("docs/pocket.md", 3), ("README.md", 1)])
def test_a_page_of_the_docs_shows_real_output(name: str, count: int) -> None:
    """Run the commands of the page and compare their whole output. Greedy choices there differ by 0.02 or more."""
    page = (Path(__file__).parents[2] / name).read_text(encoding="utf-8")
    shown = re.findall(r"```\n\$ ridgeline (generate .*)\n((?s:.*?))\n```", page)
    assert len(shown) == count
    for command, output in shown:
        result = CliRunner().invoke(app, shlex.split(command), catch_exceptions=False)
        assert result.stdout.strip("\n") == output.strip("\n"), command
    example = example_of(BUILT_IN["pocket"])
    assert example is not None and f'generate "{example.prompt}" --temperature 0 ' in page


def test_generate_needs_no_model(target: LLM) -> None:
    command = ["generate", "def fibonacci(n):", "--max-tokens", "24", "--temperature", "0"]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0
    greedy = SamplingParams(temperature=0.0, max_tokens=24)
    assert target.generate("def fibonacci(n):", greedy)[0].outputs[0].text in result.output
    assert "\n" in result.output.strip()


@pytest.mark.parametrize("name", BUILT_IN)
def test_transformers_loads_it(name: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = TEXT.read_text(encoding="utf-8")[:1500]
    folder = str(BUILT_IN[name])
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(folder)(text).input_ids
    llm = LLM(name, dtype="float32")
    assert llm.encode(text) == ids
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(llm.logits([ids])[0], wanted, atol=1e-4 * max(1.0, float(np.abs(wanted).max())))


def test_they_know_python() -> None:
    """A byte takes far less than the 8 bits of a random guess; the cards give the figure for held-out files."""
    text = TEXT.read_text(encoding="utf-8")[:20_000]
    bits = {}
    for name in BUILT_IN:
        loaded = load_model(name, LoadOptions(dtype="float32"))
        document = Document(LLM(name, dtype="float32").encode(text), len(text.encode()))
        found = measure_perplexity(loaded, [document]).bits_per_byte
        assert found is not None
        bits[name] = found.value
    assert bits["pocket"] < 1.6
    assert bits["pocket"] < bits["pocket-draft"] < 1.8


def test_the_draft_guesses_the_target(target: LLM) -> None:
    text = TEXT.read_text(encoding="utf-8")
    greedy = SamplingParams(temperature=0.0, max_tokens=96)
    prompts = [target.encode(text[i : i + 400]) for i in range(0, 16_000, 2_000)]
    outputs = target.generate([{"prompt_token_ids": ids} for ids in prompts], greedy)
    pairs = [(ids, out.outputs[0].token_ids) for ids, out in zip(prompts, outputs, strict=True)]
    draft = load_model("pocket-draft", LoadOptions(dtype="float32"))
    assert measure_acceptance(draft, pairs).tokens_per_verification.value > 3.0
