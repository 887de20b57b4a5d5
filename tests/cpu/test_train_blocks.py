"""`ridgeline train --diffusion-from`: the objective against its definitions, runs that resume, folders that serve."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from cpu.doc_folder import CONFIG, write_model
from cpu.test_distill import Stop
from ridgeline import LLM, SamplingParams
from ridgeline.archs import OUR_MODEL_TYPE, spec_from_config
from ridgeline.cli.main import app
from ridgeline.diffusion import as_blocks
from ridgeline.errors import DataError, RequestError
from ridgeline.evals import Document, measure_perplexity
from ridgeline.evals.blocks import bound_per_token
from ridgeline.ops import open_table
from ridgeline.runtime.load import LoadOptions, load_model
from ridgeline.spec import Blocks, MaskedDiffusion, ModelSpec, WholeSequence, to_json
from ridgeline.train.blocks import BlocksReport, train_blocks
from ridgeline.train.data.corpus import Corpus
from ridgeline.train.loop import TrainOptions
from ridgeline.train.masked import BlockDenoising, add_noise, draw_masks
from ridgeline.train.module import LanguageModel
from ridgeline.train.ranks import Ranks

MASK, LENGTHS = 255, (1, 2, 4)


def small(spec: ModelSpec, seed: int = 0) -> LanguageModel:
    return LanguageModel(spec, open_table("reference"), 64, seed=seed)


@pytest.fixture(scope="module")
def plain() -> ModelSpec:
    return spec_from_config({**CONFIG, "num_key_value_heads": 2})


def batch(lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...], torch.Tensor]:
    """Return random tokens, positions and targets of sequences; the last one ends its document."""
    ids = torch.randint(0, MASK, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(n) for n in lengths])
    return ids, positions, lengths, torch.cat((ids[1:], torch.tensor([-1])))


def test_blocks_of_one_token_have_the_cross_entropy_of_the_original(plain: ModelSpec) -> None:
    given = batch((13, 1, 20))
    own, objective = small(plain), BlockDenoising(small(as_blocks(plain, 4, MASK, LENGTHS)))
    found = objective.bound(1, given[0], given[2], given[3], None)
    torch.testing.assert_close(found, own(*given), rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", [2, 4, 16])
@pytest.mark.parametrize("predicts_next", [True, False])
def test_one_pass_gives_the_logits_of_each_block_as_it_is_served(
    plain: ModelSpec, size: int, predicts_next: bool
) -> None:
    """The definition: the clean blocks before, and the open block with its masks, computed alone."""
    diffusion = MaskedDiffusion(MASK, predicts_next=predicts_next, trained_blocks=(size,))
    model = small(plain.seeing(Blocks(size), diffusion))
    tokens, n = batch((27,))[0], 27
    noisy = add_noise([tokens], size, diffusion, torch.Generator().manual_seed(2))
    both = BlockDenoising(model)._models[size]
    step = model.step(noisy.token_ids, noisy.positions, noisy.lengths)
    rows: Any = noisy.rows
    found: Any = both.logits(both.forward(step), rows)
    for i, (row, wanted) in enumerate(zip(noisy.rows.tolist(), noisy.wanted.tolist(), strict=True)):
        at = (row if row < n else row - n) + predicts_next
        assert tokens[at] == wanted
        start = at // size * size
        alone = torch.cat((tokens[:start], noisy.token_ids[n:][start : start + size]))
        assert alone[at] == MASK
        logits = model.logits(alone, torch.arange(len(alone)), (len(alone),), torch.tensor([at - predicts_next]))
        torch.testing.assert_close(found[i], logits[0], rtol=1e-4, atol=1e-5)


def test_a_whole_sequence_is_one_block_without_a_clean_copy(plain: ModelSpec) -> None:
    diffusion = MaskedDiffusion(MASK)
    model = small(plain.seeing(WholeSequence(), diffusion))
    given = batch((9, 12))
    generator = torch.Generator().manual_seed(3)
    found = BlockDenoising(model).bound(BlockDenoising(model).sizes[0], given[0], given[2], given[3], generator)
    again = torch.Generator().manual_seed(3)
    total, start = torch.zeros(()), 0
    for n, more in ((9, [given[0][9]]), (12, [])):
        ids = torch.cat((given[0][start : start + n], torch.tensor([int(x) for x in more], dtype=torch.long)))
        start += n
        masked, share = draw_masks(len(ids), len(ids), again)
        logits = model.logits(
            torch.where(masked, MASK, ids), torch.arange(len(ids)), (len(ids),), masked.nonzero().squeeze(1)
        )
        losses = -logits.log_softmax(-1).gather(1, ids[masked][:, None]).squeeze(1)
        total = total + (losses * share[masked]).sum()
    torch.testing.assert_close(found, total, rtol=1e-5, atol=0)


def test_masks_follow_their_law() -> None:
    """In a block of m tokens, each number l of masks is equally likely, and each choice of l of them."""
    generator, drawn, n = torch.Generator().manual_seed(4), Counter[tuple[int, ...]](), 6000
    for _ in range(n):
        masked, share = draw_masks(6, 4, generator)  # blocks of 3 free tokens, and of 2
        assert not masked[0] and masked[1:4].any() and masked[4:].any()
        chosen = tuple(masked[1:4].nonzero().squeeze(1).tolist())
        assert float(share[1]) == pytest.approx(3 / len(chosen)) and float(share[4]) == 2 / int(masked[4:].sum())
        drawn[chosen] += 1
    for count in (1, 2, 3):
        for chosen in combinations(range(3), count):
            p = 1 / 3 / comb(3, count)
            assert abs(drawn[chosen] - n * p) < 5 * (n * p * (1 - p)) ** 0.5, chosen


@pytest.mark.parametrize("m", [2, 3, 4])
def test_the_bound_of_exact_conditionals_is_the_likelihood(m: int) -> None:
    """Brute force over all masks of a random joint of m binary tokens: the mean of the weighted losses is -log p."""
    joint = np.random.default_rng(m).dirichlet(np.ones(2**m)).reshape((2,) * m)
    for tokens in np.ndindex(joint.shape):
        total = 0.0
        for count in range(1, m + 1):
            for masked in combinations(range(m), count):
                given: Any = tuple(slice(None) if i in masked else t for i, t in enumerate(tokens))
                law = joint[given] / joint[given].sum()  # the law of the masked tokens, given the others
                losses = 0.0
                for axis, i in enumerate(masked):
                    marginal = law.sum(tuple(a for a in range(count) if a != axis))
                    losses -= float(np.log(marginal[tokens[i]]))
                total += losses * (m / count) / m / comb(m, count)
        assert total == pytest.approx(-float(np.log(joint[tokens])), rel=1e-9)


OPTIONS = TrainOptions(
    steps=24, batch_tokens=128, micro_tokens=64, context=32, learning_rate=5e-3, warmup_steps=2, eval_every=8,
    save_every=4,
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    words = ["one", "two", "three", "while", "(x)", "=", "\n    ", "return"]
    (tmp_path / "text.txt").write_text(" ".join(np.random.default_rng(0).choice(words, 2000)))
    return tmp_path


def run(
    folder: Path, out: str, watch: Any = None, mask_token: int | None = None, options: TrainOptions = OPTIONS
) -> BlocksReport:
    return train_blocks(
        str(folder / "model"), Corpus.from_paths([folder / "text.txt"]), folder / out, lambda spec, tokens: options,
        watch or Stop(), Ranks("reference"), lengths=LENGTHS, dtype="float32", mask_token=mask_token,
    )  # fmt: skip


def test_a_model_learns_to_fill_blocks_and_serves(folder: Path) -> None:
    found = run(folder, "out")
    assert found.before[1].value == pytest.approx(found.original.value, rel=1e-5)
    for size in LENGTHS:
        assert found.after[size].value < 0.9 * found.before[size].value
    report = json.loads((folder / "out" / "blocks.json").read_text())
    assert [row["block"] for row in report["blocks"]] == list(LENGTHS) and str(folder) not in json.dumps(report)
    llm = LLM(str(folder / "out"), device="cpu")
    spec = llm.loaded.spec
    assert spec.block == 4 and spec.diffusion == MaskedDiffusion(found.mask_token, True, trained_blocks=LENGTHS)
    (answer,) = llm.generate("one two", SamplingParams(max_tokens=16, temperature=1.0, seed=1, ignore_eos=True))
    tokens = answer.outputs[0].token_ids
    assert len(tokens) == 16 and found.mask_token not in tokens
    for size, noted in ((2, False), (3, True)):
        shorter = LLM(str(folder / "out"), device="cpu", diffusion_block=size)
        assert shorter.loaded.spec == spec.seeing(Blocks(size), spec.diffusion)
        notes = [note for note in shorter.loaded.notes if "were trained with blocks of 1, 2, 4" in note]
        assert len(notes) == noted and all("nats per token of a sample text, and" in note for note in notes)
    one = LLM(str(folder / "out"), device="cpu", diffusion_block=1)
    (answer,) = one.generate("one two", SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    assert answer.num_passes == 12
    for size, message in ((0, "at least 1"), (1 << 20, "shorter than a block")):
        with pytest.raises(RequestError, match=f"diffusion_block .*{message}"):
            LLM(str(folder / "out"), device="cpu", diffusion_block=size)
    with pytest.raises(RequestError, match="fills no blocks"):
        LLM(str(folder / "model"), device="cpu", diffusion_block=2)


def test_the_cost_of_blocks_of_one_token_is_the_perplexity_of_the_original(folder: Path) -> None:
    run(folder, "out", options=replace(OPTIONS, steps=1, learning_rate=0.0))
    original = load_model(str(folder / "model"), LoadOptions(device="cpu"))
    ids = [5, 9, 40, 7, 33, 60, 11, 5, 8] * 5
    found = load_model(str(folder / "out"), LoadOptions(device="cpu", diffusion_block=1))
    expected = measure_perplexity(original, [Document(ids)]).nll_per_token.value
    assert bound_per_token(found, ids) == pytest.approx(expected, rel=1e-5)


def test_a_run_that_was_stopped_ends_as_one_run_to_the_bit(folder: Path) -> None:
    whole = Stop()
    run(folder, "whole", whole)
    for stop in (3, 17):
        first, second = Stop(stop), Stop()
        with pytest.raises(KeyboardInterrupt):
            run(folder, f"parts {stop}", first)
        run(folder, f"parts {stop}", second)
        assert second.losses == whole.losses[-len(second.losses) :]
        one, two = ((folder / name / "model.safetensors").read_bytes() for name in ("whole", f"parts {stop}"))
        assert one == two


def cli(*args: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["train", *args])
    return found.exit_code, " ".join(str(found.exception or found.output).split())


def test_bad_input_is_one_line(folder: Path) -> None:
    model, text, out = (str(folder / name) for name in ("model", "text.txt", "out"))
    start = ("--diffusion-from", model, "--data", text, "--out", out)
    cases: Mapping[tuple[str, ...], str] = {
        (*start, "--block-lengths", "1,x"): "--block-lengths is '1,x'",
        (*start, "--block-lengths", "0"): "must be from 1 to",
        (*start, "--block-lengths", "2,2"): "give different lengths",
        (*start, "--mask-token", "999999"): "must be below the vocabulary's",
        (*start, "--mask-token", "2"): "and no end token",
        (*start, "--mask-token", str(CONFIG["vocab_size"])): "must be below the vocabulary's",
        (*start, "--context", str(CONFIG["max_position_embeddings"])): "must be below the model's",
        (*start, "--batch-tokens", "1048576"): "less than one batch",
        (*start, "--tokenizer", model): "--tokenizer does not apply to --diffusion-from",
        (*start, "--draft-for", model): "--draft-for does not apply to --diffusion-from",
        ("--block-lengths", "1,2", "--data", text, "--out", out): "add --diffusion-from MODEL",
        ("--diffusion-from", model, "--out", out): "data is missing",
        ("--diffusion-from", str(folder / "none"), "--data", text, "--out", out): "none",
    }
    for args, message in cases.items():
        code, line = cli(*args)
        assert code and message in line, (args, line)


def test_tokens_that_texts_have_are_no_mask(folder: Path) -> None:
    one = ord("o") - 33 + 3  # printable characters come first in the byte alphabet
    with pytest.raises(RequestError, match="which the texts have"):
        run(folder, "out", mask_token=one)


def test_a_diffusion_model_is_no_start(folder: Path) -> None:
    run(folder, "out")
    (folder / "model").rename(folder / "original")
    (folder / "out").rename(folder / "model")
    with pytest.raises(RequestError, match="needs an autoregressive model"):
        run(folder, "again")


def test_a_folder_of_others_is_left_alone(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "mine").write_text("")
    with pytest.raises(DataError, match="exists already"):
        run(folder, "out")


@pytest.mark.parametrize("sight", ["blocks", "whole"])
def test_a_diffusion_spec_trains_from_random_weights(tmp_path: Path, plain: ModelSpec, sight: str) -> None:
    seen = Blocks(4) if sight == "blocks" else WholeSequence()
    spec = plain.seeing(seen, MaskedDiffusion(MASK + 1))
    (tmp_path / "SPEC.json").write_text(json.dumps({"model_type": OUR_MODEL_TYPE, "spec": to_json(spec)}))
    words = np.random.default_rng(0).choice(["one", "two", "while", "(x)", "="], (40, 200))
    for i, text in enumerate(words):
        (tmp_path / f"{i}.txt").write_text(" ".join(text))
    texts = [part for i in range(40) for part in ("--data", str(tmp_path / f"{i}.txt"))]
    code, line = cli(
        str(tmp_path / "SPEC.json"), *texts, "--out", str(tmp_path / "out"), "--epochs", "0.2", "--context", "32",
        "--batch-tokens", "128", "--held-out", "0.2", "--dtype", "float32",
    )  # fmt: skip
    assert code == 0, line
    card = (tmp_path / "out" / "README.md").read_text()
    name = "blocks of 4" if sight == "blocks" else "whole sequences"
    assert f"Bits per byte, upper bound, {name}" in card and "Perplexity" not in card
