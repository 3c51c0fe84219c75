"""What a decoder layer is made of, found by watching it; nothing here knows a model by name.

The usual layer is ``x + attention(norm(x))``, then ``x + mlp(norm(x))``, perhaps with a norm of what attention and MLP give; attention
is one product for queries, keys and values, an RMS norm of each head or none, a rotation or none, and an output product; the
MLP is gated. What does not show here (a factor on the residual, another order of operations) shows in the layer's output,
which ``decoder_layer.py`` compares.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from specdec_triton.fusion.norms import FusedRMSNorm
from specdec_triton.fusion.siblings import FusedPart
from specdec_triton.observe import Call
from specdec_triton.passes import AttentionOptions

_ATTENTION, _MLP, _NORM = "attention", "mlp", "norm"
_ORDERS = (
    (_NORM, _ATTENTION, _NORM, _MLP),
    (_NORM, _ATTENTION, _NORM, _NORM, _MLP, _NORM),
)
_ACTIVATIONS = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
}


@dataclass(frozen=True)
class Structure:
    """The parts of a decoder layer.

    Attributes:
        layer: its index. q_heads, kv_heads, dim: of its attention. options: of verify_attention.
        norms: before attention and before the MLP. after: of what attention and MLP give, or None.
        head_norms: of each query and key head, or None.
        qkv, out, gate_up, down: linear layers; qkv's outputs are queries, keys, values, gate_up's are gate, up.
        activation: its name in ``ops.gated_linear``.
        rotation: ``half``: pairs are the lanes (i, i + R/2). ``interleaved``: (2i, 2i+1). ``repeated``: those, with factors of which
            only the first half counts, each for both lanes of a pair. None: there is none.
    """

    layer: int
    q_heads: int
    kv_heads: int
    dim: int
    options: AttentionOptions
    norms: tuple[FusedRMSNorm, FusedRMSNorm]
    after: tuple[FusedRMSNorm, FusedRMSNorm] | None
    head_norms: tuple[FusedRMSNorm, FusedRMSNorm] | None
    qkv: Any
    out: Any
    gate_up: Any
    down: Any
    activation: str
    rotation: str | None


def structures_of(layer: nn.Module, order: Sequence[str], call: Call) -> list[Structure]:
    """What the layer may be, the likeliest first; nothing if it has another structure.

    Args:
        order: names of its children in the order in which it calls them. call: what its attention asked for.
    """
    children = dict(layer.named_children())
    kinds = tuple(_kind(children[name]) for name in order)
    if kinds not in _ORDERS or set(order) != {name for name, child in children.items() if not _is_nothing(child)}:
        return []
    parts = [children[name] for name in order]
    attention: Any = parts[1]
    mlp: Any = parts[-1] if kinds == _ORDERS[0] else parts[4]
    norms: list[Any] = [part for part in parts if isinstance(part, FusedRMSNorm)]
    qkv, gate_up = _product(attention, ("q_proj", "k_proj", "v_proj")), _product(mlp, ("gate_proj", "up_proj"))
    activation = next((name for name in ("act_fn", "activation_fn") if hasattr(mlp, name)), "")
    if qkv is None or gate_up is None or call.sinks or not activation:
        return []
    rest = _own(attention) - _names_of(attention, ("q_proj", "k_proj", "v_proj")) - {"o_proj", "q_norm", "k_norm"}
    if rest or _own(mlp) - _names_of(mlp, ("gate_proj", "up_proj")) - {"down_proj", activation}:
        return []
    if not (hasattr(attention, "o_proj") and hasattr(mlp, "down_proj") and hasattr(attention, "scaling")):
        return []
    activated, head_norms = _activation(getattr(mlp, activation)), _head_norms(attention, call.key_dim)
    width = qkv.out_features - 2 * call.kv_heads * call.key_dim
    if activated is None or head_norms is False or width <= 0 or width % call.key_dim:
        return []
    found = Structure(
        layer=call.layer,
        q_heads=width // call.key_dim,
        kv_heads=call.kv_heads,
        dim=call.key_dim,
        options=AttentionOptions(float(attention.scaling), call.sliding_window, call.softcap),
        norms=(norms[0], norms[1] if len(norms) == 2 else norms[2]),
        after=None if len(norms) == 2 else (norms[1], norms[3]),
        head_norms=head_norms,
        qkv=qkv,
        out=attention.o_proj,
        gate_up=gate_up,
        down=mlp.down_proj,
        activation=activated,
        rotation=None,
    )
    rotations = [_rotation(attention), None]
    if not getattr(attention, "use_rope", True):
        rotations.reverse()
    return [replace(found, rotation=rotation) for rotation in dict.fromkeys(rotations)]


def _kind(module: nn.Module) -> str:
    if isinstance(module, FusedRMSNorm):
        return _NORM
    return _ATTENTION if hasattr(module, "layer_idx") else _MLP


def _is_nothing(module: nn.Module) -> bool:
    """At inference."""
    return isinstance(module, (nn.Dropout, nn.Identity))


def _own(module: nn.Module) -> set[str]:
    """Children that hold parameters or compute."""
    return {name for name, child in module.named_children() if not _is_nothing(child)}


def _names_of(parent: nn.Module, names: tuple[str, ...]) -> set[str]:
    return {*names, _joined(names)} & _own(parent)


def _joined(names: tuple[str, ...]) -> str:
    """``qkv_proj``, ``gate_up_proj``: what a layer is called that was trained as one."""
    return ("" if len(names) == 3 else "_").join(name.removesuffix("_proj") for name in names) + "_proj"


def _product(parent: nn.Module, names: tuple[str, ...]) -> Any:
    """The one linear layer that computes the named ones, or None."""
    parts = [getattr(parent, name, None) for name in names]
    if all(isinstance(part, FusedPart) for part in parts):
        shared = parts[0].shared  # type: ignore[union-attr]
        in_order = [part.index for part in parts] == list(range(len(names)))  # type: ignore[union-attr]
        return shared.product if in_order and len(shared.sizes) == len(names) else None
    joined = getattr(parent, _joined(names), None)
    return joined if hasattr(joined, "out_features") and all(part is None for part in parts) else None


def _activation(module: Any) -> str | None:
    x = torch.cat((torch.linspace(-6, 6, 101), torch.tensor([-1000.0, -100.0, -20.0, 20.0, 100.0, 1000.0])))
    try:
        y = module(x)
    except (RuntimeError, TypeError):
        return None
    return next((name for name, known in _ACTIVATIONS.items() if torch.allclose(known(x), y, atol=1e-6)), None)


def _head_norms(attention: Any, dim: int) -> Any:
    """False: of another kind."""
    norms: tuple[Any, Any] = (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None))
    if norms == (None, None):
        return None
    fit = all(isinstance(norm, FusedRMSNorm) and norm.weight.shape == (dim,) for norm in norms)
    return norms if fit and (norms[0].eps, norms[0].add_one) == (norms[1].eps, norms[1].add_one) else False


def _rotation(attention: nn.Module) -> str | None:
    """How the attention's module rotates: by what its function makes of a few numbers."""
    function = getattr(sys.modules.get(type(attention).__module__), "apply_rotary_pos_emb", None)
    generator = torch.Generator().manual_seed(0)
    x, cos, sin = (torch.randn(shape, generator=generator) for shape in ((1, 2, 3, 8), (1, 3, 4), (1, 3, 4)))
    cos, sin = (torch.cat((half, half), -1) for half in (cos, sin))
    try:
        turned = function(x, x, cos, sin)[0]  # type: ignore[misc]
    except (RuntimeError, TypeError, ValueError):
        return None
    halves = torch.cat((-x[..., 4:], x[..., :4]), -1)
    pairs = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    for name, partner in (("half", halves), ("interleaved", pairs), ("repeated", pairs)):
        c, s = (repeated(f) if name == "repeated" else f for f in (cos, sin))
        if torch.allclose(x * c[:, None] + partner * s[:, None], turned, atol=1e-5):
            return name
    return None


def repeated(factors: torch.Tensor) -> torch.Tensor:
    """``[...,R]``: the first half, each twice."""
    return factors[..., : factors.shape[-1] // 2].repeat_interleave(2, -1)
