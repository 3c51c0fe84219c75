"""Log-probabilities of tokens under the model's own logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TokenLogprob:
    """What the model thought of a token that was written, before temperature, filters and rules.

    Attributes:
        token_id, logprob: of the token itself; natural logarithm.
        top: token id -> logprob of the most likely tokens, the most likely first, the lowest id first of equal ones.
    """

    token_id: int
    logprob: float
    top: dict[int, float]


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of a token and of the ``top`` most likely ones for each row.

    Args:
        logits: ``[R,V]``, any floating dtype. tokens: int64 ``[R]``. top: at most V.

    Returns:
        fp32 ``[R]``, and int64 ids and fp32 ``[R,top]``. Of equal logits the lowest ids come first, however many rows there are.
    """
    exact = logits.float()
    lse = exact.logsumexp(-1, keepdim=True)
    ids = _largest(exact, top)
    return (exact.gather(1, tokens[:, None]) - lse)[:, 0], ids, exact.gather(1, ids) - lse


def _largest(rows: torch.Tensor, top: int) -> torch.Tensor:
    """Ids int64 ``[R,top]`` of the largest values of fp32 rows, the lowest id first of equal ones."""
    if rows.device.type != "cpu" or not 0 < top < rows.shape[1]:
        return _largest_by_key(rows, top)
    values, ids = rows.topk(top + 1)  # takes a quarter of the time, but picks any of equal ones
    ids = ids[:, :top].sort(-1).values
    ids = ids.gather(1, rows.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices)
    tied = (values[:, top - 1] == values[:, top]).nonzero()[:, 0]
    if len(tied):
        ids[tied] = _largest_by_key(rows[tied], top)
    return ids


def _largest_by_key(rows: torch.Tensor, top: int) -> torch.Tensor:
    """One key for value and id: the bits of the number in the order of its value, then the id from the last one down."""
    import torch

    vocab = rows.shape[1]
    bits = (rows + 0.0).view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    key = order * vocab + torch.arange(vocab - 1, -1, -1, device=rows.device)
    return vocab - 1 - key.topk(top).values % vocab
