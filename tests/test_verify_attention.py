"""``verify_attention``: its error against fp64 is at most twice that of same-dtype PyTorch (1e-5 in fp32), and a row's
bits depend on nothing but the row's own text.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from specdec_triton import ops
from specdec_triton.reference import paging
from specdec_triton.reference import verify_attention as reference
from specdec_triton.reference.verify_attention import KEY_TILE
from specdec_triton.testing import (
    FAR_PAGE,
    FP8,
    INF,
    NAN,
    attention_oracle,
    far_cache,
    lay_out,
    paged_case,
    tree,
)

OP = "verify_attention"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


TWO_BRANCHES = tree(-1, 0, 0, 1, 2)


def on(context_lens, new, **shape):
    return {"context_lens": context_lens, "new": new, **shape}


# name: (arguments of paged_case, options of the op); sinks are drawn for True
CASES = {
    "page-1": (on([0, 1, 5, 33], 3, page_size=1), {}),
    "page-7": (on([0, 6, 7, 20], 3, page_size=7), {}),
    "page-16": (on([0, 14, 16, 33], 4, page_size=16), {}),
    "page-48": (on([47, 1, 96], 3, page_size=48), {}),
    "page-544": (on([543, 3], 2, page_size=544), {}),  # faults.md F15
    "page-2048": (on([40, 300], 2, page_size=2048), {}),  # faults.md F15
    "one-past-a-page": (on([16], 1), {}),  # faults.md F10
    "length-1": (on([0, 0], 1, page_size=2), {}),  # faults.md F12, F20
    "length-0": (on([0, 4, 0], 1, query_lens=[0, 1, 1]), {}),  # faults.md F13
    "all-idle": (on([3, 0], 2, query_lens=[0, 0]), {}),
    "group-1": (on([9, 2], 3, q_heads=3, kv_heads=3), {}),
    "group-3": (on([9, 2], 3, q_heads=9, kv_heads=3), {}),
    "group-4": (on([9, 2], 3, q_heads=8, kv_heads=2), {}),
    "group-5": (on([9, 2], 3, q_heads=40, kv_heads=8), {}),  # faults.md F3
    "group-6": (on([9, 2], 3, q_heads=12, kv_heads=2), {}),  # faults.md F3
    "group-7": (on([9, 2], 3, q_heads=28, kv_heads=4), {}),  # faults.md F3
    "group-8": (on([9, 2], 3, q_heads=8, kv_heads=1), {}),  # faults.md F3
    "group-12": (on([9, 2], 3, q_heads=24, kv_heads=2), {}),
    "group-16": (on([9], 2, q_heads=64, kv_heads=4), {}),  # faults.md F3
    "group-20": (on([9, 2], 3, q_heads=40, kv_heads=2), {}),  # faults.md F4
    "group-20-of-80": (on([9], 2, q_heads=80, kv_heads=4), {}),  # faults.md F4
    "group-24": (on([9], 2, q_heads=48, kv_heads=2), {}),  # faults.md F4
    "group-71": (on([9, 2], 3, q_heads=71, kv_heads=1), {}),
    "one-row": (on([3], 1, q_heads=1, kv_heads=1), {}),  # faults.md F20
    **{f"head-{d}": (on([11, 3], 3, dim=d), {}) for d in (24, 64, 80, 96, 112, 128, 160, 192, 256)},  # faults.md F2
    **{f"T-{t}": (on([11, 3], t), {}) for t in (1, 2, 5, 6, 7, 17)},  # faults.md F6
    "T-64": (on([11], 64), {}),
    "newest-keys": (on([16], 4), {}),  # faults.md F7
    "ragged": (on([12, 0, 7, 30], 5, query_lens=[5, 1, 0, 3]), {}),
    "all-short-of-T": (on([12, 3], 5, query_lens=[2, 1]), {}),
    "prefill": (on([0, 0], 40, query_lens=[40, 17], page_size=7), {}),
    "scale": (on([12, 3], 3), {"scale": 0.7}),
    "window-1": (on([12, 0], 3), {"sliding_window": 1}),
    "window-4": (on([12, 3, 0], 5), {"sliding_window": 4}),  # faults.md F16, E4
    "window-wide": (on([12, 3], 3), {"sliding_window": 1000}),
    "window-ragged": (on([30, 3], 5, query_lens=[2, 5], page_size=7), {"sliding_window": 6}),
    "softcap-50": (on([12, 3], 3, amplitude=40.0), {"softcap": 50.0}),  # faults.md F16
    "softcap-small": (on([12, 3], 3), {"softcap": 0.5}),
    "sinks": (on([12, 0], 3), {"sinks": True}),
    "tree": (on([12, 3], 5), {"tree_mask": TWO_BRANCHES}),  # faults.md F23
    "tree-pages": (on([12, 3], 5, page_size=2), {"tree_mask": TWO_BRANCHES}),
    "tree-per-request": (
        on([12, 3], 3),
        {"tree_mask": torch.stack([tree(-1, 0, 0), tree(-1, 0, 1)])},
    ),
    "tree-ragged": (on([12, 3, 8], 5, query_lens=[5, 3, 0]), {"tree_mask": TWO_BRANCHES}),
    "tree-window": (on([12, 3], 5), {"tree_mask": TWO_BRANCHES, "sliding_window": 4}),
    "tree-without-self": (on([12, 3], 3), {"tree_mask": torch.tensor([0, 1, 4]), "sliding_window": 4}),
    "tree-64": (on([5], 64), {"tree_mask": tree(-1, *range(63))}),
    "tree-empty-rows": (on([0, 0], 3), {"tree_mask": torch.tensor([1, 0, 5])}),  # faults.md F8
    "fp8": (on([12, 3], 3, fp8=True), {}),
    "fp8-ragged-window": (
        on([40, 3, 9], 3, query_lens=[3, 0, 2], fp8=True, page_size=7),
        {"sliding_window": 8},
    ),
    "tile-edge": (on([KEY_TILE - 2, KEY_TILE - 1, KEY_TILE], 2), {}),
    "rows-of-an-unseen-tile": (on([KEY_TILE - 4], 8), {}),  # faults.md F8
    "two-tiles": (on([2 * KEY_TILE + 3, 1], 3, page_size=48), {}),
    "window-skips-tiles": (on([2 * KEY_TILE + 9], 3, page_size=7), {"sliding_window": 5}),
    "window-one-long-one-short": (on([2 * KEY_TILE + 9, 2], 3), {"sliding_window": 300}),
    "everything": (
        on([60, 0, 9], 5, query_lens=[5, 2, 4], q_heads=6, dim=80, page_size=7, fp8=True, amplitude=5.0),
        {"tree_mask": TWO_BRANCHES, "sliding_window": 6, "softcap": 3.0, "sinks": True, "scale": 0.3},
    ),
}


def build(name, dtype=torch.float32):
    arguments, options = CASES[name]
    case = paged_case(**{"page_size": 16, **arguments}, dtype=dtype)
    if options.get("sinks") is True:
        options = {**options, "sinks": torch.linspace(-1.0, 2.0, case.q.shape[2]).to(dtype)}
    return case, options


def attend(case, backend="torch", **options):
    return ops.verify_attention(*case.args, **case.scales, **options, backend=backend)


def assert_close(case, out, **options):
    """Error against fp64 at most twice that of PyTorch in the same dtype, 1e-5 in fp32."""
    dtype = case.q.dtype
    truth = attention_oracle(case, **options)
    plain = attention_oracle(case, **options, dtype=dtype)
    allowed = max(2 * (plain.double() - truth).abs().max(), 1e-5 if dtype == torch.float32 else 0.0)
    assert out.shape == case.q.shape
    assert out.dtype == dtype
    assert (out.double() - truth).abs().max() <= allowed
    for b, n in enumerate(case.query_lens.tolist()):
        assert not out[b, n:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_matches_fp64(name, dtype, backend):
    """Covers faults.md F2, F8, F10, F11, F19: NaN and garbage in slots and table entries of no one never leak."""
    case, options = build(name, dtype)
    assert_close(case, attend(case, backend, **options), **options)


@pytest.mark.parametrize("count", range(1, 18))
def test_every_number_of_rows(count, backend, few_splits):
    """faults.md F6; 3 heads to a KV head, so that rows and tiles never match."""
    case = paged_case([70, 3], count, q_heads=6)
    assert_close(case, attend(case, backend))


def test_every_group(backend, few_splits):
    """faults.md F3."""
    for group in range(1, 33):
        case = paged_case([5], 2, q_heads=group, kv_heads=1)
        assert_close(case, attend(case, backend))


@pytest.mark.parametrize("window", [None, 100], ids=["full", "window-100"])
def test_every_length(window, backend, few_splits):
    """faults.md F8: 1 to 600 keys, chunks that no row sees included."""
    case = paged_case(range(0, 600, 23), 2, query_lens=[1 + i % 2 for i in range(27)], q_heads=2, kv_heads=1)
    assert_close(case, attend(case, backend, sliding_window=window), sliding_window=window)


MIXES = {  # of vLLM's tests: (new positions, keys) of each request; heads, head size, window, softcap
    "prefill-among-decodes": ([(1, 1328), (5, 18), (129, 463)], (8, 2, 128, None, None)),
    "prefill-softcap-window": ([(1, 1328), (5, 18), (129, 463)], (4, 4, 128, 256, 50.0)),
    "decodes": ([(1, 523), (1, 37), (1, 2011)], (4, 4, 128, None, 50.0)),
    "decodes-window": ([(1, 523), (1, 37), (1, 2011)], (5, 1, 256, 64, None)),
    "decodes-window-128": ([(1, 523), (1, 37), (1, 2011)], (8, 2, 256, 128, 50.0)),
    "ragged": ([(1, 300), (3, 301), (2, 302), (4, 303)], (8, 2, 64, None, None)),
    "ragged-window": ([(5, 300), (0, 300), (3, 300), (2, 300)], (8, 2, 64, 127, None)),
    "long": ([(5, 30000)], (4, 1, 16, None, None)),
}


@pytest.mark.parametrize(("requests", "shape"), MIXES.values(), ids=MIXES)
def test_mixes(requests, shape, backend, few_splits):
    """Prefill, verification and decoding in one call, over many chunks."""
    q_heads, kv_heads, dim, window, softcap = shape
    lens = [new for new, _ in requests]
    case = paged_case(
        [keys - new for new, keys in requests],
        max(lens),
        query_lens=lens,
        q_heads=q_heads,
        kv_heads=kv_heads,
        dim=dim,
        dtype=torch.bfloat16,
    )
    options = {"sliding_window": window, "softcap": softcap, "sinks": torch.linspace(-1.0, 2.0, q_heads)}
    assert_close(case, attend(case, backend, **options), **options)


def test_identical_requests(backend):
    """faults.md F12: shorter than a page, on pages of their own."""
    x = torch.randn(1, 1, 16)
    k_cache, v_cache, table = lay_out([x, x], [-x, -x], page_size=2)
    out = ops.verify_attention(
        torch.randn(1, 1, 2, 16).repeat(2, 1, 1, 1), k_cache, v_cache, table, torch.tensor([0, 0]), backend=backend
    )
    assert torch.equal(out, (-x).expand(2, 1, 2, 16))


def by_hand(q, keys, values, context, **options):
    """One request, one head of size 16 whose first element carries the values."""

    def spread(xs):
        return torch.nn.functional.pad(torch.tensor(xs).view(-1, 1, 1), (0, 15))

    k_cache, v_cache, table = lay_out([spread(keys)], [spread(values)], 2)
    args = (spread(q)[None], k_cache, v_cache, table, torch.tensor([context]))
    return ops.verify_attention(*args, scale=1.0, **options)[0, :, 0, 0]


def test_by_hand(backend):
    """All scores 0: the mean of the visible values."""
    zeros = [0.0] * 5
    values = [1.0, 2.0, 3.0, 4.0, 5.0]

    def means(**options):
        return by_hand([0.0] * 3, zeros, values, 2, backend=backend, **options).tolist()

    assert means() == pytest.approx([2.0, 2.5, 3.0])
    assert means(sliding_window=2) == pytest.approx([2.5, 3.5, 4.5])
    assert means(tree_mask=torch.tensor([1, 3, 5])) == pytest.approx([2.0, 2.5, (1 + 2 + 3 + 5) / 4])
    # The second branch has depth 1, so its window is that of position 3: slot 3 is masked by the tree, slot 4 is seen.
    assert means(tree_mask=torch.tensor([1, 3, 5]), sliding_window=2) == pytest.approx([2.5, 3.5, (3 + 5) / 2])
    assert means(sinks=torch.zeros(1)) == pytest.approx([6 / 4, 10 / 5, 15 / 6])


def test_softcap_by_hand(backend):
    """Scores 0 and 100 capped at 1: weights 1 : e."""
    out = by_hand([10.0], [0.0, 10.0], [1.0, 2.0], 1, softcap=1.0, backend=backend)
    e = torch.e
    assert out.tolist() == pytest.approx([(1 + 2 * e) / (1 + e)])


@pytest.mark.parametrize("context", [0, 1, 15, 255, 256, 600])
def test_no_nan_at_any_length(context, backend, few_splits):
    """faults.md F8: context 0 to 600 and rows that see little."""
    case = paged_case([context, 0], 3, query_lens=[3, 1], page_size=16)
    for window in (None, 1, 2):
        assert attend(case, backend, sliding_window=window).isfinite().all()


def test_pages_below_the_window_are_not_seen(backend):
    """faults.md F11: pages that slid out of the window may have been freed and hold NaN."""
    case = paged_case([300, 40], 3, page_size=16)
    want = attend(case, backend, sliding_window=20)
    for cache in (case.k_cache, case.v_cache):
        for b, context in enumerate((300, 40)):
            for position in range(context - 19):
                cache[case.block_table[b, position // 16], position % 16] = NAN
    out = attend(case, backend, sliding_window=20)
    assert torch.equal(out, want)


def test_strided_inputs(backend):
    """q as a model gives it ([B,H,T,D] transposed), both caches in one tensor, a table cut from a wider one."""
    case, _ = build("ragged")
    want = attend(case, backend)
    q = case.q.transpose(1, 2).contiguous().transpose(1, 2)
    both = torch.stack([case.k_cache, case.v_cache], dim=2)
    wide = torch.full((8, 2 * case.block_table.shape[1]), -1, dtype=torch.int32)
    wide[::2, ::2] = case.block_table
    table = wide[::2, ::2]
    out = ops.verify_attention(
        q, both[:, :, 0], both[:, :, 1], table, case.context_lens, case.query_lens, backend=backend
    )
    assert torch.equal(out, want)


def test_inputs_are_left_alone(backend):
    case, options = build("everything")
    before = [x.clone() for x in case.args]
    attend(case, backend, **options)
    for old, now in zip(before, case.args, strict=True):
        assert torch.equal(old.view(torch.uint8), now.view(torch.uint8))


def test_tree_of_a_chain_is_causal(backend, few_splits):
    """A lower-triangular mask equals causal bit for bit; a causal call after a tree call is causal (faults.md F18)."""
    case, _ = build("ragged")
    causal = attend(case, backend)
    assert torch.equal(attend(case, backend, tree_mask=tree(-1, 0, 1, 2, 3)), causal)
    attend(case, backend, tree_mask=TWO_BRANCHES)
    assert torch.equal(attend(case, backend), causal)


@pytest.mark.parametrize(("count", "keys"), [(37, 54), (17, 97)])
def test_tree_of_a_long_chain_is_causal(count, keys, backend, few_splits):
    case = paged_case([keys - count], count, dtype=torch.bfloat16)
    assert torch.equal(attend(case, backend, tree_mask=tree(-1, *range(count - 1))), attend(case, backend))


def test_highest_bit_of_a_tree_mask(backend, few_splits):
    """Bit 63 makes an int64 negative; it is a bit like any other."""
    case = paged_case([2], 64)
    mask = tree(-1, *range(63))
    assert mask[63] == -1
    out = attend(case, backend, tree_mask=mask)
    assert (out.double() - attention_oracle(case)).abs().max() < 1e-5


def test_page_beyond_2_to_the_31_elements(backend):
    """Offsets are 64-bit (faults.md F1): a key there counts as it does in page 0."""
    cache, ones = far_cache(), torch.ones(8)
    content = torch.randn(16, 8, 128).to(FP8)
    cache[0], cache[FAR_PAGE] = content, content
    q = torch.randn(1, 2, 8, 128)
    near, far = (
        ops.verify_attention(
            q, cache, cache, torch.tensor([[page]]), torch.tensor([9]), k_scale=ones, v_scale=ones, backend=backend
        )
        for page in (0, FAR_PAGE)
    )
    assert torch.equal(near, far)


@pytest.mark.parametrize("mask", [None, torch.ones(3, dtype=torch.int64)], ids=["chain", "tree"])
def test_a_cache_without_pages_serves_idle_requests(mask, backend):
    cache, nothing = torch.empty(0, 4, 2, 16), torch.zeros(2, dtype=torch.int32)
    table = torch.full((2, 3), -1)
    out = ops.verify_attention(
        torch.randn(2, 3, 4, 16), cache, cache, table, nothing, nothing, tree_mask=mask, backend=backend
    )
    assert not out.any()


def test_head_beyond_2_to_the_31_elements(backend):
    """The heads outermost in memory: the last one's offset is far, though every stride fits an int32 (faults.md F1)."""
    pages = 2**29 // (16 * 128)
    cache = torch.empty(8, pages, 16, 128, dtype=torch.uint8).view(FP8).permute(1, 2, 0, 3)
    cache[0] = torch.randn(16, 8, 128).to(FP8)
    case = torch.randn(1, 2, 8, 128), torch.tensor([[0]]), torch.tensor([9])
    far, near = (
        ops.verify_attention(
            case[0], x, x, *case[1:], k_scale=torch.ones(8), v_scale=torch.ones(8), backend=backend
        )
        for x in (cache, cache[:1].contiguous())
    )  # fmt: skip
    assert torch.equal(far, near)


