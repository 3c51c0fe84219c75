"""Launch configurations as data: what holds for every model and chip."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch

pytest.importorskip("triton")

from specdec_triton.kernels._config import (
    CHIPS,
    INTERPRETER,
    activation_config,
    attention_config,
    attention_shared_memory,
    chip_of,
    fp8_mode,
    head_config,
    head_part,
    linear_config,
    linear_shared_memory,
    mean_config,
    nearest_chip,
    norm_config,
    pretend,
    rope_config,
)

DIMS = (16, 24, 64, 80, 96, 112, 128, 192, 256)
GROUPS = (1, 2, 3, 4, 7, 8, 12, 16, 71)
KV_HEADS = (1, 2, 3, 4, 8, 32)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8 = torch.float8_e4m3fn
MODELS = list(itertools.product(DIMS, GROUPS, KV_HEADS))


def power_of_two(n):
    return n > 0 and n & (n - 1) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.arch)
def test_attention_fits(chip, dtype):
    """faults.md K2: estimated shared memory, tiles that tensor cores take, chunks made of whole blocks, few warps."""
    for (dim, group, kv_heads), kv in itertools.product(MODELS, (dtype, FP8)):
        config = attention_config(dim, group, kv_heads, dtype, kv, chip)
        assert attention_shared_memory(config, dim, dtype) <= chip.shared_memory
        for block in (config.block_m, config.block_n):
            assert power_of_two(block)
            assert block >= 16
        assert config.split_size % config.block_n == 0
        assert power_of_two(config.num_splits)
        assert config.num_warps * chip.warp_size <= 512
        assert config.num_stages == 1 or chip.backend == "cuda"  # faults.md K3


def test_attention_depends_on_the_model_and_the_chip_alone():
    """A row's bits must not depend on T, B or a length, so a configuration cannot know them."""
    assert list(inspect.signature(attention_config).parameters) == [
        "dim",
        "group",
        "kv_heads",
        "dtype",
        "kv_dtype",
        "chip",
    ]


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.arch)
def test_split_schedule_is_the_models(chip):
    """Chunks and splits order the sums: the same on all chips, so that only a tile's shape can tell two of them apart."""
    for dim, group, kv_heads in MODELS:
        config = attention_config(dim, group, kv_heads, *[torch.bfloat16] * 2, chip)
        same = attention_config(dim, group, kv_heads, *[torch.bfloat16] * 2, INTERPRETER)
        assert (config.split_size, config.num_splits) == (same.split_size, same.num_splits)


