"""What passes cost on this machine: measured on a small grid, interpolated, and kept for later runs.

Passes of n requests with d drafts in all are timed for a few n and d. Between the points seconds are linear in both; beyond
them they go on as between the last two. They never fall as a pass grows: where a timing says so, it is noise.

Where rows are packed the drafts of a timed pass are those of few requests, as the controller hands them out: the first of
them costs a jump (rows are gathered, and attended to in groups), so there is a point for one draft of all.

Without measurements an extra row costs 5 % of a pass of one row (3 to 6 % measured on CPUs for 135M parameters), and a pass
of the drafter 10 %.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from specdec_triton import __version__, ops
from specdec_triton._upload import upload
from specdec_triton.models import cache_dir
from specdec_triton.sampling import MAX_DRAFT_TOKENS

if TYPE_CHECKING:
    from specdec_triton.adapter import ModelAdapter

FOLDER = "costs"  # in the cache folder: a file for each combination of models and machine
ROW_COST, DRAFT_COST = 0.05, 0.1  # guesses: shares of a pass of one row
PROBING = 0.005  # of the time
_SHORTEST_WAIT = 8.0  # a row that seems free may not be so on top of others
_CONTEXT = 128  # tokens of each request while passes are timed
_PAGE_SIZE = 16
_MOST_REPEATS = 15
_DRAFTING = -1  # in place of a number of drafts: a pass of the drafter
_FORMAT = 3  # of the files: raise it when what is timed changes

Run = Callable[[], object]


class Curve(NamedTuple):
    """What a round of n requests costs.

    Attributes:
        target: float32 ``[n*63+1]``, seconds of a pass of the target with 0, 1, ... rows beyond one a request.
        draft: float32 ``[]``, seconds of a drafting pass: one more draft for each request.
        wait: rounds between probes, drafts of one token to see whether drafting pays again, that spend ``PROBING`` of the
            time; infinite if not even drafts that are always right would pay.
    """

    target: torch.Tensor
    draft: torch.Tensor
    wait: float


class CostModel:
    """Seconds of passes; does not change.

    Args:
        target: seconds by (requests, drafts of all of them); empty: a guess, in passes of one row.
        draft: seconds of a drafting pass by number of requests; empty: drafts are free; None: a guess.
        device: of the curves.
    """

    def __init__(
        self,
        target: Mapping[tuple[int, int], float] | None = None,
        draft: Mapping[int, float] | None = None,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        self.target = dict(sorted((target or {}).items()))
        self.draft = None if draft is None else dict(sorted(draft.items()))
        self._device = torch.device(device)
        self._curves: dict[int, Curve] = {}

    def covers(self, slots: int) -> bool:
        """Whether batches of that size have been measured."""
        return max((n for n, _ in self.target), default=0) >= slots

    def merged(self, other: CostModel | None) -> CostModel:
        """With what the other measured and this one did not."""
        if other is None:
            return self
        draft = None if self.draft is None else {**(other.draft or {}), **self.draft}
        return CostModel({**other.target, **self.target}, draft, device=self._device)

    def curve(self, n: int) -> Curve:
        """The costs of a round of n requests; made once for each n."""
        if n not in self._curves:
            target = self._target_seconds(n, np.arange(n * MAX_DRAFT_TOKENS + 1))
            draft = self._draft_seconds(n)
            self._curves[n] = Curve(
                upload(torch.from_numpy(target), torch.float32, self._device),
                upload(torch.tensor(draft), torch.float32, self._device),
                usual_wait(n, target, draft),
            )
        return self._curves[n]

    def _target_seconds(self, n: int, drafts: np.ndarray) -> np.ndarray:
        """Seconds of passes of n requests with ``drafts`` ``[X]`` drafts in all, ascending."""
        if not self.target:
            return 1 + ROW_COST * (n + drafts - 1)
        batches = sorted({batch for batch, _ in self.target})
        by_batch = []
        for batch in batches:
            points = [(count, seconds) for (of, count), seconds in self.target.items() if of == batch]
            by_batch.append(_interpolate(drafts, *zip(*points, strict=True)))
        return _growing(_interpolate(n, batches, _growing(by_batch)))

    def _draft_seconds(self, n: int) -> float:
        if self.draft is None:
            return DRAFT_COST * float(self._target_seconds(1, np.zeros(1))[0])
        return float(_interpolate(n, list(self.draft), _growing(list(self.draft.values())))) if self.draft else 0.0


def usual_wait(n: int, target: np.ndarray, draft: float) -> float:
    """``Curve.wait``, if each of the n requests is probed by itself, in rounds of its own."""
    extra = np.arange(len(target))
    best = (n + extra) / (target + np.ceil(extra / n) * draft)  # tokens a second if every draft is right
    if best.max() <= best[0]:
        return math.inf
    return max(float((target[n] - target[0] + n * draft) / target[0]) / PROBING, _SHORTEST_WAIT)


def _growing(values: Any) -> np.ndarray:
    return np.maximum.accumulate(np.asarray(values), axis=0)


def _interpolate(at: Any, points: Sequence[float], values: Any) -> np.ndarray:
    """Piecewise linear through (points, values), beyond the ends as between the last two points.

    Args:
        at: a number or ``[X]``. points: P of them, ascending. values: ``[P]``, or for a number ``at`` also ``[P,X]``.
    """
    known, values = np.asarray(points), np.asarray(values)
    if len(known) == 1:
        return values[np.zeros_like(at, dtype=int)]
    right = np.clip(np.searchsorted(known, at), 1, len(known) - 1)
    part = (at - known[right - 1]) / (known[right] - known[right - 1])
    return values[right - 1] + part * (values[right] - values[right - 1])


def measure(
    adapter: ModelAdapter,
    drafting: Callable[[int], Run | None],
    *,
    slots: int,
    max_k: int,
    rows_of: Callable[[int], int | None],
    known: CostModel | None = None,
    seconds: float = 6.0,
    replay: Callable[[Run], Run] = lambda run: run,
    clock: Callable[[], float] = time.perf_counter,
) -> CostModel:
    """Time the passes of up to ``slots`` requests with up to ``max_k`` drafts each.

    Args:
        drafting: ``n ->`` what does one drafting pass of n requests; None: drafts are free.
        rows_of: what the rows of a pass are padded to (None: not at all).
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
    if drafting(1) is None:
        draft = {}
    else:
        points |= {(n, _DRAFTING) for n in batches if n not in draft}
    corners = {(n, d) for n, d in points if n in (1, slots) and d in (_DRAFTING, 0, 1, n * max_k)}
    new_pass = _passes(adapter, slots, max_k, rows_of)

    def prepare(n: int, d: int) -> Run:
        run = drafting(n) if d == _DRAFTING else new_pass(n, d)
        assert run is not None
        return replay(run)

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


