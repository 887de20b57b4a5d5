"""Use a model in LangChain: a prompt template, a streamed answer, and several questions in one batch.

pip install langchain-openai
ridgeline serve MODEL &
python examples/langchain_chat.py --model MODEL
"""

from __future__ import annotations

import argparse

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://localhost:8000/v1", help="Address of the server's API.")
    parser.add_argument("--model", required=True, help="Name of the model, as GET /v1/models says it.")
    given = parser.parse_args()
    model = ChatOpenAI(base_url=given.url, api_key="none", model=given.model, temperature=0, max_tokens=24)
    chain = ChatPromptTemplate.from_messages([("user", "Say one thing about {subject}.")]) | model
    for piece in chain.stream({"subject": "rivers"}):
        print(piece.content, end="", flush=True)
    print()
    for answer in chain.batch([{"subject": "snow"}, {"subject": "rain"}]):  # the server answers both at once
        print(repr(answer.content))


if __name__ == "__main__":
    main()
