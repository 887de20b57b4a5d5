"""Let a model call functions of this program until it has what it needs for an answer.

    pip install openai
    ridgeline serve MODEL &
    python examples/agent.py "What is 12 times 34?"

The first request demands a call (`tool_choice="required"`), whose arguments then follow the schema of the function. The
next ones let the model choose, and it ends with a text. Use a model whose chat template has tools, such as Qwen3.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from openai import OpenAI

MOST_ROUNDS = 4  # of calls; a model that never stops calling is ended here


def multiply(a: int, b: int) -> int:
    """Return the product of two numbers."""
    return a * b


NUMBER = {"type": "integer", "minimum": -10000, "maximum": 10000}
PARAMETERS = {
    "type": "object",
    "properties": {"a": NUMBER, "b": NUMBER},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "multiply", "description": "Multiply two numbers.", "parameters": PARAMETERS},
    }
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", default="What is 12 times 34?", help="Question for the model.")
    parser.add_argument("--url", default="http://localhost:8000/v1", help="Address of the server's API.")
    given = parser.parse_args()
    client = OpenAI(base_url=given.url, api_key="none")
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": given.question}]
    for turn in range(MOST_ROUNDS):
        answer = client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS, tool_choice="auto" if turn else "required",
            parallel_tool_calls=False, max_tokens=200, temperature=0,
        )  # fmt: skip
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            result = multiply(**json.loads(call.function.arguments))
            print(f"called {call.function.name}({call.function.arguments}): {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    print(f"answer: {message.content or 'none'}")


if __name__ == "__main__":
    main()
