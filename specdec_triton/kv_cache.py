"""The paged KV cache: a pool of pages per layer, and who owns which page.

A request lives in a slot and owns pages; position i of its text lies in its page i // S at slot i % S. Rejected drafts
need no undoing: the length shrinks, and the next round writes over them. A request's pages cover its capacity, so that
nothing is ever written outside them.

Requests whose texts begin alike can own the same pages. Only full pages of finished prompts are shared, which nobody
writes to any more; a page that is shared in part is copied at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import torch

from specdec_triton._upload import upload
from specdec_triton.errors import OutOfPagesError
from specdec_triton.prefixes import Prefixes

UNUSED = -1  # table entries that no op may read


class LayerShape(NamedTuple):
    kv_heads: int
    head_dim: int


class Swapped(NamedTuple):
    """The keys and values of a text's first ``tokens`` tokens in host memory.

    Attributes:
        pages: keys and values of each layer in turn, ``[n,S,Hkv,D]``, as bytes where the cache is fp8.
    """

    tokens: int
    pages: tuple[torch.Tensor, ...]


class KVCache:
    """Pages for every layer, block tables for every slot.

    Args:
        layers: KV heads and head size of each attention layer.
        slots: how many requests can be held at once.
        page_size: tokens a page.
        num_pages: pages in the pool; the pool grows by itself if ``growable``.
        dtype, device: of the stored keys and values.
        max_tokens: the longest text that will be held, if known: the block table is as wide from the beginning.

    Attributes:
        block_table: int32 ``[slots, max_pages]`` on the device, -1 where unused.
        version: increases whenever ``block_table`` or a layer's tensors are replaced; a captured CUDA graph still has
            the old ones then.
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
        max_tokens: int | None = None,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        if num_pages < 0:
            raise ValueError(f"num_pages must be at least 0, got {num_pages}")
        self.page_size = page_size
        self.num_pages = num_pages
        self.growable = growable
        self.version = 0
        # Keys and values in turn.
        self._pools = [
            torch.zeros((num_pages, page_size, *shape), dtype=dtype, device=device)
            for shape in layers
            for _ in range(2)
        ]
        self._free = list(range(num_pages))  # a heap: low pages first, so that requests lie contiguously
        self._owned: list[list[int]] = [[] for _ in range(slots)]
        self._owners = [0] * num_pages
        self._prefixes = Prefixes(slots)
        width = max(self.pages_for(max_tokens or 0), 1)
        self.block_table = torch.full((slots, width), UNUSED, dtype=torch.int32, device=device)

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def columns(self, tokens: int) -> int:
        """Columns of the table to read for texts of up to ``tokens`` reserved tokens: a power of two, or all.

        So that few shapes occur, and few graphs are captured.
        """
        return min(1 << max(self.pages_for(tokens) - 1, 0).bit_length(), self.block_table.shape[1])

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, ``[P,S,Hkv,D]`` each."""
        return self._pools[2 * index], self._pools[2 * index + 1]

    def capacity(self, slot: int) -> int:
        """Tokens that the slot's pages can hold."""
        return len(self._owned[slot]) * self.page_size

    def can_reserve(self, slot: int, tokens: int, *, spare: int = 0) -> bool:
        """Whether the slot's pages can be made to hold ``tokens`` tokens, with ``spare`` pages left for others."""
        return self.growable or self.pages_for(tokens) - len(self._owned[slot]) <= len(self._free) - spare

    def reserve(self, slot: int, tokens: int) -> None:
        """Make sure that the slot's pages can hold ``tokens`` tokens.

        Raises:
            OutOfPagesError: too few free pages; nothing has been changed then.
        """
        missing = self.pages_for(tokens) - len(self._owned[slot])
        if missing <= 0:
            return
        if not self.can_reserve(slot, tokens):
            raise OutOfPagesError(
                f"{tokens} tokens need {missing} more pages of {self.page_size} tokens, but only"
                f" {len(self._free)} of {self.num_pages} are free: raise num_pages, or lower max_new_tokens"
            )
        self._append(slot, self._take(missing))

    def trim(self, slot: int, tokens: int) -> None:
        """Give back the slot's pages beyond those that ``tokens`` tokens need; from there on it may be written over.

        Raises:
            ValueError: a page that is cut in two is shared, so what is past the cut must not be written over.
        """
        if tokens < 0:
            raise ValueError(f"tokens must be at least 0, got {tokens}")
        owned, keep = self._owned[slot], self.pages_for(tokens)
        if tokens % self.page_size and keep <= len(owned) and self._owners[owned[keep - 1]] > 1:
            raise ValueError(f"slot {slot} cannot be cut to {tokens} tokens: it shares the page of the last of them")
        self._prefixes.cut(slot, tokens)
        for page in owned[keep:]:
            self._owners[page] -= 1
            if self._owners[page] == 0:
                heapq.heappush(self._free, page)
        del owned[keep:]
        self.block_table[slot, keep:] = UNUSED

    def release(self, slot: int) -> None:
        """Give back all pages of the slot. Those that nobody else owns are free."""
        self.trim(slot, 0)

    def move(self, src: int, dst: int) -> None:
        """Slot src's pages and its row of the table go to the empty slot dst. No key is copied."""
        self._check_empty(dst)
        self._owned[src], self._owned[dst] = [], self._owned[src]
        self._prefixes.move(src, dst)
        self.block_table[dst] = self.block_table[src]
        self.block_table[src] = UNUSED

    # Texts that begin alike.

    def publish(self, slot: int, tokens: Sequence[int], chunk: int) -> None:
        """Other requests may share the keys of the first ``len(tokens) // chunk * chunk`` tokens, which are complete.

        A prompt is processed in chunks that begin at multiples of ``chunk``, and the bits of a chunk's keys may depend on
        its shape: only whole chunks are the same for all requests.

        Args:
            tokens: the slot's text from its beginning. Further calls look only at what is new.

        Raises:
            ValueError: the slot's pages do not reach so far, or it shares chunks of another size.
        """
        whole = len(tokens) // chunk * chunk
        if whole > self.capacity(slot):
            raise ValueError(f"slot {slot} cannot share {whole} tokens: its pages hold {self.capacity(slot)}")
        self._prefixes.hold(slot, tokens, chunk)

    def adopt(self, slot: int, tokens: Sequence[int], chunk: int) -> int:
        """Give the empty slot the keys of the longest beginning of its text that another request has published.

        Full pages are shared, one that is covered in part is copied. At least one token is left to process.

        Returns:
            How many tokens are covered, a multiple of ``chunk``; 0 too if a page must be copied and none is free.
        """
        self._check_empty(slot)
        covered, holder = self._prefixes.find(tokens, chunk)
        rest = covered % self.page_size
        if covered == 0 or (rest and not self.can_reserve(slot, 1)):
            return 0
        pages = self._owned[holder][: self.pages_for(covered)]
        if rest:
            source, (pages[-1],) = pages[-1], self._take(1)
            for pool in self._pools:
                pool[pages[-1], :rest] = pool[source, :rest]
        self._append(slot, pages)
        self._prefixes.hold(slot, tokens[:covered], chunk)
        return covered

    # Requests that make room for others.

    def swap_out(self, slot: int, tokens: int) -> Swapped:
        """Copy what the slot's first ``tokens`` tokens left in the cache to host memory, and release the slot.

        From a GPU the copies run in the order of the current stream, into pinned memory: wait for the stream before reading
        them on the host.
        """
        if tokens > self.capacity(slot):
            raise ValueError(f"slot {slot} has no {tokens} tokens: its pages hold {self.capacity(slot)}")
        pages = self.block_table[slot, : self.pages_for(tokens)]
        swapped = Swapped(tokens, tuple(_on_host(_bits(pool).index_select(0, pages)) for pool in self._pools))
        self.release(slot)
        return swapped

    def swap_in(self, slot: int, swapped: Swapped) -> None:
        """Give the empty slot pages, and write back bit for bit what :meth:`swap_out` took.

        Raises:
            OutOfPagesError: too few free pages; nothing has been changed then.
        """
        self._check_empty(slot)
        self.reserve(slot, swapped.tokens)
        pages = self.block_table[slot, : self.pages_for(swapped.tokens)].long()
        for pool, saved in zip(self._pools, swapped.pages, strict=True):
            _bits(pool).index_copy_(0, pages, saved.to(pool.device, non_blocking=True))

    def _check_empty(self, slot: int) -> None:
        if self._owned[slot]:
            raise ValueError(f"slot {slot} must be empty, it owns {len(self._owned[slot])} pages")

    def _take(self, count: int) -> list[int]:
        if count > len(self._free):
            try:
                self._grow(count - len(self._free))
            except RuntimeError as error:  # torch.OutOfMemoryError is one; on a CPU it has no class of its own
                self.growable = False  # from now on requests make room for one another
                raise OutOfPagesError(
                    f"no memory for {count} more pages of {self.page_size} tokens: {error}"
                ) from error
        return [heapq.heappop(self._free) for _ in range(count)]

    @torch.inference_mode(False)
    def _append(self, slot: int, pages: Sequence[int]) -> None:
        """The slot owns ``pages`` too, behind its others."""
        owned = self._owned[slot]
        held, width = len(owned), self.block_table.shape[1]
        owned += pages
        for page in pages:
            self._owners[page] += 1
        if len(owned) > width:
            wider = max(len(owned) - width, width // 2)
            self.block_table = torch.nn.functional.pad(self.block_table, (0, wider), value=UNUSED)
            self.version += 1
        self.block_table[slot, held : len(owned)] = upload(pages, torch.int32, self.block_table.device)

    @torch.inference_mode(False)
    def _grow(self, extra: int) -> None:
        extra = max(extra, self.num_pages // 2)
        self.version += 1
        # One by one: one tensor is held twice, never the whole cache. If memory ends on the way, some stay too long.
        for index, old in enumerate(self._pools):
            new = old.new_zeros(self.num_pages + extra, *old.shape[1:])
            new[: self.num_pages] = old[: self.num_pages]
            self._pools[index] = new
        self._free += range(self.num_pages, self.num_pages + extra)  # still a heap: they are higher than all others
        self._owners += [0] * extra
        self.num_pages += extra


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x  # indexing is not implemented for fp8 everywhere


def _on_host(x: torch.Tensor) -> torch.Tensor:
    if x.device.type in ("cpu", "meta"):
        return x
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
    return host.copy_(x, non_blocking=x.is_cuda)
