"""How a head grows a tree: level by level, the children of a level's nodes from one pass of the head over these."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from specdec_triton.drafters.base import Branch, Drafts
from specdec_triton.trees import DynamicTree, StaticTree

if TYPE_CHECKING:
    # (tokens [n,M], their parents' states [n,M,H], int64 [n,M]: bit i for the i-th node that was fed and is seen) -> states [n,M,H]
    Feed = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    # (states [n,M,H], depth) -> logits [n,M,V'] of what follows
    Score = Callable[[torch.Tensor, int], torch.Tensor]

    Tree = StaticTree | DynamicTree


def fed_nodes(tree: Tree) -> int:
    """How many nodes a head is fed at most; leaves are not."""
    return (tree.depth - 1) * tree.branch if isinstance(tree, DynamicTree) else len(set(tree.parents) - {0})


def level_of(tree: Tree, max_drafts: int) -> int:
    """The drafts of a pass of the head, if there are ``max_drafts`` in all: of dynamic trees the average."""
    nodes = max_drafts if isinstance(tree, DynamicTree) else min(max_drafts, len(tree.parents))
    return max(nodes // tree.depth, 1)


def grow(
    tree: Tree, k: int, root: torch.Tensor, feed: Feed, score: Score, branch: Branch, ids: torch.Tensor | None
) -> Drafts:
    """Trees of up to k drafts.

    Args:
        root: ``[n,H]``, the head's states at the texts' ends.
        feed: gives the states of more nodes. score: and the logits that follow from states.
        branch: see ``Round.branch``. ids: of the logits.

    Returns:
        Drafts, of which as many are counted as are possible.
    """
    growing = _dynamic if isinstance(tree, DynamicTree) else _static
    tokens, parents, scores = growing(tree, k, root, feed, score, branch, ids)  # type: ignore[arg-type]
    possible = (scores > float("-inf")).int().cumprod(1, dtype=torch.int32).sum(1, dtype=torch.int32)
    return Drafts(tokens, possible, parents=parents, failed=scores.isnan().any(1))


def _dynamic(
    tree: DynamicTree, k: int, root: torch.Tensor, feed: Feed, score: Score, branch: Branch, ids: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, parents and log-probabilities ``[n,K']`` of the likeliest nodes, likeliest first: parents are likelier than children."""
    hidden, sees = root[:, None], torch.zeros_like(root[:, :1], dtype=torch.int64)
    at = torch.full_like(sees, -1)  # the level's nodes among all; the root is none of the drafts
    above = torch.zeros_like(sees, dtype=torch.float32)  # their log-probabilities
    tokens, scores, parents = [], [], []
    fed = total = 0
    for depth in range(tree.depth):
        logits = score(hidden, depth)
        found = branch(logits, depth, min(tree.branch, logits.shape[-1]), ids)
        level = (above[..., None] + found.scores).flatten(1)
        tokens.append(found.tokens.flatten(1))
        scores.append(level)
        parents.append(at[..., None].expand_as(found.tokens).flatten(1))
        if depth + 1 == tree.depth:
            break
        above, best = _comparable(level).topk(min(tree.branch, level.shape[1]), 1)  # these are followed up
        of = best // found.tokens.shape[2]
        own = torch.arange(fed, fed + best.shape[1], device=best.device)
        sees = sees.gather(1, of) | torch.ones_like(own).bitwise_left_shift(own)
        hidden = hidden.gather(1, of[..., None].expand(-1, -1, hidden.shape[2]))
        hidden = feed(tokens[-1].gather(1, best), hidden, sees)
        at, fed, total = total + best, fed + best.shape[1], total + level.shape[1]
    all_scores, all_parents = torch.cat(scores, 1), torch.cat(parents, 1)
    order = _comparable(all_scores).sort(dim=1, descending=True, stable=True).indices  # of equals a parent comes first
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    order = order[:, :k]
    above_them = all_parents.gather(1, order)
    parent = torch.where(above_them < 0, 0, rank.gather(1, above_them.clamp(min=0)) + 1)
    return torch.cat(tokens, 1).gather(1, order), parent, all_scores.gather(1, order)


def _comparable(scores: torch.Tensor) -> torch.Tensor:
    """NaN would be the largest: nobody follows it."""
    return scores.nan_to_num(float("-inf"), float("inf"), float("-inf"))


@lru_cache(maxsize=64)
def _beginning(tree: StaticTree, k: int) -> StaticTree:
    return tree if k >= len(tree.parents) else StaticTree(tree.parents[:k])


def _static(
    tree: StaticTree, k: int, root: torch.Tensor, feed: Feed, score: Score, branch: Branch, ids: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, parents and log-probabilities, after their parent, ``[n,K']`` of the tree's nodes in its own order."""
    tree = _beginning(tree, k)
    inner = [0]  # the level's nodes that have children
    hidden, sees = root[:, None], torch.zeros_like(root[:, :1], dtype=torch.int64)
    columns: list[tuple[torch.Tensor, torch.Tensor]] = [(root, root)] * len(tree.parents)
    fed = 0
    for depth, nodes in enumerate(tree.levels):
        count = max(tree.ranks[node - 1] for node in nodes) + 1
        found = branch(score(hidden, depth), depth, count, ids)
        rows = [inner.index(tree.parents[node - 1]) for node in nodes]
        for node, row in zip(nodes, rows, strict=True):
            rank = tree.ranks[node - 1]
            columns[node - 1] = found.tokens[:, row, rank], found.scores[:, row, rank]
        followed = [(node, row) for node, row in zip(nodes, rows, strict=True) if node in tree.parents]
        if followed:
            inner, of = [node for node, _ in followed], [row for _, row in followed]
            own = torch.arange(fed, fed + len(inner), device=root.device)
            sees = sees[:, of] | torch.ones_like(own).bitwise_left_shift(own)
            fed += len(inner)
            hidden = feed(torch.stack([columns[node - 1][0] for node in inner], 1), hidden[:, of], sees)
    tokens, scores = (torch.stack(x, 1) for x in zip(*columns, strict=True))
    parents = torch.tensor(tree.parents, device=root.device).expand_as(tokens)
    return tokens, parents, scores
