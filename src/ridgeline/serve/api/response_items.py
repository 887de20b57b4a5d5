"""Build the items of a /v1/responses answer (reasoning, message, function calls) and their events."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from ridgeline.serve.api.answer import Piece

Event = tuple[str, dict[str, Any]]  # name and fields


class Items:
    """Collects the items of one answer. Pieces of the same kind extend the open item; a piece of another kind closes it
    and opens a new one. output: all items so far.
    """

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._kind = ""  # kind of the open item
        self._call: Any = None  # index of its tool call

    def add(self, piece: Piece) -> list[Event]:
        """Add a piece; return its events."""
        events: list[Event] = []
        if piece.reasoning:
            events += self._switch_to("reasoning") + self._grow(
                "response.reasoning_text.delta", "text", piece.reasoning
            )
        if piece.content:
            events += self._switch_to("message") + self._grow("response.output_text.delta", "text", piece.content)
        for call in piece.calls:
            events += self._switch_to("function_call", call)
            more = call["function"]["arguments"]
            if more:
                self._item["arguments"] += more
                events.append(("response.function_call_arguments.delta", {**self._location, "delta": more}))
        return events

    def close(self) -> list[Event]:
        """Close the open item; return its events."""
        if not self._kind:
            return []
        item, kind, self._kind = self._item, self._kind, ""
        item["status"] = "completed"
        events: list[Event] = []
        if kind == "function_call":
            fields = {**self._location, "arguments": item["arguments"], "name": item["name"]}
            events.append(("response.function_call_arguments.done", fields))
        else:
            (part,) = item["content"]
            name = "output_text" if kind == "message" else "reasoning_text"
            more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            events.append(
                (f"response.{name}.done", {**self._location, "content_index": 0, "text": part["text"], **more})
            )
            events.append(("response.content_part.done", {**self._location, "content_index": 0, "part": part}))
        events.append(("response.output_item.done", {"output_index": len(self.output) - 1, "item": item}))
        return events

    @property
    def _item(self) -> dict[str, Any]:
        return self.output[-1]

    @property
    def _location(self) -> dict[str, Any]:
        return {"output_index": len(self.output) - 1, "item_id": self._item["id"]}

    def _switch_to(self, kind: str, call: Mapping[str, Any] | None = None) -> list[Event]:
        """Open a new item unless the open one has this kind and this call. Return the events."""
        number = call["index"] if call else None
        if (kind, number) == (self._kind, self._call):
            return []
        events = self.close()
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
        events.append(("response.output_item.added", {"output_index": len(self.output) - 1, "item": _copy(item)}))
        if call is None:
            part = _part(kind)
            item["content"].append(part)
            fields = {**self._location, "content_index": 0, "part": dict(part)}
            events.append(("response.content_part.added", fields))
        return events

    def _grow(self, event: str, field: str, text: str) -> list[Event]:
        self._item["content"][0][field] += text
        more: dict[str, Any] = {"logprobs": []} if event == "response.output_text.delta" else {}
        return [(event, {**self._location, "content_index": 0, "delta": text, **more})]


def _part(kind: str) -> dict[str, Any]:
    if kind == "message":
        return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": ""}


def _copy(item: Mapping[str, Any]) -> dict[str, Any]:
    """Copy an item, since the item itself changes later."""
    return {name: list(value) if isinstance(value, list) else value for name, value in item.items()}
