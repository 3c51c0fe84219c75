"""``accept_tree``: which path of a drafted tree the target keeps, and the one token that it adds.

p is the target's distribution after a node, q the one that the node's children were drawn from, one after the other and without
replacement; u is a uniform number for each child.

* ``greedy``, ``coupled``: walk to the child that is the argmax, or the token that the request's noise selects at that position.
* ``rejection`` of children that were certain (q is one-hot): the same walk as ``coupled``. A token drawn from p that happens to be a
  child is as good as a child that was accepted with p(x), then the next with p(x) of what is left, and so on.
* ``rejection`` of children that were drawn: recursive rejection sampling (Jeon et al. 2024, "Recursive speculative decoding"; Chen
  et al. 2024, "Sequoia"). The first child is accepted with min(1, p/q); if it is not, p becomes normalise(max(p - q, 0)), q loses the
  child, and the next child is judged by these.
* ``typical`` (Cai et al. 2024, "Medusa"): the deepest path of children with p(x) > min(epsilon, delta exp(-entropy)). Lossy.

kernels/README.md has the proofs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from specdec_triton.reference.accept_reject import PAD
from specdec_triton.reference.logits import NEG_INF, bad_rows, best_of, scaled_logits
from specdec_triton.reference.noise import Stream, race, uniform


def accept_tree(
    node_tokens: torch.Tensor,
    node_logits: torch.Tensor,
    parents: torch.Tensor,
    node_draft_logits: torch.Tensor | None,
    node_lens: torch.Tensor | None,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    typical_p: torch.Tensor | None,
    seed: torch.Tensor,
    position: torch.Tensor,
    has_filters: bool | None,
    method: str,
    epsilon: float,
    delta: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """path, tokens ``[B,N]``, num_accepted, status ``[B]``; see ``specdec_triton.ops.accept_tree``."""
    if method == "greedy":
        temperature = torch.zeros_like(temperature)
    batch, n = node_tokens.shape
    device = node_tokens.device
    step, row = torch.arange(n, device=device), torch.arange(batch, device=device)
    lens = torch.full((batch,), n, device=device) if node_lens is None else node_lens
    exists = step < lens[:, None]
    largest, best = best_of(node_logits)
    status = (bad_rows(largest, temperature) & exists).any(-1)

    inside = (node_tokens >= 0) & (node_tokens < node_logits.shape[-1])
    walk = _Walk(node_tokens.where(inside, 0), parents, exists & inside & (step > 0))
    greedy = temperature <= 0
    all_greedy = device.type == "cpu" and bool(greedy.all())

    def scaled_at(logits: torch.Tensor) -> torch.Tensor:
        """The scaled logits ``[B,V]`` of each request's node."""
        rows = logits[row, walk.at]
        return scaled_logits(rows, temperature, top_k, top_p, min_p, typical_p, has_filters)

    def winner() -> torch.Tensor:
        """The target's own token ``[B]`` after each request's node."""
        own = best[row, walk.at]
        if all_greedy:
            return own
        drawn = race(scaled_at(node_logits), seed, position + walk.count, torch.zeros_like(seed), Stream.COUPLED)
        return torch.where(greedy, own, drawn)

    if method == "typical" and not all_greedy:
        t_rows, k_rows, p_rows, m_rows = (x.repeat_interleave(n) for x in (temperature, top_k, top_p, min_p))
        y_rows = None if typical_p is None else typical_p.repeat_interleave(n)
        rows = scaled_logits(node_logits.flatten(0, 1), t_rows, k_rows, p_rows, m_rows, y_rows, has_filters)
        walk.to_the_deepest(torch.where(greedy[:, None], False, _typical(walk, rows, epsilon, delta)))
        walk.follow(winner, moving=greedy)
    elif method == "rejection" and node_draft_logits is not None and not all_greedy:
        drafts = node_draft_logits

        def distributions() -> tuple[torch.Tensor, torch.Tensor]:
            return scaled_at(node_logits).softmax(-1), scaled_at(drafts).softmax(-1).nan_to_num(0.0)

        leftover = _rejection(walk, distributions, ~greedy, seed, position)
        walk.follow(winner, moving=greedy)
        # p = q up to rounding leaves nothing; a rejection there has probability zero, and p is the right answer.
        recovers = (leftover > 0).any(-1)
        recovered = race(leftover.log(), seed, position, walk.at, Stream.RECOVERED)
        return walk.result(torch.where(recovers, recovered, winner()), lens, status)
    else:
        walk.follow(winner)
    return walk.result(winner(), lens, status)


