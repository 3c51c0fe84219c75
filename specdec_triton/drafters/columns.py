"""How much of a block table a session's passes read."""

from __future__ import annotations

from specdec_triton.drafters.base import SessionOptions
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
