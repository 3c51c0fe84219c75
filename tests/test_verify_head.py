"""``verify_head``, and its halves ``head_stats`` and ``accept_stats``: the integers of ``accept_reject`` on logits that are written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specdec_triton import ops
from specdec_triton._library import why_not_triton
from specdec_triton.audit import traffic as traffic_of
from specdec_triton.interpreter import counted
from specdec_triton.kernels._config import head_part
from specdec_triton.reference.head_stats import head_logits
from specdec_triton.testing import INF, NAN, assert_guards, batch_of, guarded, poisoned_outputs

OP = "verify_head"
needs_kernel = pytest.mark.skipif(why_not_triton(OP, "cpu") is not None, reason=str(why_not_triton(OP, "cpu")))
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
KINDS = ["greedy", "coupled", "rejection"]

# name: B, K, H, V, and what the layer does besides
CASES = {
    "one-row": (1, 0, 16, 40, {}),
    "odd": (3, 4, 33, 97, {"bias": True}),
    "parts": (2, 2, 24, 300, {"scale": 0.3}),
    "tiles-of-rows": (15, 4, 16, 70, {"softcap": 3.0}),
    "all-steps": (2, 3, 16, 130, {"bias": True, "scale": 2.0, "softcap": 5.0}),
    "one-token": (2, 1, 8, 1, {}),
}


def problem(batch, k, width, vocab, steps, dtype, *, method="coupled"):
    """hidden, weight, the layer's options, drafts that are often right, their lengths, and parameters of which some are greedy."""
    generator = torch.Generator().manual_seed(batch * 100 + k)
    shapes = ((batch, k + 1, width), (vocab, width), (vocab,))
    hidden, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    options = {**steps, "bias": bias if steps.get("bias") else None}
    params = batch_of(batch, position=5, seed=7, temperature=0.7)
    params.temperature[1::3] = 0.0
    lens = torch.randint(0, k + 1, (batch,), generator=generator, dtype=torch.int32)
    logits = layer(hidden, weight, options, "torch")
    own = [
        logits[:, j].argmax(-1) if method == "greedy" else ops.sample(logits[:, j], params=params.after(j))
        for j in range(k)
    ]
    drafts = torch.stack(own, 1) if k else torch.empty(batch, 0, dtype=torch.int64)
    return hidden, weight, options, drafts, lens, params


def layer(hidden, weight, options, backend):
    """The logits, written."""
    options = {"bias": None, "scale": None, "softcap": None, **options}
    if backend == "torch":
        return head_logits(hidden, weight, options["bias"], options["scale"], options["softcap"])
    out = ops.skinny_linear(hidden.flatten(0, 1), weight, options["bias"], backend=backend)
    out = out.view(*hidden.shape[:2], -1)
    if options["scale"] is not None:
        out = out * options["scale"]
    if options["softcap"] is not None:
        out = torch.tanh(out / options["softcap"]) * options["softcap"]
    return out


