"""Launch configurations: a table of chips, and pure functions from shapes and a chip to tile sizes, warps and stages.

Nothing here depends on lengths, T or B: a row's bits must not. ``specdec-triton audit`` shows that what is chosen fits every
chip without spills.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import NamedTuple

import torch


class Chip(NamedTuple):
    """A GPU as launchers and audit see it. SM: streaming multiprocessor, AMD's compute unit. Memory in bytes.

    Attributes:
        product: whose number of SMs and bandwidth these are.
        shared_memory: the most that one block may have. registers_per_sm: of 32 bits.
        native_e4m3: whether an instruction converts OCP e4m3 (gfx942's own format is another one).
        bandwidth: of the memory, GB/s.
    """

    arch: str
    product: str
    backend: str
    warp_size: int
    shared_memory: int
    shared_memory_per_sm: int
    registers_per_sm: int
    warps_per_sm: int
    blocks_per_sm: int
    native_e4m3: bool
    num_sms: int
    bandwidth: int


# Options of every launch. A product and a sum that become one rounding in one binary and two in another would give a row
# other bits there.
EXACT = {"enable_fp_fusion": False}

_KIB = 1024
CHIPS = {
    chip.arch: chip
    for chip in (
        Chip("sm_80", "A100 SXM 80 GB", "cuda", 32, 163 * _KIB, 164 * _KIB, 65536, 64, 32, False, 108, 2039),
        Chip("sm_86", "RTX 3090", "cuda", 32, 99 * _KIB, 100 * _KIB, 65536, 48, 16, False, 82, 936),
        Chip("sm_89", "L40S", "cuda", 32, 99 * _KIB, 100 * _KIB, 65536, 48, 24, True, 142, 864),
        Chip("sm_90", "H100 SXM", "cuda", 32, 227 * _KIB, 228 * _KIB, 65536, 64, 32, True, 132, 3350),
        Chip("sm_100", "B200", "cuda", 32, 227 * _KIB, 228 * _KIB, 65536, 64, 32, True, 148, 8000),
        Chip("sm_120", "RTX 5090", "cuda", 32, 99 * _KIB, 100 * _KIB, 65536, 48, 24, True, 170, 1792),
        Chip("gfx942", "MI300X", "hip", 64, 64 * _KIB, 64 * _KIB, 131072, 32, 32, False, 304, 5300),
        Chip("gfx950", "MI355X", "hip", 64, 160 * _KIB, 160 * _KIB, 131072, 32, 32, True, 256, 8000),
    )
}
# Its programs are slow to start and its memory is the host's.
INTERPRETER = Chip("interpreter", "CPU", "interpreter", 1, 1 << 40, 1 << 40, 1 << 40, 1, 1, False, 1, 10)

_pretended: Chip | None = None


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


class LinearConfig(NamedTuple):
    """Tiles of ``skinny_linear`` and ``gated_linear``.

    Attributes:
        block_m: rows of a tile. block_n: of its columns, which are rows of the weight. block_k: of a block of K.
        splits: parts of K, which programs of their own add up.
    """

    block_m: int
    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int


class HeadConfig(NamedTuple):
    """Tiles of ``head_stats``: as in ``LinearConfig``. slab: columns whose noise is drawn at a time."""

    block_m: int
    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int
    slab: int


class MeanConfig(NamedTuple):
    """Tiles of ``row_mean``, ``rms_norm`` and ``gated_mlp_activation``: rows of a program, and lanes of a row."""

    block_rows: int
    block_d: int
    num_warps: int


class RopeConfig(NamedTuple):
    """Tiles of ``rope_append``.

    Attributes:
        heads: of a program. pairs, rest: lanes of its tiles of a head: half of what is rotated, and what is not.
        unit, turn_unit: what strides of q, k and v, and of cos and sin, are multiples of.
    """

    heads: int
    pairs: int
    rest: int
    unit: int
    turn_unit: int
    num_warps: int


_ROWS_EXPECTED = 8  # positions of a verify pass that should fit one tile: K = 7
_SPLIT_BYTES = 8192  # of a weight's row: for less, a second launch takes longer than it saves
_MOST_SPLITS = 16
_MOST_STAGES = 8
_MOST_PARTS = 512  # of a vocabulary: two waves of programs on most chips, and a merge that takes microseconds


def interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def chip_of(device: torch.device) -> Chip:
    """The chip that a launch on the device is configured for."""
    if _pretended is not None:
        return _pretended
    if device.type != "cuda":
        return INTERPRETER
    return _chip_of_gpu(device.index if device.index is not None else torch.cuda.current_device())


@contextmanager
def pretend(chip: Chip) -> Iterator[None]:
    """Configure all launches for this chip, whatever the tensors' device: the audit launches on the meta device."""
    global _pretended
    before, _pretended = _pretended, chip
    try:
        yield
    finally:
        _pretended = before


@cache
def _chip_of_gpu(index: int) -> Chip:
    if torch.version.hip:
        return nearest_chip(torch.cuda.get_device_properties(index).gcnArchName.split(":")[0])
    major, minor = torch.cuda.get_device_capability(index)
    return nearest_chip(f"sm_{major}{minor}")


def nearest_chip(arch: str) -> Chip:
    """The table's chip, or for others the latest one before it: what fits that one fits its successors mostly.

    ``sm_121`` -> sm_120, ``sm_103`` -> sm_100, ``sm_87`` -> sm_86, ``sm_75`` -> sm_86 and any other gfx -> gfx942, the tightest.
    """
    if arch in CHIPS:
        return CHIPS[arch]
    if arch.startswith("gfx"):
        return CHIPS["gfx942"]
    earlier = [chip for chip in CHIPS.values() if chip.backend == "cuda" and _number(chip.arch) <= _number(arch)]
    return max(earlier, key=lambda chip: _number(chip.arch), default=CHIPS["sm_86"])


def _number(arch: str) -> int:
    return int(arch.removeprefix("sm_"))


def attention_config(
    dim: int, group: int, kv_heads: int, dtype: torch.dtype, kv_dtype: torch.dtype, chip: Chip
) -> AttentionConfig:
    """For head size D, group G = Hq / Hkv, the dtypes of query and cache; tiles and stages shrink until the chip can hold them."""
    width, full = _power_of_two(dim), dtype == torch.float32
    # fp32 products are exact, without tensor cores, and keep whole tiles in registers.
    largest = (16 if full else 32) if width > 128 else 64
    block_m = min(max(_power_of_two(group * _ROWS_EXPECTED), 16), largest)
    block_n = (16 if full else 32) if width > 128 else 32 if full else 64
    num_splits = min(max(_power_of_two(128 // kv_heads), 16), 64)
    stages = 3 if chip.backend == "cuda" else 1  # 3: a block's pages are known before its keys are asked for
    warps = 4
    if chip.backend == "cuda":
        # Where products take registers, four warps would keep too much of a large tile each.
        large = (block_m > 32 or block_m * width > 4096) and not _multiplies_from_shared_memory(chip)
        if large or fp8_mode(kv_dtype, chip) == "bytes":
            warps = 8
    merge_rows = 64 if chip is INTERPRETER else 1
    config = AttentionConfig(block_m, block_n, 256, num_splits, warps, stages, merge_rows)
    while attention_shared_memory(config, dim, dtype) > chip.shared_memory:
        if config.num_stages > 1:
            config = config._replace(num_stages=config.num_stages - 1)
        else:
            config = config._replace(block_n=config.block_n // 2)
    return config


def attention_shared_memory(config: AttentionConfig, dim: int, dtype: torch.dtype) -> int:
    """Bytes, at most: tiles of the query and of the weights, and those of keys and values on the way; one stage has one a time."""
    row = _power_of_two(dim) * dtype.itemsize
    ahead = max(2 * (config.num_stages - 1), 1)
    return ahead * config.block_n * row + config.block_m * (row + config.block_n * dtype.itemsize)


def linear_config(n: int, k: int, dtype: torch.dtype, chip: Chip) -> LinearConfig:
    """For N outputs of K inputs.

    Row tiles are one size for all M. Hopper multiplies 64 rows at least, and a tile of 64 serves all passes but prefill; a weight
    then costs 128 operations, for which every chip but sm_86 has the time while it reads. fp32 has no tensor cores.

    Column tiles are the widest of 64, 32 and 16 of which there is one for three of four SMs. A narrow tile reads x more often, from
    the chip's cache and for few rows next to nothing beside the weight; parts of K would cost a second launch, and in a decode pass
    that waits for its launches one more in each layer. So K is cut only where even tiles of 16 occupy half of the SMs at most, and
    where each part is long enough to be worth it.
    """
    full = dtype == torch.float32
    block_m = 16 if full else 32 if chip.arch == "sm_86" else 64
    # Once the chip is full, wide tiles read x less often. An odd N stores single elements, for which registers run out.
    widest = 128 if not full and n % 16 == 0 and n >= 128 * chip.num_sms else 64
    block_n = next((width for width in (widest, 32) if -(-n // width) * 4 >= chip.num_sms * 3), 16)
    block_k = min(max(_power_of_two(k), 16), 64)
    splits = max(min(chip.num_sms // -(-n // block_n), k * dtype.itemsize // _SPLIT_BYTES, _MOST_SPLITS), 1)
    # A narrow tile asks for less at a time, so it asks further ahead.
    stages = min(1 + 3 * max(64 // block_n, 1), _MOST_STAGES) if chip.backend == "cuda" else 2
    # Four of AMD's warps have more lanes than the narrowest tile has 128 bits.
    warps = 2 if chip.backend == "hip" and block_n == 16 and not full else 4
    config = LinearConfig(block_m, block_n, block_k, splits, warps, stages)
    # Two programs on each SM: one reads while the other begins or ends.
    while config.num_stages > 2 and linear_shared_memory(config, dtype, chip) > chip.shared_memory_per_sm // 2 - _KIB:
        config = config._replace(num_stages=config.num_stages - 1)
    return config


def linear_shared_memory(config: LinearConfig, dtype: torch.dtype, chip: Chip) -> int:
    """Bytes, at most: the blocks of x and of the weight on the way, and those at work where they are not in registers then."""
    in_registers = chip.backend == "cuda" and (dtype == torch.float32 or not _multiplies_from_shared_memory(chip))
    blocks = config.num_stages - 1 if in_registers else config.num_stages
    return blocks * (config.block_m + config.block_n) * config.block_k * dtype.itemsize


def product_options(config: LinearConfig | HeadConfig, dtype: torch.dtype, chip: Chip) -> dict[str, object]:
    """Launch options of a kernel that calls ``product``."""
    spills = dtype != torch.float32  # on sm_100, unless it may have all registers
    most = at_most_registers(255, chip) if spills else {}
    return {"num_warps": config.num_warps, "num_stages": config.num_stages, **most, **EXACT}


def head_config(n: int, k: int, dtype: torch.dtype, chip: Chip, *, races: bool) -> HeadConfig:
    """For a head of N rows and H = K, with noise or without.

    K is walked as ``linear_config`` says, for the bits are to be those of ``skinny_linear``; so are row tiles where the instruction
    depends on them (64 rows on Hopper and Blackwell, AMD's larger ones). Much is kept beside a tile, in a race above all, so where its
    sums lie in registers, and in races everywhere, tiles are smaller.
    """
    config = linear_config(n, k, dtype, chip)
    block_m, block_n = config.block_m, min(config.block_n, head_part(n))
    in_registers = chip.backend == "cuda" and not _multiplies_from_shared_memory(chip)
    if races or in_registers:
        block_n = min(block_n, 64)
    if dtype == torch.float32:  # without tensor cores both operands are in registers, too
        block_n = min(block_n, 32)
    if races and in_registers:
        block_m = min(block_m, 32)
    slab = min(8 if chip.arch == "sm_100" else 16, block_n)
    return HeadConfig(block_m, block_n, config.block_k, config.splits, config.num_warps, config.num_stages, slab)


def head_part(vocab: int) -> int:
    """Columns of a part of V, of whose logits one program of ``head_stats`` keeps statistics.

    A function of V alone, so that what a row's statistics consist of does not depend on the chip, nor on whether there is one.
    """
    return 64 if vocab <= 64 * 256 else 128 * -(-vocab // (128 * _MOST_PARTS))


def _multiplies_from_shared_memory(chip: Chip) -> bool:
    return chip.arch in ("sm_90", "sm_100")


def mean_config(d: int, chip: Chip) -> MeanConfig:
    """For rows of D."""
    block_d = min(_power_of_two(d), 4096)
    return MeanConfig(64 if chip is INTERPRETER else 1, block_d, 1 if block_d <= 512 else 4)


def norm_config(h: int, chip: Chip) -> MeanConfig:
    """For rows of H: whole ones in the registers of a program, up to 8192."""
    return _lanes(min(_power_of_two(h), 8192), chip)


def activation_config(columns: int, chip: Chip) -> MeanConfig:
    """For rows of I outputs."""
    return _lanes(min(_power_of_two(columns), 1024), chip)


def _lanes(block: int, chip: Chip) -> MeanConfig:
    """Eight elements a lane: 128 bits in half precision."""
    warps = min(max(block // (8 * chip.warp_size), 1), 16)
    return MeanConfig(64 if chip is INTERPRETER else 1, block, warps)


def rope_config(heads: int, dim: int, rotary: int, chip: Chip) -> RopeConfig:
    """For up to so many heads of size D, of which the first R lanes are rotated: some 1024 elements, 128 bits of each lane's dtype
    (16 bits) to a thread, and so for the narrowest tile, which loses most if its loads are not wide."""
    pairs = _power_of_two(rotary // 2) if rotary else 0
    rest = _power_of_two(dim - rotary) if dim > rotary else 0
    heads = min(_power_of_two(heads), _power_of_two(-(-1024 // (2 * pairs + rest))))
    narrow = min(x for x in (pairs, rest) if x)
    num_warps = max(heads * narrow // (chip.warp_size * 8), 1)
    return RopeConfig(heads, pairs, rest, math.gcd(dim, 16), math.gcd(rotary, 16), num_warps)


def fp8_mode(dtype: torch.dtype, chip: Chip) -> str:
    """How a cache of this dtype is read: ``plain``, or fp8 by the chip's conversion (``native``) or from ``bytes``."""
    if dtype != torch.float8_e4m3fn:
        return "plain"
    return "native" if chip.native_e4m3 else "bytes"


def at_most_registers(count: int, chip: Chip) -> dict[str, int]:
    """Launch option: left to itself, ptxas aims at an occupancy and spills a value or two of a latency-bound kernel for it."""
    return {"maxnreg": count} if chip.backend == "cuda" else {}


def dense(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Contiguous: for small inputs, whose strides the kernels do not take."""
    return tuple(None if x is None else x.contiguous() for x in tensors)


def even_rows(x: torch.Tensor) -> torch.Tensor:
    """``[R,D]`` whose address and row stride are divisible by 16 wherever a new tensor's would be, copied if they are not.

    Triton compiles for such facts. A row that is scored alone, or a part of a batch, must not meet another binary.
    """
    rows, width = x.shape
    if rows == 1:
        x = x.as_strided((1, width), (width, 1))  # one row's stride is any number
    even = x.stride(0) == width or (x.stride(0) % 16 == 0 and width % 16 == 0)
    return x if even and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def even_strides(x: torch.Tensor, unit: int) -> tuple[torch.Tensor, tuple[int, ...]]:
    """x and its strides but the last in units of so many elements, 0 along dimensions of size 1.

    A new tensor's are such multiples where its last size is one. x is copied if its own are not, or if its address is not
    divisible by 16: then a kernel reads as wide for one view as for any other, with one binary.
    """
    strides = tuple(0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True))[:-1]
    if x.data_ptr() % 16 or any(stride % unit for stride in strides):
        x = x.clone(memory_format=torch.contiguous_format)
        strides = x.stride()[:-1]
    return x, tuple(stride // unit for stride in strides)


def on_device(x: torch.Tensor) -> AbstractContextManager[object]:
    """Launch on the tensor's device, which need not be the current one."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()
