"""Sessions that hold keys of their own for each text, and how much of a block table a session's passes read."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from specdec_triton.drafters.base import DraftSession, SessionOptions
from specdec_triton.kv_cache import KVCache


class Columns:
    """Of the slots' texts so many columns of the cache's table that the longest is covered; where shapes are fixed, all."""

    def __init__(self, cache: KVCache, options: SessionOptions, *, fixed_shapes: bool) -> None:
        self._cache = cache
        self._all = options.max_tokens is not None and fixed_shapes  # for texts of all lengths
        self._reserved = [0] * options.slots

    @property
    def count(self) -> int:
        return self._cache.block_table.shape[1] if self._all else self._cache.columns(max(self._reserved))

    def reserve(self, slot: int, tokens: int) -> None:
        """The slot's text will not be longer than this."""
        self._reserved[slot] = max(tokens, self._reserved[slot])

    def move(self, src: int, dst: int) -> None:
        self._reserved[dst], self._reserved[src] = self._reserved[src], 0

    def release(self, slot: int) -> None:
        self._reserved[slot] = 0


class CachedSession(DraftSession):
    """The drafter's passes have a cache of their own, in which the first ``seen`` tokens of each slot's text lie; what is rejected is
    forgotten by lowering that count.

    Args:
        cache: grows. fixed_shapes: as of the target's passes.
    """

    free = False
    seen: torch.Tensor

    def __init__(self, cache: KVCache, options: SessionOptions, *, fixed_shapes: bool) -> None:
        self._cache = cache
        self._columns = Columns(cache, options, fixed_shapes=fixed_shapes)
        with torch.inference_mode(False):
            self.seen = torch.zeros(options.slots, dtype=torch.int32, device=cache.block_table.device)

    @property
    def version(self) -> int:
        return self._cache.version

    @property
    def key(self) -> Hashable:
        return self._columns.count

    def room(self, tokens: int) -> int:
        """Keys that are kept of a text of so many tokens, at most."""
        return tokens

    def table(self, rows: slice) -> torch.Tensor:
        """The block table of some slots, as wide as passes read it."""
        return self._cache.block_table[rows, : self._columns.count]

    def reserve(self, slot: int, tokens: int) -> None:
        room = self.room(tokens)
        self._cache.reserve(slot, room)
        self._columns.reserve(slot, room)

    def move(self, src: int, dst: int) -> None:
        self._cache.move(src, dst)
        self._columns.move(src, dst)
        self.seen[dst], self.seen[src] = self.seen[src], 0

    def release(self, slot: int) -> None:
        self._cache.release(slot)
        self._forget(slot)

    def swap_out(self, slot: int, tokens: int) -> Any:
        saved = tokens, self._cache.swap_out(slot, tokens)
        self._forget(slot)
        return saved

    def swap_in(self, slot: int, saved: Any) -> None:
        tokens, pages = saved
        self._cache.swap_in(slot, pages)
        self._columns.reserve(slot, tokens)
        self.seen[slot] = tokens

    def _forget(self, slot: int) -> None:
        self.seen[slot] = 0
        self._columns.release(slot)
