"""Where the time of a round goes: draft, verify, accept; and the same as ranges for profilers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch.profiler import record_function

PHASES = ("prefill", "draft", "verify", "accept")


class Phases:
    """Seconds by phase. On a GPU they are measured by events, read when the device is known to have passed them; a replayed
    graph has no events in it, and counts nowhere.

    Attributes:
        seconds: by phase; of what has been collected.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._cuda = device.type == "cuda"
        self._pending: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()

    def __call__(self, name: str) -> AbstractContextManager[None]:
        if torch.autograd._profiler_enabled():
            return self._shown(name)
        return self._timed(name)

    @contextmanager
    def _shown(self, name: str) -> Iterator[None]:
        with record_function(f"specdec::{name}"), self._timed(name):
            yield

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        if not self._cuda:
            start = time.perf_counter()
            yield
            self.seconds[name] += time.perf_counter() - start
        elif torch.cuda.is_current_stream_capturing():
            yield
        else:
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
            yield
            events[1].record()
            self._pending.append((name, *events))

    def since(self, before: dict[str, float]) -> dict[str, float]:
        """Seconds by phase beyond earlier ones."""
        return {name: seconds - before[name] for name, seconds in self.seconds.items()}

    def collect(self) -> None:
        """Add what the device has finished; does not wait."""
        while self._pending and self._pending[0][2].query():
            name, start, end = self._pending.popleft()
            self.seconds[name] += start.elapsed_time(end) / 1000
