"""``RowInvariant``: what a transformers module's own forward runs inside it; and whole exact passes by the way of a GPU."""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial

import pytest
import torch
import transformers

from specdec_triton import ops
from specdec_triton._library import why_not_triton
from specdec_triton.adapter import ModelAdapter
from specdec_triton.exactness import ExactnessError, InvariantRows
from specdec_triton.row_invariant import RowInvariant
from specdec_triton.testing import own_logits, toy_model
from specdec_triton.tracing import Trace

REASON = why_not_triton("skinny_linear", "cpu")
needs_kernel = pytest.mark.skipif(REASON is not None, reason=str(REASON))
GPT2 = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")),
    **{"max_position_embeddings": None, "n_embd": 64, "n_layer": 2, "n_head": 4},
}
MODELS = {"llama": {}, "gemma3_text": {"sliding_window": 4}, "gpt2": GPT2, "qwen2": {}}


@pytest.fixture
def calls(monkeypatch):
    """How often each of the two ops was called."""
    counts = Counter()
    for name in ("skinny_linear", "row_mean"):

        def counted(op, name, *args, **options):
            counts[name] += 1
            return op(*args, **options)

        monkeypatch.setattr(ops, name, partial(counted, getattr(ops, name), name))
    return counts


def by_kernels(kind, dtype, **config):
    """An adapter that runs exact passes as on a GPU, its kernels in the interpreter."""
    adapter = ModelAdapter(toy_model(kind, dtype=dtype, **config))
    adapter._invariant_backend = "triton"
    return adapter


@needs_kernel
@pytest.mark.parametrize(
    ("kind", "dtype"), [(kind, torch.float32) for kind in MODELS] + [("llama", torch.bfloat16)], ids=str
)
def test_logits_bits_do_not_depend_on_the_pass(kind, dtype, calls):
    """T = 1, 2, 5, 8 from any start, beside other texts, with padding rows: the bits of one pass; and as near fp64 as PyTorch."""
    adapter = by_kernels(kind, dtype, **MODELS[kind])
    text = (torch.arange(8) * 31 + 5) % adapter.vocab_size
    cache = adapter.new_cache(slots=3, page_size=3, num_pages=9)
    for slot in range(3):
        cache.reserve(slot, 8)

    def score(tokens, start, lens=None):
        context = torch.full((len(tokens),), start, dtype=torch.int32)
        table = cache.block_table[: len(tokens)]
        return adapter.forward(tokens, cache, table, context, lens, rows=tokens.numel())

    want = score(text[None], 0)[0].clone()
    layers = [x for x in adapter.model.modules() if isinstance(x, (torch.nn.Linear, transformers.pytorch_utils.Conv1D))]
    norms = [x for x in adapter.model.modules() if "RMSNorm" in type(x).__name__]
    assert calls == Counter(skinny_linear=len(layers), row_mean=len(norms))
    for counts in ([1] * 8, [2, 1, 5]):
        starts = [sum(counts[:i]) for i in range(len(counts))]
        parts = [score(text[None, start : start + n], start)[0] for start, n in zip(starts, counts, strict=True)]
        assert torch.equal(torch.cat(parts), want), counts
    others = torch.stack([text.flip(0), text, text.roll(1)])
    assert torch.equal(score(others, 0)[1], want)
    ragged = score(others, 0, torch.tensor([3, 8, 1], dtype=torch.int32))
    assert torch.equal(ragged[1], want)
    truth = own_logits(copy.deepcopy(adapter.model).double(), text.tolist())
    allowed = 2 * float((own_logits(adapter.model, text.tolist()).double() - truth).abs().max())
    assert float((want.double() - truth).abs().max()) <= allowed


@needs_kernel
def test_a_modules_own_forward(calls):
    """Any shape of inputs; the module itself is as before, outside the block."""
    model = toy_model("llama", dtype=torch.bfloat16)
    ids = torch.arange(10).view(2, 5)
    with torch.inference_mode():
        plain = model(input_ids=ids, use_cache=False).logits
        with RowInvariant("triton"):
            inside = model(input_ids=ids, use_cache=False).logits
        assert calls == Counter(skinny_linear=15, row_mean=5)
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, plain)
    assert sum(calls.values()) == 20
    assert float((inside - plain).float().abs().max()) < 0.05 * float(plain.float().abs().max())


X, W, B, WIDE = torch.randn(2, 3, 4), torch.randn(5, 4), torch.randn(5), torch.randn(10, 8)
POSITIONS, FREQUENCIES = torch.arange(3.0)[None, None].expand(2, 1, 3), torch.rand(2, 8, 1)

