"""Give a checkpoint's memory back while its weights are being packed.

Weights that safetensors loads are views of one mapping of the checkpoint file, which stays as long as any of them lives.
Once a weight has been copied into packed form, nobody reads its part of the mapping again, but its pages would still count
as the process's memory: a packed model would seem to take twice its size.
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from mmap import PAGESIZE
from pathlib import Path

import torch
from torch import nn

_MADV_DONTNEED = 4


class CheckpointPages:
    """The parts of the process's memory that are privately mapped from files, as of now (on Linux; elsewhere none).

    Args:
        model: its tied weights are never released.
    """

    def __init__(self, model: nn.Module) -> None:
        self._holders = Counter(id(weight) for module in model.modules() for weight in module._parameters.values())
        self._ranges: list[tuple[int, int]] = []
        if not sys.platform.startswith("linux"):
            return
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, permissions, _, _, inode, *_ = line.split()
            if inode != "0" and permissions[1:] == "w-p":  # weights are mapped as data that may be written, privately
                low, high = span.split("-")
                self._ranges.append((int(low, 16), int(high, 16)))

    def release(self, weight: torch.Tensor) -> None:
        """Drop the pages that hold nothing but ``weight``, if they are mapped from a file and no other tensor shares them.

        The kernel would read them from the file again, should anything touch them.
        """
        if weight.device.type != "cpu" or self._holders[id(weight)] != 1:
            return
        storage = weight.untyped_storage()
        start, size = storage.data_ptr(), storage.nbytes()
        if not any(low <= start and start + size <= high for low, high in self._ranges):
            return
        if torch._C._storage_Use_Count(storage._cdata) > 2:  # the parameter and the name storage above
            return
        first, last = -(-start // PAGESIZE) * PAGESIZE, (start + size) // PAGESIZE * PAGESIZE
        if first < last:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_DONTNEED)
