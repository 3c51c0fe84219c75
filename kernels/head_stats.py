"""``head_stats``: of each row of the head's logits, over parts of the vocabulary, what a decision needs; the logits are not written.

    s = round(hidden @ weight.T + bias), scaled, capped, each step rounded; over the row's temperature

Grid ``(row tiles, parts)``. A program multiplies BLOCK_M rows by the PART rows of the weight that are its part of the vocabulary,
BLOCK_N at a time, with ``skinny_linear``'s tiles and its order of additions. Each tile of logits stays in registers, where its rows
get their maximum, the sum of exp(s - m), s of the drafted token, and the winner: of s, or in a race of s plus noise, compared exactly.

A row's race: ``coupled`` has one stream for a position. In ``rejection`` a row with a draft matters where its draft is rejected (then
another token follows, so the draft does not race, on the stream of recovered tokens), and any other row where it is the last one (the
bonus stream). kernels/README.md has the drawing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_triton.kernels._config import (
    chip_of,
    dense,
    even_rows,
    head_config,
    head_part,
    on_device,
    product_options,
)
from specdec_triton.kernels._head import logits_tile
from specdec_triton.kernels._primitives import (
    NEG_INF,
    STREAM_BONUS,
    STREAM_COUPLED,
    STREAM_DRAFT,
    STREAM_RECOVERED,
    gumbel_of,
    inverse_of,
)
from specdec_triton.kernels._splits import HIGHEST, pick_best, two_sum

GREEDY: tl.constexpr = tl.constexpr(0)
COUPLED: tl.constexpr = tl.constexpr(1)
REJECTION: tl.constexpr = tl.constexpr(2)
DRAFT: tl.constexpr = tl.constexpr(3)  # a draft that rejection will judge
RACES = {"greedy": GREEDY, "coupled": COUPLED, "rejection": REJECTION, "block": REJECTION, "draft": DRAFT}


@triton.jit
def _halves(x):
    """The left and the right half of ``[M,N]``: on a chip other names for its registers."""
    m: tl.constexpr = x.shape[0]
    n: tl.constexpr = x.shape[1]
    return tl.split(tl.permute(tl.reshape(x, [m, 2, n // 2]), [0, 2, 1]))


@triton.jit
def _visit(s, first, found, rows, RACE: tl.constexpr, SLAB: tl.constexpr):
    """Take a tile's scaled logits ``[M,N]`` into account, SLAB columns after the other: whole tiles of noise would not fit the registers.

    Args:
        first: the id of the tile's first column.
        found: for each row and each of SLAB lanes the sum of exp(s - m), s of the draft, and the best value, its rest and its id.
        rows: for each row m, whether it draws, its draft, and the noise's seed, position, node and stream.
    """
    n: tl.constexpr = s.shape[1]
    if n > SLAB:
        left, right = _halves(s)
        found = _visit(left, first, found, rows, RACE, SLAB)
        return _visit(right, first + n // 2, found, rows, RACE, SLAB)
    else:
        total, draft_s, best, best_low, best_id = found
        highest, draws, draft, seed, position, node, stream = rows
        token = (first + tl.arange(0, SLAB))[None, :]
        total += tl.exp(s - highest[:, None])
        if RACE == GREEDY:
            wins = s > best
            best = tl.where(wins, s, best)
        else:
            if RACE == REJECTION:
                is_draft = token == draft[:, None]
                draft_s = tl.where(is_draft, s, draft_s)
                s = tl.where(is_draft, NEG_INF, s)
            quad = first // 4 + tl.arange(0, SLAB // 4)[None, :] + tl.zeros([s.shape[0], 1], tl.int32)
            noise = gumbel_of(seed[:, None], position[:, None], node[:, None], stream[:, None], quad)
            high, low = two_sum(s, tl.where(draws[:, None], noise, 0.0))
            wins = (high > best) | ((high == best) & (low > best_low))
            best, best_low = tl.where(wins, high, best), tl.where(wins, low, best_low)
        return total, draft_s, best, best_low, tl.where(wins, token, best_id)


@triton.jit(do_not_specialize=["rows", "steps", "first_id", "vocab", "draft_node"])
def _head_stats_kernel(
    stats_ptr,  # fp32 [R,C,3]: maximum m (+inf: NaN or +inf found), sum of exp(s - m), s of the draft (-inf: not in the part)
    best_ptr,  # fp32 [R,C,2]: the winner's s, plus noise, as an exact sum of two numbers
    best_id_ptr,  # int32 [R,C]
    hidden_ptr,  # [R,H]
    weight_ptr,  # [N,H]
    bias_ptr,  # [N]
    draft_tokens_ptr,  # int64 [B,K]
    draft_lens_ptr,  # int32 [B]
    temperature_ptr,  # fp32 [B]
    seed_ptr,  # int64 [B]
    position_ptr,  # int64 [B]
    scale,
    softcap,
    rows,  # R = B * steps
    steps,  # K + 1
    columns,  # N
    width,  # H
    first_id,  # of the weight's first row
    vocab,  # V, of all shards
    draft_node,
    stride_hidden_row,
    stride_weight_row,
    RACE: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    SLAB: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_LENS: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    part = tl.program_id(1)
    exists = row < rows
    b, step = row // steps, row % steps
    none = tl.full([BLOCK_M], NEG_INF, tl.float32)
    zero = tl.zeros([BLOCK_M], tl.int32)
    hidden_row = hidden_ptr + row.to(tl.int64)[:, None] * stride_hidden_row
    highest, draft_s, best, best_low = none, none, none, none
    total = tl.zeros([BLOCK_M], tl.float32)
    best_id = zero + HIGHEST
    first = part * PART
    for start in range(first, tl.minimum(first + PART, columns), BLOCK_N):
        column = (start + tl.arange(0, BLOCK_N))[None, :]
        s = logits_tile(
            hidden_row, weight_ptr, bias_ptr, exists[:, None], column.to(tl.int64), columns, width, stride_weight_row,
            scale, softcap, BLOCK_M, BLOCK_N, BLOCK_K, SPLITS, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP,
        )  # fmt: skip
        # Loaded here, since registers are few while tiles are multiplied.
        temperature, draft, seed, position = none, zero - 1, zero, zero
        node, stream = zero, zero + STREAM_COUPLED
        if RACE != GREEDY:
            temperature = tl.load(temperature_ptr + b, mask=exists, other=0.0)
            seed = tl.load(seed_ptr + b, mask=exists, other=0)
            position = tl.load(position_ptr + b, mask=exists, other=0)
        if RACE == COUPLED:
            position += step
        if RACE == DRAFT:
            node, stream = zero + draft_node, zero + STREAM_DRAFT
        if RACE == REJECTION:
            length = tl.load(draft_lens_ptr + b, mask=exists, other=0) if HAS_LENS else steps - 1
            drafted = exists & (step < length)
            given = tl.load(draft_tokens_ptr + b.to(tl.int64) * (steps - 1) + step, mask=drafted, other=-1)
            draft = tl.where((given >= 0) & (given < vocab) & (temperature > 0), given, -1).to(tl.int32)
            node, stream = step, tl.where(draft >= 0, STREAM_RECOVERED, STREAM_BONUS)
        s = tl.where(column < columns, s * inverse_of(temperature)[:, None], NEG_INF)
        above = tl.maximum(highest, tl.max(s, 1))
        finite = tl.where(tl.abs(above) < float("inf"), above, 0.0)
        lanes = tl.full([BLOCK_M, SLAB], NEG_INF, tl.float32)
        found = (
            tl.zeros([BLOCK_M, SLAB], tl.float32),
            lanes,
            lanes,
            lanes,
            tl.full([BLOCK_M, SLAB], HIGHEST, tl.int32),
        )
        of_rows = (finite, temperature > 0, draft, seed, position, node, stream)
        found = _visit(s, first_id + start, found, of_rows, RACE, SLAB)
        total = total * tl.exp(highest - finite) + tl.sum(found[0], 1)  # NaN if one of the logits is
        highest = above
        draft_s = tl.maximum(draft_s, tl.max(found[1], 1))
        if RACE == GREEDY:
            here, here_low, here_id = pick_best(found[2], tl.zeros([BLOCK_M, SLAB], tl.float32), found[4])
        else:
            here, here_low, here_id = pick_best(found[2], found[3], found[4])
        wins = (here > best) | ((here == best) & (here_low > best_low))
        best, best_low = tl.where(wins, here, best), tl.where(wins, here_low, best_low)
        best_id = tl.where(wins, here_id, best_id)

    at = row.to(tl.int64) * tl.num_programs(1) + part
    tl.store(stats_ptr + at * 3, tl.where(total != total, float("inf"), highest), mask=exists)
    tl.store(stats_ptr + at * 3 + 1, total, mask=exists)
    tl.store(stats_ptr + at * 3 + 2, draft_s, mask=exists)
    tl.store(best_ptr + at * 2, best, mask=exists)
    tl.store(best_ptr + at * 2 + 1, best_low, mask=exists)
    tl.store(best_id_ptr + at, best_id, mask=exists)


def head_stats(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float | None,
    softcap: float | None,
    draft_tokens: torch.Tensor | None,
    draft_lens: torch.Tensor | None,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    first_id: int,
    vocab: int,
    method: str,
    node: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """stats ``[B,T,C,3]``, best ``[B,T,C,2]``, best_id ``[B,T,C]``; see ``specdec_triton.ops.HeadStats``.

    ``method`` may also be ``draft``, with its ``node``, for ``sample_head``.
    """
    (batch, steps, width), columns = hidden.shape, weight.shape[0]
    part = head_part(columns)
    parts = triton.cdiv(columns, part)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(batch, steps, parts, *shape, dtype=dtype, device=hidden.device)

    results = empty(3), empty(2), empty(dtype=torch.int32)
    if batch == 0:
        return results
    chip = chip_of(hidden.device)
    config = head_config(columns, width, hidden.dtype, chip, races=method != "greedy")
    rows = even_rows(hidden.reshape(batch * steps, width))
    with on_device(hidden):
        _head_stats_kernel[(triton.cdiv(batch * steps, config.block_m), parts)](
            *results,
            rows,
            weight,
            *dense(bias, draft_tokens, draft_lens, temperature, seed, position),
            0.0 if scale is None else float(scale),
            0.0 if softcap is None else float(softcap),
            batch * steps,
            steps,
            columns,
            width,
            first_id,
            vocab,
            node,
            rows.stride(0),
            weight.stride(0),
            RACE=RACES[method].value,
            PART=part,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            SPLITS=config.splits,
            SLAB=config.slab,
            HAS_BIAS=bias is not None,
            HAS_SCALE=scale is not None,
            HAS_SOFTCAP=softcap is not None,
            HAS_LENS=draft_lens is not None,
            **product_options(config, hidden.dtype, chip),
        )
    return results
