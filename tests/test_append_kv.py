"""``append_kv``: equal means that every byte of the cache is right, those that must not change included."""

from __future__ import annotations

import pytest
import torch

from specdec_triton import ops
from specdec_triton.reference.append_kv import append_on_device
from specdec_triton.testing import FAR_PAGE, FP8, GARBAGE, NAN, SENTINEL, far_cache

OP = "append_kv"
DTYPES = [torch.float32, torch.float16, torch.bfloat16, FP8]

# name: page size, contexts, T, query_lens, (Hkv, D)
CASES = {
    "page-1": (1, [0, 3], 3, None, (2, 16)),
    "page-7-crosses": (7, [5, 6, 7], 4, None, (2, 16)),
    "page-16-ends": (16, [12, 15, 16], 4, None, (1, 64)),  # faults.md E7
    "page-48": (48, [0, 47, 100], 5, None, (3, 80)),
    "page-544": (544, [543, 1], 2, None, (1, 16)),  # faults.md F15
    "one-token": (16, [0], 1, None, (4, 128)),
    "T-0": (16, [4, 2], 0, None, (2, 16)),
    "ragged-with-0": (7, [0, 6, 13, 20], 5, [5, 0, 1, 3], (2, 16)),
    "all-idle": (7, [3, 9], 3, [0, 0], (2, 16)),  # faults.md F13
    "head-256": (5, [4, 11], 3, None, (1, 256)),
    "head-96": (3, [2, 3], 7, [7, 2], (5, 96)),
}