class _Walk:
    """Where in its tree each request stands, and the way that it came.

    Attributes:
        tokens, parents: ``[B,N]``. child: bool ``[B,N]``, the nodes that can be gone to.
        at: int64 ``[B]``, the node. count: int64 ``[B]``, its depth. path: int64 ``[B,N]``, the nodes from the root on, padded.
    """

    def __init__(self, tokens: torch.Tensor, parents: torch.Tensor, child: torch.Tensor) -> None:
        self.tokens, self.parents, self.child = tokens, parents, child
        self.at = torch.zeros_like(tokens[:, 0])
        self.count = torch.zeros_like(self.at)
        self.path = torch.full_like(tokens, PAD)
        self.path[:, 0] = 0
        self._reads = tokens.device.type == "cpu"

    def idle(self, moves: torch.Tensor) -> bool:
        """Whether nobody moves, where that may be known."""
        return self._reads and not bool(moves.any())

    def go(self, to: torch.Tensor, moves: torch.Tensor) -> None:
        """Those who move are at node ``to``, a child of theirs."""
        self.at = torch.where(moves, to, self.at)
        self.count = self.count + moves
        self.path.scatter_(1, self.count[:, None], self.at[:, None])

    def follow(self, winner: Callable[[], torch.Tensor], moving: torch.Tensor | None = None) -> None:
        """Go to the first child that is the winner, again and again."""
        n = self.tokens.shape[1]
        step = torch.arange(n, device=self.at.device)
        for _ in range(n - 1):
            same = self.child & (self.parents == self.at[:, None]) & (self.tokens == winner()[:, None])
            moves = same.any(-1) if moving is None else same.any(-1) & moving
            if self.idle(moves):
                return
            self.go(torch.where(same, step, n).amin(-1).clamp(max=n - 1), moves)

    def to_the_deepest(self, keeps: torch.Tensor) -> None:
        """Go to the deepest node, the first of equals, all of whose ancestors are kept as it is itself."""
        n = self.tokens.shape[1]
        step = torch.arange(n, device=self.at.device)
        keeps = keeps & self.child & (self.parents >= 0) & (self.parents < step)
        parents = self.parents.clamp(0, n - 1)
        depth = torch.where(step == 0, 0, PAD).expand_as(parents).clone()
        for i in range(1, n):
            above = depth.gather(1, parents[:, i : i + 1])[:, 0]
            depth[:, i] = torch.where(keeps[:, i] & (above >= 0), above + 1, PAD)
        deepest = depth.amax(-1)
        node = torch.where(depth == deepest[:, None], step, n).amin(-1)
        self.at, self.count = node, deepest
        for _ in range(n):
            depth_here = depth.gather(1, node[:, None])
            self.path.scatter_(1, depth_here, node[:, None])
            node = torch.where(depth_here[:, 0] > 0, parents.gather(1, node[:, None])[:, 0], 0)

    def result(
        self, last: torch.Tensor, lens: torch.Tensor, status: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        n = self.tokens.shape[1]
        step = torch.arange(n, device=last.device)
        count = torch.where(status, 0, self.count)
        path = self.path.masked_fill(step > count[:, None], PAD)
        # The tokens of the path without its root, then the target's own.
        accepted = self.tokens.gather(1, path.roll(-1, 1).clamp(min=0))
        last = torch.where(status, 0, last)
        tokens = torch.where(step < count[:, None], accepted, torch.where(step == count[:, None], last[:, None], PAD))
        resting = (lens <= 0)[:, None]
        return path.masked_fill(resting, PAD), tokens.masked_fill(resting, PAD), count.int(), status.int()


def _rejection(
    walk: _Walk,
    distributions: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    moving: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> torch.Tensor:
    """Walk by recursive rejection; returns what is left of p at the last node, ``[B,V]``, 0 where nothing was taken from it.

    Neither p nor q is normalised on the way: a and b stand for a / sum(a) and b / sum(b).
    """
    a, b = distributions()
    touched = torch.zeros_like(moving)
    for i in range(1, walk.tokens.shape[1]):
        asked = moving & walk.child[:, i] & (walk.parents[:, i] == walk.at)
        if walk.idle(asked):
            continue
        token = walk.tokens[:, i : i + 1]
        node = torch.full_like(walk.at, i - 1)  # of a chain: the draft's number
        u = uniform(seed, position, node, Stream.ACCEPT)
        a_here, b_here = a.gather(1, token)[:, 0], b.gather(1, token)[:, 0]
        scale = a.sum(-1) / b.sum(-1)
        asked = asked & (b_here > 0)  # q = 0 cannot have been drawn: reject, and nothing is learnt
        accepted = asked & (u * scale * b_here < a_here)
        rejected = asked & ~accepted
        a = torch.where(rejected[:, None], (a - scale[:, None] * b).clamp(min=0.0), a)
        b = torch.where(rejected[:, None], b.scatter(1, token, 0.0), b)
        touched = (touched | rejected) & ~accepted
        walk.go(torch.full_like(walk.at, i), accepted)
        if not walk.idle(accepted):
            a_next, b_next = distributions()
            a, b = torch.where(accepted[:, None], a_next, a), torch.where(accepted[:, None], b_next, b)
    return torch.where(touched[:, None], a, 0.0)


def _typical(walk: _Walk, rows: torch.Tensor, epsilon: float, delta: float) -> torch.Tensor:
    """Whether each node's p, after its parent, is above the threshold; rows: scaled logits ``[B * N,V]``."""
    log_p = rows.log_softmax(-1)
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == NEG_INF, 0.0)).sum(-1).view(walk.tokens.shape)
    threshold = (delta * (-entropy).exp()).clamp(max=epsilon)
    n = walk.tokens.shape[1]
    parents = walk.parents.clamp(0, n - 1)
    first = torch.arange(len(parents), device=parents.device)[:, None] * n
    return log_p[parents + first, walk.tokens].exp() > threshold.gather(1, parents)
