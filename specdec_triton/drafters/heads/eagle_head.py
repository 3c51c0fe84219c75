"""An EAGLE head: one decoder layer that predicts the target's next hidden state from the last one and the token that followed it.

A pair of the target's features at position i and the token at i + 1 gives a hidden state from which the token at i + 2 is drafted;
that state, in the features' place, and the draft make the next pair.

* EAGLE (Li et al. 2024; EAGLE-2, Li et al. 2024, has the same weights): the features are what the target's head is given; a linear layer
  joins them with the token's embedding.
* EAGLE-3 (Li et al. 2025): hidden states of three of the target's layers, joined by ``fc``; the layer is given embedding and features
  side by side, each normed, and has a head of its own, often for a part of the vocabulary alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from specdec_triton.drafters.heads.checkpoint import Checkpoint

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Borrowed:
    """A layer of the target's: no part of the head."""

    def __init__(self, layer: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.layer = layer

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class EagleHead(nn.Module):
    """The head's layers, with the weights of those that are given the same tensor joined.

    Args:
        width: H, of the head's hidden states.
        features: of what the target's hidden states are put side by side, F.
        three: EAGLE-3.
        norm_first: the residual is the normed features (the layout of the speculators library).

    Attributes:
        embedding: ids below ``embedded_ids`` to ``[...,H]``. lm_head: the last product, over ``ids`` (int64 ``[V']``, None: all) of the
            target's vocabulary.
        dtype: of its hidden states.
    """

    def __init__(
        self,
        config: Any,
        features: int,
        *,
        three: bool,
        norm_first: bool = False,
        bias: tuple[bool, bool] = (False, False),
    ) -> None:
        super().__init__()
        from transformers.activations import ACT2FN
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        width, eps = config.hidden_size, config.rms_norm_eps
        self.dim = config.head_dim
        self.q_heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.three = three
        self.norm_first = norm_first
        heads = self.q_heads + 2 * self.kv_heads

        def norm() -> nn.RMSNorm:
            return nn.RMSNorm(width, eps)

        self.fc = nn.Linear(features if three else features + width, width, bias[0])
        self.hidden_norm: Any = norm() if three else None
        self.input_norm: Any = norm() if three else None
        self.qkv = nn.Linear(2 * width if three else width, heads * self.dim, bias[1])
        self.out = nn.Linear(self.q_heads * self.dim, width, False)
        self.mlp_norm = norm()
        self.gate_up = nn.Linear(width, 2 * config.intermediate_size, False)
        self.down = nn.Linear(config.intermediate_size, width, False)
        self.final_norm = norm() if three else None
        self.act = ACT2FN[config.hidden_act]
        self.rotary = LlamaRotaryEmbedding(config)
        self.embedding: Any = None
        self.embedded_ids = 0
        self.lm_head: Any = None
        self.ids: torch.Tensor | None = None
        self.dtype = torch.float32

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """What of the target's hidden states ``[...,F]`` is kept, and takes the place of the head's own: ``[...,H]`` (EAGLE: as it is)."""
        features = features.to(self.dtype)
        return self.fc(features) if self.three else features  # type: ignore[no-any-return]

    def rotations(self, position: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin ``[1,N,D]`` of positions int64 ``[N]``."""
        return self.rotary(like, position[None])  # type: ignore[no-any-return]

    def forward(
        self,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        rotations: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
    ) -> torch.Tensor:
        """The next hidden states ``[N,H]``.

        Args:
            tokens: int64 ``[N]``. hidden: ``[N,H]``, the fused features at the positions before, or the head's own states.
            rotations: of the positions of ``hidden``, see :meth:`rotations`.
            attend: rotated queries ``[N,Hq,D]``, rotated keys and values ``[N,Hkv,D]`` -> ``[N,Hq,D]``.
        """
        embedded = self.embedding(tokens.clamp(0, self.embedded_ids - 1)).to(hidden.dtype)
        if self.three:
            normed = self.hidden_norm(hidden)
            x = normed if self.norm_first else hidden
            joined = torch.cat((self.input_norm(embedded), normed), -1)
        else:
            x = joined = self.fc(torch.cat((embedded, hidden), -1))
        heads = self.qkv(joined).unflatten(-1, (-1, self.dim))
        rotated, v = heads.split([self.q_heads + self.kv_heads, self.kv_heads], -2)
        q, k = _rotate(rotated, rotations).split([self.q_heads, self.kv_heads], -2)
        x = x + self.out(attend(q, k, v).flatten(-2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(self.act(gate) * up)  # type: ignore[no-any-return]

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        """What ``lm_head`` is given of the layer's states ``[...,H]``."""
        return hidden if self.final_norm is None else self.final_norm(hidden)


def _rotate(x: torch.Tensor, rotations: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Heads ``[N,heads,D]`` turned half by half."""
    cos, sin = (r[0, :, None].to(x.dtype) for r in rotations)
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def target_ids(checkpoint: Checkpoint, draft_size: int, size: int) -> torch.Tensor | None:
    """The target's ids of a head's outputs, int64 ``[V']``, from their distances ``d2t``; None if they are the same.

    Raises:
        UnsupportedModelError: the table is missing or is none of distances.
    """
    if draft_size == size and not checkpoint.has("d2t"):
        return None
    if draft_size > size:
        raise checkpoint.error(f"it drafts {draft_size} ids, the target has {size}")
    distances = checkpoint.take("d2t", (draft_size,)).long()
    ids = torch.arange(draft_size) + distances
    outside = (ids < 0) | (ids >= size)
    if bool(outside.any()):
        i = int(outside.nonzero()[0])
        raise checkpoint.error(
            f"its d2t[{i}] = {int(distances[i])} leads to the id {int(ids[i])}, the target has {size}"
        )
    if len(ids.unique()) < draft_size:
        raise checkpoint.error("its d2t leads from two of its ids to one of the target's: is it a table of distances?")
    if (known := checkpoint.take_if("t2d", (size,))) is not None:
        listed = torch.zeros(size, dtype=torch.bool)
        listed[ids] = True
        if not torch.equal(known.bool(), listed):
            raise checkpoint.error("its d2t and t2d name different ids of the target")
    return ids
