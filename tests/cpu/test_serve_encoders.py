"""Servers of encoders: embeddings and scores with real clients, and bad inputs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from cpu.encoder_models import tiny_embedder, tiny_ranker
from cpu.serving import Server, serving
from ridgeline import LLM

DOCUMENTS = ["the dog runs", "the cat sat on the mat", "is the sky blue"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_embedder(tmp_path_factory.mktemp("embedder"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(str(folder), "--served-model-name", "tiny", "--max-waiting", "100") as server:
        yield server
        assert server.stop() == 0


def test_openai_client_gets_the_embeddings_of_python(server: Server, folder: Path) -> None:
    llm = LLM(str(folder))
    want = llm.embed(DOCUMENTS)
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="tiny", input=DOCUMENTS)  # in base64
        assert np.abs(np.array([one.embedding for one in answer.data]) - want).max() < 1e-6
        ids = [llm.encode(one) for one in DOCUMENTS]
        assert answer.usage.prompt_tokens == sum(map(len, ids))
        plain = client.embeddings.create(model="tiny", input=ids, encoding_format="float")
        assert np.abs(np.array([one.embedding for one in plain.data]) - want).max() < 1e-6
        one = client.embeddings.create(model="tiny", input="sat on", extra_body={"prompt_name": "query"})
        assert np.abs(np.array(one.data[0].embedding) - llm.embed("the cat sat on")[0]).max() < 1e-6
    assert server.metric("ridgeline:embedded_texts_total") == 7
    scores = llm.score("a cat", DOCUMENTS)
    status, found = server.post("/v1/score", text_1="a cat", text_2=DOCUMENTS)
    assert status == 200 and np.allclose([one["score"] for one in found["data"]], scores, atol=1e-6)
    status, found = server.post(
        "/rerank", query="a cat", documents=[DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]
    )
    order = sorted(range(3), key=lambda i: -scores[i])
    assert [one["index"] for one in found["results"]] == order
    assert [one["document"]["text"] for one in found["results"]] == [DOCUMENTS[i] for i in order]
    _, best = server.post("/v2/rerank", query="a cat", documents=DOCUMENTS, top_n=1, return_documents=False)
    assert [set(one) for one in best["results"]] == [{"index", "relevance_score"}]


@pytest.mark.parametrize(("path", "body", "message"), [
    ("/v1/embeddings", {"input": "cat " * 400}, "context length is 128"), ("/v1/embeddings", {"input": ""}, "is empty"),
    ("/v1/embeddings", {"input": []}, "empty list"), ("/v1/embeddings", {"input": [[]]}, "empty"),
    ("/v1/embeddings", {"input": "x", "dimensions": 3}, "have 64 numbers"),
    ("/v1/embeddings", {"input": "x", "prompt_name": "y"}, "prompt_name"),
    ("/v1/embeddings", {"input": ["x"] * 400}, "accepts 356 at once"),
    ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": 1}, "adds 2 tokens"),
    ("/v1/completions", {"prompt": "x"}, "is an encoder"),
    ("/v1/score", {"text_1": ["x", "y"], "text_2": ["x"]}, "as many of each"),
    ("/v1/score", {"text_1": "x", "text_2": []}, "empty list"),
    ("/v1/score", {"text_1": "x", "text_2": "y", "score_no": "n"}, "belong together"),
    ("/v1/rerank", {"query": "x", "documents": []}, "empty list"),
    ("/v1/rerank", {"query": "", "documents": ["x"]}, "an input is empty"),
])  # fmt: skip
def test_bad_inputs_are_bad_requests(server: Server, path: str, body: dict[str, Any], message: str) -> None:
    status, answer = server.post(path, **body)
    assert status == 400 and message in answer["error"]["message"], answer


def test_a_client_that_goes_away_frees_the_engine(server: Server) -> None:
    sock = server.send("/v1/embeddings", {"input": [" ".join(["cat"] * 120)] * 300})
    sock.close()
    status, _ = server.post("/v1/embeddings", input="x")
    assert status == 200
    server.until("ridgeline:answers_open", 0)


def test_a_ranker_is_served(tmp_path: Path) -> None:
    folder = tiny_ranker(tmp_path)
    want = LLM(str(folder)).score("a cat", DOCUMENTS)
    with serving(str(folder)) as server:
        _, found = server.post("/v1/rerank", query="a cat", documents=DOCUMENTS)
        assert {one["index"]: round(one["relevance_score"], 5) for one in found["results"]} == {
            i: round(score, 5) for i, score in enumerate(want)
        }
        status, answer = server.post("/v1/embeddings", input="x")
        assert status == 400 and "gives no embeddings" in answer["error"]["message"]
        long = ["the cat sat " * 200]
        assert server.post("/v1/rerank", query="a cat", documents=long)[0] == 400
        assert server.post("/v1/rerank", query="a cat", documents=long, truncate_prompt_tokens=-1)[0] == 200