def _passes(
    adapter: ModelAdapter, slots: int, max_k: int, rows_of: Callable[[int], int | None]
) -> Callable[[int, int], Run]:
    """``(n, d) ->`` what does a pass of n requests with a context and d drafts in all."""
    longest = max_k + 1
    context = _CONTEXT if adapter.max_len is None else min(_CONTEXT, adapter.max_len - longest)
    pages = -(-(context + longest) // _PAGE_SIZE)
    cache = adapter.new_cache(slots=slots, page_size=_PAGE_SIZE, num_pages=slots * pages)
    for slot in range(slots):
        cache.reserve(slot, context + longest)
    lens = torch.full((slots,), context, dtype=torch.int32, device=adapter.device)
    tokens = torch.arange(slots * longest, device=adapter.device).view(slots, longest) % adapter.vocab_size

    def new_pass(n: int, d: int) -> Run:
        table, rows = cache.block_table[:n], rows_of(n + d)
        if adapter.fixed_shapes or d in (0, n * max_k) or n == 1:  # the same for each request
            new = tokens[:n, : 1 + d // n].contiguous()
            return lambda: adapter.forward(new, cache, table, lens[:n], rows=rows)
        counts = (1 + (d - max_k * torch.arange(n)).clamp(0, max_k)).to(torch.int32)
        new = tokens[:n, : int(counts[0])]
        return lambda: adapter.forward(new, cache, table, lens[:n], counts, rows=rows, packed=True)

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


def fingerprint(
    target: ModelAdapter, drafter: Any = None, *, exact: bool, backend: str | None = None
) -> dict[str, Any]:
    """What the costs depend on; the key under which they are kept.

    Args:
        drafter: the draft model's adapter, or a name; None: drafts are free.
        exact: whether passes are padded (see ``exactness.py``). backend: of the ops.
    """
    device = target.device
    versions: dict[str, str | None] = {"specdec_triton": __version__}
    for package in ("torch", "transformers", "triton"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "format": _FORMAT,
        "target": _sizes(target),
        "drafter": _sizes(drafter) if hasattr(drafter, "model") else drafter,
        "exact": exact,
        "backend": ops.resolve_backend(backend, "verify_attention", torch.empty(0, device=device)),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "versions": versions,
    }


def _sizes(adapter: ModelAdapter) -> dict[str, Any]:
    config = adapter.config.to_dict()
    return {
        "type": config.get("model_type"),
        "sizes": {name: value for name, value in sorted(config.items()) if type(value) is int},
        "dtype": str(adapter.dtype),
        "bytes": sum(x.nbytes for x in (*adapter.model.parameters(), *adapter.model.buffers())),
        "optimized": getattr(adapter.model, "_specdec_optimized", False),
    }


def device_name(device: torch.device) -> str:
    """Of a GPU what its driver says; of a CPU its name, where the system tells, and what PyTorch uses of it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            name = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def load(key: Mapping[str, Any], *, device: torch.device | str = "cpu") -> CostModel | None:
    """What was kept under the key; None if nothing was, or if it cannot be read."""
    try:
        kept = json.loads(_path(key).read_text(encoding="utf-8"))
        target = {(n, d): seconds for n, d, seconds in kept["target"]}
        draft = dict(kept["draft"])
        whole = all(type(n) is int and n > 0 for n in (*(n for n, _ in target), *draft))
        whole = whole and all(type(d) is int and d >= 0 for _, d in target)
        timed = all(type(x) is float and 0 < x < math.inf for x in (*target.values(), *draft.values()))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return CostModel(target, draft, device=device) if whole and timed else None


def save(costs: CostModel, key: Mapping[str, Any]) -> None:
    """Keep measured costs under the key. Where the cache folder cannot be written, later runs measure again."""
    path = _path(key)
    content = {
        "key": key,
        "target": [[n, d, seconds] for (n, d), seconds in costs.target.items()],
        "draft": [[n, seconds] for n, seconds in (costs.draft or {}).items()],
    }
    text = json.dumps(content, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError:
        pass


def _path(key: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_dir() / FOLDER / f"{digest[:16]}.json"
