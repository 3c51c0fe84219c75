"""Give a checkpoint's memory back while its weights are being packed.

Weights that safetensors loads are views of one mapping of the checkpoint file, which stays as long as any of them lives.
Once a weight has been copied into packed form its part of the mapping is hardly read again, but its pages would still count
as the process's memory: a packed model would seem to take twice its size.
"""

from __future__ import annotations

import ctypes
import sys
from mmap import PAGESIZE
from pathlib import Path

import torch

_MADV_DONTNEED = 4


class CheckpointPages:
    """The parts of the process's memory that are mapped from files and unmodified, as of now (on Linux; elsewhere none)."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        if not sys.platform.startswith("linux"):
            return
        span, mapped = "", False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            name, *rest = line.split(maxsplit=5)
            if not name.endswith(":"):
                permissions, _, _, inode = rest[:4]
                span, mapped = name, inode != "0" and permissions[:2] == "rw" and permissions[3] == "p"
            elif name == "Anonymous:" and mapped and rest[0] == "0":  # a modified page would count here
                low, high = span.split("-")
                self._ranges.append((int(low, 16), int(high, 16)))

    def release(self, weight: torch.Tensor) -> None:
        """Drop the pages that hold nothing but ``weight``, if they are such a part. Whoever reads it again, a tied embedding
        for one, gets them from the file.
        """
        if weight.device.type != "cpu":
            return
        start = weight.data_ptr()
        end = start + weight.numel() * weight.element_size()
        if not weight.is_contiguous() or not any(low <= start and end <= high for low, high in self._ranges):
            return
        first, last = -(-start // PAGESIZE) * PAGESIZE, end // PAGESIZE * PAGESIZE
        if first < last:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_DONTNEED)


def trim() -> None:
    """Hand what packing has freed back to the system; glibc would keep it for this process."""
    if sys.platform.startswith("linux") and (release := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        release(0)