LAYERS = list(itertools.product((1, 192, 576, 1024, 4096, 14336, 50257, 262144), (1, 33, 576, 1024, 2560, 4096, 14336)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.arch)
def test_linear_fits(chip, dtype):
    """Two programs on NVIDIA's SMs; tiles that tensor cores take, on Hopper 64 rows; one row tile for all layers."""
    for n, k in LAYERS:
        config = linear_config(n, k, dtype, chip)
        most = chip.shared_memory_per_sm / 2 if chip.backend == "cuda" else chip.shared_memory
        assert linear_shared_memory(config, dtype, chip) < most
        for block in (config.block_m, config.block_n, config.block_k):
            assert power_of_two(block)
            assert block >= 16
        assert config.block_m == linear_config(64, 64, dtype, chip).block_m
        assert config.block_k == linear_config(64, k, dtype, chip).block_k  # the order of K is the same in all kernels
        assert 2 <= config.num_stages <= 8
        if dtype != torch.float32 and chip.arch in ("sm_90", "sm_100"):
            assert config.block_m == 64


@pytest.mark.parametrize("chip", [*CHIPS.values(), INTERPRETER], ids=lambda chip: chip.arch)
def test_column_tiles_fill_a_chip(chip):
    """The widest tile of which there is one for three of four SMs."""
    for (n, k), dtype in itertools.product(LAYERS, DTYPES):
        block_n = linear_config(n, k, dtype, chip).block_n
        assert block_n in (16, 32, 64, 128)
        if block_n > 16:
            assert -(-n // block_n) * 4 >= chip.num_sms * 3
        if block_n < 64:
            assert -(-n // (2 * block_n)) * 4 < chip.num_sms * 3
    of = {n: linear_config(n, 4096, torch.bfloat16, CHIPS["sm_90"]).block_n for n in (1024, 4096, 6144, 14336, 28672)}
    assert of == {1024: 16, 4096: 32, 6144: 32, 14336: 64, 28672: 128}


@pytest.mark.parametrize("chip", [*CHIPS.values(), INTERPRETER], ids=lambda chip: chip.arch)
def test_splits_are_a_last_resort(chip):
    """K is cut where even the narrowest tiles leave half of the SMs idle, into parts that are worth a launch; else not."""
    for (n, k), dtype in itertools.product([*LAYERS, (1024, 16384), (512, 65536)], DTYPES):
        config = linear_config(n, k, dtype, chip)
        tiles = -(-n // config.block_n)
        assert 1 <= config.splits <= 16
        splits = tiles * 2 <= chip.num_sms and k * dtype.itemsize >= 2 * 8192
        assert (config.splits > 1) is splits
        if splits:
            assert config.block_n == 16
            assert tiles * config.splits <= chip.num_sms
            assert k * dtype.itemsize >= 8192 * config.splits
    assert [linear_config(1024, k, torch.bfloat16, CHIPS["sm_90"]).splits for k in (4096, 8192)] == [1, 2]


PACKED = {
    "smollm2-135m": [(960, 576), (576, 576), (3072, 576), (576, 1536)],
    "qwen3-0.6b": [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)],
    "llama3-8b": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)],
    "gemma3-4b": [(4096, 2560), (2560, 2048), (20480, 2560), (2560, 10240)],
}


@pytest.mark.parametrize("layers", PACKED.values(), ids=PACKED)
def test_one_launch_for_each_product_of_a_layer(layers):
    """qkv, o, gate and up, down, and the parts alone; a second launch would cost a small model's pass more than it saves."""
    for (n, k), dtype, chip in itertools.product(layers, DTYPES, CHIPS.values()):
        assert linear_config(n, k, dtype, chip).splits == 1


def test_linear_depends_on_the_layer_and_the_chip_alone():
    """A row's bits must not depend on M, so a configuration cannot know it."""
    assert list(inspect.signature(linear_config).parameters) == ["n", "k", "dtype", "chip"]
    assert list(inspect.signature(mean_config).parameters) == ["d", "chip"]
    assert list(inspect.signature(norm_config).parameters) == ["h", "chip"]
    assert list(inspect.signature(activation_config).parameters) == ["columns", "chip"]


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.arch)
def test_rope_covers_each_head(chip):
    """Every lane is in a tile, a thread has no more than its registers hold, and strides are what a new tensor's are."""
    for dim, heads in itertools.product(DIMS, (1, 3, 9, 32, 71)):
        for rotary in (0, 2, dim // 4 * 2, dim):
            config = rope_config(heads, dim, rotary, chip)
            assert config.pairs >= rotary // 2
            assert config.rest >= dim - rotary
            assert (config.pairs == 0, config.rest == 0) == (rotary == 0, rotary == dim)
            assert power_of_two(config.heads)
            assert config.heads * (2 * config.pairs + config.rest) <= 96 * chip.warp_size * config.num_warps
            assert dim % config.unit == 0
            assert rotary % config.turn_unit == 0
    assert list(inspect.signature(rope_config).parameters) == ["heads", "dim", "rotary", "chip"]


def test_fp8_mode():
    """faults.md K4: fp8e4nv does not compile on sm_80 and sm_86; gfx942's own e4m3 is another format."""
    native = {arch for arch, chip in CHIPS.items() if fp8_mode(FP8, chip) == "native"}
    assert native == {"sm_89", "sm_90", "sm_100", "sm_120", "gfx950"}
    assert {fp8_mode(torch.bfloat16, chip) for chip in CHIPS.values()} == {"plain"}
    assert fp8_mode(FP8, INTERPRETER) == "bytes"


@pytest.mark.parametrize(
    ("arch", "taken"),
    [("sm_90", "sm_90"), ("sm_87", "sm_86"), ("sm_103", "sm_100"), ("sm_121", "sm_120"), ("sm_75", "sm_86"),
     ("gfx950", "gfx950"), ("gfx90a", "gfx942"), ("gfx1100", "gfx942")],
)  # fmt: skip
def test_nearest_chip(arch, taken):
    assert nearest_chip(arch).arch == taken


def test_pretend():
    cpu = torch.device("cpu")
    with pretend(CHIPS["sm_90"]):
        assert chip_of(cpu).arch == "sm_90"
        with pytest.raises(KeyError), pretend(CHIPS["gfx942"]):
            raise KeyError
        assert chip_of(torch.device("meta")).arch == "sm_90"
    assert chip_of(cpu) is INTERPRETER


def test_table():
    for arch, chip in CHIPS.items():
        assert chip.arch == arch
        assert chip.shared_memory <= chip.shared_memory_per_sm
        assert (chip.warp_size, chip.backend) in ((32, "cuda"), (64, "hip"))


@pytest.mark.parametrize("chip", [*CHIPS.values(), INTERPRETER], ids=lambda chip: chip.arch)
def test_the_head_walks_over_k_as_products_do(chip):
    """For the bits to be those of ``skinny_linear``: the same blocks and splits of K, and row tiles of the same instructions."""
    for n, k, dtype, races in itertools.product(
        (40, 4096, 50257, 128256, 262144), (16, 576, 4096), DTYPES, (False, True)
    ):
        linear, head = linear_config(n, k, dtype, chip), head_config(n, k, dtype, chip, races=races)
        assert (head.block_k, head.splits) == (linear.block_k, linear.splits)
        assert head_part(n) % head.block_n == 0
        assert head.block_n % head.slab == 0
        if chip.arch in ("sm_90", "sm_100") or chip.backend == "hip":
            assert head.block_m == linear.block_m
        assert head.block_m >= min(linear.block_m, 32)
        assert -(-n // head_part(n)) <= 512
