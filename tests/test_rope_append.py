"""``rope_append``: q and the stored keys are at most twice as far from fp64 as PyTorch in their dtype; all other bytes are right.

Where PyTorch happens to round to less than two units in the last place of the largest value, in fp32 alone, these are allowed. A
row's bits are its own for every B, T and layout of the inputs.
"""

from __future__ import annotations

import importlib

import pytest
import torch
from test_append_kv import DTYPES, expected, problem, same_bytes

from specdec_triton import ops
from specdec_triton._library import why_not_triton
from specdec_triton.interpreter import counted
from specdec_triton.testing import FAR_PAGE, FP8, NAN, SENTINEL, assert_guards, far_cache, guarded, poisoned_outputs

OP = "rope_append"
needs_kernel = pytest.mark.skipif(why_not_triton(OP, "cpu") is not None, reason=str(why_not_triton(OP, "cpu")))
PAIRS = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])

# name: (page size, contexts, T, query_lens), Hq, Hkv, D, R (0: no rotation), norms ("", "q", "k" or both)
CASES = {
    "whole": ((16, [14, 3], 4, [4, 1]), 8, 4, 128, 128, ""),
    "whole-normed": ((16, [14, 3], 4, [4, 1]), 8, 4, 128, 128, "qk"),
    "one-row": ((16, [0], 1, None), 4, 4, 64, 64, "qk"),
    "partial": ((7, [5, 6, 7], 3, [3, 0, 2]), 3, 3, 80, 32, ""),
    "partial-normed": ((7, [5, 6, 7], 3, [3, 0, 2]), 3, 3, 80, 32, "qk"),
    "partial-20-of-80": ((1, [2], 3, None), 14, 2, 80, 20, "q"),
    "head-96": ((48, [47, 0], 2, None), 35, 5, 96, 96, "k"),
    "head-256-normed": ((5, [4], 2, None), 8, 4, 256, 256, "qk"),
    "head-256-partial": ((5, [4], 2, None), 4, 1, 256, 64, ""),
    "odd-head": ((16, [3], 2, None), 3, 1, 17, 6, "qk"),
    "one-pair": ((16, [0], 1, None), 1, 1, 16, 2, ""),
    "group-71": ((16, [3], 1, None), 71, 1, 64, 64, ""),
    "all-idle": ((7, [3, 9], 3, [0, 0]), 4, 2, 16, 16, "qk"),
    "T-0": ((16, [4, 2], 0, None), 4, 2, 16, 16, "qk"),
    "no-rotation": ((7, [0, 6, 13], 3, [3, 0, 1]), 6, 2, 64, 0, ""),
    "no-rotation-normed": ((7, [0, 6, 13], 3, [3, 0, 1]), 6, 2, 64, 0, "qk"),
}


def factors(x, rotary, dtype, batch=None, seed=1):
    """cos and sin of angles that differ in every lane, so that a wrong lane shows; None where nothing is rotated."""
    if rotary == 0:
        return None, None
    generator = torch.Generator().manual_seed(seed)
    angle = torch.rand(batch or len(x), x.shape[1], rotary, generator=generator, dtype=torch.float64) * 6.3
    return angle.cos().to(dtype), angle.sin().to(dtype)


def whole_problem(pages, q_heads, kv_heads, dim, rotary, norms, dtype, *, interleaved=False, add_one=False):
    """The positional arguments, the options."""
    k, v, caches, table, context, lens, scales = problem(*pages, (kv_heads, dim), dtype)
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(*k.shape[:2], q_heads, dim, generator=generator).to(k.dtype)
    weights = {f"{x}_norm": (0.3 * torch.randn(dim, generator=generator) + (not add_one)).to(k.dtype) for x in norms}
    args = (q, k, v, *factors(k, rotary, k.dtype), *caches, table, context, lens)
    return args, {**scales, **weights, "interleaved": interleaved, "add_one": add_one, "eps": 1e-5}


