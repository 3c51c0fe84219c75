"""The ops of a decoder layer one after the other: a row's bits are its own through all of them, and they are few launches."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from specdec_triton import ops
from specdec_triton._library import why_not_triton
from specdec_triton.interpreter import counted
from specdec_triton.testing import poisoned_outputs

REASON = why_not_triton("gated_linear", "cpu")
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
ROWS = 67  # more than a row tile


class Layer:
    """Weights in a model's proportions: ``kind`` llama, qwen3 (norms of heads) or gemma3 (norms before and after, of 1 + w)."""

    def __init__(self, kind, dtype):
        self.kind = kind
        self.hidden, self.heads, self.kv_heads, self.dim, self.inner = {
            "llama": (64, 3, 1, 16, 90),  # an inner size that no tile divides
            "qwen3": (32, 2, 1, 32, 64),  # heads wider than the hidden size
            "gemma3": (48, 2, 1, 40, 96),  # a head size that is no power of two
        }[kind]
        generator = torch.Generator().manual_seed(0)

        def weight(n, k):
            return (torch.randn(n, k, generator=generator) * k**-0.5).to(dtype)

        offset = 0.0 if kind == "gemma3" else 1.0
        self.norms = [(offset + torch.randn(self.hidden, generator=generator) / 8).to(dtype) for _ in range(4)]
        self.head_norms = [(offset + torch.randn(self.dim, generator=generator) / 8).to(dtype) for _ in range(2)]
        self.qkv = weight((self.heads + 2 * self.kv_heads) * self.dim, self.hidden)
        self.out = weight(self.hidden, self.heads * self.dim)
        self.gate_up = weight(2 * self.inner, self.hidden)
        self.down = weight(self.hidden, self.inner)

    def __call__(self, x, backend="triton"):
        """Without attention: the values of a position are its own."""
        gemma = self.kind == "gemma3"
        options = {"eps": 1e-6, "add_one": gemma, "backend": backend}
        h = ops.rms_norm(x, self.norms[0], **options)
        packed = ops.skinny_linear(h, self.qkv, backend=backend).view(len(x), -1, self.dim)
        q, k = packed[:, : self.heads], packed[:, self.heads : self.heads + self.kv_heads]
        if self.kind != "llama":
            q, k = (ops.rms_norm(part, w, **options) for part, w in zip((q, k), self.head_norms, strict=True))
        attended = (q + k.repeat_interleave(self.heads // self.kv_heads, 1)).reshape(len(x), -1)
        if not gemma:
            out = ops.skinny_linear(attended, self.out, backend=backend)
            h, x = ops.rms_norm(out, self.norms[1], residual=x, **options)
            inner = ops.gated_linear(h, self.gate_up, backend=backend)
            return ops.skinny_linear(inner, self.down, residual=x, backend=backend)
        out = ops.skinny_linear(attended, self.out, backend=backend)
        x = ops.rms_norm(out, self.norms[1], residual=x, residual_after=True, **options)
        h = ops.rms_norm(x, self.norms[2], **options)
        inner = ops.gated_linear(h, self.gate_up, activation="gelu_tanh", backend=backend)
        out = ops.skinny_linear(inner, self.down, backend=backend)
        return ops.rms_norm(out, self.norms[3], residual=x, residual_after=True, **options)


def as_on(chip):
    """The configuration of a chip of the table; None: the interpreter's own."""
    if chip is None:
        return nullcontext()
    from specdec_triton.kernels._config import CHIPS, pretend

    return pretend(CHIPS[chip])


@pytest.mark.parametrize(
    ("dtype", "chip"), [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, "sm_90")],
    ids=["fp32", "bf16", "bf16-sm_90"],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_rows_are_their_own(kind, dtype, chip):
    """Alone, as a verify pass across a row tile's end, and in another order."""
    layer = Layer(kind, dtype)
    x = torch.randn(ROWS, layer.hidden).to(dtype)
    with as_on(chip), poisoned_outputs():
        want = layer(x)
        for rows in ([0], [64], slice(62, ROWS), list(range(ROWS - 1, -1, -1))):
            assert torch.equal(layer(x[rows]), want[rows]), rows


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_near_the_reference(kind):
    layer = Layer(kind, torch.float32)
    x = torch.randn(5, layer.hidden)
    torch.testing.assert_close(layer(x), layer(x, "torch"), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "launches"), [("llama", 6), ("qwen3", 8), ("gemma3", 10)])
def test_launches(kind, launches):
    """Four products, two norms of hidden states or Gemma's four, two of heads; sums and activations take none."""
    layer = Layer(kind, torch.bfloat16)
    with as_on("sm_90"), counted() as traffic:
        layer(torch.randn(5, layer.hidden).bfloat16())
    assert sum(kernel.launches for kernel in traffic.values()) == launches
