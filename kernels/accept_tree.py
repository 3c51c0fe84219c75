"""``accept_tree``: which path of a drafted tree the target keeps, and the one token that it adds.

Every target row is read once, with the vocabulary split across programs (``_rows.py``): its log-sum-exp and the winner of its
position's race. One program a request (``_pick_kernel``) then walks from the root to the child that is the winner, and so on. That is two
launches; with ``typical``, which goes to the deepest child that is likely enough, one more (``_likely_kernel``) says after which row
what is.

Children that were drawn are judged by recursive rejection, which takes two more. After k rejected siblings what is left of p at a token x
that was not among them is max(p(x) - C q(x), 0), with one number C for the whole row: a maximum with 0 of a maximum with 0 may be
taken once, at the end. So

* ``_siblings_kernel``, a program a node: for each of its children the probability with which it is accepted, and C after it. The first child
  takes no further look at the row, every other child one, for the mass that is left of p and of q.
* ``_race_kernel``, grid ``(B, splits)``: every program repeats the walk and races over its part of what is left at its last node.

kernels/README.md has the proofs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_triton.kernels._config import EXACT, at_most_registers, chip_of, dense, on_device
from specdec_triton.kernels._filters import is_cut
from specdec_triton.kernels._primitives import (
    NEG_INF,
    PAD,
    STREAM_ACCEPT,
    STREAM_COUPLED,
    STREAM_RECOVERED,
    gumbel,
    inverse_of,
    scaled_logits,
    uniform,
)
from specdec_triton.kernels._rows import row_stats
from specdec_triton.kernels._splits import (
    SPLIT_V,
    load_row,
    merge_entropy,
    merge_sums,
    merge_winners,
    store_winner,
)

WINNERS: tl.constexpr = tl.constexpr(0)
REJECTION: tl.constexpr = tl.constexpr(1)
TYPICAL: tl.constexpr = tl.constexpr(2)
_NOT_DRAWN: tl.constexpr = tl.constexpr(-1.0)  # in place of a probability: q = 0, or a token that an earlier sibling is


@triton.jit
def _tree(
    node_tokens_ptr, parents_ptr, node_lens_ptr, b, n, vocab, stride_tokens, stride_parents,
    BLOCK_N: tl.constexpr, HAS_LENS: tl.constexpr,
):  # fmt: skip
    """A request's number of nodes, their tokens and parents, and which can be gone to."""
    length = n
    if HAS_LENS:
        length = tl.load(node_lens_ptr + b)
    step = tl.arange(0, BLOCK_N)
    tokens = tl.load(node_tokens_ptr + b * stride_tokens + step, mask=step < n, other=PAD)
    parents = tl.load(parents_ptr + b * stride_parents + step, mask=step < n, other=PAD).to(tl.int32)
    child = (step < length) & (tokens >= 0) & (tokens < vocab) & (parents >= 0) & (parents < step)
    return length, tokens, parents, child


@triton.jit
def _of_node(x, node, BLOCK_N: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, BLOCK_N) == node, x, 0), 0)


@triton.jit
def _first(among, BLOCK_N: tl.constexpr):
    """The first node of a set, BLOCK_N if it is empty."""
    return tl.min(tl.where(among, tl.arange(0, BLOCK_N), BLOCK_N), 0)


@triton.jit
def _follow(taken, parents, BLOCK_N: tl.constexpr):
    """From the root to the first child that is taken, again and again: the last node, its depth, the path."""
    step = tl.arange(0, BLOCK_N)
    path = tl.where(step == 0, 0, PAD)
    at, depth = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    child = _first(taken & (parents == 0), BLOCK_N)
    while child < BLOCK_N:
        at, depth = child, depth + 1
        path = tl.where(step == depth, at, path)
        child = _first(taken & (parents == at), BLOCK_N)
    return at, depth, path


@triton.jit
def _to_the_deepest(keeps, parents, BLOCK_N: tl.constexpr):
    """To the deepest node, the first of equals, all of whose ancestors are kept as it is itself; what ``_follow`` returns."""
    step = tl.arange(0, BLOCK_N)
    path = tl.where(step == 0, 0, PAD)
    at, depth = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    level = keeps & (parents == 0)
    child = _first(level, BLOCK_N)
    while child < BLOCK_N:
        at, depth = child, depth + 1
        reached = tl.sum(tl.where(level, tl.full([BLOCK_N], 1, tl.int64) << step.to(tl.int64), 0), 0)
        level = keeps & (((reached >> tl.maximum(parents, 0).to(tl.int64)) & 1) > 0)
        child = _first(level, BLOCK_N)
    node, above = at, depth
    while above > 0:
        path = tl.where(step == above, node, path)
        node, above = _of_node(parents, node, BLOCK_N), above - 1
    return at, depth, path