def normed(x, weight, dtype, *, add_one, eps):
    """As Qwen3 and, with add_one, Gemma-3 norm; in fp64 from the definition."""
    if weight is None:
        return x.to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x = x.to(wide)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return (x * (1 + weight.to(wide))).to(dtype) if add_one else weight.to(dtype) * x.to(dtype)


def rotated(x, cos, sin, interleaved, dtype):
    """Pair by pair from the definition, every intermediate in ``dtype``."""
    out = x.to(dtype, copy=True)
    if cos is None:
        return out
    rotary = cos.shape[-1]
    cos, sin = (t.to(dtype)[:, :, None] for t in (cos, sin))
    for pair in range(rotary // 2):
        i, j = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + rotary // 2)
        a, b = x[..., i].to(dtype), x[..., j].to(dtype)
        out[..., i] = a * cos[..., i] - b * sin[..., i]
        out[..., j] = b * cos[..., j] + a * sin[..., j]
    return out


def queries_and_keys(args, options, dtype):
    """What q and k become before they are stored, every intermediate in ``dtype``."""
    norm = {name: options[name] for name in ("add_one", "eps")}
    return [
        rotated(normed(x, options.get(name), dtype, **norm), *args[3:5], options["interleaved"], dtype)
        for x, name in zip(args[:2], ("q_norm", "k_norm"), strict=True)
    ]


def past(x, lens):
    """bool ``[B,T]``: the rows past query_lens."""
    step = torch.arange(x.shape[1]).expand(x.shape[:2])
    return torch.zeros_like(step, dtype=torch.bool) if lens is None else step >= lens[:, None]


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


def assert_near(got, plain, truth, dtype):
    if truth.numel():
        least = 2.0**-22 * float(truth.abs().max()) if dtype == torch.float32 else 0.0
        allowed = max(2 * float((plain.double() - truth).abs().max()), least)
        assert float((got.double() - truth).abs().max()) <= allowed


def assert_right(out, args, options, caches):
    """Error of q and of the stored keys at most twice PyTorch's; values byte for byte; 0 past query_lens; all else untouched."""
    q, k, v, _, _, *before, table, context, lens = args
    scales = {name: options[name] for name in ("k_scale", "v_scale") if name in options}
    unused = past(q, lens)
    truths, plains = (queries_and_keys(args, options, dtype) for dtype in (torch.float64, q.dtype))
    for truth in truths:
        truth[unused] = 0
    plains[0][unused] = 0
    assert (out.shape, out.dtype, out.is_contiguous()) == (q.shape, q.dtype, True)
    assert not out[unused].any()
    assert same_bytes(caches[1], expected(k, v, before, table, context, lens, scales)[1])
    yardstick = expected(plains[1], v, before, table, context, lens, scales)[0]
    where = (table, context, lens, k, scales.get("k_scale"))
    pairs = [(out, plains[0]), (stored(caches[0], *where), stored(yardstick, *where))]
    assert same_bytes(caches[0], before[0])
    for (got, plain), truth in zip(pairs, truths, strict=True):
        assert_near(got, plain, truth, q.dtype)


@PAIRS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_matches_fp64(case, dtype, interleaved, backend):
    """Weights as Gemma stores them where pairs are interleaved; rows past query_lens hold NaN; guards around everything."""
    args, options = whole_problem(*case, dtype, interleaved=interleaved, add_one=interleaved)
    for x in args[:5]:
        if x is not None:
            x[past(x, args[-1])] = NAN
    given = [None if x is None else guarded(x, padding=16) for x in args]
    with poisoned_outputs():
        out = ops.rope_append(*given, **options, backend=backend)
    assert_guards(*(x for x in given if x is not None))
    assert_right(out, args, options, [x.contiguous() for x in given[5:7]])


def test_without_norms_and_rotation_it_copies(backend):
    args, options = whole_problem(*CASES["no-rotation"], torch.bfloat16)
    q, k, v, _, _, *caches, table, context, lens = args
    want = expected(k, v, caches, table, context, lens, {})
    out = ops.rope_append(*args, **options, backend=backend)
    assert out.data_ptr() != q.data_ptr()
    assert torch.equal(out, q.masked_fill(past(q, lens)[..., None, None], 0))
    assert all(map(same_bytes, caches, want))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["whole-normed", "partial-20-of-80", "odd-head", "no-rotation-normed"])
