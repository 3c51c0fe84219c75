"""Where a request's tokens lie in the pages: position i is slot i % S of page block_table[b, i // S]."""

from __future__ import annotations

import torch


def token_slots(
    block_table: torch.Tensor, start: torch.Tensor, count: int, valid: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Page and slot, int64 ``[B,count]`` each, of positions start .. start + count - 1.

    Args:
        start: int64 ``[B]``. valid: bool ``[B,count]``; where False, the table is not read and page 0 slot 0 returned.
    """
    position = start[:, None] + torch.arange(count, device=block_table.device)
    index = torch.where(valid, position // page_size, 0)
    page = torch.where(valid, block_table.gather(1, index).long(), 0)
    return page, torch.where(valid, position % page_size, 0)
