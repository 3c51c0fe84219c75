"""Steps captured once and replayed: one launch in place of a few hundred.

A step is a function over static tensors that reads no value on the host. Its results must lie in tensors that exist
before it runs: what it allocates belongs to its graph, and another graph's replay may write over it. Its Python code
runs twice for a new key and not at all in a replay, so it must not count on side effects.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch

from specdec_triton._warn import warn

Step = Callable[[], object]


class Graph(Protocol):
    """A step that is recorded once and then run any number of times.

    Attributes:
        bytes: what it holds in memory of its own.
    """

    bytes: int

    def capture(self, step: Step) -> None:
        """Record the step without running it."""

    def replay(self) -> None:
        """Run what was recorded, on the tensors that it was recorded with."""


class GraphPool:
    """What the graphs of a device share: the stream they are captured on and the memory of what they allocate.

    Sharing is safe while no two of them run at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._graphs: weakref.WeakSet[CudaGraph] = weakref.WeakSet()
        self._handle: Any = None

    def join(self, graph: CudaGraph) -> Any:
        """The memory to capture the graph in."""
        if not self._graphs:  # the allocator fails on a pool that has lost all of its graphs
            self._handle = torch.cuda.graph_pool_handle()
        self._graphs.add(graph)
        return self._handle


class CudaGraph:
    """A CUDA graph (on AMD a HIP graph).

    Attributes:
        bytes: by how much the capture made PyTorch's reserved memory grow; the driver's own share is not known.
    """

    def __init__(self, pool: GraphPool) -> None:
        self.bytes = 0
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, step: Step) -> None:
        """Record the step; other threads may go on using the device meanwhile.

        Raises:
            Exception: what the step raised, or else what ending the capture did.
        """
        stream, handle = self._pool.stream, self._pool.join(self)
        cause: Exception | None = None
        try:
            # If ending a capture fails, torch.cuda.graph does not put the current stream back; the outer context does.
            with (
                torch.cuda.device(stream.device),
                torch.cuda.stream(torch.cuda.current_stream(stream.device)),
                torch.cuda.graph(self._graph, pool=handle, stream=stream, capture_error_mode="thread_local"),
            ):
                before = torch.cuda.memory_reserved()  # here, since entering empties the allocator's cache
                try:
                    step()
                except Exception as error:
                    cause = error
                    raise
                self.bytes = torch.cuda.memory_reserved() - before
        except Exception:
            _end_recording(stream.device, handle)
            if cause is None:
                raise
            raise cause from None  # ending a broken capture fails as well, and does not say what broke it

    def replay(self) -> None:
        self._graph.replay()


def _end_recording(device: torch.device, handle: Any) -> None:
    """Tell the allocator that a failed capture is over.

    Before PyTorch's pull request 180395 it went on believing in a capture whose end had failed, and ``empty_cache``
    then failed as well, also the one that is the last resort before running out of memory. There is no public call.
    """
    try:
        torch._C._cuda_endAllocateToPool(device.index, handle)
    except (AttributeError, RuntimeError):
        pass  # it knows


def _warn(message: str) -> None:
    warn(message, RuntimeWarning)


class StepGraphs:
    """Runs steps: the first of each key eagerly, then from its graph.

    The eager run is a step like any other. It also compiles kernels and sets libraries up, which a capture may not do.
    All steps of a key must do the same to the same tensors; when one of those is replaced, call :meth:`invalidate`.

    Args:
        make_graph: an empty graph; None: all steps run eagerly.
        limit: the most graphs kept; the least recently used goes.
        failed: is told that a capture failed, and why.

    Attributes:
        replays: steps that ran from a graph.
    """

    def __init__(
        self, make_graph: Callable[[], Graph] | None, *, limit: int = 64, failed: Callable[[str], None] = _warn
    ) -> None:
        if limit < 1:
            raise ValueError(f"limit must be at least 1, got {limit}")
        self.replays = 0
        self._make_graph = make_graph
        self._limit = limit
        self._failed = failed
        self._graphs: OrderedDict[Hashable, Graph] = OrderedDict()

    @property
    def bytes(self) -> int:
        """What all graphs hold in memory of their own."""
        return sum(graph.bytes for graph in self._graphs.values())

    @property
    def captured(self) -> int:
        """Graphs at hand."""
        return len(self._graphs)

    def run(self, key: Hashable, step: Step) -> None:
        """One step.

        Raises:
            Exception: what the step raised while it ran. A capture that fails raises nothing: the step has run by then, and
                from now on all steps run eagerly.
        """
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            graph.replay()
            self.replays += 1
            return
        step()
        if self._make_graph is not None:
            self._capture(self._make_graph, key, step)

    def invalidate(self) -> None:
        """Drop all graphs: a tensor that steps use has been replaced."""
        self._graphs.clear()

    def _capture(self, make_graph: Callable[[], Graph], key: Hashable, step: Step) -> None:
        if len(self._graphs) >= self._limit:
            self._graphs.popitem(last=False)
        try:
            graph = make_graph()
            graph.capture(step)
        except Exception as error:
            self._make_graph = None
            self.invalidate()
            reason = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
            self._failed(f"a step cannot be captured, so all run eagerly: {reason}")
        else:
            self._graphs[key] = graph


def graphs_for(device: torch.device, *, limit: int = 64, failed: Callable[[str], None] = _warn) -> StepGraphs:
    """CUDA graphs that share their memory, up to ``limit`` of them; on other devices steps run eagerly."""
    if device.type != "cuda":
        return StepGraphs(None)
    pool = GraphPool(device)
    return StepGraphs(lambda: CudaGraph(pool), limit=limit, failed=failed)


def captured(device: torch.device) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """A function that makes of a pass what a step will launch: on a CUDA device the replay of its graph."""
    if device.type != "cuda":
        return lambda run: run
    pool = GraphPool(device)

    def capture(run: Callable[[], object]) -> Callable[[], object]:
        run()
        graph = CudaGraph(pool)
        try:
            graph.capture(run)
        except Exception:  # then steps run eagerly too
            return run
        return graph.replay

    return capture