def test_bits_do_not_depend_on_the_layout_or_the_other_rows(name, dtype, backend):
    """Contiguous, views of one product's output, [B,H,T,D] in memory; one request of the batch; one position at a time."""
    q_heads, kv_heads, dim, *rest = CASES[name][1:]
    args, options = whole_problem((16, [14, 3], 2, None), q_heads, kv_heads, dim, *rest, dtype)
    q, k, v, cos, sin, *caches, table, context, _ = args
    batch, count = q.shape[:2]
    table = torch.arange(batch * 9).view(batch, 9)  # room for T tokens each, in the same pages in every layout
    shape = (batch * 9, *caches[0].shape[1:])

    def run(q, k, v, cos, sin, table, context):
        new = [torch.zeros(shape, dtype=dtype) for _ in range(2)]
        out = ops.rope_append(q, k, v, cos, sin, *new, table, context, **options, backend=backend)
        return out, *new

    want = run(q, k, v, cos, sin, table, context)
    product = torch.cat((q, k, v), 2).flatten(2).flatten(0, 1)
    views = product.view(batch, count, -1, dim).split((q_heads, kv_heads, kv_heads), 2)
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    apart = [guarded(x, padding=3) for x in (q, k, v)]
    turns = [None if x is None else guarded(x, padding=5) for x in (cos, sin)]
    for given in ((*views, cos, sin), (*transposed, cos, sin), (*apart, *turns)):
        assert all(map(torch.equal, run(*given, table, context), want))
    one = [None if x is None else x[-1:] for x in (q, k, v, cos, sin)]
    assert torch.equal(run(*one, table[-1:], context[-1:])[0], want[0][-1:])
    both = [torch.zeros_like(x) for x in want]
    for t in range(count):
        part = [None if x is None else x[:, t : t + 1] for x in (q, k, v, cos, sin)]
        out, *caches = run(*part, table, context + t)
        both[0][:, t] = out[:, 0]
        for i in (1, 2):
            both[i] += caches[i - 1]
    assert all(map(torch.equal, both, want))


@needs_kernel
@PAIRS
@pytest.mark.parametrize("name", ["whole-normed", "partial", "head-96", "odd-head", "no-rotation-normed", "all-idle"])
def test_reads_and_writes_once(name, interleaved):
    """One launch; what is in use is read once, of an idle request nothing; every row of q is written."""
    args, options = whole_problem(*CASES[name], torch.bfloat16, interleaved=interleaved)
    q, k, *_, lens = args
    rows = q.shape[0] * q.shape[1] if lens is None else int(lens.sum())
    with counted() as traffic:
        ops.rope_append(*args, **options, backend="triton")
    assert list(traffic) == ["_rope_append_kernel"]
    mine = traffic["_rope_append_kernel"]
    assert mine.launches == 1
    for x, heads in (("q", q.shape[2]), ("k", k.shape[2]), ("v", k.shape[2])):
        size = rows * heads * q.shape[3] * 2
        assert mine.loaded[f"{x}_ptr"] == mine.distinct(f"{x}_ptr") == size
        if x != "q":
            assert mine.stored[f"{x}_cache_ptr"] == size
    assert mine.stored["out_ptr"] == q.nbytes
    if args[3] is not None:
        assert mine.loaded["cos_ptr"] == rows * (q.shape[2] + k.shape[2]) * args[3].shape[2] * 2


