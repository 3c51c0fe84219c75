"""Where a request's tokens lie in the pages: position i is slot i % S of page block_table[b, i // S].

On a device, lengths stay on the device, and every slot that the table could reach is masked. On the CPU, where they are
at hand, a :class:`Plan` turns them into index tensors once for all layers of a pass: however many requests and pages
there are, a layer's keys are appended by one indexed write and read by one indexed read. Plans are made with NumPy: on a few
hundred integers an operation of PyTorch's costs several times as much, and a drafter of one layer makes a plan for each draft.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


@dataclass(eq=False)
class Plan:
    """A pass on the CPU: B requests, ``counts[b]`` of up to ``count`` new positions after ``contexts[b]`` old ones, in the pages
    ``tables [B,P]``; of trees, what each node sees (``masks[b]``, as ``verify_attention``'s tree_mask)."""

    tables: np.ndarray
    contexts: tuple[int, ...]
    counts: tuple[int, ...]
    count: int
    page_size: int
    masks: tuple[tuple[int, ...], ...] | None = None
    _kept: dict[Any, Any] = field(default_factory=dict)

    def keep(self, key: Any, make: Callable[[], Any]) -> Any:
        """What ``make`` returns, made once per plan and key: all layers of a pass ask for the same."""
        if key not in self._kept:
            with torch.inference_mode(False):  # what is made in inference mode could not be written outside it
                self._kept[key] = make()
        return self._kept[key]

    def slots(self, request: np.ndarray, position: np.ndarray) -> torch.Tensor:
        """Where positions of requests (int64, shapes that broadcast) lie, counted through all pages, int64; all have their page."""
        page = self.tables[request, position // self.page_size].astype(np.int64)
        return torch.from_numpy(page * self.page_size + position % self.page_size)

    def new(self) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Of the N new tokens, int64 ``[N]`` each: b * count + t (None if that is 0, 1, 2 ...), and where they go, as :meth:`slots`."""
        return self.keep("new", self._new)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """The new tokens' rows ``[N,...]`` of ``[B,count,...]``, one behind the other."""
        take, _ = self.new()
        rows = x.flatten(0, 1)
        return rows if take is None else rows.index_select(0, take)

    def _new(self) -> tuple[torch.Tensor | None, torch.Tensor]:
        counts = np.array(self.counts, np.int64)
        b = np.arange(len(counts)).repeat(counts)
        if len(b) == 0:
            return None, torch.from_numpy(b)
        t = np.arange(len(b)) - (counts.cumsum() - counts)[b]
        take = None if len(b) == len(counts) * self.count else torch.from_numpy(b * self.count + t)
        return take, self.slots(b, np.array(self.contexts, np.int64)[b] + t)


_latest = threading.local()  # a plan holds buffers for a pass's keys: one is kept, and threads share none


def make_plan(
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_lens: torch.Tensor | None,
    count: int,
    page_size: int,
    tree_mask: torch.Tensor | None = None,
) -> Plan:
    """The plan of a pass; a pass's later layers get the same object."""
    contexts = tuple(context_lens.tolist())
    counts = (count,) * len(contexts) if query_lens is None else tuple(query_lens.tolist())
    tables = block_table.numpy()
    masks = None if tree_mask is None else tuple(map(tuple, tree_mask.tolist()))
    key = (tables.tobytes(), contexts, counts, count, page_size, masks)
    if getattr(_latest, "key", None) != key:
        _latest.key, _latest.plan = key, Plan(tables.copy(), *key[1:])  # the table changes in place
    plan: Plan = _latest.plan
    return plan


def load(cache: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
    """``out[i] = cache[page, slot]`` of the flat ``slots[i]``: ``out [N,Hkv,D]``, contiguous, in the cache's dtype."""
    if cache.dtype.itemsize == 1:  # fp8 cannot be indexed everywhere
        cache, out = cache.view(torch.uint8), out.view(torch.uint8)
    size = cache.shape[1]
    if cache.stride(0) == size * cache.stride(1):
        torch.index_select(cache.flatten(0, 1), 0, slots, out=out)  # of a view
    else:
        out.copy_(cache[slots // size, slots % size])


def store(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """``cache[page, slot] = rows[i]`` of the flat ``slots[i]``: ``rows [N,Hkv,D]``, in the cache's dtype."""
    if cache.dtype.itemsize == 1:
        cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
    size = cache.shape[1]
    if cache.stride(0) == size * cache.stride(1):
        cache.flatten(0, 1).index_copy_(0, slots, rows)  # of a view
    else:
        cache[slots // size, slots % size] = rows


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
