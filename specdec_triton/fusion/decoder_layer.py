"""The usual decoder layer as one straight function: norm, qkv, RoPE, attention, output, norm, gated MLP.

transformers' layers spend more time in Python, in views and in small operations than small models spend in matrix
products. This is the same layer over the paged cache with as few operations as PyTorch allows. It is recognised by
structure, and used by the adapter's passes only. What the structure does not show (a multiplier on the residual, another
order of operations) shows in the output, which :func:`layer_agrees` compares in fp32: in half precision a wrong factor can
hide in the rounding.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from specdec_triton.adapter import Pass, paged_attention
from specdec_triton.fusion.siblings import FusedPart
from specdec_triton.kv_cache import KVCache, LayerShape
from specdec_triton.reference.paging import make_plan

_TOLERANCE = 1e-4  # of what the layer adds; fp32 rounding is some 1e-6

_CHILDREN = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class RopeTables:
    """cos and sin of a pass as the fused layers need them; computed by the first layer, used by all."""

    def __init__(self) -> None:
        self._source: torch.Tensor | None = None
        self.cos = self.signed_sin = torch.empty(0)

    def update(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """From ``[1,N,D]`` to ``[N,1,D]``; sin with the sign that rotate-half gives the first half."""
        if self._source is not sin:
            half = sin.shape[-1] // 2
            self._source = sin
            self.cos = cos[0, :, None]
            self.signed_sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)[:, None]


class FusedDecoderLayer(nn.Module):
    """A decoder layer that takes the short way in the adapter's passes, and is the original everywhere else."""

    def __init__(self, inner: nn.Module, sliding_window: int | None, rope: RopeTables) -> None:
        super().__init__()
        self.inner = inner
        attention: Any = inner.self_attn
        mlp: Any = inner.mlp
        sizes = attention.q_proj.shared.sizes
        dim = attention.head_dim
        self._layer = attention.layer_idx
        self._dim = dim
        self._q_heads, self._kv_heads = sizes[0] // dim, sizes[1] // dim
        self._options = (attention.scaling, sliding_window)
        self._rope = rope
        # Bound once: looking modules up by name costs as much as a small operation.
        norms: Any = (inner.input_layernorm, inner.post_attention_layernorm)
        self._norm1, self._norm2 = map(_call, norms)
        self._qkv, self._out = _call(attention.q_proj.shared.product), _call(attention.o_proj)
        self._gate_up, self._down = _call(mlp.gate_proj.shared.product), _call(mlp.down_proj)
        self._activation = _call(mlp.act_fn)
        self._parts = tuple(inner.modules())
        self._qk_norms = (_call(attention.q_norm), _call(attention.k_norm)) if hasattr(attention, "q_norm") else None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        p = kwargs.get("specdec_pass")
        if not isinstance(p, Pass) or self._hooked():
            return self.inner(hidden_states, *args, **kwargs)
        self._rope.update(*kwargs["position_embeddings"])
        return self._over_pages(hidden_states, p, self._rope.cos, self._rope.signed_sin)

    def _hooked(self) -> bool:
        """Whether somebody watches or steers a module that the short way would pass by."""
        return any(module._forward_hooks or module._forward_pre_hooks for module in self._parts)

    def _over_pages(self, x: torch.Tensor, p: Pass, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
        rows, q_heads, kv_heads = x.shape[1], self._q_heads, self._kv_heads
        heads = self._qkv(self._norm1(x)).view(rows, q_heads + 2 * kv_heads, self._dim)
        rotated, v = heads[:, : q_heads + kv_heads], heads[:, q_heads + kv_heads :]
        if self._qk_norms is not None:
            q_norm, k_norm = self._qk_norms
            rotated = torch.cat((q_norm(rotated[:, :q_heads]), k_norm(rotated[:, q_heads:])), 1)
        rotated = torch.addcmul(rotated * cos, rotated.roll(self._dim // 2, -1), signed_sin)
        attended = paged_attention(p, self._layer, rotated[:, :q_heads], rotated[:, q_heads:], v, *self._options)
        x = x + self._out(attended.view(1, rows, q_heads * self._dim))
        gate, up = self._gate_up(self._norm2(x)).chunk(2, -1)
        return x + self._down(self._activation(gate).mul_(up))


def _call(module: nn.Module) -> Any:
    return module.forward


def fused_decoder_layer(layer: nn.Module, sliding_window: int | None, rope: RopeTables) -> FusedDecoderLayer | None:
    """The short form of ``layer``, or None if it has another structure."""
    if _names(layer) != _CHILDREN:
        return None
    attention: Any = layer.self_attn
    mlp: Any = layer.mlp
    if _names(attention) - {"q_norm", "k_norm"} != _ATTENTION or _names(mlp) != _MLP:
        return None
    if not all(hasattr(attention, name) for name in ("layer_idx", "scaling", "head_dim")):
        return None
    if hasattr(attention, "q_norm") != hasattr(attention, "k_norm"):
        return None
    parts = [getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj")] + [mlp.gate_proj, mlp.up_proj]
    if not all(isinstance(part, FusedPart) for part in parts):
        return None
    if [part.index for part in parts] != [0, 1, 2, 0, 1] or parts[0].shared is not parts[2].shared:
        return None
    return FusedDecoderLayer(layer, sliding_window, rope)


def layer_agrees(
    layer: nn.Module,
    sliding_window: int | None,
    hidden_states: torch.Tensor,
    kwargs: dict[str, Any],
    shapes: tuple[LayerShape, ...],
) -> bool:
    """Whether the short form adds to ``hidden_states [1,N,H]`` what ``layer`` adds, in fp32 arithmetic.

    Args:
        kwargs: what the model gave the layer beside the hidden states. shapes: KV shape by layer index.
    """
    wide = layer if hidden_states.dtype == torch.float32 else copy.deepcopy(layer).float()
    x, kwargs = hidden_states.float(), {name: _wide(value) for name, value in kwargs.items()}
    count, device = x.shape[1], x.device
    cache = KVCache(shapes, slots=1, page_size=count, num_pages=1, dtype=torch.float32, device=device)
    cache.reserve(0, count)
    context = torch.zeros(1, dtype=torch.int32, device=device)
    plan = make_plan(cache.block_table, context, None, count, count) if device.type == "cpu" else None
    p = Pass(
        cache=cache,
        block_table=cache.block_table,
        context_lens=context,
        query_lens=None,
        batch=1,
        count=count,
        rows=count,
        take=None,
        put=None,
        backend=("torch", "torch"),
        softcap=False,
        plan=plan,
    )
    fused = fused_decoder_layer(wide, sliding_window, RopeTables())
    assert fused is not None
    with torch.inference_mode():
        theirs = wide(x, **kwargs)
        try:
            ours = fused(x, position_embeddings=kwargs["position_embeddings"], specdec_pass=p)
        except (KeyError, RuntimeError, TypeError):
            return False  # it is called in another way, or its rotary part is not the whole head
    if not isinstance(theirs, torch.Tensor):
        return False
    return float((ours - theirs).abs().max()) < _TOLERANCE * float((theirs - x).abs().max())


def _wide(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.float()
    return tuple(map(_wide, value)) if isinstance(value, tuple) else value


def _names(module: nn.Module) -> set[str]:
    """Children that hold parameters or compute; dropout layers are nothing at inference."""
    return {name for name, child in module.named_children() if not isinstance(child, nn.Dropout)}
