"""Results on their way to the host: copied behind a step, read while the next ones run."""

from __future__ import annotations

from typing import Protocol

import torch


class Event(Protocol):
    """A point in the order of a device's work."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def synchronize(self) -> None:
        """Wait until it has."""


class Copies(Protocol):
    """Copies to the host that take their turn in the order of the device's work."""

    def allocate(self, size: int) -> torch.Tensor:
        """int64 ``[size]`` on the host, to which the device can write while the host goes on."""

    def start(self, source: torch.Tensor, target: torch.Tensor) -> Event:
        """Enqueue a copy; the event comes after it."""


class CudaCopies:
    """Through pinned memory, on the current stream of the source's device."""

    def allocate(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int64, pin_memory=True)

    def start(self, source: torch.Tensor, target: torch.Tensor) -> Event:
        target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(source.device))
        return event


class Ticket:
    """A report that is on its way."""

    def __init__(self, report: torch.Tensor, event: Event | None) -> None:
        self._report = report
        self._event = event

    @property
    def waited(self) -> bool:
        """Whether the report has been taken, so that its buffer is free."""
        return self._event is None

    def ready(self) -> bool:
        """Whether :meth:`wait` returns at once."""
        return self._event is None or self._event.query()

    def wait(self) -> torch.Tensor:
        """The report, on the host; the same each time."""
        if self._event is not None:
            self._event.synchronize()
            self._report = self._report.clone()  # the next reports' copies go to the buffer
            self._event = None
        return self._report


class ResultRing:
    """Takes the reports of steps to the host, without making it wait for the step.

    Args:
        device: where the reports lie.
        capacity: the most reports under way at once.
        rows, columns: the largest report.
        copies: how they travel. None: through pinned memory from a CUDA device; from others by a clone that is ready at
            once, since the next step writes over the report.

    Raises:
        ValueError: no capacity.
    """

    @torch.inference_mode(False)  # the buffers are written outside it too
    def __init__(
        self, device: torch.device, capacity: int, rows: int, columns: int, *, copies: Copies | None = None
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        if copies is None and device.type == "cuda":
            copies = CudaCopies()
        self._copies = copies
        self._largest = (rows, columns)
        self._buffers = [] if copies is None else [copies.allocate(rows * columns) for _ in range(capacity)]
        self._tickets: list[Ticket | None] = [None] * capacity
        self._next = 0

    def push(self, report: torch.Tensor) -> Ticket:
        """Send a report, int64 ``[n, columns]`` up to the largest.

        Raises:
            RuntimeError: the ring is full: the ticket that is ``capacity`` reports old has not been waited for.
            ValueError: a report of another kind.
        """
        fits = report.dim() == 2 and all(have <= most for have, most in zip(report.shape, self._largest, strict=True))
        if not fits or report.dtype != torch.int64:
            raise ValueError(
                f"report must be int64 of a shape up to {list(self._largest)}, got {report.dtype} {list(report.shape)}"
            )
        if self._copies is None:
            return Ticket(report.clone(), None)
        before = self._tickets[self._next]
        if before is not None and not before.waited:
            raise RuntimeError(f"{len(self._buffers)} reports are under way already: wait for the oldest first")
        target = self._buffers[self._next][: report.numel()].view(report.shape)
        ticket = Ticket(target, self._copies.start(report, target))
        self._tickets[self._next] = ticket
        self._next = (self._next + 1) % len(self._tickets)
        return ticket
