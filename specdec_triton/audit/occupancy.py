"""How many warps of a kernel one SM holds at a time, from the chip's table alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdec_triton.kernels._config import Chip

_RESERVED = 1024  # bytes of shared memory that the driver takes for each block on NVIDIA chips
_SUBPARTITIONS = 4  # a warp's registers come from one of the SM's four files


def occupancy(chip: Chip, registers: int, shared: int, num_warps: int) -> float:
    """Resident warps over the chip's most; 0: a block does not fit."""
    if shared > chip.shared_memory:
        return 0.0
    granule = 8  # registers of a thread are handed out in eights
    of_warp = max(-(-registers // granule), 1) * granule * chip.warp_size
    by_registers = chip.registers_per_sm // _SUBPARTITIONS // of_warp * _SUBPARTITIONS // num_warps
    of_block = shared + (_RESERVED if chip.backend == "cuda" else 0)
    by_shared = chip.shared_memory_per_sm // of_block if of_block else chip.blocks_per_sm
    blocks = min(by_registers, by_shared, chip.warps_per_sm // num_warps, chip.blocks_per_sm)
    return blocks * num_warps / chip.warps_per_sm
