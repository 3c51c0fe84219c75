"""What the kernels touch, seen from inside the interpreter: nothing outside their tensors, no output left unwritten, and
keys and values read once.
"""

from __future__ import annotations

import importlib

import pytest
import torch

from specdec_triton import ops
from specdec_triton._library import why_not_triton
from specdec_triton.interpreter import counted
from specdec_triton.testing import FP8, assert_guards, guarded, lay_out, paged_case, poisoned_outputs

REASON = why_not_triton("verify_attention", "cpu")
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

ATTEND, MERGE = "_verify_attention_kernel", "_merge_splits_kernel"
BLOCK_M = 32  # rows of a tile where keys are counted
TREE = torch.tensor([1, 3, 5, 11, 21])


def launches(traffic):
    return {name: of.launches for name, of in traffic.items()}


def guard(*tensors, padding=8):
    """Guarded copies; what is not a tensor stays what it is."""
    return [guarded(x, padding=padding) if isinstance(x, torch.Tensor) else x for x in tensors]


def same_bytes(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


# name: (arguments of paged_case, options)
ATTENTION = {
    "page-edges": ({"context_lens": [0, 1, 15, 16, 33], "new": 3, "kv_heads": 1}, {}),
    "ragged": ({"context_lens": [12, 0, 7, 30], "new": 5, "query_lens": [5, 1, 0, 3], "page_size": 7}, {}),
    "all-idle": ({"context_lens": [3, 0], "new": 2, "query_lens": [0, 0]}, {}),
    "window": ({"context_lens": [300, 3], "new": 2, "page_size": 48}, {"sliding_window": 20}),
    "head-80-bf16": ({"context_lens": [9, 2], "new": 3, "dim": 80, "dtype": torch.bfloat16}, {}),
    "group-7": ({"context_lens": [260], "new": 5, "q_heads": 7, "kv_heads": 1}, {}),
    "everything": (
        {"context_lens": [60, 0, 9], "new": 5, "query_lens": [5, 2, 4], "page_size": 7, "fp8": True},
        {"tree_mask": TREE, "sliding_window": 6, "softcap": 3.0, "sinks": torch.ones(4), "scale": 0.3},
    ),
}


@pytest.mark.parametrize(("shape", "options"), ATTENTION.values(), ids=ATTENTION)
def test_verify_attention_stays_inside(shape, options):
    """faults.md F10, F22: rows of every input lie apart, with NaN and garbage between and around them."""
    case = paged_case(**shape)
    options = {**case.scales, **options}
    with counted():
        want = ops.verify_attention(*case.args, **options, backend="triton")
    inputs, extras = guard(*case.args), dict(zip(options, guard(*options.values()), strict=True))
    with counted() as traffic, poisoned_outputs():
        out = ops.verify_attention(*inputs, **extras, backend="triton")
    assert torch.equal(out, want)
    assert launches(traffic) == {ATTEND: 1, MERGE: 1}
    assert_guards(*[x for x in (*inputs, *extras.values()) if isinstance(x, torch.Tensor)])


def expected_keys(case, group, window):
    """Keys that the row tiles of each KV head must read, and those among them that are different ones."""
    total = different = 0
    for context, n in zip(case.context_lens.tolist(), case.query_lens.tolist(), strict=True):
        start = 0 if window is None else max(context - window + 1, 0)
        tiles = range(0, n * group, BLOCK_M)
        ends = [min(context + n, context + (row + BLOCK_M - 1) // group + 1) for row in tiles]
        total += sum(end - start for end in ends)
        different += max(ends, default=start) - start
    return total, different


TRAFFIC = {
    "one-head-per-group": ({"context_lens": [300, 20], "new": 5, "q_heads": 2}, None),
    "many-heads-per-group": ({"context_lens": [300, 20], "new": 5, "q_heads": 12}, None),
    "two-row-tiles": ({"context_lens": [40, 3], "new": 17, "q_heads": 6}, None),
    "ragged": ({"context_lens": [40, 3, 9, 270], "new": 5, "query_lens": [5, 1, 0, 2], "page_size": 7}, None),
    "window": ({"context_lens": [530, 3], "new": 3, "page_size": 7}, 20),
    "window-two-row-tiles": ({"context_lens": [270], "new": 30, "page_size": 7}, 20),
    "head-80": ({"context_lens": [40], "new": 3, "dim": 80, "dtype": torch.bfloat16}, None),
    "fp8": ({"context_lens": [40, 9], "new": 3, "fp8": True}, None),
}


@pytest.mark.parametrize(("shape", "window"), TRAFFIC.values(), ids=TRAFFIC)
def test_verify_attention_reads_each_key_once(shape, window, monkeypatch):
    """Once for each (KV head, row tile), not once for each query head; nothing below the window or past the length."""
    kernels = importlib.import_module("specdec_triton.kernels.verify_attention")
    usual = kernels.attention_config
    monkeypatch.setattr(kernels, "attention_config", lambda *shape: usual(*shape)._replace(block_m=BLOCK_M))
    case = paged_case(**shape)
    heads, dim = case.q.shape[2:]
    page_size, kv_heads = case.k_cache.shape[1:3]
    group = heads // kv_heads
    with counted() as traffic:
        out = ops.verify_attention(*case.args, **case.scales, sliding_window=window, backend="triton")
    attend, merge = traffic[ATTEND], traffic[MERGE]
    assert launches(traffic) == {ATTEND: 1, MERGE: 1}

    total, different = expected_keys(case, group, window)
    row = kv_heads * dim * case.k_cache.element_size()
    for cache in ("k_cache_ptr", "v_cache_ptr"):
        assert attend.loaded[cache] == total * row
        assert attend.distinct(cache) == different * row
    pages = 0
    for context, n in zip(case.context_lens.tolist(), case.query_lens.tolist(), strict=True):
        start = 0 if window is None else max(context - window + 1, 0)
        pages += -(-(context + n) // page_size) - start // page_size if n else 0
    assert attend.distinct("block_table_ptr") == 4 * pages
    assert attend.distinct("q_ptr") == int(case.query_lens.sum()) * heads * dim * case.q.element_size()

    assert merge.loaded["partial_ptr"] == attend.stored["partial_ptr"]  # what was written is read, once
    assert merge.loaded["stats_ptr"] == attend.stored["stats_ptr"]
    assert merge.stored["out_ptr"] == out.numel() * out.element_size()


def test_verifying_takes_the_programs_of_decoding():
    """faults.md F21: five positions run on the split kernel, like one, and read the keys as often."""
    seen = []
    for new in (1, 5):
        case = paged_case([260 - new], new, q_heads=6)
        with counted() as traffic:
            ops.verify_attention(*case.args, backend="triton")
        seen.append((traffic[ATTEND].grid, traffic[ATTEND].loaded["k_cache_ptr"]))
    assert seen[0] == seen[1]


def test_idle_requests_cost_nothing():
    """faults.md F13: of a request without new positions not even a table entry is read."""
    case = paged_case([40, 9], 2, query_lens=[0, 0])
    with counted() as traffic:
        ops.verify_attention(*case.args, backend="triton")
    assert set(traffic[ATTEND].loaded) == {"context_lens_ptr", "query_lens_ptr"}
    assert not traffic[ATTEND].stored
    assert set(traffic[MERGE].loaded) == {"context_lens_ptr", "query_lens_ptr"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize(("heads", "dim"), [(2, 16), (3, 80), (9, 128)])
def test_append_kv_writes_each_slot_once(heads, dim, dtype):
    """faults.md E8, F22: the new slots and nothing else, of an idle request none."""
    contexts, lens = torch.tensor([5, 0, 6, 13]), torch.tensor([3, 0, 1, 2])
    new = torch.float32 if dtype == FP8 else dtype
    k, v = torch.randn(2, 4, 3, heads, dim).to(new)
    empty = [torch.zeros(int(c + n), heads, dim).to(dtype) for c, n in zip(contexts, lens, strict=True)]
    *caches, table = lay_out(empty, empty, page_size=7)
    want = [cache.clone() for cache in caches]
    scales = {"k_scale": torch.rand(heads) + 0.1, "v_scale": torch.rand(heads) + 0.1} if dtype == FP8 else {}
    ops.append_kv(k, v, *want, table, contexts, lens, **scales, backend="torch")
    inputs, extras = (
        guard(k, v, *caches, table, contexts, lens),
        dict(zip(scales, guard(*scales.values()), strict=True)),
    )
    with counted() as traffic, poisoned_outputs():
        ops.append_kv(*inputs, **extras, backend="triton")
    assert_guards(*inputs, *extras.values())
    assert same_bytes(inputs[2], want[0])
    assert same_bytes(inputs[3], want[1])
    assert launches(traffic) == {"_append_kv_kernel": 1}
    mine, elements = traffic["_append_kv_kernel"], int(lens.sum()) * heads * dim
    for name in ("k", "v"):
        assert mine.loaded[f"{name}_ptr"] == mine.distinct(f"{name}_ptr") == elements * k.element_size()
        assert mine.stored[f"{name}_cache_ptr"] == elements * caches[0].element_size()


def test_ngram_propose_stays_inside():
    """Texts lie apart with garbage between them; a text's own tokens are all that is read, every output is written."""
    texts = torch.randint(0, 3, (4, 30))
    lens = torch.tensor([30, 1, 0, 17], dtype=torch.int32)
    texts[0, 29], texts[3, 16] = texts[0, 0], texts[3, 0]  # a match that would reach back past the text's beginning
    want = ops.ngram_propose(texts, lens, 5, backend="torch")
    tokens, own = guard(texts, lens)
    with counted() as traffic, poisoned_outputs():
        drafts, found = ops.ngram_propose(tokens, own, 5, backend="triton")
    assert torch.equal(drafts, want[0])
    assert torch.equal(found, want[1])
    assert_guards(tokens, own)
    mine = traffic["_ngram_propose_kernel"]
    assert mine.distinct("tokens_ptr") <= 8 * int(lens.sum())
    assert mine.stored == {"draft_tokens_ptr": drafts.numel() * 8, "draft_lens_ptr": found.numel() * 4}
