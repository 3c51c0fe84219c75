"""A row of logits in parts: how a program loads one, and how the parts' statistics become the row's.

The vocabulary is split across programs. For its part of a row, each leaves in ``stats [..., splits, 3]`` the maximum m of the scaled
logits s (+inf: it found NaN or +inf), the sum of e = exp(s - m) and that of e (s - m), and in ``best``, ``best_id`` its winner: the
largest s - m, plus noise in a race (noise added to a large s would lose its digits).
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
def pick_best(value, token):
    """The largest value and its id, the lowest of equal ones."""
    best = tl.max(value, 0)
    return best, tl.min(tl.where(value == best, token, HIGHEST), 0)


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
def merge_winners(stats_ptr, best_ptr, best_id_ptr, at, mask):
    """The id of the largest s, or s plus noise, over the last axis of the parts at ``at``; the lowest of equal ones."""
    highest = tl.load(stats_ptr + at * 3, mask=mask, other=NEG_INF)
    value = tl.load(best_ptr + at, mask=mask, other=NEG_INF)
    token = tl.load(best_id_ptr + at, mask=mask, other=HIGHEST)
    axis: tl.constexpr = len(value.shape) - 1
    peak = tl.expand_dims(tl.max(highest, axis), axis)
    shift = tl.where((peak == NEG_INF) | (peak == float("inf")), 0.0, highest - peak)
    value = tl.where(mask, value + shift, NEG_INF)
    best = tl.max(value, axis)
    return tl.min(tl.where(value == tl.expand_dims(best, axis), token, HIGHEST), axis)


@triton.jit
def is_skipped(row, rows, length):
    """Target rows past the draft, and draft rows from its end on, are nobody's."""
    return ((row < rows) & (row > length)) | (row >= rows + length)