def same(got, want):
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("method", KINDS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_accept_reject(case, method, dtype, backend):
    hidden, weight, options, drafts, lens, params = problem(*case, dtype, method=method)
    logits = layer(hidden, weight, options, backend)
    args = {"draft_lens": lens, "params": params, "method": method, "backend": backend}
    want = ops.accept_reject(drafts, logits, **args)
    got = ops.verify_head(hidden, weight, drafts, **options, **args)
    assert same(got, want)
    halves = ops.head_stats(hidden, weight, drafts, **options, **args)
    assert same(ops.accept_stats(halves, drafts, **args), want)


def test_rejection_with_draft_logits(backend):
    """The same integers, with and without draft_lse; ``block`` is refused."""
    hidden, weight, options, _, lens, params = problem(3, 2, 16, 40, {"softcap": 4.0}, torch.float32)
    logits = layer(hidden, weight, options, backend)
    q = logits[:, :2] + 0.5 * torch.randn(3, 2, 40)
    drawn = [ops.sample(q[:, j], params=params, node=j, return_lse=True) for j in range(2)]
    drafts, lse = (torch.stack(x, 1) for x in zip(*drawn, strict=True))
    for given in (None, lse):
        args = {"draft_lse": given, "draft_lens": lens, "params": params, "method": "rejection", "backend": backend}
        got = ops.verify_head(hidden, weight, drafts, q, **options, **args)
        assert same(got, ops.accept_reject(drafts, logits, q, **args))


@pytest.mark.parametrize("method", KINDS)
def test_shards_equal_the_whole(method, backend):
    """Of different sizes, merged in any order; a draft beyond the vocabulary ends the row for all of them."""
    hidden, weight, options, drafts, lens, params = problem(4, 3, 16, 150, {"bias": True}, torch.float32, method=method)
    drafts[0, 1] = 150
    drafts[2, 0] = -1
    args = {"draft_lens": lens, "params": params, "method": method, "backend": backend}
    want = ops.verify_head(hidden, weight, drafts, **options, **args)
    shards = [
        ops.head_stats(
            hidden, weight[i:j], drafts, bias=options["bias"][i:j], first_id=i, vocab=150, **args
        )
        for i, j in ((0, 40), (40, 44), (44, 150))
    ]  # fmt: skip
    for order in ((0, 1, 2), (2, 0, 1)):
        assert same(ops.accept_stats([shards[i] for i in order], drafts, **args), want)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("method", KINDS)
def test_bad_rows(value, method, backend):
    """Status 1 for NaN, +inf or nothing but -inf in a row up to draft_lens; -inf in some columns is a mask."""
    hidden, weight = torch.ones(3, 2, 4), torch.randn(20, 4)
    bias = torch.zeros(20)
    params = batch_of(3, temperature=0.5)
    drafts = torch.zeros(3, 1, dtype=torch.int64)
    args = {"params": params, "method": method, "backend": backend, "draft_lens": torch.tensor([1, 0, 1])}
    bias[:] = -INF
    bias[7] = 0.0
    assert ops.verify_head(hidden, weight, drafts + 7, bias=bias, **args).tokens.tolist() == [[7, 7], [7, -1], [7, 7]]
    bias[7 if value == -INF else 3] = value
    result = ops.verify_head(hidden, weight, drafts, bias=bias, **args)
    assert result.status.tolist() == [1, 1, 1]
    assert result.tokens.tolist() == [[0, -1]] * 3
    hidden[0, 1], hidden[1, 1] = NAN, NAN
    assert ops.verify_head(hidden, weight, drafts, **args).status.tolist() == [1, 0, 0]


@pytest.mark.parametrize("method", ["greedy", "coupled", "rejection"])
def test_no_requests(method, backend):
    args = (torch.zeros(0, 3, 4), torch.zeros(5, 4), torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2, 5))
    got = ops.verify_head(*args, params=batch_of(0), method=method, backend=backend)
    assert [tuple(x.shape) for x in got] == [(0, 3), (0,), (0,)]


def test_strides(backend):
    """Rows of hidden out of line, a weight and a bias inside others; guards around all of them, poison in what is written."""
    hidden, weight, options, drafts, lens, params = problem(3, 1, 12, 70, {"bias": True}, torch.bfloat16)
    args = {"draft_lens": lens, "params": params, "method": "coupled", "backend": backend}
    want = ops.verify_head(hidden, weight, drafts, **options, **args)
    views = guarded(hidden, padding=7), guarded(weight, padding=3)
    bias = guarded(options["bias"])
    with poisoned_outputs():
        assert same(ops.verify_head(*views, drafts, bias=bias, **args), want)
        turned = hidden.transpose(0, 1).contiguous().transpose(0, 1)
        assert same(ops.verify_head(turned, weight, drafts, **options, **args), want)
    assert_guards(*views, bias)


@needs_kernel
@pytest.mark.parametrize("method", ["greedy", "rejection"])
def test_bits_do_not_depend_on_the_other_rows(method):
    """Statistics of a request alone and among others, in two row tiles."""
    hidden, weight, options, drafts, _, params = problem(35, 1, 12, 70, {}, torch.bfloat16)
    args = {"method": method, "backend": "triton"}
    want = ops.head_stats(hidden, weight, drafts, **options, params=params, **args)
    for some in ([0], [34], [33, 2], [17, 16, 0]):
        got = ops.head_stats(
            hidden[some], weight, drafts[some], **options, params=params.of(torch.tensor(some)), **args
        )
        for a, b in zip(got[:3], want[:3], strict=True):
            assert torch.equal(a, b[some])


