"""A block diffusion model behind the server, with OpenAI's client: the weights of pocket, untrained for blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from cpu.pocket_blocks import MASK, write_pocket_blocks
from cpu.serving import Server, serving
from ridgeline import LLM, SamplingParams

SIZE = 4
PROMPT = "def add(a, b):"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("blocks")
    write_pocket_blocks(path, SIZE)
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving("-m", str(folder), "--served-model-name", "blocks") as running:
        yield running


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)


def ask(server: Server, **more: Any) -> Any:
    given = {"prompt": PROMPT, "max_tokens": 21, "seed": 3, "extra_body": {"ignore_eos": True}, **more}
    return client(server).completions.create(model="blocks", **given)


def test_answers_streams_and_choices_are_those_of_python(folder: Path, server: Server) -> None:
    params = SamplingParams(max_tokens=21, seed=3, n=2, ignore_eos=True)
    (wanted,) = LLM(str(folder)).generate([PROMPT], params)
    found = ask(server, n=2, logprobs=1)
    assert [choice.text for choice in found.choices] == [answer.text for answer in wanted.outputs]
    assert [len(choice.logprobs.tokens) for choice in found.choices] == [21, 21]
    pieces = [chunk.choices[0].text for chunk in ask(server, stream=True) if chunk.choices]
    assert "".join(pieces) == wanted.outputs[0].text
    assert len([piece for piece in pieces if piece]) <= 1 + -(-21 // SIZE)  # a block at a time
    stopped = ask(server, stop=["("]).choices[0]
    assert stopped.text == wanted.outputs[0].text.partition("(")[0]


def test_passes_are_counted(server: Server) -> None:
    name = "ridgeline:block_passes_total"
    before = server.metric(name)
    (text,) = (ask(server, max_tokens=8, extra_body={"ignore_eos": True, "denoising_passes": 1}).choices[0].text,)
    assert text
    server.until("vllm:num_requests_running", 0)
    first = server.metric(name) - before
    assert 2 <= first <= 3  # eight tokens are in two or three blocks
    ask(server, max_tokens=8)
    server.until("vllm:num_requests_running", 0)
    assert server.metric(name) - before - first >= 8


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"extra_body": {"denoising_passes": 0}}, "denoising_passes is 0"),
    ({"extra_body": {"confidence_threshold": 2}}, "at least 0 and at most 1"),
    ({"presence_penalty": 1}, "fills them in any order"),
    ({"extra_body": {"structured_outputs": {"regex": "a+"}}}, "fills them in any order"),
    ({"prompt": [5, MASK]}, "the prompt has the mask token"),
    ({"prompt": [5] * 1024, "max_tokens": 1}, "leaves no room"),
    ({"extra_body": {"allowed_token_ids": [MASK]}}, "leave no token"),
]


@pytest.mark.parametrize(("body", "message"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_what_cannot_work_is_a_400(body: dict[str, Any], message: str, server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        ask(server, **body)


def test_clients_that_leave_and_a_biased_mask_token_change_nothing(server: Server) -> None:
    wanted = ask(server).choices[0].text
    assert ask(server, logit_bias={str(MASK): 100}).choices[0].text == wanted

    async def leave(number: int) -> None:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as them:
            stream = await them.completions.create(
                model="blocks", prompt=f"def f{number}(x):", max_tokens=200, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            await anext(aiter(stream))
            await stream.close()

    async def together() -> str:
        answer, *_ = await asyncio.gather(asyncio.to_thread(ask, server), *map(leave, range(6)))
        text: str = answer.choices[0].text
        return text

    assert asyncio.run(together()) == wanted
    server.until("vllm:num_requests_running", 0)
    server.until("ridgeline:pages_used", 0)
