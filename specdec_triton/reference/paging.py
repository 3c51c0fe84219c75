"""Where a request's tokens lie in the pages: position i is slot i % S of page block_table[b, i // S].

On a device, lengths stay on the device, and every slot that the table could reach is masked. On the CPU, where they are
at hand, a :class:`Plan` turns them into slices once for all layers of a pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch

# A request in several runs is copied run by run unless gathering its pages first is cheaper: one run more costs about as
# much as gathering this many elements. Measured with 192 and 1,024 elements a token, 256 to 4,096 tokens, bf16 and fp32.
RUN_ELEMENTS = 1 << 16


class Write(NamedTuple):
    """New positions ``tokens`` of request ``b`` go to ``slots`` of ``page``."""

    b: int
    tokens: slice
    page: int
    slots: slice


class Run(NamedTuple):
    """Keys that lie side by side: ``keys`` as in :class:`Read`, ``slots`` counted through all pages."""

    keys: slice
    slots: slice


class Read(NamedTuple):
    """Request ``b``'s ``keys``, counted from the plan's begin, lie in ``pages`` behind the first ``skip`` slots.

    A request that was alone lies in one run. It has a few if it shares a prefix or got pages that others gave back, at
    worst as many as pages.
    """

    b: int
    keys: slice
    pages: torch.Tensor
    skip: int
    runs: tuple[Run, ...]


@dataclass
class Plan:
    """A pass on the CPU: B requests, ``counts[b]`` of up to ``count`` new positions after ``contexts[b]`` old ones."""

    tables: tuple[tuple[int, ...], ...]
    contexts: tuple[int, ...]
    counts: tuple[int, ...]
    count: int
    page_size: int
    _kept: dict[Any, Any] = field(default_factory=dict)

    def keep(self, key: Any, make: Callable[[], Any]) -> Any:
        """What ``make`` returns, made once per plan and key: all layers of a pass ask for the same."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    @property
    def writes(self) -> list[Write]:
        return self.keep("writes", self._writes)

    def _writes(self) -> list[Write]:
        out = []
        for b, (table, context, n) in enumerate(zip(self.tables, self.contexts, self.counts, strict=True)):
            t = 0
            while t < n:
                slot = (context + t) % self.page_size
                width = min(self.page_size - slot, n - t)
                page = table[(context + t) // self.page_size]
                out.append(Write(b, slice(t, t + width), page, slice(slot, slot + width)))
                t += width
        return out

    def reads(self, below: int | None, tile: int) -> tuple[int, int, list[Read]]:
        """The keys' first position (a multiple of ``tile``), their number (whole tiles), each active request's part.

        Args:
            below: the first key that matters lies this far from a request's context (None: all do).
        """
        return self.keep(("reads", below, tile), lambda: self._reads(below, tile))

    def _reads(self, below: int | None, tile: int) -> tuple[int, int, list[Read]]:
        starts = [0 if below is None else max(context + below, 0) for context in self.contexts]
        active = [b for b, n in enumerate(self.counts) if n > 0]
        if not active:
            return 0, 0, []
        begin = min(starts[b] for b in active) // tile * tile
        length = -(-(max(self.contexts[b] + self.counts[b] for b in active) - begin) // tile) * tile
        return begin, length, [self._read(b, starts[b], begin) for b in active]

    def _read(self, b: int, start: int, begin: int) -> Read:
        size, end = self.page_size, self.contexts[b] + self.counts[b]
        pages = self.tables[b][start // size : -(-end // size)]
        origin = start - start % size  # position of the first page's slot 0
        leaps = [i for i in range(1, len(pages)) if pages[i] != pages[i - 1] + 1]
        runs = []
        for i, after in zip([0, *leaps], [*leaps, len(pages)], strict=True):
            position, stop = max(origin + i * size, start), min(origin + after * size, end)
            slot = pages[i] * size + position % size
            runs.append(Run(slice(position - begin, stop - begin), slice(slot, slot + stop - position)))
        return Read(b, slice(start - begin, end - begin), torch.tensor(pages), start - origin, tuple(runs))


def make_plan(
    block_table: torch.Tensor, context_lens: torch.Tensor, query_lens: torch.Tensor | None, count: int, page_size: int
) -> Plan:
    """The plan of a pass; a pass's later layers get the same object."""
    contexts = tuple(context_lens.tolist())
    counts = (count,) * len(contexts) if query_lens is None else tuple(query_lens.tolist())
    tables = tuple(map(tuple, block_table.tolist()))
    return _plan(threading.get_ident(), tables, contexts, counts, count, page_size)


@lru_cache(maxsize=4)
def _plan(
    thread: int,  # a plan holds buffers: threads must not share one
    tables: tuple[tuple[int, ...], ...],
    contexts: tuple[int, ...],
    counts: tuple[int, ...],
    count: int,
    page_size: int,
) -> Plan:
    return Plan(tables, contexts, counts, count, page_size)


def load(cache: torch.Tensor, factor: torch.Tensor | None, out: torch.Tensor, reads: list[Read]) -> None:
    """Copy the requests' keys or values into fp32 ``out [B,Hkv,L,D]``, which holds 0 elsewhere.

    Neither table entries nor slots outside a request's part are used: they may hold anything.
    """
    flat = cache.flatten(0, 1) if cache.stride(0) == cache.shape[1] * cache.stride(1) else None  # a view
    bits = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache  # fp8 cannot be selected from everywhere
    for b, keys, pages, skip, runs in reads:
        target = out[b, :, keys]
        if flat is not None and (len(runs) - 1) * RUN_ELEMENTS <= target.numel():
            for run in runs:
                out[b, :, run.keys].copy_(flat[run.slots].transpose(0, 1))
        else:
            tokens = bits.index_select(0, pages).view(cache.dtype).flatten(0, 1)[skip : skip + target.shape[1]]
            target.copy_(tokens.transpose(0, 1))
        if factor is not None:
            target *= factor[:, None, None]


def gather(
    cache: torch.Tensor,
    factor: torch.Tensor | None,
    block_table: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    length: int,
) -> torch.Tensor:
    """Keys or values on a device, fp32 ``[B,Hkv,length,D]``; 0 outside ``start[b] .. end[b] - 1``."""
    position = torch.arange(length, device=cache.device)
    valid = (position >= start[:, None]) & (position < end[:, None])
    page, slot = locate(block_table, position.expand(block_table.shape[0], -1), valid, cache.shape[1])
    tile = cache[page, slot].float()  # [B,length,Hkv,D]
    if factor is not None:
        tile = tile * factor[:, None]
    return tile.masked_fill(~valid[..., None, None], 0).transpose(1, 2)


def locate(
    block_table: torch.Tensor, position: torch.Tensor, valid: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Page and slot, int64 ``[B,N]`` each, of positions ``[B,N]``; page 0, slot 0 where not ``valid``."""
    index = torch.where(valid, position // page_size, 0)
    page = torch.where(valid, block_table.gather(1, index).long(), 0)
    return page, torch.where(valid, position % page_size, 0)


def scatter(
    cache: torch.Tensor, rows: torch.Tensor, page: torch.Tensor, slot: torch.Tensor, valid: torch.Tensor
) -> None:
    """``cache[page, slot] = rows`` ``[B,N,Hkv,D]`` where ``valid`` ``[B,N]``, without a host read.

    Where it is not valid, the first valid row is written once more; if there is none, what lies at page 0, slot 0.
    """
    valid = valid.flatten()
    first = valid.int().argmax()
    row = torch.where(valid, torch.arange(len(valid), device=valid.device), first)
    page, slot = page.flatten()[row], slot.flatten()[row]
    cache[page, slot] = torch.where(valid[first], rows.flatten(0, 1)[row], cache[page, slot])
