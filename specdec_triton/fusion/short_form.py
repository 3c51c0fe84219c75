"""The usual decoder layer in as few operations as PyTorch allows.

transformers' layers spend more time in Python, in views and in small operations than small models spend in matrix products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specdec_triton.fusion.rope_tables import signed_tables
from specdec_triton.fusion.structure import Structure
from specdec_triton.passes import Pass, paged_attention


class ShortForm:
    """A layer over the pages; only where whole heads are rotated half by half, or not at all."""

    def __init__(self, structure: Structure, activation: nn.Module) -> None:
        s = self._structure = structure
        # Bound once: looking modules up by name costs as much as a small operation.
        self._norm_attention, self._norm_mlp = map(_call, s.norms)
        self._qkv, self._out, self._gate_up, self._down = map(_call, (s.qkv, s.out, s.gate_up, s.down))
        self._activation = _call(activation)
        self._after = None if s.after is None else tuple(map(_call, s.after))
        self._head_norms = None if s.head_norms is None else tuple(map(_call, s.head_norms))

    def __call__(
        self, x: torch.Tensor, p: Pass, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """x ``[1,N,H]``; position_embeddings: cos and sin ``[1,N,D]``."""
        s = self._structure
        rows, q_heads, kv_heads = x.shape[1], s.q_heads, s.kv_heads
        heads = self._qkv(self._norm_attention(x)).view(rows, q_heads + 2 * kv_heads, s.dim)
        rotated, v = heads[:, : q_heads + kv_heads], heads[:, q_heads + kv_heads :]
        if self._head_norms is not None:
            q_norm, k_norm = self._head_norms
            rotated = torch.cat((q_norm(rotated[:, :q_heads]), k_norm(rotated[:, q_heads:])), 1)
        if s.rotation is not None:
            cos, signed_sin = signed_tables(p, *position_embeddings)
            rotated = torch.addcmul(rotated * cos, rotated.roll(s.dim // 2, -1), signed_sin)
        attended = paged_attention(p, s.layer, rotated[:, :q_heads], rotated[:, q_heads:], v, s.options)
        update = self._out(attended.view(1, rows, q_heads * s.dim))
        x = x + (update if self._after is None else self._after[0](update))
        gate, up = self._gate_up(self._norm_mlp(x)).chunk(2, -1)
        update = self._down(self._activation(gate).mul_(up))
        return x + (update if self._after is None else self._after[1](update))


def _call(module: nn.Module) -> Any:
    return module.forward
