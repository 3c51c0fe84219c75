"""``sample``: one token per row by a Gumbel race, argmax(logits / temperature + noise); greedy at temperature 0."""

from __future__ import annotations

import torch

from specdec_triton.reference.logits import best_of, scaled_logits
from specdec_triton.reference.noise import Stream, race


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    typical_p: torch.Tensor | None,
    seed: torch.Tensor,
    position: torch.Tensor,
    has_filters: bool | None,
    node: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 ``[B]`` and the log-sum-exp fp32 ``[B]`` under the parameters; see ``specdec_triton.ops.sample``."""
    _, tokens = best_of(logits)
    scaled = scaled_logits(logits, temperature, top_k, top_p, min_p, typical_p, has_filters)
    lse = scaled.logsumexp(-1)
    sampled = temperature > 0
    if logits.device.type == "cpu" and not bool(sampled.any()):
        return tokens, lse
    stream = Stream.COUPLED if node is None else Stream.DRAFT
    nodes = torch.full_like(position, node or 0)
    return torch.where(sampled, race(scaled, seed, position, nodes, stream), tokens), lse