def test_page_beyond_2_to_the_31_elements(backend):
    """Offsets are 64-bit (faults.md F1): the page there receives what page 0 would."""
    cache, ones = far_cache(), torch.ones(8)
    q, k = torch.randn(1, 1, 8, 128), torch.randn(1, 1, 8, 128)
    for page in (0, FAR_PAGE):
        where = (cache, cache, torch.tensor([[page]]), torch.tensor([3]))
        ops.rope_append(q, k, k, *factors(k, 128, k.dtype), *where, k_scale=ones, v_scale=ones, backend=backend)
    assert cache[0, 3].float().any()
    assert same_bytes(cache[FAR_PAGE, 3], cache[0, 3])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_factors_of_any_layout_and_dtype(dtype, backend):
    """One row for all requests, [1,T,R], is that row repeated; cut from a wider tensor it is the same too."""
    args, options = whole_problem((7, [6, 2], 2, [2, 1]), 6, 2, 48, 0, "qk", torch.bfloat16)
    q, k, v, _, _, *caches, table, context, lens = args
    cos, sin = factors(k, 16, dtype, batch=1)
    whole = (cos.repeat(len(k), 1, 1), sin.repeat(len(k), 1, 1))
    both = torch.cat([cos, sin], -1)
    results = []
    for turns in (whole, (cos, sin), (both[..., :16], both[..., 16:]), (cos.expand_as(whole[0]), whole[1])):
        new = [cache.clone() for cache in caches]
        out = ops.rope_append(q, k, v, *turns, *new, table, context, lens, **options, backend=backend)
        results.append((out, new[0]))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_weights_of_another_dtype(backend):
    """Some models keep their norms in fp32."""
    args, options = whole_problem(*CASES["whole-normed"], torch.bfloat16)
    wide = {name: x.float() for name, x in options.items() if name.endswith("_norm")}
    caches = [[x.clone() for x in args[5:7]] for _ in range(2)]
    outs = [
        ops.rope_append(*args[:5], *new, *args[7:], **{**options, **weights}, backend=backend)
        for new, weights in zip(caches, ({}, wide), strict=True)
    ]
    assert torch.equal(*outs)
    assert same_bytes(caches[0][0], caches[1][0])


