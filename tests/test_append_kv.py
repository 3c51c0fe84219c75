"""``append_kv``: equal means that every byte of the cache is right, those that must not change included.

Rotated keys are judged by fp64: their error is at most twice that of PyTorch in the keys' dtype.
"""

from __future__ import annotations

import importlib

import pytest
import torch

from specdec_triton import ops
from specdec_triton._library import why_not_triton
from specdec_triton.interpreter import counted
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


# Rotary embedding.

# name: case, R
ROTARY = {
    "whole": ((16, [14, 3], 4, [4, 1], (4, 128)), 128),
    "partial": ((7, [5, 6, 7], 4, [4, 0, 3], (3, 80)), 32),
    "partial-20-of-80": ((1, [2], 3, None, (2, 80)), 20),
    "head-96": ((48, [47, 0], 2, None, (5, 96)), 96),
    "head-256-partial": ((5, [4], 2, None, (1, 256)), 64),
    "odd-head": ((16, [3], 2, None, (2, 17)), 6),
    "one-pair": ((16, [0], 1, None, (1, 16)), 2),
}


def factors(k, rotary, dtype, batch=None, seed=1):
    """cos and sin of angles that differ in every lane, so that a wrong lane shows."""
    generator = torch.Generator().manual_seed(seed)
    angle = torch.rand(batch or len(k), k.shape[1], rotary, generator=generator, dtype=torch.float64) * 6.3
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotated(k, cos, sin, interleaved, dtype):
    """Pair by pair from the definition, every intermediate in ``dtype``."""
    out, rotary = k.to(dtype, copy=True), cos.shape[-1]
    cos, sin = (x.to(dtype)[:, :, None] for x in (cos, sin))
    for pair in range(rotary // 2):
        i, j = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + rotary // 2)
        x, y = k[..., i].to(dtype), k[..., j].to(dtype)
        out[..., i] = x * cos[..., i] - y * sin[..., i]
        out[..., j] = y * cos[..., j] + x * sin[..., j]
    return out


def stored(cache, table, context, lens, like, scale=None):
    """What lies at the new positions, fp64 ``[B,T,Hkv,D]``; 0 past query_lens. Blanks them out in the cache."""
    out, size = torch.zeros(like.shape, dtype=torch.float64), cache.shape[1]
    for b in range(len(like)):
        for t in range(like.shape[1] if lens is None else int(lens[b])):
            position = int(context[b]) + t
            row = cache[table[b, position // size], position % size]
            out[b, t] = row.double() if scale is None else row.double() * scale.double()[:, None]
            row.copy_(torch.full(row.shape, SENTINEL).to(cache.dtype))
    return out


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("case", "rotary"), ROTARY.values(), ids=ROTARY)
def test_rotates_keys(case, rotary, dtype, interleaved, backend):
    """The keys' first R lanes turn; the other lanes and v are stored as they are, and nothing else is written."""
    k, v, caches, table, context, lens, scales = problem(*case, dtype)
    cos, sin = factors(k, rotary, k.dtype)
    turns = {"cos": cos, "sin": sin, "interleaved": interleaved}
    plain = expected(k, v, caches, table, context, lens, scales)
    before = caches[0].clone()
    ops.append_kv(k, v, *caches, table, context, lens, **scales, **turns, backend=backend)
    assert same_bytes(caches[1], plain[1])
    assert same_bytes(caches[0][..., rotary:].contiguous(), plain[0][..., rotary:].contiguous())
    scale = scales.get("k_scale")
    got = stored(caches[0], table, context, lens, k, scale)
    assert same_bytes(caches[0], before)
    yardstick = expected(rotated(k, cos, sin, interleaved, k.dtype), v, [before, before], table, context, lens, scales)
    torchs = stored(yardstick[0], table, context, lens, k, scale)
    truth = rotated(k, cos, sin, interleaved, torch.float64)
    if lens is not None:
        truth[torch.arange(k.shape[1]) >= lens[:, None]] = 0
    assert (got - truth).abs().max() <= 2 * (torchs - truth).abs().max()


@pytest.mark.skipif(why_not_triton(OP, "cpu") is not None, reason="counts what the kernel reads")
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(("case", "rotary"), ROTARY.values(), ids=ROTARY)
def test_reads_and_writes_once(case, rotary, interleaved):
    """Keys and values in use once, but for the partners of halves, which are near; nothing outside the arguments."""
    k, v, caches, table, context, lens, _ = problem(*case, torch.bfloat16)
    turns = dict(zip(("cos", "sin"), factors(k, rotary, k.dtype), strict=True), interleaved=interleaved)
    with counted() as traffic:
        ops.append_kv(k, v, *caches, table, context, lens, **turns, backend="triton")
    mine = traffic["_append_kv_kernel"]
    rows = (k.shape[0] * k.shape[1] if lens is None else int(lens.sum())) * k.shape[2] * 2
    size = rows * k.shape[3]
    assert mine.distinct("k_ptr") == mine.loaded["v_ptr"] == size
    assert mine.loaded["k_ptr"] == size + (0 if interleaved else rows * rotary)
    assert mine.stored == {"k_cache_ptr": size, "v_cache_ptr": size}


# transformers' model type: its class prefix, settings, R of D = 64, interleaved
MODELS = {
    "llama": ("Llama", {}, 64, False),
    "gpt_neox": ("GPTNeoX", {"rotary_pct": 0.25}, 16, False),
    "cohere": ("Cohere", {}, 64, True),
    "glm": ("Glm", {"partial_rotary_factor": 0.5, "head_dim": 64}, 32, True),
}


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_rotates_as_transformers(kind, dtype, backend):
    """With cos and sin from the model's own module: at most as far from fp64 as its own apply_rotary_pos_emb."""
    from transformers import AutoConfig

    prefix, settings, rotary, interleaved = MODELS[kind]
    config = AutoConfig.for_model(kind, hidden_size=256, num_attention_heads=4, num_key_value_heads=2, **settings)
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    k, v, caches, table, context, lens, _ = problem(16, [14], 4, None, (2, 64), dtype)
    cos, sin = getattr(module, f"{prefix}RotaryEmbedding")(config)(k, (context[:, None] + torch.arange(4)))
    assert cos.shape == (1, 4, rotary)
    theirs = module.apply_rotary_pos_emb(k, k, cos, sin, unsqueeze_dim=2)[1]
    if kind == "glm":
        cos, sin = (x[..., : rotary // 2].repeat_interleave(2, -1) for x in (cos, sin))
    ops.append_kv(k, v, *caches, table, context, lens, cos=cos, sin=sin, interleaved=interleaved, backend=backend)
    ours = stored(caches[0], table, context, lens, k)
    truth = rotated(k, cos, sin, interleaved, torch.float64)
    assert (ours - truth).abs().max() <= (theirs - truth).abs().max()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_factors_of_any_layout_and_dtype(dtype, backend):
    """One row for all requests, [1,T,R], is that row repeated; cut from a wider tensor it is the same too."""
    k, v, caches, table, context, lens, _ = problem(*CASES["ragged-with-0"], torch.bfloat16)
    cos, sin = factors(k, 16, dtype, batch=1)
    whole = (cos.repeat(len(k), 1, 1), sin.repeat(len(k), 1, 1))
    both = torch.cat([cos, sin], -1)
    results = []
    for c, s in (whole, (cos, sin), (both[..., :16], both[..., 16:]), (cos.expand_as(whole[0]), whole[1])):
        new = [cache.clone() for cache in caches]
        ops.append_kv(k, v, *new, table, context, lens, cos=c, sin=s, backend=backend)
        results.append(new[0])
    assert all(same_bytes(results[0], other) for other in results[1:])
    assert not same_bytes(results[0], expected(k, v, caches, table, context, lens, {})[0])


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


def turn(**changes):
    return {"cos": torch.ones(2, 3, 16), "sin": torch.ones(1, 3, 16), **changes}


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
    "cos-alone": ("sin", {"cos": torch.ones(2, 3, 16)}),
    "sin-alone": ("cos", {"sin": torch.ones(2, 3, 16)}),
    "cos-batch": ("cos", turn(cos=torch.ones(3, 3, 16))),
    "cos-T": ("cos", turn(cos=torch.ones(2, 4, 16))),
    "cos-rank": ("cos", turn(cos=torch.ones(3, 16))),
    "cos-odd": ("cos", turn(cos=torch.ones(2, 3, 15))),
    "cos-empty": ("cos", turn(cos=torch.ones(2, 3, 0))),
    "cos-beyond-D": ("cos", turn(cos=torch.ones(2, 3, 18))),
    "cos-integer": ("cos", turn(cos=torch.ones(2, 3, 16).int())),
    "cos-inner-stride": ("cos", turn(cos=torch.ones(2, 16, 3).transpose(1, 2))),
    "sin-size": ("sin", turn(sin=torch.ones(2, 3, 8))),
    "sin-device": ("sin", turn(sin=torch.ones(2, 3, 16, device="meta"))),
    "interleaved": ("interleaved", turn(interleaved=1)),
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
    ops.append_kv(**{**good(), **turn()})


@pytest.mark.parametrize("rotary", [None, 8], ids=["plain", "rotary"])
@pytest.mark.parametrize("lens", [None, [3, 1]], ids=["full", "ragged"])
def test_opcheck(lens, rotary):
    k, v, caches, table, context, lens, _ = problem(4, [1, 2], 3, lens, (2, 16), torch.float32)
    turns = (None, None) if rotary is None else factors(k, rotary, torch.float32)
    args = (k, v, *caches, table, context, lens, None, None, *turns, True, "torch")
    torch.library.opcheck(torch.ops.specdec.append_kv.default, args)


def test_runs_on_meta():
    meta = {name: x.to("meta") for name, x in {**good(), **turn()}.items()}
    assert ops.append_kv(**meta) is None


def test_nan_is_stored_as_nan(backend):
    """The op moves values, it does not judge them."""
    k = torch.full((1, 1, 1, 16), NAN)
    caches = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 1, 16)
    ops.append_kv(k, k, *caches, torch.tensor([[0]]), torch.tensor([0]), backend=backend)
    assert caches[0].isnan().all()