@needs_kernel
@pytest.mark.parametrize("method", KINDS)
def test_statistics_are_the_reference_s(method):
    """Winners bit for bit; sums of exponentials up to rounding. In fp32 the products round differently, so both get few bits."""
    hidden, weight = torch.randint(-4, 5, (3, 3, 8)).float(), torch.randint(-4, 5, (300, 8)).float()
    drafts = torch.randint(0, 300, (3, 2))
    params = batch_of(3, temperature=0.5)
    params.temperature[1] = 0.0
    args = {"params": params, "method": method, "first_id": 8, "vocab": 400}
    got = ops.head_stats(hidden, weight, drafts, **args, backend="triton")
    want = ops.head_stats(hidden, weight, drafts, **args, backend="torch")
    assert torch.equal(got.stats[..., 0], want.stats[..., 0])
    torch.testing.assert_close(got.stats[..., 1], want.stats[..., 1])
    assert torch.equal(got.stats[..., 2], want.stats[..., 2])
    torch.testing.assert_close(got.best[..., 0], want.best[..., 0])
    assert torch.equal(got.best_id, want.best_id)


@needs_kernel
@pytest.mark.parametrize(("method", "k"), [("greedy", 0), ("rejection", 3)])
def test_launches_and_bytes(method, k):
    """Two launches; the weight once; hidden states, seen from memory, once; statistics instead of logits."""
    hidden, weight, _, drafts, lens, params = problem(3, k, 96, 600, {}, torch.bfloat16, method=method)
    with counted() as traffic:
        ops.verify_head(hidden, weight, drafts, draft_lens=lens, params=params, method=method, backend="triton")
    assert sum(x.launches for x in traffic.values()) == 2
    head = traffic["_head_stats_kernel"]
    assert head.loaded["weight_ptr"] == head.distinct("weight_ptr") == weight.nbytes
    assert head.distinct("hidden_ptr") == hidden.nbytes
    rows, parts = 3 * (k + 1), 10
    assert head.grid == (1, parts, 1)
    assert sum(head.stored.values()) == rows * parts * 24
    rest = traffic["_accept_stats_kernel"]
    assert rest.loaded["stats_ptr"] + rest.loaded["best_ptr"] + rest.loaded["best_id_ptr"] <= rows * parts * 24


