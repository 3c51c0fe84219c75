"""Timing the passes of the two models.

Where rows are packed the drafts of a timed pass are those of few requests, as the controller hands them out. The first of
them costs a jump (rows are gathered, and attended to in groups), so there is a point for one draft of all.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING

import torch

from specdec_triton.engine.costs import CostModel

if TYPE_CHECKING:
    from specdec_triton.adapter import ModelAdapter
    from specdec_triton.kv_cache import KVCache

_CONTEXT = 128  # tokens of each request while passes are timed
_CONTEXTS = 7
_PAGE_SIZE = 16
_MOST_REPEATS = 15
_DRAFTING = -1  # in place of a number of drafts: a pass of the drafter

Run = Callable[[], object]
Verify = Callable[[torch.Tensor, "KVCache", torch.Tensor, torch.Tensor], object]


def measure(
    adapter: ModelAdapter,
    verify: Verify,
    drafting: Callable[[int], Run] | None,
    *,
    slots: int,
    max_k: int,
    known: CostModel | None = None,
    seconds: float = 6.0,
    replay: Callable[[Run], Run] = lambda run: run,
    clock: Callable[[], float] = time.perf_counter,
) -> CostModel:
    """Time the passes of up to ``slots`` requests with up to ``max_k`` drafts each.

    Args:
        verify: ``(tokens [n,T], cache, context [n], counts [n]) ->`` anything: scores and judges ``counts - 1`` drafts of each of
            the cache's first n slots.
        drafting: ``n ->`` what does one drafting pass of n requests; None: drafts are free.
        known: what need not be timed again.
        seconds: to spend; little is few points and few repeats. The corners of the grid are timed in any case.
        replay: turns a pass into what the decoder will run, such as a captured graph.
        clock: in seconds.
    """
    if adapter.max_len is not None:
        max_k = min(max_k, adapter.max_len - 1)
    batches = _powers(slots)
    target, draft = ({}, {}) if known is None else (dict(known.target), dict(known.draft or {}))
    grid = {(n, d) for n in batches for d in _draft_counts(n, max_k, packed=not adapter.fixed_shapes)}
    points = grid - target.keys()
    if drafting is None:
        draft = {}
    else:
        points |= {(n, _DRAFTING) for n in batches if n not in draft}
    corners = {(n, d) for n, d in points if n in (1, slots) and d in (_DRAFTING, 0, 1, n * max_k)}
    new_pass = _passes(adapter, verify, slots, max_k)

    def prepare(n: int, d: int) -> Run:
        return replay(drafting(n) if drafting is not None and d == _DRAFTING else new_pass(n, d))

    first = sorted(points, key=lambda point: (point not in corners, sum(point)))
    for (n, d), timed in _time(first, len(corners), prepare, seconds, _synchronized(clock, adapter.device)).items():
        if d == _DRAFTING:
            draft[n] = timed
        else:
            target[n, d] = timed
    return CostModel(target, draft, device=adapter.device)


def _draft_counts(n: int, max_k: int, packed: bool) -> set[int]:
    """How many drafts the timed passes of n requests have."""
    if max_k == 0:
        return {0}
    if n > 1 and packed:
        return {0, 1, *(some * max_k for some in _powers(n))}
    return {0, *(n * k for k in _powers(max_k))}


def _powers(limit: int) -> list[int]:
    """1, 2, 4, ... and ``limit``; nothing for 0."""
    return sorted({*(1 << i for i in range(limit.bit_length())), limit} - {0})


def _passes(adapter: ModelAdapter, verify: Verify, slots: int, max_k: int) -> Callable[[int, int], Run]:
    """``(n, d) ->`` what does a pass of n requests with a context and d drafts in all."""
    longest = max_k + 1
    context = _CONTEXT if adapter.max_len is None else min(_CONTEXT, adapter.max_len - longest)
    pages = -(-(context + longest) // _PAGE_SIZE)
    cache = adapter.new_cache(slots=slots, page_size=_PAGE_SIZE, num_pages=slots * pages)
    for slot in range(slots):
        cache.reserve(slot, context + longest)
    lens = torch.full((slots,), context, dtype=torch.int32, device=adapter.device)
    # On a CPU passes over the same texts would share what is otherwise made for each pass.
    contexts = [lens] if adapter.fixed_shapes else [(lens - i).clamp(min=0) for i in range(_CONTEXTS)]
    turns = itertools.cycle(contexts)
    tokens = torch.arange(slots * longest, device=adapter.device).view(slots, longest) % adapter.vocab_size

    def new_pass(n: int, d: int) -> Run:
        of_few = (d - max_k * torch.arange(n)).clamp(0, max_k)
        drafts = torch.full((n,), d // n) if adapter.fixed_shapes else of_few
        new = tokens[:n, : int(drafts[0]) + 1].contiguous()
        counts = (1 + drafts).to(adapter.device, torch.int32)
        return lambda: verify(new, cache, next(turns)[:n], counts)

    return new_pass


def _synchronized(clock: Callable[[], float], device: torch.device) -> Callable[[], float]:
    """The clock, once the device has done what it was given."""
    if device.type != "cuda":
        return clock

    def read() -> float:
        torch.cuda.synchronize(device)
        return clock()

    return read


def _time(
    points: Sequence[tuple[int, int]],
    needed: int,
    prepare: Callable[[int, int], Run],
    seconds: float,
    clock: Callable[[], float],
) -> dict[tuple[int, int], float]:
    """Median seconds of the first ``needed`` points and of as many of the others as half the time allows.

    Repeats are interleaved, so that a slow moment of the machine touches all points alike.
    """
    start = clock()
    runs: dict[tuple[int, int], Run] = {}
    samples: dict[tuple[int, int], list[float]] = {}

    def time_once(point: tuple[int, int]) -> None:
        began = clock()
        runs[point]()
        samples[point].append(clock() - began)

    for i, point in enumerate(points):
        if i >= needed and clock() - start > seconds / 2:
            break
        runs[point], samples[point] = prepare(*point), []
        if clock() - start < seconds:
            runs[point]()  # the first run of a shape allocates, and may compile
        time_once(point)
    for _ in range(_MOST_REPEATS - 1):
        if clock() - start + sum(timed[-1] for timed in samples.values()) > seconds:
            break
        for point in runs:
            time_once(point)
    return {point: median(timed) for point, timed in samples.items()}
