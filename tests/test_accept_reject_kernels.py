"""``accept_reject``'s kernels: the same integers as the reference from the same noise, and the fewest bytes and launches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specdec_triton import SamplingParams, ops
from specdec_triton._library import why_not_triton
from specdec_triton.interpreter import counted
from specdec_triton.ops import METHODS, SamplingBatch
from specdec_triton.testing import INF, batch_of

REASON = why_not_triton("accept_reject", "cpu")
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

EQUAL = {
    **{method: (method, {}) for method in METHODS},
    "rejection-top-k": ("rejection", {"top_k": 7}),
    "block-top-p": ("block", {"top_p": 0.8, "temperature": 0.7}),
    "coupled-min-p": ("coupled", {"min_p": 0.1, "top_k": 30}),
    "rejection-typical-p": ("rejection", {"typical_p": 0.9, "min_p": 0.01}),
    "block-typical-p-too": ("block", {"typical_p": 0.8, "top_k": 30}),
    "coupled-typical-p": ("coupled", {"typical_p": 0.5}),
    "typical-all": ("typical", {"top_k": 20, "top_p": 0.9, "min_p": 0.02}),
}


@pytest.mark.parametrize(("method", "options"), EQUAL.values(), ids=EQUAL)
def test_rows_equal_the_reference(method, options):
    """Ragged, part of them greedy, with and without what the drafter's ``sample`` returned."""
    rows, k, vocab = 24 if options else 60, 4, 41
    target = torch.randn(rows, k + 1, vocab).bfloat16()
    draft = target[:, :k].float() + 0.5 * torch.randn(rows, k, vocab)
    params = batch_of(rows, position=17, **options)
    params.temperature[::9] = 0.0
    drawn = [ops.sample(draft[:, j], params=params, node=j, return_lse=True) for j in range(k)]
    drafts, lse = (torch.stack(x, 1) for x in zip(*drawn, strict=True))
    if method in ("greedy", "coupled"):  # where nothing but the target's own token is kept, most drafts are that
        for j in range(k):
            at = replace(params, position=params.position + j)
            own = target[:, j].argmax(-1) if method == "greedy" else ops.sample(target[:, j], params=at)
            drafts[:, j] = torch.where(torch.rand(rows) < 0.8, own, drafts[:, j])
    lens = torch.randint(0, k + 1, (rows,))
    lens[::2] = k
    given = {"draft_lse": lse} if len(options) % 2 else {}
    args = {"draft_lens": lens, "params": params, "method": method, **given}
    want = ops.accept_reject(drafts, target, draft, backend="torch", **args)
    got = ops.accept_reject(drafts, target, draft, backend="triton", **args)
    assert want.num_accepted.unique().numel() == k + 1
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("method", ["rejection", "block", "coupled", "typical"])
def test_a_wide_vocabulary_with_ties_and_every_filter(method):
    """Several splits, a last one that is not full, thresholds on tied values, and rows without enough to bound the cut:
    top-k beyond the groups of 32, top-p of a flat row."""
    k, vocab = 1, 9001
    filters = [
        {"top_k": 1}, {"top_k": 50}, {"top_k": 400}, {"top_p": 0.9}, {"top_p": 0.0}, {"min_p": 0.3},
        {"top_k": 300, "top_p": 0.95, "min_p": 0.01}, {"temperature": 0.3, "top_p": 0.999}, {"top_k": vocab}, {},
    ]  # fmt: skip
    rows = len(filters)
    params = SamplingBatch.from_params([SamplingParams(seed=3, **x) for x in filters], [5] * rows)
    target = (torch.randn(rows, k + 1, vocab) * 2).bfloat16()
    target[:, :, 8500:] = -INF
    target[3] = 0.01 * torch.randn(k + 1, vocab)
    draft = target[:, :k].clone()
    draft[:, :, ::3] += 0.5
    drafts = ops.sample(draft[:, 0], params=params, node=0)[:, None]
    args = {"params": params, "method": method}
    want = ops.accept_reject(drafts, target, draft, backend="torch", **args)
    got = ops.accept_reject(drafts, target, draft, backend="triton", **args)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


BYTES = {  # method, filters, draft logits, draft_lse, most launches
    "greedy": ("greedy", {}, False, False, 2),
    "coupled": ("coupled", {}, False, False, 2),
    "coupled-filters": ("coupled", {"top_k": 50, "top_p": 0.9}, False, False, 6),
    "rejection-n-gram": ("rejection", {}, False, False, 3),
    "rejection": ("rejection", {}, True, True, 3),
    "rejection-no-lse": ("rejection", {}, True, False, 3),
    "rejection-filters": ("rejection", {"top_k": 50, "top_p": 0.9}, True, True, 6),
    "block": ("block", {}, True, True, 3),
    "typical": ("typical", {}, False, False, 3),
}


@pytest.mark.parametrize(("method", "options", "has_draft", "has_lse", "launches"), BYTES.values(), ids=BYTES)
def test_launches_and_bytes(method, options, has_draft, has_lse, launches):
    """Every target row is read once; then one row again, with its draft row. All that is read is within 1.25 of that, and
    what is written within 2% of it (a filtering request: 10%); V = 151,936, bf16, K = 5.

    The searches of a filtering request read its candidates over and over; what comes from memory are distinct bytes.
    """
    k, vocab = 5, 151_936
    target = torch.randn(1, k + 1, vocab).bfloat16() * 2
    draft = target[:, :k].clone()
    params = batch_of(1, position=3, **options)
    drafts = torch.randint(0, vocab, (1, k))
    draft.scatter_(-1, drafts[..., None], 30.0)  # so that the first draft is rejected
    lse = draft.float().logsumexp(-1) if has_lse else None
    with counted() as traffic:
        ops.accept_reject(
            drafts, target, draft if has_draft else None, draft_lse=lse, params=params, method=method, backend="triton"
        )
    row = vocab * 2
    rows = k + 1
    if method in ("rejection", "typical"):
        rows += 1
    if method == "rejection" and has_draft:
        rows += 1 if has_lse and not options else 1 + k
    if method == "block":
        rows += 2 * k + 1
    assert sum(x.launches for x in traffic.values()) <= launches
    loaded = sum(x.distinct(name) if options else size for x in traffic.values() for name, size in x.loaded.items())
    assert rows * row <= loaded <= 1.25 * rows * row
    assert sum(sum(x.stored.values()) for x in traffic.values()) <= (0.1 if options else 0.02) * loaded
