"""`ridgeline embed` and `ridgeline rerank`: print the embeddings of texts, and order texts by how well they fit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ridgeline.cli.flags import options as o
from ridgeline.cli.flags.groups import EngineFlags, LoadFlags, grouped, llm_arguments
from ridgeline.cli.option import option

if TYPE_CHECKING:
    from ridgeline.spec.encoder import Pool

_Truncate = Annotated[
    int | None,
    option(
        "--truncate-prompt-tokens",
        help="Most tokens of a text, -1 for as many as the model takes; tokens at its end are dropped. Default: a text "
        "that is too long is refused.",
    ),
]
_Model = Annotated[str, typer.Argument(help="A folder or a Hugging Face hub id.")]


@grouped
def embed(
    *,
    model: _Model,
    texts: Annotated[list[str], typer.Argument(metavar="TEXT...", help="The texts.")],
    pooling: Annotated[
        str | None,
        option(
            "--pooling",
            help="The hidden states that become the vector: cls, mean or last. Default: as the model's folder says.",
        ),
    ] = None,
    prompt: Annotated[
        str | None, option("--prompt", help="A text that is put before each of the texts. Default: none.")
    ] = None,
    prompt_name: Annotated[
        str | None,
        option("--prompt-name", help="Name of a prompt in the model's folder, instead of --prompt. Default: none."),
    ] = None,
    dimensions: Annotated[
        int | None,
        option("--dimensions", help="Numbers of a vector, for models that allow shorter ones. Default: all."),
    ] = None,
    truncate_prompt_tokens: _Truncate = None,
    tokenizer: o.TokenizerName = None,
    load: LoadFlags,
) -> None:
    """Print the embedding of each text, as one JSON object per line."""
    from ridgeline.cli.flags.loading import load as load_llm
    from ridgeline.errors import RequestError

    if pooling not in (None, "cls", "mean", "last"):
        raise RequestError(f"--pooling is {pooling!r:.100}; it must be cls, mean or last")
    llm = load_llm(model, _arguments(load, tokenizer))
    found = llm.embed(
        texts, prompt=prompt, prompt_name=prompt_name, pooling=cast("Pool | None", pooling), dimensions=dimensions,
        truncate_prompt_tokens=truncate_prompt_tokens,
    )  # fmt: skip
    for text, row in zip(texts, found, strict=True):
        print(json.dumps({"text": text, "embedding": row.tolist()}, ensure_ascii=False))


@grouped
def rerank(
    *,
    model: _Model,
    query: Annotated[str, typer.Argument(help="The text that the others are compared with.")],
    texts: Annotated[list[str], typer.Argument(metavar="TEXT...", help="The texts.")],
    truncate_prompt_tokens: _Truncate = None,
    tokenizer: o.TokenizerName = None,
    load: LoadFlags,
) -> None:
    """Print texts with their scores, as one JSON object per line. The text that fits the query best comes first.

    The score is that of the model's head, or the similarity of two embeddings.
    """
    from ridgeline.cli.flags.loading import load as load_llm

    llm = load_llm(model, _arguments(load, tokenizer))
    scores = llm.score(query, texts, truncate_prompt_tokens=truncate_prompt_tokens)
    for index in sorted(range(len(texts)), key=lambda i: -scores[i]):
        print(json.dumps({"score": scores[index], "text": texts[index]}, ensure_ascii=False))


def _arguments(load: LoadFlags, tokenizer: str | None) -> dict[str, Any]:
    return llm_arguments(load, EngineFlags(), tokenizer=tokenizer)