# name: call, the op that it becomes (None: none)
CALLS = {
    "linear": (lambda: torch.nn.functional.linear(X, W, B), "skinny_linear"),
    "linear-keywords": (lambda: torch.nn.functional.linear(input=X, weight=W), "skinny_linear"),
    "linear-one-row": (lambda: torch.nn.functional.linear(X[0, 0], W), "skinny_linear"),
    "linear-transposed-input": (lambda: torch.nn.functional.linear(X.transpose(0, 2).expand(4, 3, 2), W[:, :2].contiguous()), "skinny_linear"),
    "linear-no-rows": (lambda: torch.nn.functional.linear(X[:0], W, B), "skinny_linear"),
    "linear-double": (lambda: torch.nn.functional.linear(X.double(), W.double()), None),
    "linear-sparse-strides": (lambda: torch.nn.functional.linear(X, WIDE[::2, ::2]), None),
    "linear-vector": (lambda: torch.nn.functional.linear(X, W[0]), None),
    "linear-meta-subclass": (lambda: torch.nn.functional.linear(X, W.as_subclass(Special)), None),
    "conv1d": (lambda: torch.addmm(B, X[0], W.t()), "skinny_linear"),
    "addmm-scaled": (lambda: torch.addmm(B, X[0], W.t(), beta=2), None),
    "addmm-matrix": (lambda: torch.addmm(torch.ones(3, 5), X[0], W.t()), None),
    "mean": (lambda: X.mean(-1, keepdim=True), "row_mean"),
    "mean-last": (lambda: torch.mean(X, (2,)), "row_mean"),
    "mean-of-half": (lambda: X.half().mean(dim=2, keepdim=True, dtype=torch.float32), "row_mean"),
    "mean-all": (lambda: X.mean(), None),
    "mean-first": (lambda: X.mean(0), None),
    "mean-two": (lambda: X.mean((1, 2)), None),
    "mean-double": (lambda: X.double().mean(-1), None),
    "mean-of-nothing": (lambda: X[:, :, :0].mean(-1), None),
    "matmul": (lambda: X @ W.t(), None),
    "layer-norm": (lambda: torch.nn.functional.layer_norm(X, (4,)), None),
}  # fmt: skip


class Special(torch.Tensor):
    """A weight of a type of its own, as quantized ones are."""


@needs_kernel
@pytest.mark.parametrize(("call", "op"), CALLS.values(), ids=CALLS)
def test_what_is_replaced(call, op, calls):
    """The same result, shape and dtype; through the op or untouched."""
    want = call()
    with RowInvariant("triton"):
        got = call()
    assert calls == (Counter([op]) if op else Counter())
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize(
    "product", [lambda: FREQUENCIES @ POSITIONS, lambda: torch.bmm(FREQUENCIES, POSITIONS), lambda: torch.matmul(FREQUENCIES, POSITIONS), lambda: FREQUENCIES.matmul(POSITIONS)],
    ids=["operator", "bmm", "matmul", "method"],
)  # fmt: skip
def test_rotary_tables_are_elements(product):
    """An inner dimension of 1 leaves no order to choose: no matrix product is issued."""
    want = product()
    frequencies, positions = FREQUENCIES.to("meta"), POSITIONS.to("meta")
    with RowInvariant():
        assert torch.equal(product(), want)
        with Trace() as trace:
            assert (frequencies @ positions).shape == want.shape
    assert set(trace.by_op) == {"aten.mul"}


@pytest.mark.parametrize("call", [lambda: torch.nn.functional.linear(X, W[:, :3]), lambda: torch.addmm(B[:3], X[0], W.t())], ids=["linear", "addmm"])  # fmt: skip
def test_errors_are_pytorchs(call):
    with RowInvariant(), pytest.raises(RuntimeError, match=r"shape|size"):
        call()


# Exact passes.


@needs_kernel
def test_passes_are_not_padded_but_tested(monkeypatch):
    """At the start the layers and a chain are; a count is given back as it is."""
    adapter = by_kernels("llama", torch.float32, num_hidden_layers=1)
    monkeypatch.setattr("specdec_triton.exactness._OUTPUTS", 256)
    rows = adapter.invariant_rows()
    assert {1, 2, 5, 8, 17, 70} <= {count for count, invariant in rows._known.items() if invariant}
    assert [rows.pad(n) for n in (1, 3, 7, 31, 1000)] == [1, 3, 7, 31, 1000]


@needs_kernel
def test_layers_that_are_not_row_invariant_are_refused(monkeypatch):
    """A layer that multiplies by its own way is covered by the tests at the start alone."""

    class Rows(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * (1 + 1e-6 * (x.numel() // x.shape[-1] % 2))

    adapter = by_kernels("llama", torch.float32, num_hidden_layers=1)
    layer = adapter.model.model.layers[0].mlp.down_proj
    adapter.model.model.layers[0].mlp.down_proj = Rows(layer.in_features, layer.out_features, bias=False)
    monkeypatch.setattr("specdec_triton.exactness._OUTPUTS", 256)
    with pytest.raises(ExactnessError, match="depend on the number of rows"):
        InvariantRows(adapter)


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "gpt2"])  # its mask reads a value
def test_exact_passes_on_meta(kind):
    """What an exact pass issues on a GPU: our products and means, and no matrix product, padding or reduction of PyTorch's."""
    with torch.device("meta"):
        adapter = ModelAdapter(toy_model(kind, dtype=torch.bfloat16, **MODELS[kind]))
    cache = adapter.new_cache(slots=2, page_size=4, num_pages=8)
    tokens = torch.zeros(2, 5, dtype=torch.int64, device="meta")
    lens = torch.zeros(2, dtype=torch.int32, device="meta")
    traces = {}
    for rows in (None, adapter.invariant_rows().pad(10)):
        with Trace(strict=True) as traces[rows]:
            logits = adapter.forward(tokens, cache, cache.block_table, lens, rows=rows)
        assert logits.shape == (2, 5, adapter.vocab_size)
    theirs, ours = traces[None].by_op, traces[10].by_op
    products = ("aten.mm", "aten.addmm", "aten.bmm", "aten.linear", "aten.matmul")
    assert ours["specdec.skinny_linear"].launches == sum(theirs[op].launches for op in products if op in theirs)
    assert ours["specdec.row_mean"].launches == theirs["aten.mean"].launches
    assert not {*products, "aten.mean", "aten.constant_pad_nd"} & {op for op, cost in ours.items() if cost.launches}


def test_which_way():
    """Padding on the CPU; kernels where Triton runs on a device, and on meta."""
    assert ModelAdapter(toy_model()).pads
    with torch.device("meta"):
        assert not ModelAdapter(toy_model()).pads