def test_expanded_and_strided_small_inputs(backend):
    """Lengths expanded from one number, a mask and a table taken as every other column."""
    case = paged_case([20, 20, 20], 3, query_lens=[3, 3, 3])
    mask = TWO_BRANCHES[:3]
    want = attend(case, backend, tree_mask=mask)
    wide = torch.stack([mask, mask + 1], 1).flatten()[::2]
    table = torch.stack([case.block_table, case.block_table - 1], 2).flatten(1)[:, ::2]
    one = torch.tensor([20], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    out = ops.verify_attention(
        case.q, case.k_cache, case.v_cache, table, *(x.expand(3) for x in one), tree_mask=wide, backend=backend
    )
    assert torch.equal(out, want)


def test_query_beyond_2_to_the_31_elements(backend):
    """Offsets of rows are 64-bit too (faults.md F1)."""
    stride = 2**31 + 64
    far = torch.empty(stride + 64, dtype=torch.float16).as_strided((2, 1, 4, 16), (stride, 64, 16, 1))
    case = paged_case([9, 9], 1, dtype=torch.float16)
    far.copy_(case.q)
    out = ops.verify_attention(far, *case.args[1:], backend=backend)
    assert torch.equal(out, attend(case, backend))


# Bits.

EDGES = [0, 1, 5, KEY_TILE - 2, KEY_TILE - 1, KEY_TILE, KEY_TILE + 1, 2 * KEY_TILE - 1, 2 * KEY_TILE + 1]
SHAPES = {"3x3x64": (9, 3, 64), "71x1x16": (71, 1, 16), "4x1x80": (4, 4, 80), "2x4x128": (8, 2, 128)}
OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 100},
    "window-of-tiles": {"sliding_window": 300},
    "softcap-sinks": {"softcap": 5.0, "sinks": True},
}


