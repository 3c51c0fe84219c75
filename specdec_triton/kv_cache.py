"""The paged KV cache: a pool of pages per layer, and who owns which page.

A request lives in a slot and owns pages; position i of its text lies in its page i // S at slot i % S. Rejected drafts
need no undoing: the length shrinks, and the next round writes over them. A request's pages cover its capacity, so that
nothing is ever written outside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from specdec_triton.errors import OutOfPagesError

UNUSED = -1  # table entries that no op may read


class LayerShape(NamedTuple):
    kv_heads: int
    head_dim: int


class KVCache:
    """Pages for every layer, block tables for every slot.

    Args:
        layers: KV heads and head size of each attention layer.
        slots: how many requests can be held at once.
        page_size: tokens a page.
        num_pages: pages in the pool; the pool grows by itself if ``growable``.
        dtype, device: of the stored keys and values.

    Attributes:
        block_table: int32 ``[slots, max_pages]`` on the device, -1 where unused.
    """

    @torch.inference_mode(False)  # what a decoder's step makes must stay writable outside it
    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        slots: int,
        page_size: int,
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
        growable: bool = False,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        if num_pages < 0:
            raise ValueError(f"num_pages must be at least 0, got {num_pages}")
        self.page_size = page_size
        self.growable = growable
        self._layers = tuple(layers)
        self._keys = [torch.zeros((num_pages, page_size, *shape), dtype=dtype, device=device) for shape in self._layers]
        self._values = [torch.zeros_like(keys) for keys in self._keys]
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: low pages first, so that requests lie contiguously
        self._owned: list[list[int]] = [[] for _ in range(slots)]
        self.block_table = torch.full((slots, 1), UNUSED, dtype=torch.int32, device=device)

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, ``[P,S,Hkv,D]`` each."""
        return self._keys[index], self._values[index]

    def capacity(self, slot: int) -> int:
        """Tokens that the slot's pages can hold."""
        return len(self._owned[slot]) * self.page_size

    def can_reserve(self, slot: int, tokens: int) -> bool:
        return self.growable or self.pages_for(tokens) - len(self._owned[slot]) <= len(self._free)

    @torch.inference_mode(False)
    def reserve(self, slot: int, tokens: int) -> None:
        """Make sure that the slot's pages can hold ``tokens`` tokens.

        Raises:
            OutOfPagesError: too few free pages; nothing has been changed then.
        """
        missing = self.pages_for(tokens) - len(self._owned[slot])
        if missing <= 0:
            return
        if missing > len(self._free):
            if not self.growable:
                raise OutOfPagesError(
                    f"{tokens} tokens need {missing} more pages of {self.page_size} tokens, but only"
                    f" {len(self._free)} of {self.num_pages} are free: raise num_pages, or lower max_new_tokens"
                )
            self._grow(missing - len(self._free))
        pages = [self._free.pop() for _ in range(missing)]
        held = len(self._owned[slot])
        self._owned[slot] += pages
        if len(self._owned[slot]) > self.block_table.shape[1]:
            wider = len(self._owned[slot]) - self.block_table.shape[1]
            self.block_table = torch.nn.functional.pad(self.block_table, (0, wider), value=UNUSED)
        self.block_table[slot, held : held + missing] = torch.tensor(pages, dtype=torch.int32)

    def trim(self, slot: int, tokens: int) -> None:
        """Give back the slot's pages beyond those that ``tokens`` tokens need."""
        keep = self.pages_for(tokens)
        surplus = self._owned[slot][keep:]
        del self._owned[slot][keep:]
        self._free.extend(reversed(surplus))
        self.block_table[slot, keep:] = UNUSED

    def release(self, slot: int) -> None:
        """Give back all pages of the slot."""
        self.trim(slot, 0)

    def _grow(self, extra: int) -> None:
        extra = max(extra, self.num_pages // 2)
        for tensors in (self._keys, self._values):
            for index, old in enumerate(tensors):  # layer by layer: one layer is held twice, never the whole cache
                new = old.new_zeros(self.num_pages + extra, *old.shape[1:])
                new[: self.num_pages] = old
                tensors[index] = new
        self._free = sorted([*self._free, *range(self.num_pages, self.num_pages + extra)], reverse=True)
        self.num_pages += extra