@needs_kernel
def test_strides_as_a_new_tensor_has_them():
    """Triton compiles for what is divisible by 16: every view of a head size shares a new tensor's binary."""
    from specdec_triton.kernels._config import even_strides

    base = torch.arange(2.0 * 3 * 40 * 48).view(2, 3, 40, 48)
    for x in (base, base[:1, :, 3:5], base[:, 1:2], base.transpose(1, 2), base[:, :, ::2]):
        same, strides = even_strides(x, 16)
        assert same.data_ptr() == x.data_ptr()
        sizes = zip(x.shape[:-1], x.stride()[:-1], strides, strict=True)
        assert all(mine == (0 if size == 1 else theirs // 16) for size, theirs, mine in sizes)
    for x in (base[..., 1:33], base.view(-1, 40)[:96].view(2, 3, 16, 40)[..., :16]):
        copy, strides = even_strides(x, 16)
        assert torch.equal(copy, x)
        assert copy.data_ptr() % 16 == 0
        assert strides == tuple(stride // 16 for stride in copy.stride()[:-1])


# Models.

SCALING = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
    },
    "longrope": {
        "factor": 4.0, "original_max_position_embeddings": 16,
        "short_factor": [1.0 + i / 8 for i in range(32)], "long_factor": [2.0 + i / 4 for i in range(32)],
    },
}  # fmt: skip
# name: transformers' model type, its class prefix, settings, the rotary module's further arguments, R of D = 64, interleaved
MODELS = {
    **{
        f"llama-{kind}": (
            "llama", "Llama",
            {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **more}, "max_position_embeddings": 16}, (), 64, False,
        )
        for kind, more in SCALING.items()
    },
    "qwen3": ("qwen3", "Qwen3", {"head_dim": 64}, (), 64, False),
    "gemma3-local": ("gemma3_text", "Gemma3", {"head_dim": 64}, ("sliding_attention",), 64, False),
    "gemma3-global": ("gemma3_text", "Gemma3", {"head_dim": 64}, ("full_attention",), 64, False),
    "gpt_neox": ("gpt_neox", "GPTNeoX", {"rotary_pct": 0.25}, (), 16, False),
    "phi": ("phi", "Phi", {"partial_rotary_factor": 0.5}, (), 32, False),
    "cohere": ("cohere", "Cohere", {}, (), 64, True),
    "glm": ("glm", "Glm", {"partial_rotary_factor": 0.5, "head_dim": 64}, (), 32, True),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_as_transformers(name, dtype, backend):
    """With the model's own tables and norms: at most twice as far from fp64 as the model's own functions."""
    from transformers import AutoConfig

    kind, prefix, settings, more, rotary, interleaved = MODELS[name]
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 6}
    config = AutoConfig.for_model(kind, **sizes, **settings)
    family = kind.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    args, options = whole_problem((16, [14], 4, None), 4, 2, 64, 0, "", dtype, interleaved=interleaved)
    q, k, v, _, _, *caches, table, context, lens = args
    cos, sin = getattr(module, f"{prefix}RotaryEmbedding")(config)(k, context[:, None] + torch.arange(4), *more)
    assert cos.shape == (1, 4, rotary)
    normed_q, normed_k = q, k
    if kind in ("qwen3", "gemma3_text"):
        options |= {"add_one": kind == "gemma3_text", "eps": config.rms_norm_eps}
        norms = [getattr(module, f"{prefix}RMSNorm")(64, config.rms_norm_eps).to(dtype) for _ in range(2)]
        for norm, x in zip(norms, "qk", strict=True):
            norm.weight.data.add_(0.3 * torch.randn(64).to(dtype))
            options[f"{x}_norm"] = norm.weight.data
        normed_q, normed_k = norms[0](q).detach(), norms[1](k).detach()
    theirs = [
        torch.cat((turned, x[..., rotary:]), -1)
        for turned, x in zip(
            module.apply_rotary_pos_emb(
                normed_q[..., :rotary], normed_k[..., :rotary], cos, sin, unsqueeze_dim=2
            ),
            (normed_q, normed_k),
            strict=True,
        )
    ]  # fmt: skip
    if kind == "glm":
        cos, sin = (x[..., : rotary // 2].repeat_interleave(2, -1) for x in (cos, sin))
    args = (q, k, v, cos, sin, *caches, table, context, lens)
    out = ops.rope_append(*args, **options, backend=backend)
    ours = out, stored(caches[0], table, context, lens, k)
    for mine, plain, truth in zip(ours, theirs, queries_and_keys(args, options, torch.float64), strict=True):
        assert_near(mine, plain, truth, dtype)


# Arguments.


def good():
    """Arguments that fit; each case below spoils one."""
    return {
        "q": torch.zeros(2, 3, 4, 16),
        "k": torch.zeros(2, 3, 2, 16),
        "v": torch.zeros(2, 3, 2, 16),
        "cos": torch.ones(2, 3, 16),
        "sin": torch.ones(1, 3, 16),
        "k_cache": torch.zeros(5, 4, 2, 16),
        "v_cache": torch.zeros(5, 4, 2, 16),
        "block_table": torch.tensor([[0, 1], [2, 3]]),
        "context_lens": torch.tensor([1, 2]),
        "query_lens": torch.tensor([3, 1]),
        "q_norm": torch.ones(16),
        "k_norm": torch.ones(16),
    }


BAD = {
    "q-not-a-tensor": ("q", {"q": [1.0]}),
    "q-rank": ("q", {"q": torch.zeros(2, 3, 16)}),
    "q-T": ("q", {"q": torch.zeros(2, 4, 4, 16)}),
    "q-head-size": ("q", {"q": torch.zeros(2, 3, 4, 32)}),
    "q-heads": ("q", {"q": torch.zeros(2, 3, 3, 16)}),
    "q-no-heads": ("q", {"q": torch.zeros(2, 3, 0, 16)}),
    "q-dtype": ("q", {"q": torch.zeros(2, 3, 4, 16).half()}),
    "q-double": ("q", {"q": torch.zeros(2, 3, 4, 16).double()}),
    "q-device": ("q", {"q": torch.zeros(2, 3, 4, 16, device="meta")}),
    "q-inner-stride": ("q", {"q": torch.zeros(2, 3, 16, 4).transpose(2, 3)}),
    "k-not-a-tensor": ("k", {"k": [1.0]}),
    "v-shape": ("v", {"v": torch.zeros(2, 4, 2, 16)}),
    "cache-dtype": ("k_cache", {"k_cache": torch.zeros(5, 4, 2, 16, dtype=torch.bfloat16)}),
    "fp8-without-scale": (
        "k_scale", {"k_cache": torch.zeros(5, 4, 2, 16).to(FP8), "v_cache": torch.zeros(5, 4, 2, 16).to(FP8)},
    ),
    "page-too-large": (r"block_table\[1,0\]", {"block_table": torch.tensor([[0, 1], [5, 3]])}),
    "context-negative": (r"context_lens\[1\]", {"context_lens": torch.tensor([0, -1])}),
    "query-above-T": (r"query_lens\[1\]", {"query_lens": torch.tensor([3, 4])}),
    "cos-alone": ("sin", {"sin": None}),
    "sin-alone": ("cos", {"cos": None}),
    "cos-batch": ("cos", {"cos": torch.ones(3, 3, 16)}),
    "cos-T": ("cos", {"cos": torch.ones(2, 4, 16)}),
    "cos-rank": ("cos", {"cos": torch.ones(3, 16)}),
    "cos-odd": ("cos", {"cos": torch.ones(2, 3, 15)}),
    "cos-empty": ("cos", {"cos": torch.ones(2, 3, 0)}),
    "cos-beyond-D": ("cos", {"cos": torch.ones(2, 3, 18)}),
    "cos-integer": ("cos", {"cos": torch.ones(2, 3, 16).int()}),
    "cos-inner-stride": ("cos", {"cos": torch.ones(2, 16, 3).transpose(1, 2)}),
    "sin-size": ("sin", {"sin": torch.ones(2, 3, 8)}),
    "sin-device": ("sin", {"sin": torch.ones(2, 3, 16, device="meta")}),
    "interleaved": ("interleaved", {"interleaved": 1}),
    "norm-of-the-row": ("q_norm", {"q_norm": torch.ones(64)}),  # OLMo-2's
    "norm-rank": ("k_norm", {"k_norm": torch.ones(1, 16)}),
    "norm-integer": ("k_norm", {"k_norm": torch.ones(16).int()}),
    "norm-device": ("q_norm", {"q_norm": torch.ones(16, device="meta")}),
    "eps-0": ("eps", {"eps": 0.0}),
    "eps-nan": ("eps", {"eps": NAN}),
    "eps-none": ("eps", {"eps": None}),
    "add-one": ("add_one", {"add_one": 1}),
    "backend": ("backend", {"backend": "cuda"}),
}  # fmt: skip


@pytest.mark.parametrize(("named", "changes"), BAD.values(), ids=BAD)
def test_refuses(named, changes):
    """The error names the argument, and the caches stay as they were."""
    args = {**good(), **changes}
    with pytest.raises(ValueError, match=f"^{named} must be"):
        ops.rope_append(**args)
    assert not args["k_cache"].float().any()
    assert not args["v_cache"].float().any()


def test_good_arguments_are_good():
    ops.rope_append(**good())
    for none in (("cos", "sin"), ("q_norm",), ("k_norm",), ("q_norm", "k_norm"), ("query_lens",)):
        ops.rope_append(**{**good(), **dict.fromkeys(none)})


@pytest.mark.parametrize("name", ["partial-normed", "no-rotation", "all-idle"])
def test_opcheck(name):
    args, options = whole_problem(*CASES[name], torch.float32)
    norms = (options.get("q_norm"), options.get("k_norm"))
    torch.library.opcheck(torch.ops.specdec.rope_append.default, (*args, True, *norms, 1e-6, True, None, None, "torch"))


def test_runs_on_meta():
    out = ops.rope_append(**{name: x.to("meta") for name, x in good().items()})
    assert (out.shape, out.dtype, out.device.type) == ((2, 3, 4, 16), torch.float32, "meta")