@triton.jit
def _accepts(ratio_ptr, seed, position, b, n, child, BLOCK_N: tl.constexpr):
    """Which children would be accepted, were it their turn, and which were drawn at all."""
    step = tl.arange(0, BLOCK_N)
    ratio = tl.load(ratio_ptr + b * n + step, mask=child, other=_NOT_DRAWN)
    u = uniform(seed, position, tl.maximum(step - 1, 0), STREAM_ACCEPT)  # of a chain: the draft's number
    return child & (u < ratio), child & (ratio != _NOT_DRAWN)


@triton.jit(do_not_specialize=["n", "splits", "vocab", "stride_tokens", "stride_parents"])
def _siblings_kernel(
    ratio_ptr,  # fp32 [B,N]: the probability with which a child is accepted if its turn comes, perhaps above 1
    spent_ptr,  # fp32 [B,N]: C once it has been rejected
    left_ptr,  # fp32 [B,N]: what is left of p at its own token then
    node_logits_ptr,  # [B,N,V]
    draft_logits_ptr,  # [B,N,V]
    node_tokens_ptr,  # int64 [B,N]
    parents_ptr,  # int64 [B,N]
    node_lens_ptr,  # int32 [B]
    stats_ptr,  # of the target rows, then of the draft rows
    cut_ptr,  # fp32 [B,2 N,2], of both
    temperature_ptr,  # fp32 [B]
    n,
    splits,
    vocab,
    stride_tokens,
    stride_parents,
    stride_target_batch,
    stride_target_row,
    stride_draft_batch,
    stride_draft_row,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_LENS: tl.constexpr,
    HAS_CUT: tl.constexpr,
):
    b, node = (tl.program_id(0) // n).to(tl.int64), tl.program_id(0) % n
    temperature = tl.load(temperature_ptr + b)
    length, tokens, parents, child = _tree(
        node_tokens_ptr, parents_ptr, node_lens_ptr, b, n, vocab, stride_tokens, stride_parents, BLOCK_N, HAS_LENS
    )
    mine = child & (parents == node)
    if (temperature <= 0) | (_first(mine, BLOCK_N) == BLOCK_N):
        return
    inverse = inverse_of(temperature)
    part = tl.arange(0, BLOCK_S)
    p_row, q_row = b * 2 * n + node, b * 2 * n + n + node
    peak, log_sum = merge_sums(stats_ptr, p_row * splits + part, part < splits)
    draft_peak, draft_log_sum = merge_sums(stats_ptr, q_row * splits + part, part < splits)
    target = node_logits_ptr + b * stride_target_batch + node.to(tl.int64) * stride_target_row
    draft = draft_logits_ptr + b * stride_draft_batch + node.to(tl.int64) * stride_draft_row
    s = scaled_logits(tl.load(target + tokens, mask=mine, other=NEG_INF), inverse)
    d = scaled_logits(tl.load(draft + tokens, mask=mine, other=NEG_INF), inverse)
    if HAS_CUT:
        s = tl.where(is_cut(s, cut_ptr, p_row, True), NEG_INF, s)
        d = tl.where(is_cut(d, cut_ptr, q_row, True), NEG_INF, d)
    p, q = tl.exp((s - peak) - log_sum), tl.exp((d - draft_peak) - draft_log_sum)
    q = tl.where(q == q, q, 0.0)

    step = tl.arange(0, BLOCK_N)
    gone = tl.full([BLOCK_N], PAD, tl.int64)  # the tokens of the siblings so far
    spent, left = 0.0, 0.0
    siblings = 0
    for i in range(node + 1, length):
        at = b * n + i
        if tl.max(tl.where(step == i, mine, False).to(tl.int32), 0) > 0:
            token = _of_node(tokens, i, BLOCK_N)
            p_here, q_here = _of_node(p, i, BLOCK_N), _of_node(q, i, BLOCK_N)
            again = tl.max((gone == token).to(tl.int32), 0) > 0
            if (q_here > 0) & (again == 0):
                # The mass that is left of p and of q.
                p_mass, q_mass = 1.0, 1.0
                if siblings > 0:
                    p_mass, q_mass = left, 0.0
                    for first in range(0, vocab, BLOCK_V):
                        s_tile = load_row(target, first, vocab, inverse, BLOCK_V)
                        d_tile = load_row(draft, first, vocab, inverse, BLOCK_V)
                        if HAS_CUT:
                            s_tile = tl.where(is_cut(s_tile, cut_ptr, p_row, True), NEG_INF, s_tile)
                            d_tile = tl.where(is_cut(d_tile, cut_ptr, q_row, True), NEG_INF, d_tile)
                        p_tile = tl.exp((s_tile - peak) - log_sum)
                        q_tile = tl.exp((d_tile - draft_peak) - draft_log_sum)
                        rest = first + tl.arange(0, BLOCK_V) >= 0
                        for j in range(node + 1, i):
                            rest = rest & (first + tl.arange(0, BLOCK_V) != _of_node(gone, j, BLOCK_N))
                        q_tile = tl.where(rest & (q_tile == q_tile), q_tile, 0.0)
                        p_tile = tl.where(rest & (p_tile == p_tile), p_tile, 0.0)
                        p_mass += tl.sum(tl.maximum(p_tile - spent * q_tile, 0.0), 0)
                        q_mass += tl.sum(q_tile, 0)
                scale = p_mass / q_mass
                tl.store(ratio_ptr + at, tl.maximum(p_here - spent * q_here, 0.0) / (scale * q_here))
                spent += scale
                left_here = tl.maximum(p_here - spent * q_here, 0.0)
                left += left_here
                siblings += 1
                tl.store(spent_ptr + at, spent)
                tl.store(left_ptr + at, left_here)
                gone = tl.where(step == i, token, gone)
            else:
                tl.store(ratio_ptr + at, _NOT_DRAWN)


@triton.jit(do_not_specialize=["n", "splits", "vocab", "stride_tokens", "stride_parents"])
def _race_kernel(
    race_ptr,  # fp32 [B,splits,2]: best value of what is left at the last node, as an exact sum
    race_id_ptr,  # int32 [B,splits]
    ratio_ptr,
    spent_ptr,
    left_ptr,
    node_logits_ptr,
    draft_logits_ptr,
    node_tokens_ptr,
    parents_ptr,
    node_lens_ptr,
    stats_ptr,
    cut_ptr,
    temperature_ptr,
    seed_ptr,  # int64 [B]
    position_ptr,  # int64 [B]
    n,
    splits,
    vocab,
    stride_tokens,
    stride_parents,
    stride_target_batch,
    stride_target_row,
    stride_draft_batch,
    stride_draft_row,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_LENS: tl.constexpr,
    HAS_CUT: tl.constexpr,
):
    b, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + b)
    if temperature <= 0:
        return
    seed, position = tl.load(seed_ptr + b), tl.load(position_ptr + b)
    length, tokens, parents, child = _tree(
        node_tokens_ptr, parents_ptr, node_lens_ptr, b, n, vocab, stride_tokens, stride_parents, BLOCK_N, HAS_LENS
    )
    accepts, drawn = _accepts(ratio_ptr, seed, position, b, n, child, BLOCK_N)
    node, _, _ = _follow(accepts, parents, BLOCK_N)
    rejected = drawn & (parents == node)
    if _first(rejected, BLOCK_N) == BLOCK_N:
        return  # nothing was taken from p
    inverse = inverse_of(temperature)
    part = tl.arange(0, BLOCK_S)
    p_row, q_row = b * 2 * n + node, b * 2 * n + n + node
    peak, log_sum = merge_sums(stats_ptr, p_row * splits + part, part < splits)
    draft_peak, draft_log_sum = merge_sums(stats_ptr, q_row * splits + part, part < splits)
    first = split * SPLIT
    token = first + tl.arange(0, SPLIT)
    s = load_row(
        node_logits_ptr + b * stride_target_batch + node.to(tl.int64) * stride_target_row, first, vocab, inverse, SPLIT
    )
    d = load_row(
        draft_logits_ptr + b * stride_draft_batch + node.to(tl.int64) * stride_draft_row, first, vocab, inverse, SPLIT
    )
    if HAS_CUT:
        s = tl.where(is_cut(s, cut_ptr, p_row, True), NEG_INF, s)
        d = tl.where(is_cut(d, cut_ptr, q_row, True), NEG_INF, d)
    q = tl.exp((d - draft_peak) - draft_log_sum)
    q = tl.where(q == q, q, 0.0)
    at = b * n + tl.arange(0, BLOCK_N)
    spent = tl.max(tl.load(spent_ptr + at, mask=rejected, other=0.0), 0)  # it grows from sibling to sibling
    left = tl.exp((s - peak) - log_sum) - spent * q
    left_there = tl.load(left_ptr + at, mask=rejected, other=0.0)
    for i in range(node + 1, length):
        if tl.max(tl.where(tl.arange(0, BLOCK_N) == i, rejected, False).to(tl.int32), 0) > 0:
            left = tl.where(token == _of_node(tokens, i, BLOCK_N), _of_node(left_there, i, BLOCK_N), left)
    value = tl.where(left > 0, tl.log(tl.maximum(left, 1e-37)), NEG_INF)
    noise = gumbel(seed, position, node, STREAM_RECOVERED, first, SPLIT)
    store_winner(race_ptr, race_id_ptr, b * splits + split, value, noise, token)


