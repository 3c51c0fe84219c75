"""What the audit compiles: ops in the shapes of real models, each at many run-time sizes that one binary has to serve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from specdec_triton import ops
from specdec_triton.audit import traffic
from specdec_triton.audit.traffic import Traffic
from specdec_triton.reference.accept_reject import METHODS

if TYPE_CHECKING:
    from specdec_triton.kernels._config import Chip

PAGE_SIZE = 16
FP8 = torch.float8_e4m3fn
INT = torch.int32


class Size(NamedTuple):
    """Run-time values: B, T, tokens in the cache, V, and the pages of the pool."""

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
        tensor_cores: whether its attention kernel must have matrix instructions.
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
        "q": (4096, 4096), "kv": (1024, 4096), "gate": (14336, 4096), "down": (4096, 14336), "head": (128256, 4096),
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

# The first size is the one whose traffic is shown: 8 requests, K = 4, 4096 tokens of context.
_CHAIN = (
    Size(8, 5, 4096),
    Size(1, 1, 0),
    Size(1, 8, 130000),
    Size(3, 2, 17, pages=7),
    Size(64, 6, 999),
    Size(2, 512, 3),
)
# AMD addresses a tensor of up to 2 GiB with 32-bit offsets, and has another binary beyond.
_LARGE_POOL = (Size(8, 5, 4096, pages=100_000), Size(1, 8, 130000, pages=1_000_000))
_TREE = (Size(8, 16, 4096), Size(1, 64, 100), Size(3, 5, 0, pages=7), Size(16, 33, 20000))
_ROWS = (
    Size(8, 5, 0, 128256),
    Size(1, 2, 0, 151936),
    Size(64, 8, 0, 49152),
    Size(3, 6, 0, 262144),
    Size(5, 1, 0, 32000),
)
_DRAFTS_OF_8 = (Size(8, 9, 0, 128256), Size(1, 16, 0, 151936), Size(3, 12, 0, 49152))
_DRAFTS_OF_16 = (Size(8, 17, 0, 128256), Size(1, 32, 0, 151936), Size(3, 25, 0, 49152))
_LONG_DRAFTS = (Size(8, 33, 0, 128256), Size(1, 64, 0, 151936), Size(3, 40, 0, 49152))
# Rows of a product are B * T.
_PASSES = (Size(8, 5, 0), Size(1, 1, 0), Size(1, 5, 0), Size(1, 8, 0), Size(3, 1, 0), Size(64, 8, 0), Size(4, 600, 0))
_ODD_VOCAB = (Size(8, 5, 0, 50257), Size(1, 2, 0, 32003), Size(64, 8, 0, 99999))


def cases() -> list[Case]:
    return [*_attention_cases(), *_append_cases(), *_row_cases(), *_linear_cases(), *_other_cases()]


def _meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _pages(model: Model, size: Size, kv: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """k_cache, v_cache, block_table, context_lens."""
    cache = (size.pages, PAGE_SIZE, model.kv_heads, model.dim)
    columns = -(-(size.context + size.steps) // PAGE_SIZE)
    return (
        _meta(*cache, dtype=kv),
        _meta(*cache, dtype=kv),
        _meta(size.batch, columns, dtype=INT),
        _meta(size.batch, dtype=INT),
    )


def _scales(model: Model, kv: torch.dtype) -> dict[str, Any]:
    if kv != FP8:
        return {}
    return {name: _meta(model.kv_heads, dtype=torch.float32) for name in ("k_scale", "v_scale")}


def _attention(
    name: str,
    dtype: torch.dtype = torch.bfloat16,
    kv: torch.dtype | None = None,
    *,
    tree: bool = False,
    large_pool: bool = False,
    quick: bool = False,
) -> Case:
    model = MODELS[name]
    kv = kv or dtype
    sizes = _TREE if tree else _LARGE_POOL if large_pool else _CHAIN

    def call(size: Size) -> None:
        # As the attention interface hands them over: [B,Hq,T,D] in memory, transposed.
        q = _meta(size.batch, model.heads, size.steps, model.dim, dtype=dtype).transpose(1, 2)
        extra: dict[str, Any] = _scales(model, kv)
        if tree:
            extra["tree_mask"] = _meta(size.batch, size.steps, dtype=torch.int64)
        if model.sinks:
            extra["sinks"] = _meta(model.heads, dtype=dtype)
        lens = _meta(size.batch, dtype=INT)
        ops.verify_attention(
            q,
            *_pages(model, size, kv),
            lens,
            sliding_window=model.window,
            softcap=model.softcap,
            **extra,
            backend="triton",
        )

    def moved(chip: Chip) -> Traffic:
        from specdec_triton.kernels._config import attention_config

        size = sizes[0]
        config = attention_config(model.dim, model.heads // model.kv_heads, model.kv_heads, dtype, kv, chip)
        return traffic.attention(
            traffic.AttentionShape(
                size.batch, size.steps, size.context, model.heads, model.kv_heads, model.dim, dtype.itemsize, kv.itemsize,
                model.window or 0, config.block_m, config.split_size, config.num_splits,
            )
        )  # fmt: skip

    kind = (
        _short(dtype)
        + (" kv-fp8" if kv == FP8 else "")
        + (" tree" if tree else "")
        + (" large pool" if large_pool else "")
    )
    return Case("verify_attention", f"{name} {kind}", call, moved, sizes, dtype != torch.float32, quick)


def _attention_cases() -> list[Case]:
    fp16, fp32 = torch.float16, torch.float32
    quick = ("llama3-8b", "gemma3-4b", "gpt-oss-20b", "smollm2-135m")
    return [
        *(_attention(name, quick=name in quick) for name in MODELS),
        *(_attention(name, fp16) for name in ("llama3-8b", "gemma2-9b", "smollm2-135m")),
        *(_attention(name, kv=FP8, quick=name == "llama3-8b") for name in ("llama3-8b", "llama3-70b", "gpt-oss-20b")),
        *(_attention(name, kv=FP8) for name in ("gemma3-4b", "phi3-mini", "head-192")),
        *(
            _attention(name, tree=True, quick=name == "llama3-8b")
            for name in ("llama3-8b", "gemma3-4b", "smollm2-135m")
        ),
        _attention("gpt-oss-20b", kv=FP8, tree=True),
        _attention("llama3-8b", large_pool=True),
        *(_attention(name, fp32) for name in ("smollm2-135m", "gemma3-4b")),
    ]


def _append_cases() -> list[Case]:
    return [
        *(_append(name, torch.bfloat16, torch.bfloat16) for name in ("llama3-8b", "smollm2-135m", "phi2")),
        *(_append(name, torch.bfloat16, FP8) for name in ("llama3-8b", "smollm2-135m")),
        _append("llama3-8b", torch.bfloat16, torch.bfloat16, rotary=128),
        _append("llama3-8b", torch.bfloat16, FP8, rotary=128),
        _append("phi2", torch.bfloat16, torch.bfloat16, rotary=32),
        _append("llama3-8b", torch.bfloat16, torch.bfloat16, rotary=128, interleaved=True),
    ]


def _append(name: str, dtype: torch.dtype, kv: torch.dtype, *, rotary: int = 0, interleaved: bool = False) -> Case:
    model = MODELS[name]

    def call(size: Size) -> None:
        k = _meta(size.batch, model.kv_heads, size.steps, model.dim, dtype=dtype).transpose(1, 2)
        lens = _meta(size.batch, dtype=INT)
        turn = _meta(size.batch, size.steps, rotary, dtype=dtype) if rotary else None
        extra: dict[str, Any] = {**_scales(model, kv), "cos": turn, "sin": turn, "interleaved": interleaved}
        ops.append_kv(k, k, *_pages(model, size, kv), lens, **extra, backend="triton")

    def moved(chip: Chip) -> Traffic:
        size = _CHAIN[0]
        heads = (model.kv_heads, model.dim)
        return traffic.append_kv(size.batch, size.steps, *heads, dtype.itemsize, kv.itemsize, rotary)

    kind = _short(dtype) + (" kv-fp8" if kv == FP8 else "")
    kind += (f" rope-{rotary}" if rotary else "") + (" interleaved" if interleaved else "")
    return Case("append_kv", f"{name} {kind}", call, moved, _CHAIN, quick=name == "llama3-8b")


def _params(batch: int, has_filters: bool) -> ops.SamplingBatch:
    temperature, top_p, min_p = (_meta(batch, dtype=torch.float32) for _ in range(3))
    seed, position = (_meta(batch, dtype=torch.int64) for _ in range(2))
    return ops.SamplingBatch(temperature, _meta(batch, dtype=INT), top_p, min_p, seed, position, has_filters)


def _row_cases() -> list[Case]:
    bf16, fp32 = torch.bfloat16, torch.float32
    found = [
        _sample("race", bf16, _ROWS, None, False),
        _sample("race", fp32, _ROWS, None, False),
        _sample("race, filters", bf16, _ROWS, None, True),
        _sample("draft", bf16, _ROWS, 1, False),
        _sample("race, odd V", bf16, _ODD_VOCAB, None, False),
    ]
    for method in METHODS:
        found.append(_accept(method, bf16, "K <= 7", _ROWS[:4]))
        found.append(_accept(method, bf16, "K 32-63", _LONG_DRAFTS))
        if method != "greedy":
            found.append(_accept(method, bf16, "K <= 7, filters", _ROWS[:4], has_filters=True))
    for method in ("rejection", "block"):
        draft = {"has_draft": True, "has_lse": True}
        found.append(_accept(method, bf16, "K <= 7, draft", _ROWS[:4], **draft))
        found.append(_accept(method, bf16, "K <= 7, draft, no lse", _ROWS[:4], has_draft=True))
        found.append(_accept(method, bf16, "K <= 7, draft, filters", _ROWS[:4], has_filters=True, **draft))
        found.append(_accept(method, bf16, "K 8-15, draft", _DRAFTS_OF_8, **draft))
        found.append(_accept(method, bf16, "K 16-31, draft", _DRAFTS_OF_16, **draft))
        found.append(_accept(method, bf16, "K 32-63, draft", _LONG_DRAFTS, **draft))
    found.append(_accept("coupled", fp32, "K <= 7", _ROWS[:4]))
    found.append(_accept("coupled", bf16, "K <= 7, odd V", _ODD_VOCAB))
    return found


def _sample(name: str, dtype: torch.dtype, sizes: tuple[Size, ...], node: int | None, filters: bool) -> Case:
    def call(size: Size) -> None:
        logits = _meta(size.batch, size.vocab, dtype=dtype)
        ops.sample(logits, params=_params(size.batch, filters), return_lse=True, node=node, backend="triton")

    def moved(chip: Chip) -> Traffic:
        return traffic.sample(sizes[0].batch, sizes[0].vocab, dtype.itemsize, filters=filters)

    quick = name.startswith("race") and dtype == torch.bfloat16
    return Case("sample", f"{_short(dtype)} {name}", call, moved, sizes, quick=quick)


def _accept(
    method: str,
    dtype: torch.dtype,
    name: str,
    sizes: tuple[Size, ...],
    *,
    has_draft: bool = False,
    has_lse: bool = False,
    has_filters: bool = False,
) -> Case:
    def call(size: Size) -> None:
        batch, k, vocab = size.batch, size.steps - 1, size.vocab
        ops.accept_reject(
            _meta(batch, k, dtype=torch.int64),
            _meta(batch, k + 1, vocab, dtype=dtype),
            _meta(batch, k, vocab, dtype=dtype) if has_draft else None,
            draft_lse=_meta(batch, k, dtype=torch.float32) if has_lse else None,
            draft_lens=_meta(batch, dtype=INT),
            params=_params(batch, has_filters),
            method=method,
            backend="triton",
        )

    def moved(chip: Chip) -> Traffic:
        size = sizes[0]
        return traffic.accept_reject(
            size.batch,
            size.steps - 1,
            size.vocab,
            dtype.itemsize,
            method=method,
            has_draft=has_draft,
            has_lse=has_lse,
            filters=has_filters,
        )

    short = name in ("K <= 7", "K <= 7, draft", "K <= 7, filters")
    quick = short and method in ("coupled", "rejection") and dtype == torch.bfloat16
    return Case("accept_reject", f"{method} {_short(dtype)} {name}", call, moved, sizes, quick=quick)


def _linear_cases() -> list[Case]:
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    return [
        *(_linear(model, layer, bf16) for model in LAYERS for layer in LAYERS[model] if model != "gpt2"),
        *(_linear("llama3-8b", layer, dtype) for dtype in (fp16, fp32) for layer in ("kv", "gate", "down", "head")),
        *(_linear("smollm2-135m", layer, dtype) for dtype in (fp16, fp32) for layer in LAYERS["smollm2-135m"]),
        *(_linear("qwen3-0.6b", layer, bf16, has_bias=True) for layer in ("q", "o")),
        *(_linear("gpt2", "qkv", dtype, has_bias=True, transposed=True) for dtype in (bf16, fp32)),
        *(_linear("gpt2", "head", dtype) for dtype in (bf16, fp16, fp32)),
        *(_mean(width, bf16) for width in (128, 576, 4096)),
        *(_mean(width, fp32) for width in (128, 576, 4096, 14336)),
    ]


def _linear(model: str, layer: str, dtype: torch.dtype, *, has_bias: bool = False, transposed: bool = False) -> Case:
    n, k = LAYERS[model][layer]

    def call(size: Size) -> None:
        x = _meta(size.batch * size.steps, k, dtype=dtype)
        weight = _meta(k, n, dtype=dtype).t() if transposed else _meta(n, k, dtype=dtype)
        ops.skinny_linear(x, weight, _meta(n, dtype=dtype) if has_bias else None, backend="triton")

    def moved(chip: Chip) -> Traffic:
        from specdec_triton.kernels._config import linear_config

        config = linear_config(n, k, dtype, chip)
        tiles = traffic.LinearTiles(config.block_m, config.block_n, config.splits)
        return traffic.skinny_linear(_PASSES[0].batch * _PASSES[0].steps, n, k, dtype.itemsize, tiles, bias=has_bias)

    kind = _short(dtype) + (" bias" if has_bias else "") + (" transposed" if transposed else "")
    quick = model == "llama3-8b" and layer in ("kv", "gate") and dtype == torch.bfloat16
    return Case("skinny_linear", f"{model} {layer} {kind}", call, moved, _PASSES, dtype != torch.float32, quick)


def _mean(width: int, dtype: torch.dtype) -> Case:
    def call(size: Size) -> None:
        ops.row_mean(_meta(size.batch * size.steps, width, dtype=dtype), backend="triton")

    def moved(chip: Chip) -> Traffic:
        return traffic.row_mean(_PASSES[0].batch * _PASSES[0].steps, width, dtype.itemsize)

    quick = width == 4096 and dtype == torch.float32
    return Case("row_mean", f"D = {width} {_short(dtype)}", call, moved, _PASSES, quick=quick)


def _other_cases() -> list[Case]:
    sizes = (Size(8, 4, 4096), Size(1, 4, 1), Size(64, 4, 130001), Size(3, 4, 77))

    def propose(size: Size) -> None:
        tokens = _meta(size.batch, size.context, dtype=torch.int64)
        ops.ngram_propose(tokens, _meta(size.batch, dtype=INT), size.steps, backend="triton")

    return [
        Case("ngram_propose", "k = 4", propose, lambda chip: traffic.ngram_propose(8, 4096), sizes, quick=True),
        _compact("llama3-8b", torch.bfloat16),
        _compact("smollm2-135m", FP8),
    ]


def _compact(name: str, kv: torch.dtype) -> Case:
    model = MODELS[name]

    def call(size: Size) -> None:
        path = _meta(size.batch, size.steps, dtype=torch.int64)
        ops.compact_kv(*_pages(model, size, kv), path, _meta(size.batch, dtype=INT), backend="triton")

    def moved(chip: Chip) -> Traffic:
        return traffic.copy_rows(_TREE[0].batch, _TREE[0].steps, model.kv_heads, model.dim, kv.itemsize)

    return Case("compact_kv", f"{name} {_short(kv)}", call, moved, _TREE)


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", FP8: "fp8"}[dtype]
