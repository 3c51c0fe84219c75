"""What does writing new keys and values into the pages cost?

    python -m bench.bench_append_kv --out bench/results/append_kv.jsonl
    python -m bench.bench_append_kv --quick
    TRITON_INTERPRET=1 python -m bench.bench_append_kv      # launches and bytes

``torch``: ``index_put_`` at slots that were computed beforehand; where the cache is fp8, after PyTorch's division and cast.
transformers' dynamic cache is no baseline, since it copies the whole context (its static cache is the ``index_put_``).
FlashInfer's and vLLM's kernels do not, here, quantise. These calls are short: on a GPU a few microseconds of a launch are most of their
time. With norms and rotation on the way: ``bench_rope_append``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.micro import OURS, Bench, Problem, Provider, Skip, backend, installed, normal, run
from specdec_triton import ops
from specdec_triton.audit import traffic
from specdec_triton.audit.cases.base import FP8, MODELS, PAGE_SIZE
from specdec_triton.audit.traffic import Traffic
from specdec_triton.kernels._config import Chip

SHAPES = {name: MODELS[name] for name in ("llama3-8b", "smollm2-135m", "phi2")}


@dataclass(frozen=True)
class Spec:
    shape: str
    batch: int
    steps: int
    fp8: bool = False
    context: int = 1000
    dtype: str = "bfloat16"

    @property
    def model(self) -> Any:
        return SHAPES[self.shape]


def specs(machine: str, quick: bool) -> list[Spec]:
    if machine != "gpu":
        name = "smollm2-135m"
        found = [Spec(name, 4, 5), Spec(name, 4, 5, fp8=True), Spec(name, 1, 1)]
        return found[:2] if quick else found
    found = [Spec("llama3-8b", 64, 5), Spec("llama3-8b", 64, 5, fp8=True)]
    if quick:
        return found
    return [
        *found,
        *(Spec("llama3-8b", batch, steps) for batch, steps in ((1, 5), (8, 5), (64, 1), (1, 1), (8, 512))),
        Spec("smollm2-135m", 64, 5),
        Spec("phi2", 64, 5),
    ]


def bytes_moved(spec: Spec, chip: Chip) -> Traffic:
    size = getattr(torch, spec.dtype).itemsize
    model = spec.model
    return traffic.append_kv(spec.batch, spec.steps, model.kv_heads, model.dim, size, 1 if spec.fp8 else size)


def flops(spec: Spec) -> int:
    """None to speak of: the op copies."""
    return 0


def memory(spec: Spec) -> int:
    return 8 * 2 * spec.batch * (spec.context + spec.steps + PAGE_SIZE) * spec.model.kv_heads * spec.model.dim


def build(spec: Spec, device: torch.device) -> Problem:
    x = Tensors(spec, device)
    return Problem(
        {
            "torch": Provider(x.torch),
            "flashinfer": Provider(x.flashinfer),
            "vllm": Provider(x.vllm),
            OURS: Provider(x.ours),
        },
        x.gate,
    )


class Tensors:
    def __init__(self, spec: Spec, device: torch.device) -> None:
        self.spec, self.device, model = spec, device, spec.model
        dtype = getattr(torch, spec.dtype)
        # As a model gives them: [B,Hkv,T,D] in memory.
        self.k, self.v = (
            normal(spec.batch, model.kv_heads, spec.steps, model.dim, device=device, dtype=dtype, seed=i).transpose(
                1, 2
            )
            for i in (1, 2)
        )
        columns = -(-(spec.context + spec.steps) // PAGE_SIZE)
        shape = (spec.batch * columns, PAGE_SIZE, model.kv_heads, model.dim)
        stored = FP8 if spec.fp8 else dtype
        self.caches = [torch.zeros(shape, dtype=dtype, device=device).to(stored) for _ in range(2)]
        order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(0))
        self.table = order.view(spec.batch, columns).int().to(device)
        self.context = torch.full((spec.batch,), spec.context, dtype=torch.int32, device=device)
        position = spec.context + torch.arange(spec.steps, device=device)
        self.slots = (self.table[:, position // PAGE_SIZE].long() * PAGE_SIZE + position % PAGE_SIZE).flatten()
        self.scales: dict[str, torch.Tensor] = {}
        if spec.fp8:
            self.scales = {name: torch.full((model.kv_heads,), 0.5, device=device) for name in ("k_scale", "v_scale")}

    def ours(self) -> Callable[[], None]:
        return lambda: self.append(self.caches, backend())

    def append(self, caches: list[torch.Tensor], backend: str) -> None:
        ops.append_kv(self.k, self.v, *caches, self.table, self.context, **self.scales, backend=backend)

    def gate(self) -> str | None:
        """Every byte that of the reference."""
        mine, theirs = ([raw(x).clone().view(x.dtype) for x in self.caches] for _ in range(2))
        self.append(mine, backend())
        self.append(theirs, "torch")
        wrong = [not torch.equal(raw(a), raw(b)) for a, b in zip(mine, theirs, strict=True)]
        return "other bytes than the reference" if any(wrong) else None

    def torch(self) -> Callable[[], object]:
        caches = [raw(x).flatten(0, 1) if self.spec.fp8 else x.flatten(0, 1) for x in self.caches]

        def put(cache: torch.Tensor, x: torch.Tensor, scale: str) -> None:
            if self.spec.fp8:
                x = raw((x / self.scales[scale][:, None]).to(FP8))
            cache.index_put_((self.slots,), x.flatten(0, 1))

        def call() -> None:
            put(caches[0], self.k, "k_scale")
            put(caches[1], self.v, "v_scale")

        return call

    def plain_only(self) -> None:
        if self.spec.fp8:
            raise Skip("compared on plain copies alone")

    def flashinfer(self) -> Callable[[], object]:
        flashinfer = installed("flashinfer")
        self.plain_only()
        spec, columns = self.spec, self.table.shape[1]
        ints = {"dtype": torch.int32, "device": self.device}
        pages = torch.arange(spec.batch + 1, **ints) * columns
        last = torch.full((spec.batch,), (spec.context + spec.steps - 1) % PAGE_SIZE + 1, **ints)
        request = torch.arange(spec.batch, **ints).repeat_interleave(spec.steps)
        position = (spec.context + torch.arange(spec.steps, **ints)).repeat(spec.batch)
        k, v = (x.flatten(0, 1) for x in (self.k, self.v))
        args = (k, v, request, position, tuple(self.caches), self.table.flatten(), pages, last)
        return lambda: flashinfer.append_paged_kv_cache(*args)

    def vllm(self) -> Callable[[], object]:
        module: Any = installed("vllm._custom_ops")
        self.plain_only()
        k, v = (x.flatten(0, 1) for x in (self.k, self.v))
        one = torch.ones(1, device=self.device)
        return lambda: module.reshape_and_cache_flash(k, v, *self.caches, self.slots, "auto", one, one)


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


BENCH = Bench("append_kv", __doc__ or "", specs, build, bytes_moved, flops, memory, vs={"torch": "over_torch"})


def main(argv: list[str] | None = None) -> int:
    return run(BENCH, argv)


if __name__ == "__main__":
    sys.exit(main())
