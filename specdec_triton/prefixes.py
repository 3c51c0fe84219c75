"""Whose pages a new request can share: the beginnings of the texts that live requests hold, in plain Python.

A text's beginning is a path in a tree, one node per chunk of tokens. A node lives as long as a slot holds it, so what is
found can always be read; nothing outlives its last request, since the model's weights may change between two calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)  # the same chunk behind another beginning is another node
class _Node:
    """A chunk behind all that is before it, and the slots that hold the keys of both."""

    parent: _Node | None
    chunk: tuple[int, ...]
    holders: set[int] = field(default_factory=set)


class Prefixes:
    """Which slots hold which beginnings of texts, in whole chunks.

    Nodes are found by (parent, chunk) itself, not by a hash of the text, which could collide. Paths in chunks of different
    sizes never meet.
    """

    def __init__(self, slots: int) -> None:
        self._nodes: dict[tuple[_Node | None, tuple[int, ...]], _Node] = {}
        self._paths: list[list[_Node]] = [[] for _ in range(slots)]

    def hold(self, slot: int, tokens: Sequence[int], chunk: int) -> None:
        """The slot holds all whole chunks of ``tokens``; those that it held before are not looked at again.

        Raises:
            ValueError: it held chunks of another size.
        """
        path = self._paths[slot]
        if path and len(path[0].chunk) != chunk:
            raise ValueError(f"slot {slot} shares chunks of {len(path[0].chunk)} tokens, got chunks of {chunk}")
        for start in range(len(path) * chunk, len(tokens) // chunk * chunk, chunk):
            key = path[-1] if path else None, tuple(tokens[start : start + chunk])
            node = self._nodes.setdefault(key, _Node(*key))
            node.holders.add(slot)
            path.append(node)

    def find(self, tokens: Sequence[int], chunk: int) -> tuple[int, int]:
        """The longest beginning of ``tokens`` that a slot holds, short of the last token: (tokens, the lowest such slot).

        (0, -1) if there is none.
        """
        node, covered = None, 0
        while covered + chunk < len(tokens):
            child = self._nodes.get((node, tuple(tokens[covered : covered + chunk])))
            if child is None:
                break
            node, covered = child, covered + chunk
        return covered, -1 if node is None else min(node.holders)

    def cut(self, slot: int, tokens: int) -> None:
        """The slot holds no more than its first ``tokens`` tokens."""
        path = self._paths[slot]
        while path and len(path) * len(path[0].chunk) > tokens:
            node = path.pop()
            node.holders.remove(slot)
            if not node.holders:
                del self._nodes[node.parent, node.chunk]

    def move(self, src: int, dst: int) -> None:
        """What slot src holds is held by the empty slot dst instead."""
        self._paths[src], self._paths[dst] = [], self._paths[src]
        for node in self._paths[dst]:
            node.holders.remove(src)
            node.holders.add(dst)
