"""Use a model in LlamaIndex: a completion, a chat, and a streamed answer.

pip install llama-index-llms-openai-like
ridgeline serve MODEL &
python examples/llama_index_chat.py --model MODEL
"""

from __future__ import annotations

import argparse

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://localhost:8000/v1", help="Address of the server's API.")
    parser.add_argument("--model", required=True, help="Name of the model, as GET /v1/models says it.")
    given = parser.parse_args()
    llm = OpenAILike(
        api_base=given.url, api_key="none", model=given.model, is_chat_model=True, temperature=0, max_tokens=24,
        context_window=1024,
    )  # fmt: skip
    print(repr(llm.chat([ChatMessage(role="user", content="Say one thing about rivers.")]).message.content))
    for piece in llm.stream_complete("Say one thing about snow."):
        print(piece.delta, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
