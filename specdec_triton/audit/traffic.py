"""Bytes that one call of an op moves, by our kernels' plan, and the fewest that any plan could.

Counting rule. *Floor*: every input element that the result depends on is read once and every output element is written once;
nothing else moves. *Moved*: what each kernel loads and stores, each tile's loads counted once for each program that makes
them, intermediate results counted when written and again when read. A tile is counted without the lanes that its mask
switches off. Block tables, lengths, per-request parameters and scales are left out of both: 3% at most, for a page id beside each
key of an fp8 cache with D = 64. Caches are taken to hold nothing between programs, so moved is an upper bound for what reaches
the memory.

A predicted time is moved bytes over the chip's bandwidth. It is a prediction for long calls that wait for memory, not a
measurement: launches and latency come on top, and arithmetic is not in it (the noise of a race costs a hundred instructions a token).
"""

from __future__ import annotations

from typing import NamedTuple

FP32 = 4
GROUP = 32  # tokens that share a maximum where a row is filtered: kernels/_rows.py


class Traffic(NamedTuple):
    moved: int
    floor: int


class AttentionShape(NamedTuple):
    """What ``verify_attention`` moves depends on. ``itemsize`` of q and out, ``kv_itemsize`` of the cache; window 0: none."""

    batch: int
    steps: int
    context: int
    heads: int
    kv_heads: int
    dim: int
    itemsize: int
    kv_itemsize: int
    window: int
    block_m: int
    split_size: int
    num_splits: int


