"""Ops on the paged cache: attention, appending and compacting; and the n-gram search, whose text grows as the cache does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from specdec_triton import ops
from specdec_triton.audit import traffic
from specdec_triton.audit.cases.base import FP8, INT, MODELS, PAGE_SIZE, Case, Model, Size, meta, name_of
from specdec_triton.audit.traffic import Traffic

if TYPE_CHECKING:
    from specdec_triton.kernels._config import Chip

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


def cases() -> list[Case]:
    return [*_attention_cases(), *_append_cases(), *_rope_cases(), *_other_cases()]


def _pages(model: Model, size: Size, kv: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """k_cache, v_cache, block_table, context_lens."""
    cache = (size.pages, PAGE_SIZE, model.kv_heads, model.dim)
    columns = -(-(size.context + size.steps) // PAGE_SIZE)
    return (
        meta(*cache, dtype=kv),
        meta(*cache, dtype=kv),
        meta(size.batch, columns, dtype=INT),
        meta(size.batch, dtype=INT),
    )


def _scales(model: Model, kv: torch.dtype) -> dict[str, Any]:
    if kv != FP8:
        return {}
    return {name: meta(model.kv_heads, dtype=torch.float32) for name in ("k_scale", "v_scale")}


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
        q = meta(size.batch, model.heads, size.steps, model.dim, dtype=dtype).transpose(1, 2)
        extra: dict[str, Any] = _scales(model, kv)
        if tree:
            extra["tree_mask"] = meta(size.batch, size.steps, dtype=torch.int64)
        if model.sinks:
            extra["sinks"] = meta(model.heads, dtype=dtype)
        lens = meta(size.batch, dtype=INT)
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
        name_of(dtype)
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
    ]


def _append(name: str, dtype: torch.dtype, kv: torch.dtype) -> Case:
    model = MODELS[name]

    def call(size: Size) -> None:
        k = meta(size.batch, model.kv_heads, size.steps, model.dim, dtype=dtype).transpose(1, 2)
        ops.append_kv(
            k, k, *_pages(model, size, kv), meta(size.batch, dtype=INT), **_scales(model, kv), backend="triton"
        )

    def moved(chip: Chip) -> Traffic:
        size = _CHAIN[0]
        return traffic.append_kv(size.batch, size.steps, model.kv_heads, model.dim, dtype.itemsize, kv.itemsize)

    kind = name_of(dtype) + (" kv-fp8" if kv == FP8 else "")
    return Case("append_kv", f"{name} {kind}", call, moved, _CHAIN, quick=name == "llama3-8b")


def _rope_cases() -> list[Case]:
    fp16, fp32 = torch.float16, torch.float32
    return [
        _rope("llama3-8b", quick=True),
        *(_rope("llama3-8b", dtype) for dtype in (fp16, fp32)),
        _rope("llama3-8b", kv=FP8, quick=True),
        _rope("llama3-8b", interleaved=True),
        _rope("llama3-8b", rotary=64, interleaved=True),  # GLM
        *(_rope("qwen3-0.6b", kv=kv, norms=True, quick=kv is None) for kv in (None, FP8)),
        *(_rope("gemma3-4b", kv=kv, norms=True, quick=kv is None) for kv in (None, FP8)),
        _rope("gemma3-4b", fp32, norms=True),
        *(_rope("smollm2-135m", dtype) for dtype in (torch.bfloat16, fp32)),
        _rope("smollm2-135m", rotary=0),  # SmolLM3's layers without positions
        *(_rope("phi2", rotary=32, kv=kv) for kv in (None, FP8)),
        _rope("phi3-mini"),
        _rope("head-192", norms=True),
    ]


def _rope(
    name: str,
    dtype: torch.dtype = torch.bfloat16,
    kv: torch.dtype | None = None,
    *,
    rotary: int | None = None,
    interleaved: bool = False,
    norms: bool = False,
    quick: bool = False,
) -> Case:
    model, kv = MODELS[name], kv or dtype
    rotary = model.dim if rotary is None else rotary

    def call(size: Size) -> None:
        heads = (model.heads, model.kv_heads, model.kv_heads)
        product = meta(size.batch * size.steps, sum(heads) * model.dim, dtype=dtype)
        q, k, v = product.view(size.batch, size.steps, sum(heads), model.dim).split(heads, 2)
        turn = meta(size.batch, size.steps, rotary, dtype=dtype) if rotary else None
        weight = meta(model.dim, dtype=dtype) if norms else None
        lens = meta(size.batch, dtype=INT)
        ops.rope_append(
            q, k, v, turn, turn, *_pages(model, size, kv), lens, interleaved=interleaved, q_norm=weight, k_norm=weight,
            add_one=name.startswith("gemma"), **_scales(model, kv), backend="triton",
        )  # fmt: skip

    def moved(chip: Chip) -> Traffic:
        size = _CHAIN[0]
        return traffic.rope_append(
            traffic.RopeShape(
                size.batch, size.steps, model.heads, model.kv_heads, model.dim, rotary, dtype.itemsize, kv.itemsize, norms
            )
        )  # fmt: skip

    kind = (
        name_of(dtype) + (" kv-fp8" if kv == FP8 else "") + f" rope-{rotary}" + (" interleaved" if interleaved else "")
    )
    return Case("rope_append", f"{name} {kind}{' normed' if norms else ''}", call, moved, _CHAIN, quick=quick)


def _other_cases() -> list[Case]:
    sizes = (Size(8, 4, 4096), Size(1, 4, 1), Size(64, 4, 130001), Size(3, 4, 77))

    def propose(size: Size) -> None:
        tokens = meta(size.batch, size.context, dtype=torch.int64)
        ops.ngram_propose(tokens, meta(size.batch, dtype=INT), size.steps, backend="triton")

    return [
        Case("ngram_propose", "k = 4", propose, lambda chip: traffic.ngram_propose(8, 4096), sizes, quick=True),
        _compact("llama3-8b", torch.bfloat16),
        _compact("smollm2-135m", FP8),
    ]


def _compact(name: str, kv: torch.dtype) -> Case:
    model = MODELS[name]

    def call(size: Size) -> None:
        path = meta(size.batch, size.steps, dtype=torch.int64)
        ops.compact_kv(*_pages(model, size, kv), path, meta(size.batch, dtype=INT), backend="triton")

    def moved(chip: Chip) -> Traffic:
        return traffic.copy_rows(_TREE[0].batch, _TREE[0].steps, model.kv_heads, model.dim, kv.itemsize)

    return Case("compact_kv", f"{name} {name_of(kv)}", call, moved, _TREE)
