"""Extract fields from a text as JSON that follows a schema.

    pip install 'ridgeline[structured]'
    python examples/structured_extraction.py --model MODEL "Ada Lovelace was born in 1815."

The schema decides which tokens are allowed, so the answer is valid JSON with every model. Whether the fields are right
depends on the model: use one that follows instructions.
"""

from __future__ import annotations

import argparse
import json

from ridgeline import LLM, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "year": {"type": "integer", "minimum": 0, "maximum": 3000},
    },
    "required": ["name", "year"],
    "additionalProperties": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", default="Ada Lovelace was born in 1815.", help="Text to read.")
    parser.add_argument("--model", default="pocket", help="A folder, a GGUF file or a hub id. Default: pocket.")
    given = parser.parse_args()
    params = SamplingParams(max_tokens=200, temperature=0, structured_outputs={"json": SCHEMA})
    prompt = f"Text: {given.text}\nThe person's name and year of birth as JSON:\n"
    (output,) = LLM(given.model).generate(prompt, params)
    found = json.loads(output.outputs[0].text)
    print(f"name: {found['name']}\nyear: {found['year']}")


if __name__ == "__main__":
    main()
