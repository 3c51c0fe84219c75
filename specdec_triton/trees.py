"""Trees of drafts. Node 0 is the text's last token and node i + 1 is draft i; a node comes after its parent, so the first few
drafts of a tree are a tree too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from specdec_triton._checks import check_integer, require
from specdec_triton.errors import UnsupportedModelError
from specdec_triton.sampling import MAX_DRAFT_TOKENS

if TYPE_CHECKING:
    from specdec_triton.adapter import ModelAdapter


class Lineage(NamedTuple):
    """What a pass needs to know of trees of N = K+1 nodes.

    Attributes:
        mask: int64 ``[n,N]``, bit j of a node's: j is the node itself or an ancestor. depth: int32 ``[n,N]``, 0 of the root.
    """

    mask: torch.Tensor
    depth: torch.Tensor


def lineage(parents: torch.Tensor) -> Lineage:
    """Of the nodes' parents, int64 ``[n,K]`` for the drafts, K <= 63. Reads nothing back: each step doubles how far up a node sees."""
    count, k = parents.shape
    above = torch.nn.functional.pad(parents, (1, 0))  # the root is its own
    step = torch.arange(k + 1, device=parents.device)
    mask = torch.ones_like(step).bitwise_left_shift(step).expand(count, -1)
    depth = (step > 0).int().expand(count, -1)
    for _ in range(k.bit_length()):
        mask = mask | mask.gather(1, above)
        depth = depth + depth.gather(1, above)
        above = above.gather(1, above)
    return Lineage(mask, depth)


def chain_parents(like: torch.Tensor) -> torch.Tensor:
    """The parents of chains as long as ``like [n,K]``: int64 ``[n,K]``."""
    return torch.arange(like.shape[1], device=like.device).expand(like.shape[0], -1)


@dataclass(frozen=True)
class StaticTree:
    """A tree whose shape is always the same.

    Args:
        parents: the node that each draft follows: 0 for the text's last token, i + 1 for draft i; before the draft itself. A node's
            children are the drafter's likeliest tokens there, in order.

    Raises:
        ValueError: no drafts, more than 63, or a parent that does not come before its child.

    Example:
        >>> StaticTree.of_choices([[0], [1], [0, 0]]) == StaticTree([0, 0, 1])
        True
    """

    parents: tuple[int, ...]

    def __init__(self, parents: Sequence[int]) -> None:
        require(
            isinstance(parents, Sequence) and 1 <= len(parents) <= MAX_DRAFT_TOKENS,
            "tree", f"parents of 1 to {MAX_DRAFT_TOKENS} drafts", parents,
        )  # fmt: skip
        for i, parent in enumerate(parents):
            fits = isinstance(parent, int) and not isinstance(parent, bool) and 0 <= parent <= i
            require(fits, f"tree[{i}]", f"a node from 0 to {i} (a parent comes before its children)", repr(parent))
        object.__setattr__(self, "parents", tuple(parents))

    @classmethod
    def of_choices(cls, choices: Sequence[Sequence[int]]) -> StaticTree:
        """Of paths of ranks, as Medusa's trees are written: ``[0, 2]`` is the third likeliest token behind the likeliest.

        Raises:
            ValueError: a path whose beginning is missing, or that is there twice.
        """
        require(isinstance(choices, Sequence) and len(choices) > 0, "tree", "a list of paths", repr(choices)[:60])
        paths = sorted(map(tuple, choices), key=lambda path: (len(path), path))
        nodes: dict[tuple[int, ...], int] = {(): 0}
        for path in paths:
            before = path[:-1], (*path[:-1], path[-1] - 1) if path and path[-1] else path[:-1]
            whole = len(path) > 0 and path not in nodes and all(part in nodes for part in before)
            require(whole, "tree", "paths all of whose beginnings and smaller ranks are there, each once", list(path))
            nodes[path] = len(nodes)
        return cls([nodes[path[:-1]] for path in paths])

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Which of its parent's children each draft is, from 0 on."""
        return tuple(self.parents[:i].count(parent) for i, parent in enumerate(self.parents))

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """The nodes of each depth, from 1 on."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(tuple(node for node, d in enumerate(depths) if d == depth) for depth in range(1, max(depths) + 1))

    @property
    def depth(self) -> int:
        return len(self.levels)


@dataclass(frozen=True)
class DynamicTree:
    """A tree that grows where the drafter is sure of itself (EAGLE-2): of each depth the likeliest ``branch`` nodes are followed up with
    ``branch`` children each, and of all nodes the likeliest are verified, as many as the decoder's ``num_draft_tokens`` says.

    Args:
        depth: the longest path. branch: (depth - 1) * branch <= 64.

    Raises:
        ValueError: out of range.

    Source: Li et al. 2024, "EAGLE-2" (arXiv:2406.16858).
    """

    depth: int = 5
    branch: int = 8

    def __post_init__(self) -> None:
        check_integer("depth", self.depth, 1, MAX_DRAFT_TOKENS)
        check_integer("branch", self.branch, 1, MAX_DRAFT_TOKENS)
        require(
            (self.depth - 1) * self.branch <= MAX_DRAFT_TOKENS + 1,
            "branch", f"at most {(MAX_DRAFT_TOKENS + 1) // max(self.depth - 1, 1)} with a depth of {self.depth}", self.branch,
        )  # fmt: skip


def check_target(target: ModelAdapter) -> None:
    """Raises UnsupportedModelError: nodes of trees lie further back in the cache than in the text, which a short window does not allow."""
    window = min((call.sliding_window for call in target.observation.calls if call.sliding_window), default=None)
    if window is not None and window <= MAX_DRAFT_TOKENS:
        raise UnsupportedModelError(
            f"{type(target.model).__name__} cannot verify trees: it has a sliding window of {window} tokens, and"
            f" trees may have {MAX_DRAFT_TOKENS} nodes; draft chains (tree=None)"
        )
