"""A row of logits in parts: how a program loads one, and how the parts' statistics become the row's.

The vocabulary is split across programs. For its part of a row, each leaves in ``stats [..., splits, 3]`` the maximum m of the scaled
logits s (+inf: it found NaN or +inf), the sum of e = exp(s - m) and that of e (s - m), and in ``best [..., splits, 2]`` and ``best_id``
its winner: the largest s, in a race s + noise, exactly, as the unrounded sum of two numbers. So a winner does not depend on the splits
(noise added to a large s would else lose its digits, and to s - m take on the maximum's).
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_triton.kernels._primitives import NEG_INF, scaled_logits

SPLIT_V = 4096  # tokens of a part
HIGHEST: tl.constexpr = tl.constexpr(2**31 - 1)


@triton.jit
def load_row(row_ptr, first, vocab, inverse, BLOCK: tl.constexpr):
    """Scaled logits of the tokens ``first .. first + BLOCK - 1``; -inf past the vocabulary."""
    token = first + tl.arange(0, BLOCK)
    return scaled_logits(tl.load(row_ptr + token, mask=token < vocab, other=NEG_INF), inverse)


@triton.jit
def two_sum(a, b):
    """a + b, exactly: the rounded sum, and what rounding took (Knuth's TwoSum); 0 where the sum is not finite."""
    high = a + b
    part = high - a
    low = (a - (high - part)) + (b - part)
    return high, tl.where(tl.abs(high) < float("inf"), low, 0.0)


@triton.jit
def pick_best(high, low, token):
    """Over the last axis, the largest high + low (a rounded sum and its rest) and its id, the lowest of equal ones."""
    axis: tl.constexpr = len(high.shape) - 1
    best = tl.max(high, axis)
    low = tl.where(high == tl.expand_dims(best, axis), low, NEG_INF)
    best_low = tl.max(low, axis)
    return best, best_low, tl.min(tl.where(low == tl.expand_dims(best_low, axis), token, HIGHEST), axis)


@triton.jit
def store_winner(race_ptr, race_id_ptr, at, value, noise, token):
    """The winner of a race in one part, as entry ``at``."""
    high, low = two_sum(value, noise)
    best, best_low, best_id = pick_best(high, low, token)
    tl.store(race_ptr + at * 2, best)
    tl.store(race_ptr + at * 2 + 1, best_low)
    tl.store(race_id_ptr + at, best_id)


@triton.jit
def merge_sums(stats_ptr, at, mask):
    """Maximum m over the last axis of the parts at ``at``, and log of the sum of exp(s - m).

    Apart, since their sum, the log-sum-exp, loses digits where m is large. m = +inf: the row held NaN or +inf; the sum is no
    number then.
    """
    highest = tl.load(stats_ptr + at * 3, mask=mask, other=NEG_INF)
    total = tl.load(stats_ptr + at * 3 + 1, mask=mask, other=0.0)
    axis: tl.constexpr = len(highest.shape) - 1
    peak = tl.max(highest, axis)
    finite = tl.where((peak == NEG_INF) | (peak == float("inf")), 0.0, peak)
    return peak, tl.log(tl.sum(total * tl.exp(highest - tl.expand_dims(finite, axis)), axis))


@triton.jit
def merge_entropy(stats_ptr, at, mask):
    """Entropy in nats over the last axis: log Z - sum of e (s - m) / Z, where Z is the sum of e = exp(s - m)."""
    highest = tl.load(stats_ptr + at * 3, mask=mask, other=NEG_INF)
    total = tl.load(stats_ptr + at * 3 + 1, mask=mask, other=0.0)
    moment = tl.load(stats_ptr + at * 3 + 2, mask=mask, other=0.0)
    axis: tl.constexpr = len(highest.shape) - 1
    shift = tl.where(highest == NEG_INF, 0.0, highest - tl.expand_dims(tl.max(highest, axis), axis))
    weight = tl.where(highest == NEG_INF, 0.0, tl.exp(shift))
    z = tl.sum(total * weight, axis)
    return tl.log(z) - tl.sum((moment + total * shift) * weight, axis) / z


@triton.jit
def merge_winners(best_ptr, best_id_ptr, at, mask):
    """The largest s, or s plus noise, over the last axis of the parts at ``at``: rounded, and its id, the lowest of equal ones."""
    high = tl.load(best_ptr + at * 2, mask=mask, other=NEG_INF)
    low = tl.load(best_ptr + at * 2 + 1, mask=mask, other=0.0)
    token = tl.load(best_id_ptr + at, mask=mask, other=HIGHEST)
    best, _, best_id = pick_best(high, low, token)
    return best, best_id


@triton.jit
def is_skipped(row, rows, length, TREE: tl.constexpr):
    """Target rows past the draft, and draft rows from its end on, are nobody's. A tree's length counts its root, and draft rows are its
    nodes' too."""
    chain = ((row < rows) & (row > length)) | (row >= rows + length)
    return (row % rows >= length) if TREE else chain


@triton.jit
def depth_of(row, parents_ptr, first, TREE: tl.constexpr):
    """How many tokens come between the row's request's first target row and this one."""
    if TREE:
        depth, node = 0, row
        while node > 0:
            # A parent comes before its children: whatever a table holds, this ends.
            node = tl.minimum(tl.load(parents_ptr + first + node).to(tl.int32), node - 1)
            depth += 1
    else:
        depth = row
    return depth
