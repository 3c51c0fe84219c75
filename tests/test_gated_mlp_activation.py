"""``gated_mlp_activation``: at most twice as far from fp64 as PyTorch's activation and product, a row's bits its own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from specdec_triton import ops
from specdec_triton._library import why_not_triton
from specdec_triton.interpreter import counted
from specdec_triton.testing import assert_guards, guarded, poisoned_outputs

OP = "gated_mlp_activation"
needs_kernel = pytest.mark.skipif(why_not_triton(OP, "cpu") is not None, reason=str(why_not_triton(OP, "cpu")))
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ACTIVATIONS = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "gelu": F.gelu}
CASES = {
    "one-element": (1, 2),
    "one-row": (1, 3072),
    "odd": (5, 66),
    "row-tiles": (70, 64),
    "one-dimension": (80,),
    "three-dimensions": (2, 3, 34),
    "column-blocks": (2, 2 * 1030),
}


def problem(shape, dtype):
    """Gates between -12 and 12: the tails of all activations."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(shape, generator=generator) * 4).clamp(-12, 12).to(dtype)


def plain(gate_up, activation):
    gate, up = gate_up.chunk(2, -1)
    return ACTIVATIONS[activation](gate) * up


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", CASES.values(), ids=CASES)
def test_matches_fp64(shape, dtype, activation, backend):
    gate_up = problem(shape, dtype)
    with poisoned_outputs():
        out = ops.gated_mlp_activation(gate_up, activation=activation, backend=backend)
    theirs, truth = plain(gate_up, activation), plain(gate_up.double(), activation)
    assert (out.shape, out.dtype, out.is_contiguous()) == (theirs.shape, dtype, True)
    allowed = 2 * float((theirs.double() - truth).abs().max()) + torch.finfo(torch.float32).eps
    assert float((out.double() - truth).abs().max()) <= allowed


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_gate(dtype, activation, backend):
    """From -100 to 100 element by element, relative to the gate: no tail overflows, cancels or flips its sign."""
    gate = torch.linspace(-100, 100, 2001).to(dtype)
    out = ops.gated_mlp_activation(torch.cat((gate, torch.ones_like(gate))), activation=activation, backend=backend)
    truth = ACTIVATIONS[activation](gate.double())
    scale = gate.double().abs().clamp_min(1.0)
    allowed = torch.finfo(dtype).eps * truth.abs() + 2 * torch.finfo(torch.float32).eps * scale
    allowed += torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # the last step of fp16's subnormal numbers
    assert bool(((out.double() - truth).abs() <= allowed).all())


@needs_kernel
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_reference(dtype, activation):
    """Both compute in fp32 and round once: they differ by a step where fp32's last bits decide."""
    gate_up = problem((7, 200), dtype)
    ours, theirs = (
        ops.gated_mlp_activation(gate_up, activation=activation, backend=backend).double()
        for backend in ("triton", "torch")
    )
    scale = gate_up[:, :100].double().abs().clamp_min(1.0) * gate_up[:, 100:].double().abs()
    allowed = torch.finfo(dtype).eps * theirs.abs() + 4 * torch.finfo(torch.float32).eps * scale
    assert bool(((ours - theirs).abs() <= allowed).all())


@needs_kernel
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_do_not_depend_on_the_other_rows(dtype, activation):
    gate_up = problem((70, 130), dtype)
    want = ops.gated_mlp_activation(gate_up, activation=activation, backend="triton")
    for rows in ([0], [69], [64, 1], list(range(69, -1, -1)), slice(3, 9)):
        part = ops.gated_mlp_activation(gate_up[rows], activation=activation, backend="triton")
        assert torch.equal(part, want[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strided_inputs(dtype, backend):
    gate_up = problem((5, 66), dtype)
    want = ops.gated_mlp_activation(gate_up, backend=backend)
    view = guarded(gate_up, padding=7)
    with poisoned_outputs():
        assert torch.equal(ops.gated_mlp_activation(view, backend=backend), want)
    assert_guards(view)
    repeated = ops.gated_mlp_activation(gate_up[:1].expand(5, -1), backend=backend)
    assert torch.equal(repeated, want[:1].expand(5, -1))
    turned = gate_up.view(1, 5, 66).expand(2, -1, -1).transpose(0, 1)
    assert torch.equal(ops.gated_mlp_activation(turned, backend=backend), want[:, None].expand(-1, 2, -1))


@needs_kernel
def test_reads_each_element_once():
    gate_up = problem((70, 200), torch.float16)
    with counted() as traffic:
        ops.gated_mlp_activation(gate_up, backend="triton")
    mine = traffic["_gated_mlp_activation_kernel"]
    assert (mine.launches, mine.loaded["gate_up_ptr"], mine.distinct("gate_up_ptr")) == (
        1,
        gate_up.nbytes,
        gate_up.nbytes,
    )
    assert mine.stored["out_ptr"] == gate_up.nbytes // 2


def test_no_rows(backend):
    assert ops.gated_mlp_activation(torch.zeros(0, 4), backend=backend).shape == (0, 2)


BAD = {
    "not-a-tensor": ("gate_up", {"gate_up": [1.0]}),
    "scalar": ("gate_up", {"gate_up": torch.tensor(1.0)}),
    "integer": ("gate_up", {"gate_up": torch.ones(5, 4).int()}),
    "double": ("gate_up", {"gate_up": torch.ones(5, 4).double()}),
    "inner-stride": ("gate_up", {"gate_up": torch.ones(4, 5).t()}),
    "odd": ("gate_up", {"gate_up": torch.ones(5, 3)}),
    "empty-rows": ("gate_up", {"gate_up": torch.ones(5, 0)}),
    "activation": ("activation", {"activation": "relu"}),
    "activation-none": ("activation", {"activation": None}),
    "backend": ("backend", {"backend": "cuda"}),
}


@pytest.mark.parametrize(("named", "changes"), BAD.values(), ids=BAD)
def test_refuses(named, changes):
    with pytest.raises(ValueError, match=f"^{named} must be"):
        ops.gated_mlp_activation(**{"gate_up": torch.ones(5, 4), **changes})


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_opcheck(activation):
    torch.library.opcheck(torch.ops.specdec.gated_mlp_activation.default, (torch.randn(2, 3, 4), activation, "torch"))


def test_runs_on_meta():
    out = ops.gated_mlp_activation(torch.ones(3, 8, device="meta").bfloat16())
    assert (out.shape, out.dtype, out.device.type) == ((3, 4), torch.bfloat16, "meta")


def test_contiguous_whatever_the_strides(backend):
    x = torch.randn(4, 2, 8).transpose(0, 1)
    assert ops.gated_mlp_activation(x, backend=backend).is_contiguous()
    torch.library.opcheck(torch.ops.specdec.gated_mlp_activation.default, (x, "silu", "torch"))
