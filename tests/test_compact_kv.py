"""``compact_kv``: equal means that every byte of the caches is right, those that must not change included."""

from __future__ import annotations

import random

import pytest
import torch

from specdec_triton import ops
from specdec_triton._library import why_not_triton
from specdec_triton.interpreter import counted
from specdec_triton.testing import FAR_PAGE, FP8, GARBAGE, NAN, far_cache

OP = "compact_kv"
DTYPES = [torch.float32, torch.float16, torch.bfloat16, FP8]

# name: page size, contexts, paths, number of nodes, (Hkv, D)
CASES = {
    "page-1": (1, [0, 3], [[0, 2, 3], [0, 1, 4]], 5, (2, 16)),
    "page-2-crosses": (2, [5, 6], [[0, 3, 4, 6], [0, 2]], 7, (3, 64)),
    "page-16-ends": (16, [12, 15, 16], [[0, 5, 6], [0, 1, 9], [0, 2]], 10, (1, 80)),
    "page-48": (48, [47, 40], [[0, 2, 4, 6, 8], [0, 8]], 9, (8, 128)),
    "page-544": (544, [543, 1], [[0, 2], [0, 1, 3]], 4, (1, 16)),  # faults.md F15
    "chain": (7, [3, 6], [[0, 1, 2, 3], [0, 1]], 4, (2, 16)),
    "root-only": (7, [3], [[0]], 4, (2, 16)),
    "ragged-with-0": (7, [0, 6, 13], [[], [0, 4], []], 5, (2, 16)),  # faults.md F13
    "every-row-moves": (3, [4], [[2, 3, 5, 7]], 8, (5, 96)),
    "last-node": (16, [8], [[0, 63]], 64, (2, 16)),
    "head-256": (5, [4], [[0, 2, 3]], 4, (3, 256)),
}


