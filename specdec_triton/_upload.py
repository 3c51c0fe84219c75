"""Small tensors from the host to a device without making it wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def upload(values: Sequence[int] | torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Values on the device. From pageable memory the copy would wait for all work before it."""
    host = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)
