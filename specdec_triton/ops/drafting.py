"""The ops that draft."""

from __future__ import annotations

import torch

from specdec_triton._checks import check_integer, check_tensor, integers, require
from specdec_triton._library import register, resolve_backend
from specdec_triton.sampling import MAX_DRAFT_TOKENS

_ngram_propose = register(
    "ngram_propose(Tensor tokens, Tensor lens, int k, int min_ngram, int max_ngram, str backend) -> (Tensor, Tensor)",
    fake=lambda tokens, lens, k, *rest: (
        tokens.new_empty((tokens.shape[0], k)),
        tokens.new_empty((tokens.shape[0],), dtype=torch.int32),
    ),
)


def ngram_propose(
    tokens: torch.Tensor,
    lens: torch.Tensor,
    k: int,
    min_ngram: int = 1,
    max_ngram: int = 3,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Propose what followed the last earlier occurrence of the text's tail (prompt lookup).

    The longest tail of min_ngram..max_ngram tokens that occurs earlier wins; of its occurrences the most recent; the
    tail never matches itself.

    Args:
        tokens: int64 ``[B,L]``, the texts so far. lens: int32 ``[B]``, their lengths.
        k: the most tokens to propose.

    Returns:
        draft_tokens int64 ``[B,k]`` padded with -1, and draft_lens int32 ``[B]`` (0: no match).

    Raises:
        ValueError: shapes, dtypes, devices or sizes that do not fit.

    Source: Saxena 2023, "Prompt lookup decoding".

    Example:
        >>> ngram_propose(torch.tensor([[5, 6, 7, 5, 6, 8, 5, 6]]), torch.tensor([8]), 3)[0].tolist()
        [[8, 5, 6]]
    """
    check_tensor("tokens", tokens, (None, None))
    tokens = integers("tokens", tokens, tuple(tokens.shape), tokens, torch.int64)
    lens = integers("lens", lens, (tokens.shape[0],), tokens, torch.int32)
    check_integer("k", k, 0, MAX_DRAFT_TOKENS)
    check_integer("min_ngram", min_ngram, 1)
    check_integer("max_ngram", max_ngram, min_ngram)
    if tokens.device.type == "cpu" and lens.numel():
        low, high = int(lens.min()), int(lens.max())
        require(low >= 0 and high <= tokens.shape[1], "lens", f"from 0 to L = {tokens.shape[1]}", (low, high))
    return _ngram_propose(tokens, lens, k, min_ngram, max_ngram, resolve_backend(backend, "ngram_propose", tokens))
