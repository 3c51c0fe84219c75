"""Launch configurations: tables and pure functions from shapes and the chip to tile sizes, warps and stages.

Nothing here depends on lengths, T or B: a row's bits must not. ``specdec-triton audit`` shows that what is chosen fits every
chip without spills.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch


class AttentionConfig(NamedTuple):
    """Tiles of ``verify_attention``.

    Attributes:
        block_m: rows (T * G) of a tile. block_n: keys of a block. split_size: keys of a chunk. num_splits: see the kernel.
        merge_rows: rows of a merging program.
    """

    block_m: int
    block_n: int
    split_size: int
    num_splits: int
    num_warps: int
    num_stages: int
    merge_rows: int


_ROWS_EXPECTED = 8  # positions of a verify pass that should fit one tile: K = 7


def interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def attention_config(dim: int, group: int, kv_heads: int, dtype: torch.dtype, device: torch.device) -> AttentionConfig:
    """For head size D, group G = Hq / Hkv and the query's dtype."""
    wide = dim > 128
    rows = _power_of_two(group * _ROWS_EXPECTED)
    block_m = min(max(rows, 16), 32 if wide else 64)
    block_n = 32 if wide or dtype == torch.float32 else 64
    num_splits = min(max(_power_of_two(128 // kv_heads), 16), 64)
    stages = 1 if torch.version.hip else 2
    merge_rows = 1
    if interpreting():
        merge_rows = 64
    return AttentionConfig(block_m, block_n, 256, num_splits, 4, stages, merge_rows)


def fp8_mode(dtype: torch.dtype, device: torch.device) -> str:
    """How a cache of this dtype is read: ``plain``, or fp8 by the chip's conversion (``native``) or from ``bytes``."""
    if dtype != torch.float8_e4m3fn:
        return "plain"
    if device.type == "cpu":
        return "bytes"
    if torch.version.hip:
        return "native" if "gfx95" in torch.cuda.get_device_properties(device).gcnArchName else "bytes"
    return "native" if torch.cuda.get_device_capability(device) >= (8, 9) else "bytes"


def on_device(x: torch.Tensor) -> AbstractContextManager[object]:
    """Launch on the tensor's device, which need not be the current one."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()
