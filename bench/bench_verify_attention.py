"""Does scoring T = K + 1 positions cost what one costs, and does the kernel read keys and values at the memory's pace?

    python -m bench.bench_verify_attention --out bench/results/verify_attention.jsonl
    python -m bench.bench_verify_attention --quick
    TRITON_INTERPRET=1 python -m bench.bench_verify_attention      # launches and bytes

Aims on a GPU: T = 5 within 1.15 x T = 1 at 32K tokens of context; three quarters of the copy bandwidth where batch x KV heads x
context is large. ``specdec-T1`` is ours for one position over the same keys, timed in the same rounds.

SDPA, transformers and FlexAttention read keys and values that were gathered from the pages beforehand: that gather, which a
paged cache would need at every layer, is **not** in their times. ``transformers`` is its own attention function with the mask
that it would make, for which it repeats the KV heads.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from bench.micro import OURS, Bench, Problem, Provider, Skip, backend, installed, normal, run
from specdec_triton import ops
from specdec_triton.audit import traffic
from specdec_triton.audit.cases.base import FP8, MODELS, PAGE_SIZE
from specdec_triton.audit.traffic import Traffic
from specdec_triton.kernels._config import Chip, attention_config

SHAPES = {
    name: MODELS[name] for name in ("llama3-8b", "smollm2-135m", "gemma2-9b", "gemma3-4b-global", "gpt-oss-20b", "phi2")
}


@dataclass(frozen=True)
class Spec:
    shape: str
    batch: int
    steps: int
    context: int
    dtype: str = "bfloat16"
    fp8: bool = False
    tree: bool = False

    @property
    def model(self) -> Any:
        return SHAPES[self.shape]

    @property
    def flex(self) -> bool:
        """FlexAttention compiles for each shape, so only one is measured."""
        return not self.fp8 and (self.shape, self.batch, self.steps, self.context) == ("llama3-8b", 8, 5, 32768)

    @property
    def query_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def cache_dtype(self) -> torch.dtype:
        return FP8 if self.fp8 else self.query_dtype


def specs(machine: str, quick: bool) -> list[Spec]:
    if machine == "interpreter":
        found = [
            Spec("smollm2-135m", 1, 5, 300),
            Spec("smollm2-135m", 1, 1, 300),
            Spec("llama3-8b", 1, 5, 300, fp8=True),
            Spec("gpt-oss-20b", 1, 5, 300),
        ]
        return found[:1] if quick else found
    if machine == "cpu":
        found = [
            Spec("smollm2-135m", 1, 5, 1024),
            Spec("smollm2-135m", 1, 1, 1024),
            Spec("smollm2-135m", 8, 5, 1024),
            Spec("smollm2-135m", 1, 5, 1024, "float32"),
            Spec("llama3-8b", 1, 5, 1024),
        ]
        return [Spec("smollm2-135m", 1, 5, 256)] if quick else found
    first = [
        Spec("llama3-8b", 8, 5, 32768),
        Spec("llama3-8b", 64, 5, 32768),
        Spec("llama3-8b", 1, 5, 32768),
    ]
    if quick:
        return first
    found = [
        *first,
        Spec("llama3-8b", 8, 5, 8192, fp8=True),
        Spec("llama3-8b", 8, 16, 8192, tree=True),
        Spec("gpt-oss-20b", 8, 5, 8192),
        Spec("gemma3-4b-global", 8, 5, 8192),
        Spec("gemma2-9b", 8, 5, 8192),
        Spec("smollm2-135m", 8, 5, 8192),
        Spec("phi2", 8, 5, 8192),
    ]
    for context in (32768, 8192, 1024):
        for batch in (8, 64, 1):
            for steps in (5, 17, 1, 8, 2):
                spec = Spec("llama3-8b", batch, steps, context)
                if spec not in found:
                    found.append(spec)
    return found


def bytes_moved(spec: Spec, chip: Chip) -> Traffic:
    model = spec.model
    config = attention_config(
        model.dim, model.heads // model.kv_heads, model.kv_heads, spec.query_dtype, spec.cache_dtype, chip
    )
    return traffic.attention(
        traffic.AttentionShape(
            spec.batch, spec.steps, spec.context, model.heads, model.kv_heads, model.dim, spec.query_dtype.itemsize,
            spec.cache_dtype.itemsize, model.window or 0, config.block_m, config.split_size, config.num_splits,
        )
    )  # fmt: skip


def flops(spec: Spec) -> int:
    return traffic.attention_flops(
        spec.batch, spec.steps, spec.context, spec.model.heads, spec.model.dim, spec.model.window or 0
    )


def memory(spec: Spec) -> int:
    """Pages, the dense copy, the partial results, and what the gate takes for two requests in fp64."""
    model = spec.model
    request = 2 * (spec.context + spec.steps) * model.kv_heads * model.dim
    partial = spec.batch * spec.steps * model.heads * 64 * (model.dim + 2) * 4
    dense = 0 if spec.fp8 else request * spec.query_dtype.itemsize
    gate = 2 * 8 * (2 * request * model.heads // model.kv_heads + 4 * model.heads * spec.steps * spec.context)
    return spec.batch * (request * spec.cache_dtype.itemsize + dense) + 2 * partial + gate


def build(spec: Spec, device: torch.device) -> Problem:
    x = Tensors(spec, device)
    return Problem(
        {
            "sdpa": Provider(x.sdpa),
            "transformers": Provider(x.transformers),
            "flex": Provider(x.flex),
            "flashinfer": Provider(x.flashinfer),
            "vllm": Provider(x.vllm),
            "specdec-T1": Provider(x.one_step, same_work=False),
            OURS: Provider(x.ours),
        },
        x.gate,
    )


class Tensors:
    """B requests of equal length over pages in random order, the new positions' keys included."""

    def __init__(self, spec: Spec, device: torch.device) -> None:
        self.spec, self.device, model = spec, device, spec.model
        self.length = spec.context + spec.steps
        columns = -(-self.length // PAGE_SIZE)
        shape = (spec.batch * columns, PAGE_SIZE, model.kv_heads, model.dim)
        self.k_cache, self.v_cache = (
            normal(*shape, device=device, dtype=spec.query_dtype, seed=i).to(spec.cache_dtype) for i in (1, 2)
        )
        order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(0))
        self.table = order.view(spec.batch, columns).int().to(device)
        self.context = torch.full((spec.batch,), spec.context, dtype=torch.int32, device=device)
        # As a model gives it: [B,Hq,T,D] in memory.
        q = normal(spec.batch, model.heads, spec.steps, model.dim, device=device, dtype=spec.query_dtype, seed=3)
        self.q = q.transpose(1, 2)
        self.options: dict[str, Any] = {"sliding_window": model.window, "softcap": model.softcap}
        if model.sinks:
            self.options["sinks"] = torch.linspace(-1.0, 2.0, model.heads, device=device).to(spec.query_dtype)
        if spec.fp8:
            self.options |= {name: torch.full((model.kv_heads,), 0.5, device=device) for name in ("k_scale", "v_scale")}
        if spec.tree:
            self.options["tree_mask"] = _binary_tree(spec.steps).to(device)
        self.scale = model.dim**-0.5

    # Ours.

    def ours(self) -> Callable[[], torch.Tensor]:
        args = (self.q, self.k_cache, self.v_cache, self.table, self.context)
        return lambda: ops.verify_attention(*args, **self.options, backend=backend())

    def one_step(self) -> Callable[[], object]:
        """The last position alone."""
        if self.spec.steps == 1 or self.spec.tree:
            raise Skip("only beside chains with T > 1")
        q, context = self.q[:, -1:], self.context + self.spec.steps - 1
        args = (q, self.k_cache, self.v_cache, self.table, context)
        return lambda: ops.verify_attention(*args, **self.options, backend=backend())

    def gate(self) -> str | None:
        """Error against fp64 at most twice that of PyTorch in the query's dtype (1e-5 in fp32); first and last request."""
        out = self.ours()()
        for b in {0, self.spec.batch - 1}:
            truth, plain = (self.by_definition(b, dtype) for dtype in (torch.float64, self.spec.query_dtype))
            allowed = float((plain.double() - truth).abs().max()) * 2
            if self.spec.query_dtype == torch.float32:
                allowed = max(allowed, 1e-5)
            error = float((out[b].double() - truth).abs().max())
            if not error <= allowed:
                return f"request {b} is {error:.2e} from fp64, allowed {allowed:.2e}"
        return None

    def by_definition(self, b: int, dtype: torch.dtype) -> torch.Tensor:
        """Request b, ``[T,Hq,D]``, every intermediate in ``dtype``."""
        group = self.spec.model.heads // self.spec.model.kv_heads
        k, v = (
            self.dense_of(cache, slice(b, b + 1), name)[0].to(dtype)
            for cache, name in ((self.k_cache, "k_scale"), (self.v_cache, "v_scale"))
        )
        q = self.q[b].to(dtype).transpose(0, 1).unflatten(0, (-1, group))  # [Hkv,G,T,D]
        scores = (q @ k[:, None].transpose(-1, -2)) * self.scale
        if self.options["softcap"] is not None:
            scores = torch.tanh(scores / self.options["softcap"]) * self.options["softcap"]
        scores = scores.masked_fill(~self.visible(), float("-inf"))
        if "sinks" in self.options:
            sinks = self.options["sinks"].to(dtype).view(-1, group, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], -1)
        weights = scores.softmax(-1)[..., : self.length]
        return (weights @ v[:, None]).flatten(0, 1).transpose(0, 1)

    # What the others read.

    def dense_of(self, cache: torch.Tensor, requests: slice, scale: str = "") -> torch.Tensor:
        """``[B,Hkv,L,D]``."""
        pages = self.table[requests].long()
        rows = cache.view(torch.uint8)[pages].view(FP8).float() if self.spec.fp8 else cache[pages]
        rows = rows.flatten(1, 2)[:, : self.length].transpose(1, 2)
        return rows * self.options[scale][:, None, None] if scale in self.options else rows

    @functools.cached_property
    def dense(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v as ``[B,H,L,D]``, gathered."""
        if self.spec.fp8:
            raise Skip("reads no fp8 cache")
        everyone = slice(None)
        k, v = (self.dense_of(cache, everyone).contiguous() for cache in (self.k_cache, self.v_cache))
        return self.q.transpose(1, 2), k, v

    def visible(self) -> torch.Tensor:
        """bool ``[T,L]``."""
        key = torch.arange(self.length, device=self.device)
        step = torch.arange(self.spec.steps, device=self.device)[:, None]
        new, depth = key - self.spec.context, step
        sees = new <= step
        if self.spec.tree:
            mask = self.options["tree_mask"][:, None]
            sees = (new < 0) | ((mask >> new.clamp(0, 63)) & 1).bool()
            depth = ((mask >> torch.arange(64, device=self.device)) & 1).sum(-1, keepdim=True) - 1
        if self.spec.model.window:
            sees = sees & (new > depth - self.spec.model.window)
        return sees

    def plain_only(self) -> None:
        if self.spec.model.softcap or self.spec.model.sinks:
            raise Skip(f"has neither softcap nor sinks ({self.spec.shape})")

    # Providers.

    def sdpa(self) -> Callable[[], object]:
        self.plain_only()
        q, k, v = self.dense
        mask: Any = None
        if self.spec.steps > 1 or self.spec.model.window:
            mask = self.visible()
            if self.device.type == "cuda" and not self.spec.tree and not self.spec.model.window:
                from torch.nn.attention.bias import causal_lower_right

                mask = causal_lower_right(self.spec.steps, self.length)  # flash attention takes no other mask
        return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    def transformers(self) -> Callable[[], object]:
        self.plain_only()
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        q, k, v = self.dense
        group = self.spec.model.heads // self.spec.model.kv_heads
        if self.device.type == "cuda" and 3 * group * k.nbytes > torch.cuda.mem_get_info()[0]:
            raise Skip(f"{label_of(self.spec)}: no room for its repeated KV heads")
        module = SimpleNamespace(num_key_value_groups=group, is_causal=True, training=False)
        mask = self.visible().expand(self.spec.batch, 1, -1, -1) if self.spec.steps > 1 else None
        return lambda: sdpa_attention_forward(module, q, k, v, mask, scaling=self.scale, is_causal=False)

    def flex(self) -> Callable[[], object]:
        if not self.spec.flex:
            raise Skip("it compiles for each shape, so only one is measured: llama3-8b, B=8, T=5, 32K")
        self.plain_only()
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        q, k, v = self.dense
        context = self.spec.context

        def sees(b: Any, h: Any, t: Any, j: Any) -> Any:
            return j <= t + context

        mask = create_block_mask(sees, None, None, self.spec.steps, self.length, device=self.device.type)
        attend = torch.compile(flex_attention, dynamic=False)
        return lambda: attend(q, k, v, block_mask=mask, enable_gqa=True)

    def flashinfer(self) -> Callable[[], object]:
        flashinfer = installed("flashinfer")
        self.plain_only()
        if self.spec.fp8 or self.spec.tree:
            raise Skip("compared on chains over bf16 alone")
        spec, model, columns = self.spec, self.spec.model, self.table.shape[1]
        ints = {"dtype": torch.int32, "device": self.device}
        pages = torch.arange(spec.batch + 1, **ints) * columns
        last = torch.full((spec.batch,), (self.length - 1) % PAGE_SIZE + 1, **ints)
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=self.device)
        q = self.q.reshape(-1, model.heads, model.dim)
        heads = (model.heads, model.kv_heads, model.dim, PAGE_SIZE)
        dtypes = {"q_data_type": spec.query_dtype, "kv_data_type": spec.cache_dtype}
        window = {"window_left": model.window - 1 if model.window else -1}
        if spec.steps == 1:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
            wrapper.plan(pages, self.table.flatten(), last, *heads, **window, **dtypes)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
            starts = torch.arange(spec.batch + 1, **ints) * spec.steps
            wrapper.plan(starts, pages, self.table.flatten(), last, *heads, causal=True, **window, **dtypes)
        return lambda: wrapper.run(q, (self.k_cache, self.v_cache))

    def vllm(self) -> Callable[[], object]:
        try:
            module = installed("vllm.v1.attention.ops.triton_unified_attention")
        except Skip:
            module = installed("vllm.attention.ops.triton_unified_attention")
        self.plain_only()
        if self.spec.fp8 or self.spec.tree:
            raise Skip("compared on chains over bf16 alone")
        spec, model = self.spec, self.spec.model
        q = self.q.reshape(-1, model.heads, model.dim)
        ints = {"dtype": torch.int32, "device": self.device}
        arguments = {
            "q": q,
            "k": self.k_cache,
            "v": self.v_cache,
            "out": torch.empty_like(q),
            "cu_seqlens_q": torch.arange(spec.batch + 1, **ints) * spec.steps,
            "max_seqlen_q": spec.steps,
            "seqused_k": self.context + spec.steps,
            "max_seqlen_k": self.length,
            "softmax_scale": self.scale,
            "causal": True,
            "window_size": (model.window - 1 if model.window else -1, 0 if model.window else -1),
            "block_table": self.table,
            "softcap": 0.0,
            "q_descale": None,
            "k_descale": None,
            "v_descale": None,
        }
        known = inspect.signature(module.unified_attention).parameters  # it differs between releases
        chosen = {name: value for name, value in arguments.items() if name in known}
        return lambda: module.unified_attention(**chosen)


def label_of(spec: Spec) -> str:
    return f"B={spec.batch} T={spec.steps} context={spec.context}"


def _binary_tree(nodes: int) -> torch.Tensor:
    """Masks of a tree in which node n's parent is (n - 1) // 2."""
    masks: list[int] = []
    for node in range(nodes):
        masks.append((masks[(node - 1) // 2] if node else 0) | 1 << node)
    return torch.tensor(masks)


BENCH = Bench(
    "verify_attention", __doc__ or "", specs, build, bytes_moved, flops, memory,
    vs={"specdec-T1": "over_T1", "sdpa": "over_sdpa"},
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    return run(BENCH, argv)


if __name__ == "__main__":
    sys.exit(main())
