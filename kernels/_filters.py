"""What top-k, top-p, min-p and typical-p keep of rows of logits, found exactly, without a sort, and with few of their tokens read again.

The first three keep the tokens that reach some value, the cut: the largest value that enough of the tokens reach (``top_k`` of them; of what
that leaves, ``top_p`` of the mass). ``_row_stats_kernel`` leaves the maxima of groups of 32 tokens; then

1. ``_candidates_kernel``, a program a row: the largest value that enough of these maxima reach bounds the cut from below (if k
   groups hold a token >= c, so do k tokens), and only groups that reach it can hold a kept token. Of 151,936 tokens, top-k 50
   leaves 50 groups.
2. ``_cut_kernel``, a program a row: the cut, by bisection over the candidates. Its ends are moved to values that occur, so that
   it ends after about as many steps as the candidates' number has bits. Then the statistics of the kept tokens replace the row's.
   typical-p keeps, of those, the tokens whose logit is nearest to the expected one: an interval, found by another bisection over
   the distance.

Where the maxima are not enough (top-p of a row flatter than one token in 32 can speak for; typical-p without another filter), all
groups are candidates, and one program reads the whole row in every step: exact still, and some milliseconds for a large vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_triton.kernels._config import EXACT, at_most_registers, chip_of
from specdec_triton.kernels._primitives import NEG_INF, STREAM_COUPLED, gumbel_of, inverse_of, scaled_logits
from specdec_triton.kernels._splits import HIGHEST, SPLIT_V, depth_of, is_skipped, merge_sums, pick_best, two_sum

GROUP = 32  # tokens that share a maximum
_PEAKS = 8192  # group maxima of a row: one size up to V = 262,144
_BLOCK_G = 64  # candidate groups of a block
_LOWEST: tl.constexpr = tl.constexpr(-(2**31))


@triton.jit
def filters_at_all(temperature, top_k, top_p, min_p, typical_p, vocab):
    """Whether a request filters at all."""
    return (temperature > 0) & (((top_k > 0) & (top_k < vocab)) | (top_p < 1) | (min_p > 0) | (typical_p < 1))


@triton.jit
def is_cut(s, cut_ptr, at, mask):
    """Whether scaled logits lie outside of what the row (or rows) at ``at`` keeps."""
    low = tl.load(cut_ptr + at * 2, mask=mask, other=0.0)
    high = tl.load(cut_ptr + at * 2 + 1, mask=mask, other=0.0)
    return (s < low) | (s > high)


@triton.jit
def _ordered(x):
    """fp32 -> int32 of the same order; the two zeros are equal."""
    bits = tl.where(x == 0.0, 0, x.to(tl.int32, bitcast=True))
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _unordered(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _between(low, high):
    """The middle of two ordered keys, above low."""
    return low + ((high.to(tl.int64) - low + 1) // 2).to(tl.int32)


@triton.jit(do_not_specialize=["vocab", "rows", "all_rows", "splits"])
def _candidates_kernel(
    candidates_ptr,  # int32 [B,R,splits * SPLIT / GROUP]: groups that may hold a kept token
    bound_ptr,  # int32 [B,R,2]: how many groups (0: the row is skipped, bad or not filtered), the bound as an ordered key
    stats_ptr,  # in place, as are the winners: the sums go to split 0
    best_ptr,
    peaks_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    typical_p_ptr,
    lens_ptr,
    vocab,
    rows,
    all_rows,  # R
    splits,
    BLOCK_S: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_LENS: tl.constexpr,
    HAS_TYPICAL: tl.constexpr,
    TREE: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    b, row = at // all_rows, (at % all_rows).to(tl.int32)
    tl.store(bound_ptr + at * 2, 0)
    temperature = tl.load(temperature_ptr + b)
    top_k, top_p, min_p = tl.load(top_k_ptr + b), tl.load(top_p_ptr + b), tl.load(min_p_ptr + b)
    typical_p = tl.load(typical_p_ptr + b) if HAS_TYPICAL else 1.0
    if filters_at_all(temperature, top_k, top_p, min_p, typical_p, vocab) == 0:
        return
    if HAS_LENS:
        length = tl.load(lens_ptr + b)
        if is_skipped(row, rows, length, TREE):
            return
    part = tl.arange(0, BLOCK_S)
    entry = at * splits + part
    highest, log_sum = merge_sums(stats_ptr, entry, part < splits)
    if (highest == NEG_INF) | (highest == float("inf")):
        return
    # From here on the row is its split 0, which the cut kernel will fill.
    total = tl.exp(log_sum)
    tl.store(stats_ptr + entry * 3, tl.where(part == 0, highest, NEG_INF), mask=part < splits)
    tl.store(stats_ptr + entry * 3 + 1, tl.where(part == 0, total, 0.0), mask=part < splits)
    tl.store(stats_ptr + entry * 3 + 2, 0.0, mask=part < splits)
    tl.store(best_ptr + entry * 2, NEG_INF, mask=part < splits)
    # The group maxima stay in registers. Groups past the vocabulary are -inf: they weigh nothing once key is above that.
    row_groups = splits * (SPLIT // GROUP)
    group = tl.arange(0, BLOCK)
    peak = tl.load(peaks_ptr + at * row_groups + group, mask=group < row_groups, other=NEG_INF)
    order = _ordered(peak)

    # The largest key that groups of enough weight reach: k of them, or (a little over) top-p of the mass.
    by_mass = (top_k <= 0) | (top_k >= vocab)
    each = tl.where(by_mass, tl.exp(peak - highest), 1.0)
    enough = tl.where(by_mass, top_p * total * 1.0001, top_k.to(tl.float32))
    searching = (top_p < 1) | (by_mass == 0)
    low = _ordered(tl.where(searching, NEG_INF, highest + tl.log(min_p)))
    key, high = low, _ordered(highest)
    while searching:
        reaches = order >= key
        weight = tl.sum(tl.where(reaches, each, 0.0), 0)
        low = tl.where(weight >= enough, tl.min(tl.where(reaches, order, HIGHEST), 0), low)
        high = tl.where(weight >= enough, high, tl.max(tl.where(reaches, _LOWEST, order), 0))
        key = _between(low, high)
        searching = low < high

    reaches = (group < (vocab + GROUP - 1) // GROUP) & (order >= low)
    place = tl.cumsum(reaches.to(tl.int32), 0) - 1
    tl.store(candidates_ptr + at * row_groups + place, group, mask=reaches)
    count = tl.sum(reaches.to(tl.int32), 0)
    tl.store(bound_ptr + at * 2, count)
    tl.store(bound_ptr + at * 2 + 1, low)


@triton.jit
def _load_groups(
    logits, draft_logits, is_draft, candidates, start, count, vocab, inverse,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, HAS_DRAFT: tl.constexpr,
):  # fmt: skip
    """Scaled logits ``[BLOCK_G,GROUP]`` of the candidate groups from ``start`` on, the groups, and which tokens exist."""
    place = start + tl.arange(0, BLOCK_G)
    group = tl.load(candidates + place, mask=place < count, other=0)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    valid = (place < count)[:, None] & (token < vocab)
    if HAS_DRAFT:
        if is_draft:
            s = scaled_logits(tl.load(draft_logits + token, mask=valid, other=NEG_INF), inverse)
        else:
            s = scaled_logits(tl.load(logits + token, mask=valid, other=NEG_INF), inverse)
    else:
        s = scaled_logits(tl.load(logits + token, mask=valid, other=NEG_INF), inverse)
    return s, group, valid


@triton.jit
def _weigh_tokens(
    logits, draft_logits, is_draft, candidates, count, vocab, inverse, key, highest,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, HAS_DRAFT: tl.constexpr,
):  # fmt: skip
    """Of the candidates >= key: how many, their mass, the least of them; and the largest of the others."""
    number, mass, above, below = 0.0, 0.0, HIGHEST, _LOWEST
    for start in range(0, count, BLOCK_G):
        s, _, valid = _load_groups(
            logits, draft_logits, is_draft, candidates, start, count, vocab, inverse, GROUP, BLOCK_G, HAS_DRAFT
        )
        order = _ordered(s)
        reaches = valid & (order >= key)
        number += tl.sum(reaches.to(tl.float32))
        mass += tl.sum(tl.where(reaches, tl.exp(s - highest), 0.0))
        above = tl.minimum(above, tl.min(tl.where(reaches, order, HIGHEST)))
        below = tl.maximum(below, tl.max(tl.where(valid & (order < key), order, _LOWEST)))
    return number, mass, above, below


@triton.jit
def _weigh_distances(
    logits, draft_logits, is_draft, candidates, count, vocab, inverse, mean, reach, cut, highest,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, HAS_DRAFT: tl.constexpr,
):  # fmt: skip
    """Of the tokens >= cut at most ``reach`` from the mean: mass, moment, least and largest logit, the largest distance; and
    the least distance of the others. ``reach`` and distances are ordered keys, logits are scaled."""
    mass, moment, below, above = 0.0, 0.0, _LOWEST, HIGHEST
    low = tl.full([], float("inf"), tl.float32)
    high = tl.full([], NEG_INF, tl.float32)
    for start in range(0, count, BLOCK_G):
        s, _, valid = _load_groups(
            logits, draft_logits, is_draft, candidates, start, count, vocab, inverse, GROUP, BLOCK_G, HAS_DRAFT
        )
        kept = valid & (s >= cut) & (s > NEG_INF)
        shifted = tl.where(kept, s - highest, 0.0)
        order = _ordered(tl.abs(shifted - mean))
        near = kept & (order <= reach)
        e = tl.where(near, tl.exp(shifted), 0.0)
        mass += tl.sum(e)
        moment += tl.sum(e * shifted)
        low = tl.minimum(low, tl.min(tl.where(near, s, float("inf"))))
        high = tl.maximum(high, tl.max(tl.where(near, s, NEG_INF)))
        below = tl.maximum(below, tl.max(tl.where(near, order, _LOWEST)))
        above = tl.minimum(above, tl.min(tl.where(kept & (order > reach), order, HIGHEST)))
    return mass, moment, low, high, below, above


@triton.jit
def _typical(
    logits, draft_logits, is_draft, candidates, count, vocab, inverse, typical_p, cut, highest,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, HAS_DRAFT: tl.constexpr,
):  # fmt: skip
    """The least and the largest scaled logit that typical-p keeps of those >= cut.

    -log p - H of a token is the expected logit less its own: the distance by which tokens are taken, up to the mass.
    """
    total, moment, low, high, below, above = _weigh_distances(
        logits, draft_logits, is_draft, candidates, count, vocab, inverse, 0.0, HIGHEST, cut, highest,
        GROUP, BLOCK_G, HAS_DRAFT,
    )  # fmt: skip
    mean = tl.div_rn(moment, total)
    least, most = tl.full([], 0, tl.int32), HIGHEST - 1  # keys of distances, which are not negative
    while least < most:
        reach = least + (most - least) // 2
        mass, moment, near_low, near_high, below, above = _weigh_distances(
            logits, draft_logits, is_draft, candidates, count, vocab, inverse, mean, reach, cut, highest,
            GROUP, BLOCK_G, HAS_DRAFT,
        )  # fmt: skip
        enough = mass >= typical_p * total
        enough = enough & (below > _LOWEST)  # one token at least
        most = tl.where(enough, below, most)
        low, high = tl.where(enough, near_low, low), tl.where(enough, near_high, high)
        least = tl.where(enough, least, above)
    return low, high


@triton.jit(do_not_specialize=["rows", "all_rows", "splits", "node", "stride_parents"])
def _cut_kernel(
    cut_ptr,  # fp32 [B,R,2]: scaled logits below the first or above the second are removed; infinite if the request keeps all
    stats_ptr,  # in place, as are the winners: those of the kept tokens in split 0
    best_ptr,
    best_id_ptr,
    candidates_ptr,
    bound_ptr,
    logits_ptr,  # [B,rows,V]
    draft_logits_ptr,  # [B,R - rows,V]
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    typical_p_ptr,
    seed_ptr,
    position_ptr,
    parents_ptr,
    vocab,
    rows,
    all_rows,  # R
    splits,
    node,
    stride_parents,
    stride_logits_batch,
    stride_logits_row,
    stride_draft_batch,
    stride_draft_row,
    STREAM: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HAS_DRAFT: tl.constexpr,
    HAS_TYPICAL: tl.constexpr,
    TREE: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    b, row = at // all_rows, (at % all_rows).to(tl.int32)
    tl.store(cut_ptr + at * 2, NEG_INF)
    tl.store(cut_ptr + at * 2 + 1, float("inf"))
    count = tl.load(bound_ptr + at * 2)
    if count == 0:
        return
    low = tl.load(bound_ptr + at * 2 + 1)
    inverse = inverse_of(tl.load(temperature_ptr + b))
    top_k, top_p, min_p = tl.load(top_k_ptr + b), tl.load(top_p_ptr + b), tl.load(min_p_ptr + b)
    candidates = candidates_ptr + at * splits * (SPLIT // GROUP)
    logits = logits_ptr + b * stride_logits_batch + row.to(tl.int64) * stride_logits_row
    is_draft = row >= rows
    draft_logits = draft_logits_ptr
    if HAS_DRAFT:
        draft_logits += b * stride_draft_batch + (row - rows).to(tl.int64) * stride_draft_row
    entry = at * splits
    highest, total = tl.load(stats_ptr + entry * 3), tl.load(stats_ptr + entry * 3 + 1)

    # The largest key that enough of the candidates reach: top_k of them; then, of what that leaves, top_p of the mass.
    mass = total
    for which in range(2):
        by_mass = which == 1
        enough = tl.where(by_mass, top_p * mass, top_k.to(tl.float32))
        searching = tl.where(by_mass, top_p < 1, (top_k > 0) & (top_k < vocab))
        key, high = low, _ordered(highest)
        while searching:
            number, reached, above, below = _weigh_tokens(
                logits, draft_logits, is_draft, candidates, count, vocab, inverse, key, highest,
                GROUP, BLOCK_G, HAS_DRAFT,
            )  # fmt: skip
            reaches = tl.where(by_mass, reached, number) >= enough
            low = tl.where(reaches, above, low)
            mass = tl.where(reaches, reached, mass)
            high = tl.where(reaches, high, below)
            key = _between(low, high)
            searching = low < high
    cut, ceiling = tl.maximum(_unordered(low), highest + tl.log(min_p)), highest
    if HAS_TYPICAL:
        typical_p = tl.load(typical_p_ptr + b)
        if typical_p < 1:
            cut, ceiling = _typical(
                logits, draft_logits, is_draft, candidates, count, vocab, inverse, typical_p, cut, highest,
                GROUP, BLOCK_G, HAS_DRAFT,
            )  # fmt: skip
    tl.store(cut_ptr + at * 2, cut)
    tl.store(cut_ptr + at * 2 + 1, ceiling)

    total, moment = 0.0, 0.0
    best = tl.full([], NEG_INF, tl.float32)
    best_low = tl.full([], NEG_INF, tl.float32)
    best_id = tl.full([], HIGHEST, tl.int32)
    for start in range(0, count, BLOCK_G):
        s, group, valid = _load_groups(
            logits, draft_logits, is_draft, candidates, start, count, vocab, inverse, GROUP, BLOCK_G, HAS_DRAFT
        )
        kept = valid & (s >= cut) & (s <= ceiling)
        e = tl.where(kept, tl.exp(s - highest), 0.0)
        total += tl.sum(e)
        moment += tl.sum(tl.where(e > 0, e * (s - highest), 0.0))
        value, rest = s, tl.zeros([BLOCK_G, GROUP], tl.float32)
        if STREAM >= 0:
            position = tl.load(position_ptr + b)
            if STREAM == STREAM_COUPLED:
                position += depth_of(row, parents_ptr, b * stride_parents, TREE)
            quad = group[:, None] * (GROUP // 4) + tl.arange(0, GROUP // 4)[None, :]
            value, rest = two_sum(s, gumbel_of(tl.load(seed_ptr + b), position, node, STREAM, quad))
        value = tl.reshape(tl.where(kept, value, NEG_INF), [BLOCK_G * GROUP])
        token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        here, here_low, here_id = pick_best(
            value, tl.reshape(rest, [BLOCK_G * GROUP]), tl.reshape(token, [BLOCK_G * GROUP])
        )
        # Candidates come in ascending order: of equal values the first stays.
        wins = (here > best) | ((here == best) & (here_low > best_low))
        best, best_low = tl.where(wins, here, best), tl.where(wins, here_low, best_low)
        best_id = tl.where(wins, here_id, best_id)
    tl.store(stats_ptr + entry * 3 + 1, total)
    tl.store(stats_ptr + entry * 3 + 2, moment)
    tl.store(best_ptr + entry * 2, best)
    tl.store(best_ptr + entry * 2 + 1, best_low)
    tl.store(best_id_ptr + entry, best_id)


def filter_rows(
    stats: torch.Tensor,
    best: torch.Tensor,
    best_id: torch.Tensor,
    peaks: torch.Tensor,
    logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    params: tuple[torch.Tensor | None, ...],
    noise: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    strides: tuple[int, ...],
    stream: int,
    node: int,
    block_s: int,
) -> torch.Tensor:
    """What is kept, fp32 ``[B,R,2]``, from the first to the second scaled logit; the rows' statistics and winners become those of the kept tokens.

    Args:
        stats ``[B,R,splits,3]``, best ``[B,R,splits,2]``, best_id ``[B,R,splits]``, peaks ``[B,R,splits * SPLIT_V / GROUP]``: in place.
        params: temperature, top_k, top_p, min_p, typical_p or None, draft lengths or None. noise: seed, position, parents or None. strides: of parents,
            of logits' requests and rows, and of draft_logits'.
    """
    batch, all_rows, splits = best_id.shape
    rows, vocab = logits.shape[1:]
    device = logits.device
    cut = torch.empty(batch, all_rows, 2, dtype=torch.float32, device=device)
    candidates = torch.empty_like(peaks, dtype=torch.int32)
    bound = torch.empty(batch, all_rows, 2, dtype=torch.int32, device=device)
    sizes = (vocab, rows, all_rows, splits)
    flags = {
        "SPLIT": SPLIT_V,
        "GROUP": GROUP,
        "HAS_TYPICAL": params[-2] is not None,
        "TREE": noise[2] is not None,
        **EXACT,
    }
    grid = (batch * all_rows,)
    _candidates_kernel[grid](
        candidates,
        bound,
        stats,
        best,
        peaks,
        *params,
        *sizes,
        BLOCK_S=block_s,
        BLOCK=max(_PEAKS, triton.next_power_of_2(splits * SPLIT_V // GROUP)),
        HAS_LENS=params[-1] is not None,
        num_warps=16,
        **flags,
    )
    _cut_kernel[grid](
        cut,
        stats,
        best,
        best_id,
        candidates,
        bound,
        logits,
        draft_logits,
        *params[:-1],
        *noise,
        *sizes,
        node,
        *strides,
        STREAM=stream,
        BLOCK_G=_BLOCK_G,
        HAS_DRAFT=draft_logits is not None,
        num_warps=4,
        **at_most_registers(168, chip_of(device)),
        **flags,
    )
    return cut