@triton.jit(do_not_specialize=["n", "splits"])
def _likely_kernel(
    likely_ptr,  # fp32 [B,N,3]: the maximum and the log of the sum of each row, and what is likely enough after it
    stats_ptr,
    node_lens_ptr,
    epsilon,
    delta,
    n,
    splits,
    BLOCK_S: tl.constexpr,
    HAS_LENS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if HAS_LENS:
        if row % n >= tl.load(node_lens_ptr + row // n):
            return
    part = tl.arange(0, BLOCK_S)
    at, exists = row * splits + part, part < splits
    peak, log_sum = merge_sums(stats_ptr, at, exists)
    threshold = tl.minimum(delta * tl.exp(-merge_entropy(stats_ptr, at, exists)), epsilon)
    tl.store(likely_ptr + row * 3, peak)
    tl.store(likely_ptr + row * 3 + 1, log_sum)
    tl.store(likely_ptr + row * 3 + 2, threshold)


@triton.jit(do_not_specialize=["n", "all_rows", "splits", "vocab", "stride_tokens", "stride_parents"])
def _pick_kernel(
    path_ptr,  # int64 [B,N]
    tokens_ptr,  # int64 [B,N]
    num_accepted_ptr,  # int32 [B]
    status_ptr,  # int32 [B]
    race_ptr,
    race_id_ptr,
    ratio_ptr,
    likely_ptr,  # (TYPICAL)
    node_logits_ptr,
    node_tokens_ptr,
    parents_ptr,
    node_lens_ptr,
    stats_ptr,
    best_ptr,
    best_id_ptr,
    cut_ptr,
    temperature_ptr,
    seed_ptr,
    position_ptr,
    n,
    all_rows,
    splits,
    vocab,
    stride_tokens,
    stride_parents,
    stride_target_batch,
    stride_target_row,
    METHOD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_LENS: tl.constexpr,
    HAS_CUT: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + b)
    length, tokens, parents, child = _tree(
        node_tokens_ptr, parents_ptr, node_lens_ptr, b, n, vocab, stride_tokens, stride_parents, BLOCK_N, HAS_LENS
    )
    step, part = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_S)
    own_row = b * all_rows + step
    parent_row = b * all_rows + tl.maximum(parents, 0)
    of_parent, parts = parent_row[:, None] * splits + part[None, :], child[:, None] & (part < splits)[None, :]
    winner = merge_winners(best_ptr, best_id_ptr, of_parent, parts)[1].to(tl.int64)
    node, depth, path = _follow(child & (tokens == winner), parents, BLOCK_N)
    recovers = length < 0
    if METHOD == REJECTION:
        if temperature > 0:
            accepts, drawn = _accepts(ratio_ptr, tl.load(seed_ptr + b), tl.load(position_ptr + b), b, n, child, BLOCK_N)
            node, depth, path = _follow(accepts, parents, BLOCK_N)
            recovers = _first(drawn & (parents == node), BLOCK_N) < BLOCK_N
    if METHOD == TYPICAL:
        if temperature > 0:
            offset = b * stride_target_batch + tl.maximum(parents, 0).to(tl.int64) * stride_target_row + tokens
            log_p = scaled_logits(tl.load(node_logits_ptr + offset, mask=child, other=NEG_INF), inverse_of(temperature))
            if HAS_CUT:
                log_p = tl.where(is_cut(log_p, cut_ptr, parent_row, child), NEG_INF, log_p)
            likely = likely_ptr + (b * n + tl.maximum(parents, 0)) * 3
            peak, log_sum = tl.load(likely, mask=child, other=0.0), tl.load(likely + 1, mask=child, other=0.0)
            threshold = tl.load(likely + 2, mask=child, other=0.0)
            keeps = child & (tl.exp((log_p - peak) - log_sum) > threshold)
            node, depth, path = _to_the_deepest(keeps, parents, BLOCK_N)

    last = merge_winners(best_ptr, best_id_ptr, (b * all_rows + node) * splits + part, part < splits)[1].to(tl.int64)
    if METHOD == REJECTION:
        if recovers:
            # p = q up to rounding leaves nothing; a rejection there has probability zero, and p is right.
            best, best_id = merge_winners(race_ptr, race_id_ptr, b * splits + part, part < splits)
            last = tl.where(best > NEG_INF, best_id.to(tl.int64), last)

    exists = step < length
    peak = merge_sums(stats_ptr, own_row[:, None] * splits + part[None, :], exists[:, None] & (part < splits)[None, :])[
        0
    ]
    bad = tl.max((((peak == float("inf")) | (peak == NEG_INF)) & exists).to(tl.int32), 0)
    depth, last = tl.where(bad > 0, 0, depth), tl.where(bad > 0, 0, last)
    path = tl.where((step <= depth) & (length > 0), path, PAD)
    # The tokens of the path without its root, then the target's own: written where they go, step by step.
    tl.store(path_ptr + b * n + step, path.to(tl.int64), mask=step < n)
    accepted = tl.load(node_tokens_ptr + b * stride_tokens + tl.maximum(path, 0), mask=path > 0, other=PAD)
    tl.store(tokens_ptr + b * n + step - 1, accepted, mask=(step > 0) & (step <= depth) & (step < n))
    tl.store(
        tokens_ptr + b * n + step,
        tl.where((step == depth) & (length > 0), last, PAD),
        mask=(step >= depth) & (step < n),
    )
    tl.store(num_accepted_ptr + b, depth)
    tl.store(status_ptr + b, bad)


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
    batch, n = node_tokens.shape
    vocab = node_logits.shape[-1]

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=node_logits.device)

    path, tokens = empty(batch, n, dtype=torch.int64), empty(batch, n, dtype=torch.int64)
    results = (path, tokens, empty(batch, dtype=torch.int32), empty(batch, dtype=torch.int32))
    if batch == 0:
        return results
    params = dense(temperature, top_k, top_p, min_p, typical_p, seed, position)
    temperature, _, _, _, _, seed, position = params
    node_tokens, parents, node_lens = dense(node_tokens, parents, node_lens)
    drafts = node_draft_logits if method == "rejection" else None
    with on_device(node_logits):
        rows = row_stats(
            node_logits,
            drafts,
            node_lens,
            *params,
            has_filters=method != "greedy" and has_filters is not False,
            parents=parents,
            stream=STREAM_COUPLED.value if method != "greedy" else -1,
            greedy=method == "greedy",
            entropy=method == "typical",
        )
        all_rows, splits = rows.best_id.shape[1:]
        tree = (node_tokens, parents, node_lens)
        sizes = (splits, vocab, node_tokens.stride(0), parents.stride(0))
        flags = {
            "BLOCK_N": max(8, triton.next_power_of_2(n)),
            "BLOCK_S": rows.block_s,
            "HAS_LENS": node_lens is not None,
            "HAS_CUT": rows.cut is not None,
            **EXACT,
        }
        race = race_id = ratio = likely = None
        kind = WINNERS
        if method == "typical":
            kind, likely = TYPICAL, empty(batch, n, 3)
            _likely_kernel[(batch * n,)](
                likely, rows.stats, node_lens, epsilon, delta, n, splits,
                BLOCK_S=rows.block_s, HAS_LENS=node_lens is not None, num_warps=1, **EXACT,
            )  # fmt: skip
        if drafts is not None:
            kind = REJECTION
            ratio, spent, left = empty(batch, n), empty(batch, n), empty(batch, n)
            race, race_id = empty(batch, splits, 2), empty(batch, splits, dtype=torch.int32)
            logits, strides = (node_logits, drafts), (*node_logits.stride()[:2], *drafts.stride()[:2])
            stats = (rows.stats, rows.cut, temperature)
            _siblings_kernel[(batch * n,)](
                ratio, spent, left, *logits, *tree, *stats, n, *sizes, *strides,
                BLOCK_V=SPLIT_V // 2, num_warps=4, **at_most_registers(192, chip_of(node_logits.device)), **flags,
            )  # fmt: skip
            _race_kernel[(batch, splits)](
                race, race_id, ratio, spent, left, *logits, *tree, *stats, seed, position, n, *sizes, *strides,
                SPLIT=SPLIT_V, num_warps=8, **flags,
            )  # fmt: skip
        _pick_kernel[(batch,)](
            *results, race, race_id, ratio, likely, node_logits, *tree, rows.stats, rows.best, rows.best_id, rows.cut,
            temperature, seed, position, n, all_rows, *sizes, *node_logits.stride()[:2],
            METHOD=kind.value, num_warps=8, **flags,
        )  # fmt: skip
    return results
