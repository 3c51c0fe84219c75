"""Small tensors from the host to a device without making it wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def upload(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``[len(values)]`` on the device. From pageable memory the copy would wait for all work before it."""
    pinned = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(device, non_blocking=pinned)
