"""Medusa heads: blocks x + SiLU(W x + b) on the target's last hidden state, then an lm_head."""

from __future__ import annotations

import re

import torch
from torch import nn
from torch.nn import functional as F

from specdec_triton.adapter import ModelAdapter
from specdec_triton.drafters.heads.checkpoint import Checkpoint
from specdec_triton.drafters.heads.eagle_head import Borrowed
from specdec_triton.drafters.heads.placing import copied, packed


class MedusaHeads(nn.Module):
    """Of each head its blocks, and which of the ``lm_heads`` is its own; None: ``borrowed``.

    Attributes:
        dtype: of the hidden states that they take.
    """

    def __init__(
        self, blocks: list[list[nn.Linear]], lm_heads: list[nn.Linear], which: list[int | None], borrowed: Borrowed
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList(layers) for layers in blocks)
        self.lm_heads = nn.ModuleList(lm_heads)
        self.which = which
        self.borrowed = borrowed
        self.dtype = torch.float32

    def __len__(self) -> int:
        return len(self.which)

    def forward(self, head: int, state: torch.Tensor) -> torch.Tensor:
        """Logits ``[n,V]`` of a head, from the target's hidden states ``[n,H]``."""
        for block in self.blocks[head]:  # type: ignore[attr-defined]
            state = state + F.silu(block(state))
        index = self.which[head]
        return self.borrowed(state) if index is None else self.lm_heads[index](state)  # type: ignore[no-any-return]


def load_medusa(checkpoint: Checkpoint, target: ModelAdapter) -> MedusaHeads:
    """The heads on the target's device.

    Raises:
        UnsupportedModelError: see :class:`~specdec_triton.drafters.MedusaDrafter`.
    """
    c = checkpoint
    for prefix in ("model.", "medusa_head.", "medusa_heads."):
        c.strip(prefix)
    width, size = target.hidden_size, target.vocab_size
    vllm = any(name.startswith("blocks.") for name in c.names)
    pattern = r"blocks\.(\d+)\.layers\.(\d+)\.weight" if vllm else r"(\d+)\.(\d+)\.linear\.weight"
    found = sorted({tuple(map(int, match.groups())) for name in c.names if (match := re.fullmatch(pattern, name))})
    if not found:
        raise c.error(
            "it has no Medusa heads: expected tensors '0.0.linear.weight' ... or 'blocks.0.layers.0.weight' ..., it has "
            + ", ".join(c.names[:4])
        )
    heads, layers = 1 + max(head for head, _ in found), 1 + max(layer for _, layer in found)
    stated = c.config.get("medusa_num_heads") or c.config.get("num_heads") or heads
    if stated != heads:
        raise c.error(f"its config.json says {stated} heads, it has {heads}")

    blocks: list[list[nn.Linear]] = []
    lm_heads: list[nn.Linear] = []
    which: list[int | None] = []
    shared = c.take_if("lm_head.weight", (size, width))
    if shared is not None:
        lm_heads.append(copied(shared, None, target))
    for i in range(heads):
        of_head = []
        for j in range(layers):
            name = f"blocks.{i}.layers.{j}" if vllm else f"{i}.{j}.linear"
            bias = c.take_if(f"{name}.bias", (width,))
            of_head.append(copied(c.take(f"{name}.weight", (width, width)), bias, target))
        blocks.append(of_head)
        own = c.take_if(f"lm_heads.{i}.weight" if vllm else f"{i}.{layers}.weight", (size, width))
        if own is not None:
            lm_heads.append(copied(own, None, target))
            which.append(len(lm_heads) - 1)
        else:
            which.append(None if shared is None else 0)
    c.finish()
    medusa = MedusaHeads(blocks, lm_heads, which, Borrowed(target.logits_of))
    if not packed(medusa):
        medusa.dtype = target.dtype
    return medusa.eval().requires_grad_(False)
