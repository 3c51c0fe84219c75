"""``sample_head``: the tokens of ``sample`` on logits that are written, and its log-sum-exp up to rounding."""

from __future__ import annotations

import pytest
import torch

from specdec_triton import ops
from specdec_triton.testing import INF, NAN, batch_of

OP = "sample_head"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# name: B, H, V, options of the layer
CASES = {
    "one-row": (1, 16, 40, {}),
    "odd": (5, 33, 97, {}),
    "parts": (3, 24, 300, {"scale": 0.3}),
    "tiles-of-rows": (70, 16, 70, {"softcap": 3.0}),
}


def layer(hidden, weight, options, backend):
    """The logits, written."""
    out = ops.skinny_linear(hidden, weight, backend=backend)
    out = out * options.get("scale", 1.0)
    cap = options.get("softcap")
    return out if cap is None else torch.tanh(out / cap) * cap


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("node", [None, 3])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_sample(case, node, dtype, backend):
    batch, width, vocab, options = case
    hidden, weight = torch.randn(batch, width).to(dtype), torch.randn(vocab, width).to(dtype)
    params = batch_of(batch, position=9, temperature=0.6)
    params.temperature[1::3] = 0.0
    logits = layer(hidden, weight, options, backend)
    args = {"params": params, "node": node, "return_lse": True, "backend": backend}
    tokens, lse = ops.sample_head(hidden, weight, **options, **args)
    want, want_lse = ops.sample(logits, **args)
    assert torch.equal(tokens, want)
    assert (tokens.dtype, lse.dtype) == (torch.int64, torch.float32)
    torch.testing.assert_close(lse, want_lse, rtol=1e-6, atol=1e-6)
    args["return_lse"] = False
    assert torch.equal(ops.sample_head(hidden, weight, **options, **args), want)


@pytest.mark.parametrize("vocab", [1, 64, 513])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_nan_gives_an_id(vocab, temperature, backend):
    """It may be fed to a model before anybody looks at the log-sum-exp."""
    hidden = torch.tensor([[NAN, 1.0], [1.0, 1.0]])
    params = batch_of(2, temperature=temperature)
    tokens, lse = ops.sample_head(hidden, torch.ones(vocab, 2), params=params, return_lse=True, backend=backend)
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < vocab
    assert lse.isfinite().tolist() == [False, True]


def test_masks_and_no_rows(backend):
    bias = torch.full((10,), -INF)
    bias[3] = 1.0
    tokens = ops.sample_head(torch.ones(4, 2), torch.ones(10, 2), bias=bias, params=batch_of(4), backend=backend)
    assert tokens.tolist() == [3] * 4
    assert ops.sample_head(torch.ones(0, 2), torch.ones(10, 2), params=batch_of(0), backend=backend).shape == (0,)


BAD = {
    "hidden-rank": ("hidden", {"hidden": torch.ones(2, 1, 4)}),
    "weight-width": ("weight", {"weight": torch.ones(8, 5)}),
    "bias-size": ("bias", {"bias": torch.ones(4)}),
    "scale": ("scale", {"scale": float("inf")}),
    "node": ("node", {"node": -1}),
    "filters": ("params.has_filters", {"params": batch_of(2, min_p=0.1)}),
    "params-size": ("params.temperature", {"params": batch_of(3)}),
    "backend": ("backend", {"backend": "cuda"}),
}


@pytest.mark.parametrize(("named", "changes"), BAD.values(), ids=BAD)
def test_refuses(named, changes):
    good = {"hidden": torch.ones(2, 4), "weight": torch.ones(8, 4), "params": batch_of(2)}
    ops.sample_head(**good)
    with pytest.raises(ValueError, match=f"^{named} must be"):
        ops.sample_head(**{**good, **changes})


def test_opcheck():
    params = batch_of(2)
    args = (torch.randn(2, 4), torch.randn(8, 4), None, None, None, params.temperature, params.seed, params.position)
    torch.library.opcheck(torch.ops.specdec.sample_head.default, (*args, None, "torch"))
