"""Trees of draft tokens. Node i is draft i of a work; parents give the index of each one's parent, which is smaller.

Parents are () for a chain: each draft follows the one before it.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST_DRAFTS = 63  # of a tree: a draft's path is 64 bits without the sign
ROOT = -1  # parent of the first drafts: the last known token of the sequence
MOST_WIDTH = 16  # tokens after a node that a head proposes: the largest --draft-tree
MOST_LEVELS = 8  # of a tree of an EAGLE head, which takes a pass for each level


def head_levels(width: int, nodes: int) -> int:
    """Return the levels of an EAGLE head's tree of `nodes` drafts, with the best `width` tokens after each node.

    All rows of the head must fit into one path of bits (`paths`).
    """
    return min(nodes, MOST_LEVELS, 1 + MOST_DRAFTS // width)


def head_rows(width: int, nodes: int) -> int:
    """Return how many rows of its own an EAGLE head runs for a tree: `width` for each level but the last one."""
    return width * (head_levels(width, nodes) - 1) if width > 1 else nodes - 1


def depths(parents: Sequence[int]) -> tuple[int, ...]:
    """Return the number of ancestors of each node of a tree, which is its distance from the first draft token."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent == ROOT else found[parent] + 1)
    return tuple(found)


def paths(parents: Sequence[int]) -> list[int]:
    """Return the bits of each node's path: its own bit, and those of its ancestors."""
    found: list[int] = []
    for i, parent in enumerate(parents):
        found.append(1 << i | (0 if parent == ROOT else found[parent]))
    return found


def children(parents: Sequence[int], count: int, node: int) -> Sequence[int]:
    """Return the nodes whose parent is `node`, in order. count: number of drafts."""
    if not parents:
        return (node + 1,) if node + 1 < count else ()
    return [i for i, parent in enumerate(parents) if parent == node]


def child_with(parents: Sequence[int], tokens: Sequence[int], node: int, token: int) -> int | None:
    """Return the first child of a node that is `token`; None if there is none. tokens: the drafts."""
    return next((i for i in children(parents, len(tokens), node) if tokens[i] == token), None)


def first_chain(parents: Sequence[int]) -> list[int]:
    """Return the chain of first children: the first child of the root, its first child, and so on."""
    chain: list[int] = []
    for i, parent in enumerate(parents):
        if parent == (chain[-1] if chain else ROOT):
            chain.append(i)
    return chain


def as_parents(parents: Sequence[int], count: int) -> tuple[int, ...]:
    """Return the parents of a tree of `count` drafts; () if it is a chain. Raises ValueError for what is no tree."""
    if not parents or list(parents) == list(range(ROOT, count - 1)):
        return ()
    if len(parents) != count or any(not ROOT <= parent < i for i, parent in enumerate(parents)):
        raise ValueError(f"the parents of {count} drafts are {tuple(parents)}: each must be {ROOT} or an earlier draft")
    if count > MOST_DRAFTS:
        raise ValueError(f"a tree has {count} drafts; at most {MOST_DRAFTS} are possible")
    return tuple(parents)
