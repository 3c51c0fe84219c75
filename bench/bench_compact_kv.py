"""What does moving an accepted tree path's keys and values to a chain's place cost?

    python -m bench.bench_compact_kv --out bench/results/compact_kv.jsonl
    python -m bench.bench_compact_kv --quick
    TRITON_INTERPRET=1 python -m bench.bench_compact_kv      # launches and bytes

``torch``: rows gathered and put at slots that were computed beforehand. No other library that is compared here has such a
kernel: transformers, vLLM and FlashInfer keep no sampled trees in a paged cache. The calls are short: a launch is most of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.micro import OURS, Bench, Problem, Provider, backend, normal, run
from specdec_triton import ops
from specdec_triton.audit import traffic
from specdec_triton.audit.cases.base import FP8, MODELS, PAGE_SIZE
from specdec_triton.audit.traffic import Traffic
from specdec_triton.kernels._config import Chip

SHAPES = {name: MODELS[name] for name in ("llama3-8b", "smollm2-135m", "gemma3-4b-global")}


@dataclass(frozen=True)
class Spec:
    """``rows``: accepted nodes besides the root; all of them move."""

    shape: str
    batch: int
    nodes: int = 16
    rows: int = 4
    fp8: bool = False
    context: int = 1000
    dtype: str = "bfloat16"

    @property
    def model(self) -> Any:
        return SHAPES[self.shape]

    @property
    def stored(self) -> torch.dtype:
        return FP8 if self.fp8 else getattr(torch, self.dtype)


def specs(machine: str, quick: bool) -> list[Spec]:
    if machine != "gpu":
        found = [Spec("smollm2-135m", 4), Spec("smollm2-135m", 4, fp8=True), Spec("smollm2-135m", 1)]
        return found[:1] if quick else found
    found = [Spec("llama3-8b", batch) for batch in (64, 8, 1)]
    if quick:
        return found[:1]
    return [*found, Spec("llama3-8b", 64, fp8=True), Spec("llama3-8b", 64, 64, 12), Spec("gemma3-4b-global", 64)]


def bytes_moved(spec: Spec, chip: Chip) -> Traffic:
    return traffic.copy_rows(spec.batch, spec.rows, spec.model.kv_heads, spec.model.dim, spec.stored.itemsize)


def flops(spec: Spec) -> int:
    """None: the op copies."""
    return 0


def memory(spec: Spec) -> int:
    return 8 * 2 * spec.batch * (spec.context + spec.nodes + PAGE_SIZE) * spec.model.kv_heads * spec.model.dim


def build(spec: Spec, device: torch.device) -> Problem:
    x = Tensors(spec, device)
    return Problem({"torch": Provider(x.torch), OURS: Provider(x.ours)}, x.gate)


class Tensors:
    def __init__(self, spec: Spec, device: torch.device) -> None:
        self.spec, model = spec, spec.model
        columns = -(-(spec.context + spec.nodes) // PAGE_SIZE)
        shape = (spec.batch * columns, PAGE_SIZE, model.kv_heads, model.dim)
        dtype = getattr(torch, spec.dtype)
        self.caches = [normal(*shape, device=device, dtype=dtype, seed=i).to(spec.stored) for i in (1, 2)]
        order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(0))
        self.table = order.view(spec.batch, columns).int().to(device)
        self.context = torch.full((spec.batch,), spec.context, dtype=torch.int32, device=device)
        # The root, then the last nodes: every one of them moves.
        path = [0, *range(spec.nodes - spec.rows, spec.nodes), *[-1] * (spec.nodes - spec.rows - 1)]
        self.path = torch.tensor(path, dtype=torch.int32, device=device).repeat(spec.batch, 1)
        self.lens = torch.full((spec.batch,), spec.rows + 1, dtype=torch.int32, device=device)

    def compact(self, caches: list[torch.Tensor], backend: str) -> None:
        ops.compact_kv(*caches, self.table, self.context, self.path, self.lens, backend=backend)

    def ours(self) -> Callable[[], None]:
        return lambda: self.compact(self.caches, backend())

    def slots(self, nodes: torch.Tensor) -> torch.Tensor:
        position = self.spec.context + nodes
        return (self.table[:, position // PAGE_SIZE].long() * PAGE_SIZE + position % PAGE_SIZE).flatten()

    def torch(self) -> Callable[[], None]:
        return self.gather_and_put([x.view(torch.int16) if x.dtype.itemsize == 2 else raw(x) for x in self.caches])

    def gather_and_put(self, caches: list[torch.Tensor]) -> Callable[[], None]:
        source = self.slots(self.path[0, 1 : self.spec.rows + 1])
        target = self.slots(torch.arange(1, self.spec.rows + 1, device=self.path.device))
        flat = [x.flatten(0, 1) for x in caches]

        def call() -> None:
            for x in flat:
                x.index_put_((target,), x[source])

        return call

    def gate(self) -> str | None:
        """Every byte that of a copy of all rows before any is written."""
        mine, theirs = ([raw(x).clone() for x in self.caches] for _ in range(2))
        self.compact([x.view(self.spec.stored) for x in mine], backend())
        self.gather_and_put(theirs)()
        same = all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        return None if same else "other bytes than a copy of the rows"


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


BENCH = Bench("compact_kv", __doc__ or "", specs, build, bytes_moved, flops, memory, vs={"torch": "over_torch"})


def main(argv: list[str] | None = None) -> int:
    return run(BENCH, argv)


if __name__ == "__main__":
    sys.exit(main())
