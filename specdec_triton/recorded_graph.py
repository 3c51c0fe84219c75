"""The semantics of a CUDA graph on a CPU: what a capture freezes, and what a step may not do while it is captured.

graph = RecordedGraph()
graph.capture(step)  # changes nothing
graph.replay()  # the same ops on the same memory, whatever Python would do by now

``StepGraphs(RecordedGraph)`` runs an engine's steps so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from specdec_triton.tracing import Call, HostSyncError, LeafOps, storage_id, tensors

_READERS = frozenset(
    getattr(torch.Tensor, name) for name in ("cpu", "numpy", "tolist", "__array__", "__format__", "__repr__")
)
_CHECKS = ("specdec_triton._checks", "specdec_triton.ops.")  # they look at values, but of tensors on the CPU alone


class RecordedGraph:
    """A graph as :class:`specdec_triton.engine.graphs.Graph` has it, for steps on the CPU.

    It holds the memory that the step used: a tensor that takes another's place later is not seen by a replay. What the
    step allocated holds NaN, in integers a large number, until the first replay.

    Attributes:
        bytes: of the memory that the step allocated.
        ops: names of what a replay runs, as in ``aten.mm``; views and allocations are not among them.
        reads: (address, bytes) of each storage that these ops read or write and that was there before the capture.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.ops: list[str] = []
        self.reads: set[tuple[int, int]] = set()
        self._calls: list[Call] = []

    def capture(self, step: Callable[[], None]) -> None:
        """Record the step; all tensors that were there before, and the random state, end up as they were.

        Raises:
            HostSyncError: the step read a value on the host, or made a tensor of the host's data. The bodies of custom
                ops and the checks of :mod:`specdec_triton.ops` may read: they do so on the CPU alone.
        """
        recorder = _Recorder()
        with torch.random.fork_rng(devices=[]):
            try:
                with _Readers(), recorder:
                    step()
            finally:
                recorder.undo()
        self._calls = recorder.calls
        self.bytes = sum(x.untyped_storage().nbytes() for x in recorder.own.values())
        self.ops = [str(call.op) for call in self._calls]
        storages = [x.untyped_storage() for x in recorder.foreign.values()]
        self.reads = {(storage.data_ptr(), storage.nbytes()) for storage in storages}

    def replay(self) -> None:
        with torch.inference_mode():  # what was allocated under it can be written under it alone
            for call in self._calls:
                results = tensors(call.func(*call.args, **call.kwargs))
                for mine, new in zip(call.made, results, strict=True):
                    if mine is not None:
                        mine.copy_(new)


class _Recorder(LeafOps):
    """Runs a step and notes its ops.

    Attributes:
        own, foreign: a tensor of each storage that the step allocated, or that was there before and that its ops use,
            by storage id. Held here, so that no id is used twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.own: dict[int, torch.Tensor] = {}
        self.foreign: dict[int, torch.Tensor] = {}
        self._scalars: dict[int, torch.Tensor] = {}  # made of Python numbers
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def before(self, call: Call) -> None:
        if call.needs_host and not _is_check():
            raise HostSyncError(call.func)
        if call.op is torch.ops.aten.lift_fresh:  # of Python data
            if call.args[0].dim():
                raise HostSyncError("torch.tensor")
            self._scalars[storage_id(call.args[0])] = call.args[0]
        for x in call.changed:
            self._save(x)

    def after(self, call: Call) -> None:
        # Tensor objects of our own: the step may give its own ones other shapes or memory later.
        args, kwargs, made = tree_map_only(torch.Tensor, torch.Tensor.detach, (call.args, call.kwargs, call.made))
        call = replace(call, args=args, kwargs=kwargs, made=made)
        self.own.update((storage_id(x), x) for x in made if x is not None)
        if call.has_kernel:
            self.calls.append(call)
            self.foreign.update((storage_id(x), x) for x in call.inputs if self._is_foreign(x))

    def undo(self) -> None:
        """Put back what the step has written over, and leave nothing in what it has allocated."""
        for storage, before in self._before.values():
            storage.copy_(before)
        for x in self.own.values():
            raw = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
            raw.fill_(0xFF if x.is_floating_point() else 0x7F)

    def _save(self, x: torch.Tensor) -> None:
        if self._is_foreign(x) and storage_id(x) not in self._before:
            storage = x.untyped_storage()
            self._before[storage_id(x)] = storage, storage.clone()

    def _is_foreign(self, x: torch.Tensor) -> bool:
        return storage_id(x) not in self.own and storage_id(x) not in self._scalars


class _Readers(TorchFunctionMode):
    """Refuses the methods that read a tensor on the CPU without an op."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in _READERS and not _is_check():
            raise HostSyncError(f"Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


def _is_check() -> bool:
    """Whether the call comes from a check of an op's arguments."""
    frame = sys._getframe(1)
    while frame is not None and not str(frame.f_globals.get("__name__")).startswith(_CHECKS):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None