def problem(page_size, contexts, count, lens, shape, dtype, seed=0):
    """New k and v, a cache full of sentinels, a shuffled table with garbage past each request's length."""
    generator = torch.Generator().manual_seed(seed)
    new = torch.float32 if dtype == FP8 else dtype
    k, v = (torch.randn(len(contexts), count, *shape, generator=generator).to(new) for _ in range(2))
    counts = [count] * len(contexts) if lens is None else lens
    needed = [-(-(c + n) // page_size) if n else 0 for c, n in zip(contexts, counts, strict=True)]
    order = torch.randperm(sum(needed) + 2, generator=generator).tolist()
    table = torch.tensor([GARBAGE], dtype=torch.int32).repeat(len(contexts), max(needed) + 1)
    for b, pages in enumerate(needed):
        for i in range(pages):
            table[b, i] = order.pop()
    caches = [torch.full((sum(needed) + 2, page_size, *shape), SENTINEL).to(dtype) for _ in range(2)]
    context = torch.tensor(contexts, dtype=torch.int32)
    lens = None if lens is None else torch.tensor(lens, dtype=torch.int32)
    scales = {}
    if dtype == FP8:
        scales = {"k_scale": torch.linspace(0.01, 1.0, shape[0]), "v_scale": torch.linspace(2.0, 0.5, shape[0])}
    return k, v, caches, table, context, lens, scales


def expected(k, v, caches, table, context, lens, scales):
    """The caches after the call, one element at a time from the definition."""
    out = [cache.clone() for cache in caches]
    for cache, new, scale in zip(out, (k, v), (scales.get("k_scale"), scales.get("v_scale")), strict=True):
        page_size = cache.shape[1]
        for b in range(k.shape[0]):
            for t in range(k.shape[1] if lens is None else int(lens[b])):
                position = int(context[b]) + t
                x = new[b, t] if scale is None else (new[b, t] / scale[:, None]).clamp(-448, 448)
                cache[table[b, position // page_size], position % page_size] = x.to(cache.dtype)
    return out


def same_bytes(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_matches_definition(case, dtype, backend):
    """Covers faults.md E8 and F22 too: nothing outside the new positions changes."""
    k, v, caches, table, context, lens, scales = problem(*case, dtype)
    want = expected(k, v, caches, table, context, lens, scales)
    assert ops.append_kv(k, v, *caches, table, context, lens, **scales, backend=backend) is None
    assert same_bytes(caches[0], want[0])
    assert same_bytes(caches[1], want[1])


def test_by_hand(backend):
    """Page size 2, table [2, 0], one token cached: positions 1, 2, 3 are (2, 1), (0, 0), (0, 1)."""
    k = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1).expand(1, 3, 1, 16).contiguous()
    k_cache, v_cache = torch.zeros(3, 2, 1, 16), torch.zeros(3, 2, 1, 16)
    ops.append_kv(k, -k, k_cache, v_cache, torch.tensor([[2, 0]]), torch.tensor([1]), backend=backend)
    assert k_cache[..., 0, 0].tolist() == [[2.0, 3.0], [0.0, 0.0], [0.0, 1.0]]
    assert v_cache[..., 0, 0].tolist() == [[-2.0, -3.0], [0.0, 0.0], [0.0, -1.0]]


def test_strided_inputs(backend):
    """k as a model gives it ([B,H,T,D] transposed), both caches in one tensor, the rest cut from wider tensors."""
    k, v, caches, table, context, lens, scales = problem(*CASES["ragged-with-0"], torch.float32)
    want = expected(k, v, caches, table, context, lens, scales)
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    both = torch.stack(caches, dim=2)  # [P,S,2,Hkv,D]
    wide = torch.full((table.shape[0] * 2, table.shape[1] * 2), -1, dtype=torch.int32)
    wide[::2, ::2] = table
    context, lens = torch.stack([context, lens], 1).unbind(1)
    k_cache, v_cache = both.unbind(2)
    for keys, values in ((k_cache, v_cache), (caches[0], v_cache), (k_cache, caches[1])):
        keys.fill_(SENTINEL)
        values.fill_(SENTINEL)
        ops.append_kv(k, v, keys, values, wide[::2, ::2], context, lens, backend=backend)
        assert torch.equal(keys, want[0])
        assert torch.equal(values, want[1])


def test_other_integer_types_are_converted(backend):
    k, v, caches, table, context, lens, _ = problem(*CASES["page-7-crosses"], torch.float32)
    want = expected(k, v, caches, table, context, lens, {})
    ops.append_kv(k, v, *caches, table.long(), context.long(), torch.tensor([4, 4, 4]), backend=backend)
    assert torch.equal(caches[0], want[0])


def test_fp8_saturates(backend):
    """e4m3 has no infinity: what is beyond 448 x scale becomes the largest value, not NaN (faults.md E13)."""
    k = torch.tensor([1e6, -1e6, 1.0, 0.0]).repeat(4).view(1, 1, 1, 16)
    caches = torch.zeros(1, 1, 1, 16).to(FP8), torch.zeros(1, 1, 1, 16).to(FP8)
    scale = torch.tensor([0.5])
    ops.append_kv(k, k, *caches, torch.tensor([[0]]), torch.tensor([0]), k_scale=scale, v_scale=scale, backend=backend)
    assert caches[0].float().flatten()[:4].tolist() == [448.0, -448.0, 2.0, 0.0]


def test_page_beyond_2_to_the_31_elements(backend):
    """Offsets are 64-bit (faults.md F1): the page there receives what page 0 would."""
    cache, ones = far_cache(), torch.ones(8)
    k = torch.randn(1, 1, 8, 128)
    for page in (0, FAR_PAGE):
        args = (cache, cache, torch.tensor([[page]]), torch.tensor([3]))
        ops.append_kv(k, k, *args, k_scale=ones, v_scale=ones, backend=backend)
    assert torch.equal(cache[FAR_PAGE, 3].float(), k[0, 0].to(FP8).float())
    assert same_bytes(cache[FAR_PAGE, 3], cache[0, 3])


@pytest.mark.parametrize("dtype", [torch.float32, FP8], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_reference_without_host_reads(case, dtype):
    """What the reference does on a device; an idle request leaves page 0 to its owner."""
    k, v, caches, table, context, lens, scales = problem(*case, dtype)
    want = expected(k, v, caches, table, context, lens, scales)
    if scales:
        k, v = k / scales["k_scale"][:, None], v / scales["v_scale"][:, None]
    append_on_device(k, v, *caches, table, context, lens)
    assert all(same_bytes(cache, new) for cache, new in zip(caches, want, strict=True))


# Arguments.


def test_scales_of_a_cache_that_is_not_fp8(backend):
    """stored x scale = key there too, so that what ``verify_attention`` reads is what was given."""
    k = torch.randn(1, 2, 2, 16)
    caches, scale = torch.zeros(2, 1, 4, 2, 16), torch.tensor([0.5, 4.0])
    ops.append_kv(k, -k, *caches, torch.tensor([[0]]), torch.tensor([1]), k_scale=scale, v_scale=scale, backend=backend)
    assert torch.equal(caches[0, 0, 1:3], (k / scale[:, None])[0])
    assert torch.equal(caches[1, 0, 1:3], (-k / scale[:, None])[0])


def good():
    """Arguments that fit; each case below spoils one."""
    return {
        "k": torch.zeros(2, 3, 2, 16),
        "v": torch.zeros(2, 3, 2, 16),
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
    "k-not-a-tensor": ("k", {"k": [1.0]}),
    "k-rank": ("k", {"k": torch.zeros(2, 3, 16)}),
    "k-integer": (
        "k",
        {"k": torch.zeros(2, 3, 2, 16, dtype=torch.int32), "v": torch.zeros(2, 3, 2, 16, dtype=torch.int32)},
    ),
    "k-fp64": ("k", {"k": torch.zeros(2, 3, 2, 16).double(), "v": torch.zeros(2, 3, 2, 16).double()}),
    "k-inner-stride": ("k", {"k": torch.zeros(2, 3, 16, 2).transpose(2, 3)}),
    "v-shape": ("v", {"v": torch.zeros(2, 4, 2, 16)}),
    "v-dtype": ("v", {"v": torch.zeros(2, 3, 2, 16, dtype=torch.float16)}),
    "v-device": ("v", {"v": torch.zeros(2, 3, 2, 16, device="meta")}),
    "cache-heads": ("k_cache", {"k_cache": torch.zeros(5, 4, 3, 16)}),
    "cache-head-size": ("k_cache", {"k_cache": torch.zeros(5, 4, 2, 32)}),
    "cache-dtype": ("k_cache", {"k_cache": torch.zeros(5, 4, 2, 16, dtype=torch.bfloat16)}),
    "caches-differ": ("v_cache", {"v_cache": torch.zeros(6, 4, 2, 16)}),
    "cache-page-size-0": ("k_cache", {"k_cache": torch.zeros(5, 0, 2, 16), "v_cache": torch.zeros(5, 0, 2, 16)}),
    "cache-inner-stride": ("k_cache", {"k_cache": torch.zeros(5, 4, 16, 2).transpose(2, 3)}),
    "table-batch": ("block_table", {"block_table": torch.tensor([[0, 1]])}),
    "table-float": ("block_table", {"block_table": torch.zeros(2, 2)}),
    "table-too-narrow": (
        "block_table",
        {"block_table": torch.tensor([[0], [1]]), "context_lens": torch.tensor([2, 2])},
    ),
    "page-negative": (r"block_table\[0,0\]", {"block_table": torch.tensor([[-1, 1], [2, 3]])}),
    "page-too-large": (r"block_table\[1,0\]", {"block_table": torch.tensor([[0, 1], [5, 3]])}),  # faults.md F10
    "context-negative": (r"context_lens\[1\]", {"context_lens": torch.tensor([0, -1])}),
    "context-batch": ("context_lens", {"context_lens": torch.tensor([0])}),
    "context-bool": ("context_lens", {"context_lens": torch.tensor([True, False])}),
    "query-negative": (r"query_lens\[0\]", {"query_lens": torch.tensor([-1, 1])}),
    "query-above-T": (r"query_lens\[1\]", {"query_lens": torch.tensor([3, 4])}),
    "fp8-without-k-scale": ("k_scale", fp8(k_scale=None)),  # faults.md E13
    "fp8-without-v-scale": ("v_scale", fp8(v_scale=None)),
    "scale-shape": ("k_scale", fp8(k_scale=torch.ones(1))),
    "backend": ("backend", {"backend": "cuda"}),
}


@pytest.mark.parametrize(("named", "changes"), BAD.values(), ids=BAD)
def test_refuses(named, changes):
    """The error names the argument, and the caches stay as they were."""
    args = {**good(), **changes}
    before = [args[name].float().clone() for name in ("k_cache", "v_cache")]
    with pytest.raises(ValueError, match=f"^{named} must be"):
        ops.append_kv(**args)
    for name, old in zip(("k_cache", "v_cache"), before, strict=True):
        assert torch.equal(args[name].float(), old)


def test_good_arguments_are_good():
    ops.append_kv(**good())
    ops.append_kv(**{**good(), **fp8()})


@pytest.mark.parametrize("lens", [None, [3, 1]], ids=["full", "ragged"])
def test_opcheck(lens):
    k, v, caches, table, context, lens, _ = problem(4, [1, 2], 3, lens, (2, 16), torch.float32)
    args = (k, v, *caches, table, context, lens, None, None, "torch")
    torch.library.opcheck(torch.ops.specdec.append_kv.default, args)


def test_runs_on_meta():
    meta = {name: x.to("meta") for name, x in good().items()}
    assert ops.append_kv(**meta) is None


def test_nan_is_stored_as_nan(backend):
    """The op moves values, it does not judge them."""
    k = torch.full((1, 1, 1, 16), NAN)
    caches = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 1, 16)
    ops.append_kv(k, k, *caches, torch.tensor([[0]]), torch.tensor([0]), backend=backend)
    assert caches[0].isnan().all()