def attention(s: AttentionShape) -> Traffic:
    """Keys and values once for each row tile; each used split's fp32 sums (and two statistics) written once, read once."""
    start = max(s.context - s.window + 1, 0) if s.window else 0
    seen = s.context + s.steps - start
    rows = s.steps * (s.heads // s.kv_heads)
    tiles = -(-rows // s.block_m)
    kv = 2 * s.batch * s.kv_heads * seen * s.dim * s.kv_itemsize
    query = s.batch * s.steps * s.heads * s.dim * s.itemsize
    chunks = -(-(s.context + s.steps) // s.split_size) - start // s.split_size
    used = min(chunks, s.num_splits)
    partial = s.batch * s.steps * s.heads * used * (s.dim + 2) * FP32
    return Traffic(moved=tiles * kv + used * query + 2 * partial + query, floor=kv + 2 * query)


def attention_flops(batch: int, steps: int, context: int, heads: int, dim: int, window: int = 0) -> int:
    """Multiplications and additions of both products over the keys that a chain's positions see."""
    seen = [context + step + 1 for step in range(steps)]
    return 4 * batch * heads * dim * sum(min(keys, window) if window else keys for keys in seen)


def append_kv(batch: int, steps: int, kv_heads: int, dim: int, itemsize: int, kv_itemsize: int) -> Traffic:
    """One read and one write of every element: the floor."""
    return Traffic(*[2 * batch * steps * kv_heads * dim * (itemsize + kv_itemsize)] * 2)


class RopeShape(NamedTuple):
    """What ``rope_append`` moves depends on. ``rotary``: R. ``norms``: of q and k; ``kv_itemsize`` of the cache."""

    batch: int
    steps: int
    heads: int
    kv_heads: int
    dim: int
    rotary: int
    itemsize: int
    kv_itemsize: int
    norms: bool = False


def rope_append(s: RopeShape) -> Traffic:
    """One read and one write of every element; cos, sin and the norms' weights, which a chip's cache serves, once for every head
    instead of once."""
    tokens, heads = s.batch * s.steps, s.heads + s.kv_heads
    queries = 2 * tokens * s.heads * s.dim * s.itemsize
    plain = queries + append_kv(s.batch, s.steps, s.kv_heads, s.dim, s.itemsize, s.kv_itemsize).floor
    factors = 2 * tokens * s.rotary * s.itemsize
    weights = s.dim * s.itemsize if s.norms else 0
    return Traffic(moved=plain + heads * (factors + tokens * weights), floor=plain + factors + 2 * weights)


def copy_rows(batch: int, rows: int, kv_heads: int, dim: int, kv_itemsize: int) -> Traffic:
    """``compact_kv``: the rows of an accepted path, read and written: the floor."""
    return Traffic(*[4 * batch * rows * kv_heads * dim * kv_itemsize] * 2)


def apply_logit_rules(
    batch: int, rows: int, vocab: int, itemsize: int, *, penalties: bool, bias: bool, mask: bool, text: int = 0
) -> Traffic:
    """Every row once, what it becomes, its mask, and counts and biases once for each row instead of once for its request.
    With ``text``, the length of texts in which n-grams must not repeat, each row reads that too; bans are few.
    """
    table = batch * vocab * FP32 * (penalties + bias)
    texts = batch * text * 8
    own = batch * rows * (vocab * (itemsize + FP32) + (-(-vocab // 32) * 4 if mask else 0))
    return Traffic(moved=own + rows * (table + texts), floor=own + table + texts)


def sample(batch: int, vocab: int, itemsize: int, *, filters: bool, typical: bool = False) -> Traffic:
    """The row once; with filters its group maxima are written, and read again for the cut. The candidates that the cut is searched
    among, few as a rule, are left out; ``typical``: typical-p is the only filter, and all groups are candidates."""
    row = batch * vocab * itemsize
    return Traffic(moved=row + batch * _filtering(vocab, itemsize, filters, typical), floor=row)


def accept_reject(
    batch: int,
    k: int,
    vocab: int,
    itemsize: int,
    *,
    method: str,
    has_draft: bool,
    has_lse: bool,
    filters: bool,
    typical: bool = False,
) -> Traffic:
    """Statistics read every target row once, and the draft rows where their log-sum-exp or cut is to be found. A method that
    draws then reads the row that it draws from again, target's and drafter's; ``block``, which weighs the residuals of all
    positions, reads all rows again.

    Floor: every target row once; of the draft rows one, where ``draft_lse`` makes the others needless, else all.
    """
    row = batch * vocab * itemsize
    weighs_all = method == "block" and has_draft
    summed = k + 1 + (k if has_draft and (filters or not has_lse) else 0)
    drawn = 0
    if weighs_all:
        drawn = 2 * k + 1
    elif method not in ("greedy", "coupled"):
        drawn = 2 if has_draft else 1
    drafts = 0 if not has_draft else 1 if has_lse and not weighs_all else k
    moved = row * (summed + drawn) + batch * summed * _filtering(vocab, itemsize, filters, typical)
    return Traffic(moved, floor=row * (k + 1 + drafts))


def accept_tree(batch: int, nodes: int, vocab: int, itemsize: int, *, drawn: bool, filters: bool) -> Traffic:
    """Every target row once; of ``drawn`` children the draft rows too, and the two rows of the last node again for what is left of them.
    The passes that siblings after the first take are left out: they depend on the tree. Floor: both once."""
    row = batch * vocab * itemsize
    summed = nodes * (2 if drawn else 1)
    moved = row * (summed + (2 if drawn else 0)) + batch * summed * _filtering(vocab, itemsize, filters, False)
    return Traffic(moved, floor=row * summed)


def _filtering(vocab: int, itemsize: int, filters: bool, typical: bool) -> int:
    """Bytes of one row's filters: the group maxima, written and read. Typical-p alone reads all groups in each step, of which there are
    about as many as V has bits (V = 49,152, normal logits: 13 in bf16, 19 in fp32), before them for the mean, and for the winner."""
    if not filters:
        return 0
    groups = -(-vocab // GROUP)
    searched = (vocab.bit_length() + 2) * (vocab * itemsize + groups * FP32) if typical else 0
    return 2 * groups * FP32 + searched


class LinearTiles(NamedTuple):
    """Of ``skinny_linear`` and ``gated_linear``: rows and columns of a tile, and parts of K."""

    block_m: int
    block_n: int
    splits: int


def skinny_linear(
    rows: int, n: int, k: int, itemsize: int, tiles: LinearTiles, *, bias: bool, residual: bool = False
) -> Traffic:
    """The weight once for each row tile, the rows once for each column tile; with splits their fp32 sums, written and read."""
    x, weight, out = rows * k * itemsize, n * k * itemsize, (1 + residual) * rows * n * itemsize
    row_tiles, column_tiles = -(-rows // tiles.block_m), -(-n // tiles.block_n)
    whole = tiles.splits == 1
    partial = 0 if whole else 2 * tiles.splits * rows * n * FP32
    biases = n * itemsize if bias else 0
    return Traffic(
        moved=row_tiles * weight + column_tiles * x + partial + (row_tiles if whole else rows) * biases + out,
        floor=x + weight + biases + out,
    )


def gated_linear(rows: int, outputs: int, k: int, itemsize: int, tiles: LinearTiles, *, bias: bool) -> Traffic:
    """A product of 2I columns without splits, of which I are written."""
    whole = skinny_linear(rows, 2 * outputs, k, itemsize, tiles._replace(splits=1), bias=bias)
    kept = rows * outputs * itemsize
    return Traffic(whole.moved - kept, whole.floor - kept)


def gated_mlp_activation(rows: int, outputs: int, itemsize: int) -> Traffic:
    """Both halves, and what becomes of them: the floor."""
    return Traffic(*[3 * rows * outputs * itemsize] * 2)


def rms_norm(
    rows: int,
    width: int,
    itemsize: int,
    weight_itemsize: int,
    *,
    block: int,
    residual: bool = False,
    after: bool = False,
) -> Traffic:
    """Every element once, or twice where a row is longer than a program's ``block``; the weight once for each row instead of once.
    A residual is read, and what it is added to before the norm is written."""
    read, written = 1 + residual, 1 + (residual and not after)
    row, weight = rows * width * itemsize, width * weight_itemsize
    again = read - (residual and after) if width > block else 0
    return Traffic(moved=(read + again + written) * row + rows * weight, floor=(read + written) * row + weight)


class HeadTiles(NamedTuple):
    """Of ``head_stats``: rows and columns of a tile, columns of a part."""

    block_m: int
    block_n: int
    part: int


_STATS = 6 * FP32  # of a row and part: maximum, sum, the draft's logit, the winner's two numbers and id


def verify_head(rows: int, n: int, k: int, itemsize: int, tiles: HeadTiles, *, bias: bool) -> Traffic:
    """The weight once for each row tile, the rows once for each column tile, the parts' statistics written and read. No logits."""
    x, weight = rows * k * itemsize, n * k * itemsize
    row_tiles, column_tiles = -(-rows // tiles.block_m), -(-n // tiles.block_n)
    biases = n * itemsize if bias else 0
    stats = rows * -(-n // tiles.part) * _STATS
    return Traffic(moved=row_tiles * (weight + biases) + column_tiles * x + 2 * stats, floor=x + weight + biases)


def head_from_memory(rows: int, n: int, k: int, itemsize: int, part: int, *, bias: bool) -> int:
    """Bytes that the memory sees, where a chip's cache serves all readings of a block of rows or of the weight but the first."""
    x, weight, biases = rows * k * itemsize, n * k * itemsize, n * itemsize if bias else 0
    return x + weight + biases + 2 * rows * -(-n // part) * _STATS


def linear_flops(rows: int, n: int, k: int) -> int:
    """Multiplications and additions."""
    return 2 * rows * n * k


def row_mean(rows: int, width: int, itemsize: int) -> Traffic:
    """Every element once, and the means: the floor."""
    return Traffic(*[rows * (width + 1) * itemsize] * 2)


def ngram_propose(batch: int, length: int) -> Traffic:
    """The text once: only tokens that equal the tail's last one are compared with what comes before it, and those are
    few."""
    text = batch * length * 8
    return Traffic(moved=text, floor=text)