@pytest.mark.parametrize("shape", [(128256, 4096), (151936, 1024), (262144, 2560)], ids=str)
@pytest.mark.parametrize("rows", [1, 40, 64])
def test_bytes_from_memory_are_the_weight_s(rows, shape):
    """Llama 3, Qwen 3, Gemma 3: at most 1.05 of weight and hidden states, and what is allocated is far less than the logits."""
    n, k = shape
    moved = traffic_of.head_from_memory(rows, n, k, 2, head_part(n), bias=False)
    assert moved <= 1.05 * (n * k + rows * k) * 2
    assert rows * -(-n // head_part(n)) * 24 <= 0.1 * rows * n * 2


def good():
    """Arguments that fit; each case below spoils one."""
    return {
        "hidden": torch.ones(2, 3, 4),
        "weight": torch.ones(8, 4),
        "draft_tokens": torch.zeros(2, 2, dtype=torch.int64),
        "params": batch_of(2),
        "method": "rejection",
    }


BAD = {
    "hidden-rank": ("hidden", {"hidden": torch.ones(6, 4)}),
    "hidden-integer": ("hidden", {"hidden": torch.ones(2, 3, 4).int()}),
    "hidden-empty": ("hidden", {"hidden": torch.ones(2, 0, 4)}),
    "weight-width": ("weight", {"weight": torch.ones(8, 5)}),
    "weight-dtype": ("weight", {"weight": torch.ones(8, 4).half()}),
    "weight-strides": ("weight", {"weight": torch.ones(4, 8).t()}),
    "weight-empty": ("weight", {"weight": torch.ones(0, 4)}),
    "bias-size": ("bias", {"bias": torch.ones(4)}),
    "bias-dtype": ("bias", {"bias": torch.ones(8).half()}),
    "scale": ("scale", {"scale": 0.0}),
    "softcap": ("softcap", {"softcap": -1.0}),
    "drafts-shape": ("draft_tokens", {"draft_tokens": torch.zeros(2, 3, dtype=torch.int64)}),
    "drafts-floating": ("draft_tokens", {"draft_tokens": torch.zeros(2, 2)}),
    "lens": ("draft_lens", {"draft_lens": torch.tensor([0, 3])}),
    "lse-alone": ("draft_lse", {"draft_lse": torch.zeros(2, 2)}),
    "draft-logits": ("draft_logits", {"draft_logits": torch.zeros(2, 2, 7)}),
    "params": ("params", {"params": None}),
    "filters": ("params.has_filters", {"params": batch_of(2, top_k=3)}),
    "unknown-filters": ("params.has_filters", {"params": replace(batch_of(2, top_p=0.5), has_filters=None)}),
    "typical": ("method", {"method": "typical"}),
    "block": ("method", {"method": "block", "draft_logits": torch.zeros(2, 2, 8)}),
    "method": ("method", {"method": "best"}),
    "backend": ("backend", {"backend": "cuda"}),
}


@pytest.mark.parametrize(("named", "changes"), BAD.values(), ids=BAD)
def test_refuses(named, changes):
    with pytest.raises(ValueError, match=f"^{named} must be"):
        ops.verify_head(**{**good(), **changes})


def test_good_arguments_are_good():
    ops.verify_head(**good())
    ops.verify_head(**{**good(), "params": replace(batch_of(2), has_filters=None)})
    ops.verify_head(**{**good(), "params": batch_of(2, top_k=3), "method": "greedy"})
    ops.verify_head(**{**good(), "draft_logits": torch.zeros(2, 2, 8), "draft_lse": torch.zeros(2, 2)})
    ops.verify_head(**{**good(), "method": "block"})


def test_halves_refuse():
    args = good()
    for changes in ({"first_id": 2}, {"first_id": -4}, {"first_id": 2**31 - 8}, {"first_id": None}, {"vocab": 7}):
        with pytest.raises(ValueError, match=f"^{next(iter(changes))} must be"):
            ops.head_stats(**args, **changes)
    stats = ops.head_stats(**args)
    rest = {"draft_tokens": args["draft_tokens"], "params": args["params"], "method": "rejection"}
    nothing = stats._replace(stats=stats.stats[:, :, :0], best=stats.best[:, :, :0], best_id=stats.best_id[:, :, :0])
    for bad in (
        [],
        None,
        3,
        [None],
        nothing,
        stats._replace(vocab=8.0),
        stats._replace(vocab=-1),
        [stats, stats._replace(vocab=9)],
        stats._replace(best=stats.best[..., :1]),
    ):
        with pytest.raises(ValueError, match=r"^stats"):
            ops.accept_stats(bad, **rest)


def test_opcheck():
    args = good()
    noise = args["params"].temperature, args["params"].seed, args["params"].position
    x = (args["hidden"], args["weight"], None, None, 2.0)
    drafts = args["draft_tokens"]
    op = torch.ops.specdec
    torch.library.opcheck(op.verify_head.default, (*x, drafts, None, None, None, *noise, "rejection", "torch"))
    torch.library.opcheck(op.head_stats.default, (*x, drafts, None, *noise, 0, 8, "rejection", "torch"))
    stats = op.head_stats(*x, drafts, None, *noise, 0, 8, "rejection", "torch")
    torch.library.opcheck(op.accept_stats.default, (*stats, drafts, None, *noise, 8, "rejection", "torch"))


def test_runs_on_meta():
    args = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in good().items()}
    fields = {name: x.to("meta") for name, x in vars(args["params"]).items() if isinstance(x, torch.Tensor)}
    args["params"] = replace(args["params"], **fields)
    result = ops.verify_head(**args)
    assert [(list(x.shape), x.dtype) for x in result] == [([2, 3], torch.int64), ([2], torch.int32), ([2], torch.int32)]