def problem(page_size, contexts, paths, nodes, shape, dtype, seed=0):
    """Caches with NaN where nothing lies, a shuffled table with garbage where no position of a path lies."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-(context + nodes) // page_size) for context in contexts]
    order = torch.randperm(sum(needed) + 2, generator=generator).tolist()
    table = torch.tensor([GARBAGE], dtype=torch.int32).repeat(len(contexts), max(needed) + 1)[:, : max(needed) + 2]
    caches = [torch.full((len(order), page_size, *shape), NAN).to(dtype) for _ in range(2)]
    path = torch.full((len(contexts), nodes), -1, dtype=torch.int32)
    for b, (context, row) in enumerate(zip(contexts, paths, strict=True)):
        path[b, : len(row)] = torch.tensor(row, dtype=torch.int32)
        used = {(context + x) // page_size for x in [*row, *range(len(row))]}
        pages = [order.pop() for _ in range(needed[b])]
        for position in range(context + nodes):
            for cache in caches:
                cache[pages[position // page_size], position % page_size] = torch.randn(shape, generator=generator).to(
                    dtype
                )
        for index in used:
            table[b, index] = pages[index]
    return caches, table, torch.tensor(contexts, dtype=torch.int32), path


def expected(caches, table, contexts, paths):
    """The caches' bytes after the call: each row from a copy of what was there before."""
    out = []
    for cache in caches:
        old, new = raw(cache).clone(), raw(cache).clone()
        size = cache.shape[1]
        for b, (context, row) in enumerate(zip(contexts, paths, strict=True)):
            for i, node in enumerate(row):
                to, source = context + i, context + node
                new[table[b, to // size], to % size] = old[table[b, source // size], source % size]
        out.append(new)
    return out


def raw(x):
    return x.view(torch.uint8)


@pytest.mark.parametrize("given", [False, True], ids=["padded", "path_lens"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_matches_definition(case, dtype, given, backend):
    """With path_lens, what follows a path's end is garbage that nobody reads."""
    caches, table, context, path = problem(*case, dtype)
    want = expected(caches, table, case[1], case[2])
    lens = None
    if given:
        lens = torch.tensor([len(row) for row in case[2]], dtype=torch.int32)
        path[path < 0] = 1 << 20
    assert ops.compact_kv(*caches, table, context, path, lens, backend=backend) is None
    assert all(torch.equal(raw(cache), new) for cache, new in zip(caches, want, strict=True))


def test_random_trees(backend):
    """Any increasing path, any page size, any lengths."""
    rng = random.Random(5)
    for seed in range(25):
        batch, nodes = rng.randint(1, 3), rng.randint(1, 12)
        contexts = [rng.randint(0, 20) for _ in range(batch)]
        paths = [sorted(rng.sample(range(nodes), rng.randint(0, nodes))) for _ in range(batch)]
        case = (rng.randint(1, 9), contexts, paths, nodes, (rng.randint(1, 3), rng.choice([16, 24])))
        caches, table, context, path = problem(*case, torch.bfloat16, seed=seed)
        want = expected(caches, table, contexts, paths)
        ops.compact_kv(*caches, table, context, path, backend=backend)
        assert all(torch.equal(raw(cache), new) for cache, new in zip(caches, want, strict=True)), case


@pytest.mark.skipif(why_not_triton(OP, "cpu") is not None, reason="counts what the kernel reads")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_reads_and_writes_what_moves(case):
    """Each row that moves once, the others never, and nothing outside the arguments."""
    caches, table, context, path = problem(*case, torch.bfloat16)
    with counted() as traffic:
        ops.compact_kv(*caches, table, context, path, backend="triton")
    moved = sum(i != node for row in case[2] for i, node in enumerate(row)) * caches[0][0, 0].numel() * 2
    mine = traffic["_compact_kv_kernel"]
    for name in ("k_cache_ptr", "v_cache_ptr"):
        assert (mine.loaded[name], mine.stored[name], mine.distinct(name)) == (moved, moved, moved)


def test_by_hand(backend):
    """Page size 2, table [2, 0], one token of context: nodes 0 to 2 lie at (2, 1), (0, 0), (0, 1)."""
    k_cache = torch.tensor([11.0, 12.0, 0.0, 0.0, 9.0, 10.0]).view(3, 2, 1, 1).expand(3, 2, 1, 16).contiguous()
    v_cache = -k_cache
    args = (torch.tensor([[2, 0]]), torch.tensor([1]), torch.tensor([[0, 2, -1]]))
    ops.compact_kv(k_cache, v_cache, *args, backend=backend)
    assert k_cache[..., 0, 0].tolist() == [[12.0, 12.0], [0.0, 0.0], [9.0, 10.0]]
    assert torch.equal(v_cache, -k_cache)


@pytest.mark.parametrize("dtype", [torch.float32, FP8], ids=str)
def test_strided_inputs(dtype, backend):
    """Keys with heads before slots, values with slots before heads, guard lanes; tables and lengths cut from others."""
    case = CASES["page-2-crosses"]
    caches, table, context, path = problem(*case, dtype)
    want = expected(caches, table, case[1], case[2])
    pages, size, heads, dim = caches[0].shape
    both = torch.full((2, pages, heads, size, dim + 3), NAN).to(dtype)
    views = both[0, ..., :dim].transpose(1, 2), both[1].view(pages, size, heads, dim + 3)[..., :dim]
    for view, cache in zip(views, caches, strict=True):
        view.copy_(cache)
    guards = raw(both[..., dim:].contiguous()).clone()
    wide = torch.full((table.shape[0], table.shape[1] * 2), -1, dtype=torch.int32)
    wide[:, ::2] = table
    context, lens = torch.stack([context, torch.tensor([len(row) for row in case[2]])], 1).int().unbind(1)
    ops.compact_kv(*views, wide[:, ::2], context, path.T.contiguous().T, lens, backend=backend)
    assert all(torch.equal(raw(view.contiguous()), new) for view, new in zip(views, want, strict=True))
    assert torch.equal(raw(both[..., dim:].contiguous()), guards)


def test_other_integer_types_are_converted(backend):
    case = CASES["page-1"]
    caches, table, context, path = problem(*case, torch.float32)
    want = expected(caches, table, case[1], case[2])
    ops.compact_kv(*caches, table.long(), context.long(), path.long(), torch.tensor([3, 3]), backend=backend)
    assert torch.equal(raw(caches[0]), want[0])


@pytest.mark.parametrize("pages", [[0, FAR_PAGE], [FAR_PAGE, 0]], ids=["from", "to"])
def test_page_beyond_2_to_the_31_elements(pages, backend):
    """Offsets are 64-bit (faults.md F1): node 16, in the second page, moves to the first."""
    cache, path = far_cache(), torch.full((1, 17), -1)
    path[0, :2] = torch.tensor([0, 16])
    row = torch.randint(0, 255, (8, 128), dtype=torch.uint8)
    raw(cache)[pages[0], 1] = 0
    raw(cache)[pages[1], 0] = row
    ops.compact_kv(cache, far_cache(), torch.tensor([pages]), torch.tensor([0]), path, backend=backend)
    assert torch.equal(raw(cache)[pages[0], 1], row)


@pytest.mark.parametrize(("batch", "nodes"), [(0, 3), (2, 0)])
def test_nothing_to_do(batch, nodes, backend):
    caches = torch.zeros(2, 4, 2, 16), torch.zeros(2, 4, 2, 16)
    args = (torch.zeros(batch, 1).int(), torch.zeros(batch).int(), torch.zeros(batch, nodes).int())
    ops.compact_kv(*caches, *args, backend=backend)
    assert not caches[0].any()


def good():
    """Arguments that fit; each case below spoils one."""
    return {
        "k_cache": torch.ones(5, 4, 2, 16),
        "v_cache": torch.ones(5, 4, 2, 16),
        "block_table": torch.tensor([[0, 1], [2, 3]]),
        "context_lens": torch.tensor([1, 4]),
        "path": torch.tensor([[0, 2, 3, -1], [0, 1, 3, -1]]),
        "path_lens": torch.tensor([3, 3]),
    }


BAD = {
    "cache-rank": ("k_cache", {"k_cache": torch.zeros(5, 4, 32)}),
    "cache-integer": ("k_cache", {name: torch.zeros(5, 4, 2, 16).int() for name in ("k_cache", "v_cache")}),
    "cache-inner-stride": ("k_cache", {"k_cache": torch.zeros(5, 4, 16, 2).transpose(2, 3)}),
    "caches-differ": ("v_cache", {"v_cache": torch.zeros(6, 4, 2, 16)}),
    "caches-dtypes": ("v_cache", {"v_cache": torch.zeros(5, 4, 2, 16).half()}),
    "table-batch": ("block_table", {"block_table": torch.tensor([[0, 1]])}),
    "table-float": ("block_table", {"block_table": torch.zeros(2, 2)}),
    "table-too-narrow": ("block_table", {"block_table": torch.tensor([[0], [2]])}),
    "page-negative": (r"block_table\[1,1\]", {"block_table": torch.tensor([[0, 1], [2, -1]])}),
    "page-too-large": (r"block_table\[0,0\]", {"block_table": torch.tensor([[5, 1], [2, 3]])}),  # faults.md F10
    "context-negative": (r"context_lens\[1\]", {"context_lens": torch.tensor([1, -1])}),
    "context-batch": ("context_lens", {"context_lens": torch.tensor([1])}),
    "path-not-a-tensor": ("path", {"path": [[0, 1]]}),
    "path-rank": ("path", {"path": torch.tensor([0, 1])}),
    "path-float": ("path", {"path": torch.zeros(2, 4)}),
    "path-device": ("path", {"path": torch.zeros(2, 4, device="meta").int()}),
    "path-repeats": (r"path\[1,2\]", {"path": torch.tensor([[0, 2, 3, -1], [0, 2, 2, -1]])}),
    "path-decreases": (r"path\[0,1\]", {"path": torch.tensor([[2, 0, 3, -1], [0, 1, 2, -1]])}),
    "path-beyond-N": (r"path\[0,2\]", {"path": torch.tensor([[0, 2, 4, -1], [0, 1, 3, -1]])}),
    "path-negative": (r"path\[1,1\]", {"path": torch.tensor([[0, 2, 3, -1], [0, -1, 3, -1]])}),  # faults.md F22
    "lens-batch": ("path_lens", {"path_lens": torch.tensor([3])}),
    "lens-above-N": (r"path_lens\[0\]", {"path_lens": torch.tensor([5, 3])}),
    "lens-negative": (r"path_lens\[1\]", {"path_lens": torch.tensor([3, -1])}),
    "backend": ("backend", {"backend": "cuda"}),
}


@pytest.mark.parametrize(("named", "changes"), BAD.values(), ids=BAD)
def test_refuses(named, changes):
    with pytest.raises(ValueError, match=f"^{named} must be"):
        ops.compact_kv(**{**good(), **changes})


def test_good_arguments_are_good():
    ops.compact_kv(**good())
    ops.compact_kv(**{**good(), "path_lens": None})


def test_a_path_ends_at_its_first_negative_entry(backend):
    """Even where entries follow that would be nodes."""
    args = {**good(), "path": torch.tensor([[0, -1, 3, 2], [-1, 2, 3, 0]]), "path_lens": None}
    args["k_cache"].copy_(torch.arange(20.0).view(5, 4, 1, 1))
    before = args["k_cache"].clone()
    ops.compact_kv(**args, backend=backend)
    assert torch.equal(args["k_cache"], before)


@pytest.mark.parametrize("lens", [None, [3, 2]], ids=["padded", "path_lens"])
def test_opcheck(lens):
    caches, table, context, path = problem(2, [5, 6], [[0, 3, 4], [0, 2, 5]], 7, (2, 16), torch.float32)
    lens = None if lens is None else torch.tensor(lens, dtype=torch.int32)
    torch.library.opcheck(torch.ops.specdec.compact_kv.default, (*caches, table, context, path, lens, "torch"))


def test_runs_on_meta():
    assert ops.compact_kv(**{name: x.to("meta") for name, x in good().items()}) is None