class Texts:
    """Texts with known q, k, v at every position, of which any stretch can be scored in any company."""

    def __init__(self, lengths, shape, dtype=torch.float32, seed=0):
        generator = torch.Generator().manual_seed(seed)
        q_heads, kv_heads, dim = shape

        def normal(n, heads):
            return torch.randn(n, heads, dim, generator=generator).to(dtype)

        self.q, self.k, self.v = ([normal(n, heads) for n in lengths] for heads in (q_heads, kv_heads, kv_heads))
        self.sinks = torch.linspace(-1.0, 2.0, q_heads).to(dtype)

    def score(self, stretches, page_size=16, seed=0, backend="torch", **options):
        """Attention outputs of stretches (text, first position, end), scored in one call."""
        if options.get("sinks"):
            options["sinks"] = self.sinks
        lens = [end - first for _, first, end in stretches]
        q = torch.full((len(lens), max(lens), *self.q[0].shape[1:]), NAN).to(self.q[0].dtype)
        for b, (i, first, end) in enumerate(stretches):
            q[b, : lens[b]] = self.q[i][first:end]
        k, v, table = lay_out(
            [self.k[i][:end] for i, _, end in stretches],
            [self.v[i][:end] for i, _, end in stretches],
            page_size,
            seed=seed,
        )
        context = torch.tensor([first for _, first, _ in stretches])
        out = ops.verify_attention(q, k, v, table, context, torch.tensor(lens), **options, backend=backend)
        return [row[:n] for row, n in zip(out, lens, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_bits_do_not_depend_on_the_pass(shape, options, dtype):
    """faults.md A1, A7: K+1 rows or one, alone or in a batch, on any pages: the same bits."""
    texts = Texts([context + 9 for context in EDGES], shape, dtype)
    for i, context in enumerate(EDGES):
        (together,) = texts.score([(i, context, context + 9)], **options)
        for first, count in ((0, 1), (1, 1), (2, 3), (3, 5), (8, 1)):
            part = slice(first, first + count)
            (alone,) = texts.score([(i, context + first, context + part.stop)], page_size=7, seed=first, **options)
            assert torch.equal(alone, together[part]), (context, first, count)
    company = [(i, context + i % 4, context + i % 4 + 1 + i % 5) for i, context in enumerate(EDGES)]
    for (i, first, end), row in zip(company, texts.score(company, page_size=48, seed=5, **options), strict=True):
        (alone,) = texts.score([(i, first, end)], **options)
        assert torch.equal(row, alone), (i, first, end)


@pytest.mark.parametrize(
    ("window", "dtype"), [(None, torch.float32), (100, torch.bfloat16)], ids=["full-fp32", "window-100-bf16"]
)
def test_bits_of_any_number_of_rows(window, dtype, backend):
    """17 new positions across the edge of a chunk, 1, 2, 5 or 8 of them, alone or between two others (faults.md A1, A7)."""
    texts = Texts([KEY_TILE + 20, 40, 2 * KEY_TILE + 30], (2, 1, 16), dtype)
    start = KEY_TILE - 6
    (together,) = texts.score([(0, start, start + 17)], backend=backend, sliding_window=window)
    for first, count in ((6, 1), (5, 2), (3, 5), (4, 8)):
        mine = (0, start + first, start + first + count)
        company = [(1, 30 - count, 30), mine, (2, 2 * KEY_TILE - 1, 2 * KEY_TILE + 2)]
        (alone,) = texts.score([mine], page_size=7, seed=count, backend=backend, sliding_window=window)
        _, among, _ = texts.score(company, page_size=48, seed=first, backend=backend, sliding_window=window)
        assert torch.equal(alone, together[first : first + count])
        assert torch.equal(among, alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 100], ids=["full", "window-100"])
def test_bits_in_a_batch_of_64(window, dtype, backend, few_splits):
    """faults.md A7: where the splits are few, so that a program walks over several chunks."""
    texts = Texts([7 * i % 400 + 9 for i in range(64)], (2, 1, 16), dtype)
    stretches = [(i, 7 * i % 400 + i % 4, 7 * i % 400 + i % 4 + 1 + i % 5) for i in range(64)]
    rows = texts.score(stretches, backend=backend, sliding_window=window)
    for i in (0, 3, 29, 56, 63):
        (alone,) = texts.score([stretches[i]], page_size=7, backend=backend, sliding_window=window)
        assert torch.equal(rows[i], alone), stretches[i]


def test_bits_do_not_depend_on_the_number_of_threads():
    texts = Texts([700, 700, 300], (9, 3, 64))
    stretches = [(0, 690, 695), (1, 600, 601), (2, 290, 300)]
    want = texts.score(stretches)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for rows, old in zip(texts.score(stretches), want, strict=True):
            assert torch.equal(rows, old)
        for stretch, old in zip(stretches, want, strict=True):
            assert torch.equal(texts.score([stretch])[0], old)
    finally:
        torch.set_num_threads(threads)


# name: old and new tokens of each request, sliding window, the groups they are attended to in
GROUPS = {
    "alike": ([(10, 1), (200, 1), (90, 2)], None, [[0, 1, 2]]),
    "idle": ([(10, 1), (200, 0), (90, 2)], None, [[0, 2]]),
    "all-idle": ([(10, 0), (200, 0)], None, []),
    "a-pair-stays": ([(10, 5), (200, 1)], None, [[0, 1]]),
    "one-long-text": ([(10, 1), (4000, 1), (90, 1)], None, [[1], [0, 2]]),
    "long-texts-in-a-window": ([(10, 1), (4000, 1), (90, 1)], 100, [[0, 1, 2]]),
    "one-long-draft": ([(10, 1)] * 15 + [(10, 40)], None, [[15], list(range(15))]),
    "long-texts-and-a-draft": ([(300, 1)] * 8 + [(100, 5)], None, [list(range(8)), [8]]),
    "drafts-and-none": ([(10, 1), (10, 5)] * 16, None, [list(range(1, 32, 2)), list(range(0, 32, 2))]),
}


@pytest.mark.parametrize(("requests", "window", "groups"), GROUPS.values(), ids=GROUPS)
def test_groups(requests, window, groups):
    """Apart where a longer text or draft would cost the others more than a group does."""
    contexts, counts = zip(*requests, strict=True)
    plan = paging.Plan(np.zeros((len(counts), 1), np.int32), contexts, counts, max(counts), 1 << 20)
    assert reference._partition(plan, (9, 3, 64), window) == groups


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_do_not_depend_on_the_groups(dtype, options, monkeypatch):
    """faults.md A7: all in one group, or apart by every length and number of rows; one request is idle."""
    texts = Texts([context + 9 for context in EDGES], (9, 3, 64), dtype)
    company = [(i, context, context + (0, 1, 5, 9)[i % 4]) for i, context in enumerate(EDGES)]
    rows, sizes, partition = [], [], reference._partition

    def watched(*args):
        groups = partition(*args)
        sizes.append(len(groups))
        return groups

    monkeypatch.setattr(reference, "_partition", watched)
    for cost in (0, 1 << 60):
        monkeypatch.setattr(reference, "GROUP_COST", cost)
        vars(paging._latest).clear()
        rows.append(torch.cat(texts.score(company, **options)))
    vars(paging._latest).clear()
    assert sizes[0] > 4
    assert sizes[1] == 1
    assert torch.equal(*rows)


def test_order_of_requests_does_not_matter():
    """faults.md A4, G4: permuting the requests permutes the results."""
    texts = Texts([40, 20, 300], (4, 2, 16))
    stretches = [(0, 37, 40), (1, 10, 11), (2, 290, 295)]
    rows = texts.score(stretches)
    for order in itertools.permutations(range(3)):
        again = texts.score([stretches[i] for i in order])
        assert all(torch.equal(again[j], rows[i]) for j, i in enumerate(order))


# Arguments.


def good():
    return {
        "q": torch.zeros(2, 3, 4, 16),
        "k_cache": torch.zeros(5, 4, 2, 16),
        "v_cache": torch.zeros(5, 4, 2, 16),
        "block_table": torch.tensor([[0, 1], [2, 3]]),
        "context_lens": torch.tensor([1, 2]),
        "query_lens": torch.tensor([3, 1]),
    }


def fp8(**changes):
    caches = {"k_cache": torch.zeros(5, 4, 2, 16).to(FP8), "v_cache": torch.zeros(5, 4, 2, 16).to(FP8)}
    return {**caches, "k_scale": torch.ones(2), "v_scale": torch.ones(2), **changes}


BAD = {
    "q-rank": ("q", {"q": torch.zeros(2, 3, 64)}),
    "q-integer": ("q", {"q": torch.zeros(2, 3, 4, 16, dtype=torch.int64)}),
    "q-inner-stride": ("q", {"q": torch.zeros(2, 3, 16, 4).transpose(2, 3)}),
    "heads-3-of-2": ("q", {"q": torch.zeros(2, 3, 3, 16)}),  # faults.md F5
    "heads-33-of-2": ("q", {"q": torch.zeros(2, 3, 33, 16)}),
    "no-kv-heads": ("q", {"k_cache": torch.zeros(5, 4, 0, 16), "v_cache": torch.zeros(5, 4, 0, 16)}),
    "cache-head-size": ("k_cache", {"k_cache": torch.zeros(5, 4, 2, 32)}),
    "cache-dtype": ("k_cache", {"k_cache": torch.zeros(5, 4, 2, 16).half()}),
    "cache-device": ("k_cache", {"k_cache": torch.zeros(5, 4, 2, 16, device="meta")}),
    "v-shape": ("v_cache", {"v_cache": torch.zeros(5, 4, 2, 32)}),
    "v-dtype": ("v_cache", {"v_cache": torch.zeros(5, 4, 2, 16).half()}),
    "table-batch": ("block_table", {"block_table": torch.tensor([[0, 1]])}),
    "table-too-narrow": (
        "block_table",
        {"block_table": torch.tensor([[0], [1]]), "context_lens": torch.tensor([2, 2])},
    ),
    "page-negative": (r"block_table\[1,0\]", {"block_table": torch.tensor([[0, 1], [-1, 3]])}),
    "page-too-large": (r"block_table\[0,0\]", {"block_table": torch.tensor([[5, 1], [2, 3]])}),  # faults.md F10
    "context-negative": (r"context_lens\[0\]", {"context_lens": torch.tensor([-1, 2])}),
    "context-float": ("context_lens", {"context_lens": torch.tensor([1.0, 2.0])}),
    "query-negative": (r"query_lens\[1\]", {"query_lens": torch.tensor([3, -2])}),
    "query-above-T": (r"query_lens\[0\]", {"query_lens": torch.tensor([4, 1])}),  # faults.md F12
    "scale-0": ("scale", {"scale": 0.0}),
    "scale-nan": ("scale", {"scale": NAN}),
    "softcap-0": ("softcap", {"softcap": 0.0}),  # faults.md F16
    "softcap-negative": ("softcap", {"softcap": -1.0}),
    "softcap-inf": ("softcap", {"softcap": INF}),
    "softcap-nan": ("softcap", {"softcap": NAN}),
    "softcap-text": ("softcap", {"softcap": "50"}),
    "window-0": ("sliding_window", {"sliding_window": 0}),
    "window-negative": ("sliding_window", {"sliding_window": -1}),
    "window-float": ("sliding_window", {"sliding_window": 4.0}),
    "window-bool": ("sliding_window", {"sliding_window": True}),
    "tree-shape": ("tree_mask", {"tree_mask": torch.zeros(4, dtype=torch.int64)}),  # faults.md F18
    "tree-batch": ("tree_mask", {"tree_mask": torch.zeros(3, 3, dtype=torch.int64)}),
    "tree-bool": ("tree_mask", {"tree_mask": torch.ones(3, dtype=torch.bool)}),
    "tree-65": ("tree_mask", {"q": torch.zeros(2, 65, 4, 16), "tree_mask": torch.ones(65, dtype=torch.int64)}),
    "sinks-shape": ("sinks", {"sinks": torch.zeros(2)}),
    "sinks-device": ("sinks", {"sinks": torch.zeros(4, device="meta")}),
    "fp8-without-k-scale": ("k_scale", fp8(k_scale=None)),  # faults.md E13
    "fp8-without-v-scale": ("v_scale", fp8(v_scale=None)),
    "scales-shape": ("v_scale", fp8(v_scale=torch.ones(4))),
    "backend": ("backend", {"backend": "cuda"}),
}


@pytest.mark.parametrize(("named", "changes"), BAD.values(), ids=BAD)
def test_refuses(named, changes):
    with pytest.raises(ValueError, match=f"^{named} must be"):
        ops.verify_attention(**{**good(), **changes})


def test_good_arguments_are_good():
    ops.verify_attention(**good())
    ops.verify_attention(**{**good(), **fp8()})


def test_empty_batch_and_no_new_positions(backend):
    caches = torch.zeros(5, 4, 2, 16), torch.zeros(5, 4, 2, 16)
    empty = torch.zeros(0, dtype=torch.int32)
    out = ops.verify_attention(torch.zeros(0, 3, 4, 16), *caches, empty.view(0, 2), empty, backend=backend)
    assert out.shape == (0, 3, 4, 16)
    table = torch.tensor([[0]], dtype=torch.int32)
    out = ops.verify_attention(torch.zeros(1, 0, 4, 16), *caches, table, torch.tensor([2]), backend=backend)
    assert out.shape == (1, 0, 4, 16)


@pytest.mark.parametrize("name", ["ragged", "tree-window"])
def test_opcheck(name):
    case, options = build(name)
    order = ("scale", "tree_mask", "sliding_window", "softcap", "sinks")
    args = (*case.args, *(options.get(option) for option in order), case.k_scale, case.v_scale, "torch")
    args = (case.q.nan_to_num(), *args[1:])
    torch.library.opcheck(torch.ops.specdec.verify_attention.default, args)


def test_shapes_on_meta():
    out = ops.verify_attention(**{name: x.to("meta") for name, x in good().items()})
    assert (out.shape, out.dtype, out.device.type) == ((2, 3, 4, 16), torch.float32, "meta")


def test_calls_leave_nothing_behind():
    """Buffers that the CPU keeps for a pass's layers: same lengths, other modes, dtypes and scales."""
    case = paged_case([9, 35], 3, fp8=True)
    want = attention_oracle(case)
    with torch.inference_mode():
        attend(case)
    assert (attend(case).double() - want).abs().max() < 1e-5
    infinite = {"k_scale": case.k_scale, "v_scale": torch.tensor([INF, 1.0])}
    ops.verify_attention(*case.args, **infinite)
    assert (attend(case).double() - want).abs().max() < 1e-5
    torch.set_default_dtype(torch.float64)
    try:
        other = paged_case([9, 36], 3)
        for options in ({}, {"tree_mask": TWO_BRANCHES[:3]}):
            error = attend(other, **options).double() - attention_oracle(other, **options)
            assert error.abs().max() < 1e-5
    finally:
        torch.set_default_dtype(torch.float32)
    assert (attend(other).double() - attention_oracle(other)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context_lens": torch.tensor([9 + 2**32])}, "context_lens must be within torch.int32"),
        ({"block_table": torch.zeros(1, 3, dtype=torch.int64) + 2**32}, "block_table must be within torch.int32"),
        ({"sinks": torch.ones(4, dtype=torch.complex64)}, "sinks must be float32"),
        ({"k_scale": torch.ones(2, dtype=torch.bool)}, "k_scale must be float32"),
        ({"sliding_window": True}, "sliding_window must be an integer"),
    ],
)
def test_values_that_do_not_fit_their_type(change, message):
    case = paged_case([9], 3, page_size=4, fp8=True)
    names = ("q", "k_cache", "v_cache", "block_table", "context_lens", "query_lens")
    arguments = {**dict(zip(names, case.args, strict=True)), **case.scales, **change}
    with pytest.raises(ValueError, match=message):
        ops.verify_attention(**arguments)


def test_a_huge_window_is_none():
    case = paged_case([9], 3)
    assert torch.equal(attend(case, sliding_window=2**64), attend(case))
