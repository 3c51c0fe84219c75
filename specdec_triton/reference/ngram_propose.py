"""``ngram_propose``: prompt lookup. What followed the last occurrence of the text's tail is proposed again.

(Saxena, "Prompt lookup decoding", 2023.) The longest tail of ``min_ngram..max_ngram`` tokens that occurs earlier wins,
and of its occurrences the most recent one; the tail never matches itself.
"""

from __future__ import annotations

import torch

from specdec_triton.reference.accept_reject import PAD


def ngram_propose(
    tokens: torch.Tensor, lens: torch.Tensor, k: int, min_ngram: int, max_ngram: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """draft_tokens int64 ``[B,k]`` padded with -1, draft_lens int32 ``[B]``; see ``specdec_triton.ops``."""
    batch, capacity = tokens.shape
    if tokens.device.type == "cpu":  # no need to search capacity that no row uses yet
        capacity = min(capacity, int(lens.max()) if lens.numel() else 0)
        tokens = tokens[:, :capacity]
    device = tokens.device
    lens = lens.long()
    end = torch.arange(capacity, device=device)  # a candidate match ends at this index, inclusive
    last = lens[:, None] - 1

    # length[b, i]: how many tokens before and at i equal the tail, counted up to max_ngram.
    length = torch.zeros(batch, capacity, dtype=torch.long, device=device)
    run = (end < last).expand(batch, capacity)
    for back in range(min(max_ngram, capacity)):
        tail = tokens.gather(1, (last - back).clamp(min=0))
        shifted = tokens.roll(back, dims=1)
        run = run & (end >= back) & (last - back >= 0) & (shifted == tail)
        length += run
    length = length.masked_fill(length < min_ngram, 0)

    score = length * (capacity + 1) + end  # longest first, then latest
    score = torch.where(length > 0, score, -1)
    if capacity == 0:
        return tokens.new_full((batch, k), PAD), torch.zeros(batch, dtype=torch.int32, device=device)
    best, at = score.max(1)
    draft_lens = torch.where(best >= 0, (last[:, 0] - at).clamp(max=k), 0)
    step = torch.arange(k, device=device)
    drafts = tokens.gather(1, (at[:, None] + 1 + step).clamp(max=capacity - 1))
    return drafts.masked_fill(step >= draft_lens[:, None], PAD), draft_lens.int()
