"""The items that an answer of /v1/responses consists of, one after the other, and the events that tell of them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from ridgeline.serve.api.answer import Piece

Told = tuple[str, dict[str, Any]]  # an event's name and fields


class Items:
    """Thoughts, text, calls: each kind goes on in its item until another kind comes. output: the items, complete."""

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._kind = ""  # of the item that is open
        self._call: Any = None  # its number

    def add(self, piece: Piece) -> list[Told]:
        """The events of a piece."""
        told: list[Told] = []
        if piece.reasoning:
            told += self._turn_to("reasoning") + self._grow("response.reasoning_text.delta", "text", piece.reasoning)
        if piece.content:
            told += self._turn_to("message") + self._grow("response.output_text.delta", "text", piece.content)
        for call in piece.calls:
            told += self._turn_to("function_call", call)
            more = call["function"]["arguments"]
            if more:
                self._item["arguments"] += more
                told.append(("response.function_call_arguments.delta", {**self._place, "delta": more}))
        return told

    def close(self) -> list[Told]:
        """The end of the item that is open."""
        if not self._kind:
            return []
        item, kind, self._kind = self._item, self._kind, ""
        item["status"] = "completed"
        told: list[Told] = []
        if kind == "function_call":
            fields = {**self._place, "arguments": item["arguments"], "name": item["name"]}
            told.append(("response.function_call_arguments.done", fields))
        else:
            (part,) = item["content"]
            name = "output_text" if kind == "message" else "reasoning_text"
            more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            told.append((f"response.{name}.done", {**self._place, "content_index": 0, "text": part["text"], **more}))
            told.append(("response.content_part.done", {**self._place, "content_index": 0, "part": part}))
        told.append(("response.output_item.done", {"output_index": len(self.output) - 1, "item": item}))
        return told

    @property
    def _item(self) -> dict[str, Any]:
        return self.output[-1]

    @property
    def _place(self) -> dict[str, Any]:
        return {"output_index": len(self.output) - 1, "item_id": self._item["id"]}

    def _turn_to(self, kind: str, call: Mapping[str, Any] | None = None) -> list[Told]:
        """Open an item, unless the open one is of this kind, and of the same call."""
        number = call["index"] if call else None
        if (kind, number) == (self._kind, self._call):
            return []
        told = self.close()
        self._kind, self._call = kind, number
        name = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
        item: dict[str, Any] = {"id": f"{name}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress"}
        if call is not None:
            item |= {"call_id": call["id"], "name": call["function"]["name"], "arguments": ""}
        elif kind == "message":
            item |= {"role": "assistant", "content": []}
        else:
            item |= {"summary": [], "content": []}
        self.output.append(item)
        told.append(("response.output_item.added", {"output_index": len(self.output) - 1, "item": _copy(item)}))
        if call is None:
            part = _part(kind)
            item["content"].append(part)
            fields = {**self._place, "content_index": 0, "part": dict(part)}
            told.append(("response.content_part.added", fields))
        return told

    def _grow(self, event: str, field: str, text: str) -> list[Told]:
        self._item["content"][0][field] += text
        more: dict[str, Any] = {"logprobs": []} if event == "response.output_text.delta" else {}
        return [(event, {**self._place, "content_index": 0, "delta": text, **more})]


def _part(kind: str) -> dict[str, Any]:
    if kind == "message":
        return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": ""}


def _copy(item: Mapping[str, Any]) -> dict[str, Any]:
    """As it is now: it is going to grow."""
    return {name: list(value) if isinstance(value, list) else value for name, value in item.items()}
