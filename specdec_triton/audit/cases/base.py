"""What a case of the audit is, and the sizes of real models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from specdec_triton.audit.traffic import Traffic
from specdec_triton.sampling import SamplingBatch

if TYPE_CHECKING:
    from specdec_triton.kernels._config import Chip

PAGE_SIZE = 16
FP8 = torch.float8_e4m3fn
INT = torch.int32


class Size(NamedTuple):
    """Run-time values: B, T, tokens in the cache or of the text, V, and the pages of the pool."""

    batch: int
    steps: int
    context: int
    vocab: int = 0
    pages: int = 5000


@dataclass(frozen=True)
class Case:
    """One configuration of an op.

    Attributes:
        call: runs the op with ``backend="triton"`` on meta tensors of a size.
        sizes: which one binary a kernel serves; traffic is that of the first.
        tensor_cores: whether its product of matrices must have matrix instructions.
        quick: part of the subset for CI.
    """

    op: str
    name: str
    call: Callable[[Size], object]
    traffic: Callable[[Chip], Traffic]
    sizes: tuple[Size, ...]
    tensor_cores: bool = True
    quick: bool = False


class Model(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


MODELS = {
    "llama3-8b": Model(32, 8, 128),
    "llama3-70b": Model(64, 8, 128),
    "qwen3-0.6b": Model(16, 8, 128),
    "qwen3-30b-a3b": Model(32, 4, 128),
    "gemma2-9b": Model(16, 8, 256, window=4096, softcap=50.0),
    "gemma3-4b": Model(8, 4, 256, window=1024),
    "gemma3-27b-global": Model(32, 16, 128),
    "gemma3-4b-global": Model(8, 4, 256),
    "gpt-oss-20b": Model(64, 8, 64, window=128, sinks=True),
    "gpt-oss-20b-global": Model(64, 8, 64, sinks=True),
    "smollm2-135m": Model(9, 3, 64),
    "phi2": Model(32, 32, 80),
    "phi3-mini": Model(32, 32, 96),
    "head-192": Model(16, 4, 192),
}

# Linear layers: outputs N and inputs K.
LAYERS = {
    "llama3-8b": {
        "q": (4096, 4096), "kv": (1024, 4096), "qkv": (6144, 4096), "gate": (14336, 4096), "down": (4096, 14336),
        "head": (128256, 4096),
    },
    "qwen3-0.6b": {
        "q": (2048, 1024), "kv": (1024, 1024), "o": (1024, 2048), "gate": (3072, 1024), "down": (1024, 3072),
        "head": (151936, 1024),
    },
    "gemma3-4b": {
        "q": (2048, 2560), "kv": (1024, 2560), "o": (2560, 2048), "gate": (10240, 2560), "down": (2560, 10240),
        "head": (262144, 2560),
    },
    "smollm2-135m": {"q": (576, 576), "kv": (192, 576), "gate": (1536, 576), "down": (576, 1536), "head": (49152, 576)},
    "gpt2": {"qkv": (2304, 768), "head": (50257, 768)},
}  # fmt: skip


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def parameters(batch: int, has_filters: bool = False, has_typical: bool = False) -> SamplingBatch:
    """Of B requests."""
    temperature, top_p, min_p, typical_p = (meta(batch, dtype=torch.float32) for _ in range(4))
    seed, position = (meta(batch, dtype=torch.int64) for _ in range(2))
    return SamplingBatch(
        temperature,
        meta(batch, dtype=INT),
        top_p,
        min_p,
        seed,
        position,
        has_filters,
        typical_p if has_typical else None,
    )


def name_of(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", FP8: "fp8"}[dtype]
