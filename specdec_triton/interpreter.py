"""What kernels read and write, lane by lane: Triton's interpreter as a memory checker and a counter of bytes.

with counted() as traffic:
    ops.verify_attention(...)
traffic["_verify_attention_kernel"].loaded["k_cache_ptr"]  # bytes
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch


@dataclass
class Traffic:
    """What the launches of one kernel moved.

    Attributes:
        launches: number of launches. grid: programs of the last one along each axis.
        loaded, stored: bytes by name of the argument that points to them; masked lanes do not count.
    """

    launches: int = 0
    grid: tuple[int, ...] = ()
    loaded: Counter[str] = field(default_factory=Counter)
    stored: Counter[str] = field(default_factory=Counter)
    _read: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    _sizes: dict[str, int] = field(default_factory=dict)

    def distinct(self, argument: str) -> int:
        """Bytes of the elements of an argument that were read at least once."""
        return len(self._read[argument]) * self._sizes.get(argument, 0)


class _Argument:
    """A tensor given to a kernel; its elements do not overlap."""

    def __init__(self, name: str, x: torch.Tensor) -> None:
        self.name, self.start, self.itemsize = name, x.data_ptr(), x.element_size()
        dims = [(stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1 and stride]
        self.dims = sorted(dims, reverse=True)
        self.empty = x.numel() == 0

    def holds(self, addresses: np.ndarray) -> np.ndarray:
        """Which addresses are those of an element: gaps between rows do not count."""
        offset = addresses.astype(np.int64) - self.start
        inside = (offset >= 0) & (offset % self.itemsize == 0) & (not self.empty)
        offset //= self.itemsize
        for stride, size in self.dims:
            index = offset // stride
            inside &= index < size
            offset = offset - index * stride
        return inside & (offset == 0)


class _Launch:
    """The launch in progress."""

    def __init__(self, name: str, arguments: dict[str, Any], traffic: Traffic) -> None:
        self.name, self.traffic = name, traffic
        self.arguments = [_Argument(key, x) for key, x in arguments.items() if isinstance(x, torch.Tensor)]
        traffic._sizes.update({x.name: x.itemsize for x in self.arguments})

    def record(self, pointers: Any, mask: Any, verb: str) -> None:
        data = pointers.data
        addresses = data[np.broadcast_to(mask.data, data.shape)] if mask is not None else data.ravel()
        counts = self.traffic.stored if verb == "writes" else self.traffic.loaded
        for argument in self.arguments:
            if not len(addresses):
                return
            held = argument.holds(addresses)
            if not held.any():
                continue
            counts[argument.name] += int(held.sum()) * argument.itemsize
            if verb == "reads":
                self.traffic._read[argument.name].update(addresses[held].tolist())
            addresses = addresses[~held]
        if len(addresses):
            raise IndexError(f"{self.name} {verb} {len(addresses)} elements outside its arguments")


@contextmanager
def counted() -> Iterator[defaultdict[str, Traffic]]:
    """Count the launches inside the block and the bytes that they move, by kernel name.

    A read or write of anything but an element of the launch's own tensors raises, before it happens, so what lies beside
    them needs no sentinel: the bytes before and after, gaps between rows, the other cache of a pair.

    Raises:
        RuntimeError: the kernels are not interpreted.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("counted() needs the interpreter: set TRITON_INTERPRET=1 before the first import")
    from triton.runtime import interpreter

    traffic: defaultdict[str, Traffic] = defaultdict(Traffic)
    launches: list[_Launch] = []
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    call, set_grid = executor.__call__, builder.set_grid_dim

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = self.fn.__name__
        launches.append(_Launch(name, {**dict(zip(self.arg_names, args, strict=False)), **kwargs}, traffic[name]))
        traffic[name].launches += 1
        try:
            return call(self, *args, **kwargs)
        finally:
            launches.pop()

    def grid(self: Any, *dims: int) -> None:
        launches[-1].traffic.grid = dims
        set_grid(self, *dims)

    def recorded(
        method: Callable[..., Any], verbs: tuple[str, ...], pointers: int, mask: int | None
    ) -> Callable[..., Any]:
        def record(self: Any, *args: Any, **kwargs: Any) -> Any:
            for verb in verbs:
                launches[-1].record(args[pointers], None if mask is None else args[mask], verb)
            return method(self, *args, **kwargs)

        return record

    accesses = {
        "create_masked_load": (("reads",), 0, 1),
        "create_masked_store": (("writes",), 0, 2),
        "create_atomic_cas": (("reads", "writes"), 0, None),
        "create_atomic_rmw": (("reads", "writes"), 1, 3),
    }
    with ExitStack() as patches:
        patches.enter_context(patch.object(executor, "__call__", launch))
        patches.enter_context(patch.object(builder, "set_grid_dim", grid))
        for name, where in accesses.items():
            patches.enter_context(patch.object(builder, name, recorded(getattr(builder, name), *where)))
        yield traffic
