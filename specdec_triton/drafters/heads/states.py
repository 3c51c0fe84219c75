"""The target's last hidden states of each text, as a session is shown them."""

from __future__ import annotations

import torch


class LastStates:
    """Of each slot's text the states at its last positions: position i at i % kept, what is rejected is written over.

    Args:
        kept: how many. width: of a state.
    """

    def __init__(self, slots: int, kept: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.kept, self.width = kept, width
        with torch.inference_mode(False):
            # The last column takes what is nobody's.
            self._held = torch.zeros(slots, kept + 1, width, dtype=dtype, device=device)

    def write(self, first: int, states: torch.Tensor, start: torch.Tensor, counts: torch.Tensor | None) -> None:
        """As ``DraftSession.see``; states: ``[n,T,width]``."""
        step = torch.arange(states.shape[1], device=start.device)
        column = (start[:, None] + step) % self.kept
        if counts is not None:
            column = torch.where(step < counts[:, None], column, self.kept)
        states = states.to(self._held.dtype)
        self._held[first : first + len(states)].scatter_(1, column.long()[..., None].expand_as(states), states)

    def read(self, rows: slice, position: torch.Tensor) -> torch.Tensor:
        """``[n,T,width]`` at positions int64 ``[n,T]`` of the slots ``rows``."""
        return self._held[rows].gather(1, (position % self.kept)[..., None].expand(-1, -1, self.width))

    def blank(self, n: int) -> torch.Tensor:
        """States ``[n,width]`` of zeros."""
        return self._held.new_zeros(n, self.width)

    def move(self, src: int, dst: int) -> None:
        self._held[dst] = self._held[src]

    def take(self, slot: int) -> torch.Tensor:
        """A slot's states in host memory."""
        return self._held[slot].cpu()

    def give(self, slot: int, saved: torch.Tensor) -> None:
        self._held[slot] = saved.to(self._held.device)
