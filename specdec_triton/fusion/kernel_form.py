"""The usual decoder layer as one launch for each of its steps.

    norm, qkv, rope_append, attention and the merge of its splits, output + residual, norm, gate and up, down + residual

nine launches; two more where what attention and MLP give is normed before it is added. Passes of many rows that need not be
exact, prompts' say, leave their products to the vendor's library, which is faster there.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from specdec_triton import ops
from specdec_triton.fusion.norms import FusedRMSNorm
from specdec_triton.fusion.rope_tables import unpacked_tables
from specdec_triton.fusion.structure import Structure
from specdec_triton.passes import Pass

_FEW_ROWS = 64  # for which ops.skinny_linear reads its weight once


class KernelForm:
    """A layer over the pages."""

    def __init__(self, structure: Structure) -> None:
        self._structure = structure

    def __call__(
        self, x: torch.Tensor, p: Pass, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """x ``[1,N,H]``; position_embeddings: cos and sin ``[1,N,R]``."""
        s, x = self._structure, x[0]
        rows = len(x)
        qkv = _linear(s.qkv, _normed(s.norms[0], x, p), p)
        q, k, v = p.unpack(qkv.view(rows, -1, s.dim)).split([s.q_heads, s.kv_heads, s.kv_heads], 2)
        q = self._append(q, k, v, p, position_embeddings)
        attended = p.attend(s.layer, q, s.options, rows).flatten(1)
        x = _added(x, s.out, attended, None if s.after is None else s.after[0], p)
        gated = _gated(s, _normed(s.norms[1], x, p), p)
        return _added(x, s.down, gated, None if s.after is None else s.after[1], p)[None]

    def _append(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: Pass, embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Keys and values into the pages; the rotated queries."""
        s = self._structure
        norms = s.head_norms
        cos, sin = (None, None) if s.rotation is None else unpacked_tables(p, *embeddings, s.rotation)
        return ops.rope_append(
            q, k, v, cos, sin, *p.cache.layer(s.layer), p.block_table, p.context_lens, p.query_lens,
            interleaved=s.rotation in ("interleaved", "repeated"),
            q_norm=None if norms is None else norms[0].weight,
            k_norm=None if norms is None else norms[1].weight,
            eps=1e-6 if norms is None else norms[0].eps,
            add_one=norms is not None and norms[0].add_one,
            backend=p.backends.append,
        )  # fmt: skip


def _linear(layer: torch.nn.Linear, x: torch.Tensor, p: Pass, residual: torch.Tensor | None = None) -> torch.Tensor:
    if p.exact or len(x) <= _FEW_ROWS:
        return ops.skinny_linear(x, layer.weight, layer.bias, residual=residual, backend=p.backends.rows)
    out = F.linear(x, layer.weight, layer.bias)
    return out if residual is None else residual + out


def _gated(s: Structure, x: torch.Tensor, p: Pass) -> torch.Tensor:
    weight, bias = s.gate_up.weight, s.gate_up.bias
    if p.exact or len(x) <= _FEW_ROWS:
        return ops.gated_linear(x, weight, bias, activation=s.activation, backend=p.backends.rows)
    return ops.gated_mlp_activation(F.linear(x, weight, bias), activation=s.activation, backend=p.backends.rows)


def _added(
    x: torch.Tensor, layer: torch.nn.Linear, update: torch.Tensor, norm: FusedRMSNorm | None, p: Pass
) -> torch.Tensor:
    """x plus the layer's product, normed or not."""
    if norm is None:
        return _linear(layer, update, p, residual=x)
    update = _linear(layer, update, p)
    return ops.rms_norm(  # type: ignore[no-any-return]
        update,
        norm.weight,
        eps=norm.eps,
        add_one=norm.add_one,
        residual=x,
        residual_after=True,
        backend=p.backends.rows,
    )


def _normed(norm: FusedRMSNorm, x: torch.Tensor, p: Pass) -> torch.Tensor:
    return ops.rms_norm(x, norm.weight, eps=norm.eps, add_one=norm.add_one, backend=p.backends.rows)  # type: ignore[no-any-return]
