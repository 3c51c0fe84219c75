"""What a step would launch and move on a GPU, counted on the meta device; what makes the host wait is refused there."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from specdec_triton import SamplingParams, ops
from specdec_triton._library import why_not_triton
from specdec_triton.interpreter import counted
from specdec_triton.logit_rules import LogitRules
from specdec_triton.reference.accept_reject import METHODS
from specdec_triton.testing import batch_of, paged_case, toy_model
from specdec_triton.tracing import HostSyncError, Trace


def meta(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype, device="meta")


X, W, TABLE, IDS = meta(4, 6), meta(5, 6), meta(1000, 6), meta(3, dtype=torch.int64)
ROWS, ROW_OF_3, CUBE = meta(3, 6), meta(3), meta(9, 1000, 2)
ROW = 6 * 4

# name: (step, launches, bytes)
SMALL = {
    "views": (lambda: X.t()[1:].reshape(5, 4).unsqueeze(0).expand(3, 5, 4), 0, 0),
    "views-in-place": (lambda: X.clone().t_().unsqueeze_(0), 1, 2 * 4 * ROW),
    "allocation": (lambda: (torch.empty_like(X), X.new_empty(3), torch.empty(2, device="meta")), 0, 0),
    "nothing-to-do": (lambda: X[:0] + 1, 0, 0),
    "on-the-host": (lambda: torch.ones(3) + 1, 0, 0),
    "add": (lambda: X + X[:1], 1, 4 * ROW + ROW + 4 * ROW),
    "same-input-twice": (lambda: X * X, 1, 2 * 4 * ROW),
    "expanded-input": (lambda: X + X[:, :1].expand(4, 6), 1, 4 * ROW + 4 * 4 + 4 * ROW),
    "in-place": (lambda: X.add_(1), 1, 2 * 4 * ROW),
    "overwrite": (lambda: X.copy_(X[0]), 1, ROW + 4 * ROW),
    "fill": (lambda: X.zero_(), 1, 4 * ROW),
    "number-assigned": (lambda: X.__setitem__(0, 1.0), 1, 4 + ROW),
    "copying-reshape": (lambda: X.t().reshape(-1), 1, 2 * 4 * ROW),
    "linear": (lambda: F.linear(X, W), 1, (4 * 6 + 5 * 6 + 4 * 5) * 4),
    "norm": (lambda: F.rms_norm(X, (6,)), 1, 2 * 4 * ROW),
    "attention": (lambda: F.scaled_dot_product_attention(CUBE, CUBE, CUBE), 1, 2 * CUBE.nbytes),
    "embedding": (lambda: F.embedding(IDS, TABLE), 1, 3 * 8 + 2 * 3 * ROW),
    "gather": (lambda: TABLE[IDS], 1, 3 * 8 + 2 * 3 * ROW),
    "index-put": (lambda: TABLE.index_put_((IDS,), X[0]), 1, 3 * 8 + ROW + 3 * ROW),
    "index-put-beside": (lambda: CUBE.__setitem__((slice(None), IDS), X[0, 0]), 1, 3 * 8 + 4 + 9 * 3 * 2 * 4),
    "scatter": (lambda: TABLE[:, 0].scatter_(0, IDS, ROW_OF_3), 1, 3 * 8 + 2 * 3 * 4),
    "index-copy": (lambda: TABLE.index_copy_(0, IDS, ROWS), 1, 3 * 8 + 2 * 3 * ROW),
    "two-results": (lambda: X.max(1), 1, 4 * ROW + 4 * 4 + 4 * 8),
}


@pytest.mark.parametrize(("step", "launches", "size"), SMALL.values(), ids=SMALL)
def test_launches_and_bytes_of_small_steps(step, launches, size):
    with Trace(strict=True) as trace:
        step()
    assert (trace.launches, trace.bytes, trace.uploads) == (launches, size, 0)


def test_counts_by_op():
    with Trace() as trace:
        F.silu(F.linear(X, W)).add_(1).mul(F.linear(X, W))
    assert {name: cost.launches for name, cost in trace.by_op.items()} == {
        "aten.mm": 2, "aten.silu": 1, "aten.add_": 1, "aten.mul": 1,
    }  # fmt: skip
    assert trace.by_op["aten.silu"].bytes == 2 * 4 * 5 * 4
    X + 1
    assert trace.launches == 5  # outside the block nothing counts


UPLOADS = {
    "tensor": (lambda: torch.tensor([1, 2], device="meta"), 1),
    "as-tensor": (lambda: torch.as_tensor(3.0, device="meta"), 1),
    "new-tensor": (lambda: X.new_tensor([1]), 1),
    "to": (lambda: torch.arange(3).to("meta"), 1),
    "copy": (lambda: X.copy_(torch.zeros(6)), 1),
    "scalar-copy": (lambda: X.copy_(torch.tensor(1.0)), 1),
    "index-on-the-host": (lambda: X[torch.arange(2)], 1),
    "list-as-an-index": (lambda: X[[0, 1], 0], 1),
    "scalar-as-an-argument": (lambda: X * torch.tensor(2.0), 0),
    "numbers": (lambda: (X[0], torch.full((3,), 2, device="meta"), torch.arange(4, device="meta"), X > 0), 0),
    "already-there": (lambda: torch.as_tensor(X), 0),
}


@pytest.mark.parametrize(("step", "uploads"), UPLOADS.values(), ids=UPLOADS)
def test_uploads_are_counted_or_refused(step, uploads):
    with Trace() as trace:
        step()
    assert trace.uploads == uploads
    if uploads:
        with pytest.raises(HostSyncError), Trace(strict=True):
            step()
    assert X.add(1).shape == X.shape  # the modes are gone


META_READS = {
    "item": ("_local_scalar_dense", lambda: X[0, 0].item()),
    "bool": ("_local_scalar_dense", lambda: bool(X[0, 0] > 0)),
    "index-by-a-scalar": ("_local_scalar_dense", lambda: X[IDS[0]]),
    "cpu": ("_to_copy", lambda: X.cpu()),
    "to": ("_to_copy", lambda: X.to("cpu", torch.float64)),
    "tolist": ("_to_copy", lambda: X.tolist()),
    "copy": ("copy_", lambda: torch.zeros(4, 6).copy_(X)),
    "nonzero": ("nonzero", lambda: X.nonzero()),
    "mask": ("index", lambda: X[X > 0]),
    "mask-assignment": ("index_put_", lambda: X.__setitem__(X > 0, 1.0)),
    "unique": ("_unique2", lambda: IDS.unique()),
    "equal": ("equal", lambda: torch.equal(X, X)),
}


@pytest.mark.parametrize(("name", "read"), META_READS.values(), ids=META_READS)
def test_host_reads_are_refused_on_meta(name, read):
    with pytest.raises(HostSyncError, match=rf"^aten\.{name}\.\w+ makes the host wait"), Trace():
        read()


def test_values_on_the_host_may_be_read():
    with Trace() as trace:
        x = torch.arange(3.0)
        assert (x[x > 0].tolist(), float(x[1]), x.to(torch.int64).unique().tolist()) == ([1, 2], 1.0, [0, 1, 2])
    assert trace.launches == trace.uploads == 0


def own_ops(to):
    """name: (a call of an op of ours with a backend, the kernels it launches), on tensors that ``to`` has moved."""
    case = paged_case([33, 7], 3, page_size=7)
    _, k_cache, v_cache, table, context, lens = paged = [to(x) for x in case.args]
    k, v = to(torch.randn(2, 2, 3, 2, 16))
    drafts, logits, draft_logits = to(torch.ones(2, 3).long()), to(torch.randn(2, 4, 20)), to(torch.randn(2, 3, 20))
    texts, path = to(torch.ones(2, 9).long()), to(torch.tensor([[0, 2, -1]] * 2).int())

    def params(**filters):
        batch = batch_of(2, **filters)
        return ops.SamplingBatch(*(to(x) if isinstance(x, torch.Tensor) else x for x in vars(batch).values()))

    def rule(**rules):
        given = LogitRules.from_params([SamplingParams(**rules)] * 2, [[1, 2]] * 2, [[3]] * 2, 20)
        given = LogitRules(*(to(x) if isinstance(x, torch.Tensor) else x for x in vars(given).values()))
        return lambda backend: ops.apply_logit_rules(logits, drafts, rules=given, backend=backend)

    def accept(given, method, q=None):
        return lambda backend: ops.accept_reject(drafts, logits, q, params=given, method=method, backend=backend)

    plain, filtered, typical = params(), params(top_k=3), params(typical_p=0.5)
    calls = {
        "append_kv": (lambda backend: ops.append_kv(k, v, k_cache, v_cache, table, context, lens, backend=backend), 1),
        "rope_append": (
            lambda backend: ops.rope_append(
                k, k, v, None, None, k_cache, v_cache, table, context, lens, backend=backend
            ),
            1,
        ),
        "compact_kv": (lambda backend: ops.compact_kv(k_cache, v_cache, table, context, path, backend=backend), 1),
        "verify_attention": (lambda backend: ops.verify_attention(*paged, backend=backend), 2),
        "ngram_propose": (lambda backend: ops.ngram_propose(texts, lens, 3, backend=backend), 1),
        "skinny_linear": (lambda backend: ops.skinny_linear(logits[0], logits[1], backend=backend), 1),
        "row_mean": (lambda backend: ops.row_mean(logits[0], backend=backend), 1),
        "rms_norm": (lambda backend: ops.rms_norm(logits, logits[0, 0], residual=logits, backend=backend), 1),
        "gated_mlp_activation": (lambda backend: ops.gated_mlp_activation(k, backend=backend), 1),
        "gated_linear": (lambda backend: ops.gated_linear(logits[0], logits[1, :2], backend=backend), 1),
        "sample_head": (lambda backend: ops.sample_head(logits[:, 0], logits[0], params=plain, backend=backend), 2),
        "sample": (lambda backend: ops.sample(logits[:, 0], params=plain, backend=backend), 2),
        "sample-filtered": (lambda backend: ops.sample(logits[:, 0], params=filtered, backend=backend), 4),
        "sample-typical-p": (lambda backend: ops.sample(logits[:, 0], params=typical, backend=backend), 4),
        "coupled-typical-p": (accept(typical, "coupled"), 4),
        "rules": (rule(frequency_penalty=0.5, min_new_tokens=2, logit_bias={3: 1.0}), 1),
        "rules-n-gram": (rule(no_repeat_ngram_size=2), 2),
    }
    for method in ("greedy", "coupled", "rejection"):
        calls[f"head-{method}"] = (
            lambda backend, given={"params": plain, "method": method}: ops.verify_head(
                logits, logits[0], drafts, **given, backend=backend
            ),
            2,
        )
    for method in METHODS:
        few = 2 if method in ("greedy", "coupled") else 3
        calls[method] = accept(plain, method), few
        calls[f"{method}-drawn"] = accept(plain, method, draft_logits), few
        calls[f"{method}-filtered"] = accept(filtered, method, draft_logits), few + 2 * (method != "greedy")
    return calls


ON_META, ON_CPU = own_ops(lambda x: x.to("meta")), own_ops(lambda x: x)


@pytest.mark.parametrize("name", ON_META)
def test_launches_of_our_ops(name):
    call, kernels = ON_META[name]
    with Trace(strict=True) as trace:
        call("torch")
    assert trace.launches == kernels


@pytest.mark.skipif(why_not_triton("sample", "cpu") is not None, reason=str(why_not_triton("sample", "cpu")))
@pytest.mark.parametrize("name", ON_CPU)
def test_launches_of_our_ops_are_those_of_the_kernels(name):
    call, kernels = ON_CPU[name]
    with counted() as traffic:
        call("triton")
    assert sum(kernel.launches for kernel in traffic.values()) == kernels


def test_no_op_of_ours_launches_nothing_for_nobody():
    with Trace() as trace:
        ops.sample(meta(0, 5), params=ops.SamplingBatch(*(meta(0), IDS[:0].int(), meta(0), meta(0), IDS[:0], IDS[:0])))
    assert trace.launches == 0


PAGED = {"k_cache": meta(5000, 16, 2, 64), "v_cache": meta(5000, 16, 2, 64)}
KEYS = 2 * 2 * 64 * 4  # bytes of a token's key and value


@pytest.mark.parametrize(
    ("options", "tokens"),
    [({}, 1003), ({"sliding_window": 100}, 99 + 3), ({"sliding_window": 2000}, 1003)],
    ids=["full", "window", "wide-window"],
)
def test_attention_reads_the_context_not_the_pool(options, tokens):
    q, lens, table = meta(4, 3, 6, 64), meta(4, dtype=torch.int32), meta(4, 999, dtype=torch.int32)
    with Trace(context=1000) as trace:
        ops.verify_attention(q, **PAGED, block_table=table, context_lens=lens, **options)
    assert trace.bytes == 4 * (tokens * KEYS + math.ceil(tokens / 16) * 4 + 4) + 2 * q.nbytes


def test_appending_and_compacting_touch_their_rows():
    k, v = meta(2, 4, 3, 2, 64)
    turn = meta(1, 3, 64)
    lens, table, path = (meta(*shape, dtype=torch.int32) for shape in ((4,), (4, 999), (4, 5)))
    with Trace(context=1000) as trace:
        ops.append_kv(k, v, **PAGED, block_table=table, context_lens=lens)
        ops.compact_kv(**PAGED, block_table=table, context_lens=lens, path=path)
        ops.rope_append(k, k, v, turn, turn, **PAGED, block_table=table, context_lens=lens)
    assert trace.by_op["specdec.append_kv"].bytes == 4 * (3 * KEYS * 2 + 4 + 4)
    own = 4 * (3 * KEYS * 2 + 4 + 4) + k.nbytes + turn.nbytes
    assert trace.by_op["specdec.rope_append"].bytes == own
    assert trace.by_op["specdec.compact_kv"].bytes == 4 * (5 * KEYS * 2 + 5 * 4 + 4 + 4)


def traced_llama(layers):
    with torch.device("meta"):
        model = toy_model(num_hidden_layers=layers, vocab_size=1000)
    ids = meta(2, 5, dtype=torch.int64)
    causal = meta(2, 1, 5, 5, dtype=torch.bool)  # to make one, transformers reads a value
    with Trace(context=100) as trace:
        model(input_ids=ids, attention_mask=causal, use_cache=False)
    return model, trace


def test_a_llama_on_meta():
    (model, two), (_, three), (_, four) = map(traced_llama, (2, 3, 4))
    assert two.by_op["aten.mm"].launches == 2 * 7 + 1
    assert four.launches - three.launches == three.launches - two.launches > 7  # a layer's
    assert two.launches < 2 * 40 + 40
    embedded = model.get_input_embeddings().weight.nbytes
    weights = sum(x.nbytes for x in model.parameters()) - embedded
    assert weights < two.bytes < 2 * weights  # few rows: the weights are most of it
    assert two.by_op["aten.embedding"].bytes < embedded / 10
    assert two.uploads == 0
