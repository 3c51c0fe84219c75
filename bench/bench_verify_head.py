"""What does it save not to write the logits: the head's product and the decision in one, against one after the other?

    python -m bench.bench_verify_head --out bench/results/verify_head.jsonl
    python -m bench.bench_verify_head --quick
    TRITON_INTERPRET=1 python -m bench.bench_verify_head      # launches and bytes

``written``: ``skinny_linear``, then ``accept_reject``, which give the same integers. ``torch``: ``F.linear``, then ``accept_reject``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.micro import OURS, Bench, Problem, Provider, backend, normal, run
from specdec_triton import SamplingParams, ops
from specdec_triton.audit import traffic
from specdec_triton.audit.cases.base import LAYERS
from specdec_triton.audit.traffic import Traffic
from specdec_triton.kernels._config import Chip, head_config, head_part
from specdec_triton.ops import AcceptResult, SamplingBatch

SHAPES = {"small-head": (600, 64), **{model: layers["head"] for model, layers in LAYERS.items() if "head" in layers}}


@dataclass(frozen=True)
class Spec:
    shape: str
    batch: int
    k: int
    method: str

    @property
    def sizes(self) -> tuple[int, int]:
        """V and H."""
        return SHAPES[self.shape]


def specs(machine: str, quick: bool) -> list[Spec]:
    if machine != "gpu":
        found = [Spec("small-head", 1, 4, "greedy"), Spec("small-head", 1, 4, "rejection")]
        return found[:1] if quick else found
    found = [Spec("llama3-8b", batch, 4, method) for batch in (1, 8) for method in ("greedy", "rejection")]
    if quick:
        return found
    found += [Spec("llama3-8b", batch, 4, "coupled") for batch in (1, 8)]
    found += [
        Spec(model, 1, 4, method) for model in ("qwen3-0.6b", "smollm2-135m") for method in ("greedy", "rejection")
    ]
    return [*found, Spec("gemma3-4b", 8, 7, "rejection")]


def bytes_moved(spec: Spec, chip: Chip) -> Traffic:
    n, k = spec.sizes
    config = head_config(n, k, torch.bfloat16, chip, races=spec.method != "greedy")
    tiles = traffic.HeadTiles(config.block_m, config.block_n, head_part(n))
    return traffic.verify_head(spec.batch * (spec.k + 1), n, k, 2, tiles, bias=False)


def flops(spec: Spec) -> int:
    return traffic.linear_flops(spec.batch * (spec.k + 1), *spec.sizes)


def memory(spec: Spec) -> int:
    n, k = spec.sizes
    return 4 * n * k * 2 + spec.batch * (spec.k + 1) * n * 16


def build(spec: Spec, device: torch.device) -> Problem:
    x = Tensors(spec, device)
    return Problem({"torch": Provider(x.torch), "written": Provider(x.written), OURS: Provider(x.ours)}, x.gate)


class Tensors:
    def __init__(self, spec: Spec, device: torch.device) -> None:
        n, k = spec.sizes
        self.hidden = normal(spec.batch, spec.k + 1, k, device=device).bfloat16()
        self.weight = normal(n, k, device=device, seed=1, scale=3 * k**-0.5).bfloat16()
        one = [SamplingParams(temperature=0.8)] * spec.batch
        self.params = SamplingBatch.from_params(one, [100] * spec.batch, device, seeds=range(spec.batch))
        self.method = spec.method
        logits = torch.nn.functional.linear(self.hidden[:, :-1], self.weight)
        self.drafts = logits.argmax(-1)

    def ours(self) -> Callable[[], AcceptResult]:
        given = {"params": self.params, "method": self.method, "backend": backend()}
        return lambda: ops.verify_head(self.hidden, self.weight, self.drafts, **given)

    def judge(self, logits: torch.Tensor) -> AcceptResult:
        return ops.accept_reject(self.drafts, logits, params=self.params, method=self.method, backend=backend())

    def torch(self) -> Callable[[], AcceptResult]:
        return lambda: self.judge(torch.nn.functional.linear(self.hidden, self.weight))

    def written(self) -> Callable[[], AcceptResult]:
        def call() -> AcceptResult:
            rows = ops.skinny_linear(self.hidden.flatten(0, 1), self.weight, backend=backend())
            return self.judge(rows.view(*self.hidden.shape[:2], -1))

        return call

    def gate(self) -> str | None:
        """The integers of ``written``."""
        same = all(torch.equal(a, b) for a, b in zip(self.ours()(), self.written()(), strict=True))
        return None if same else "other tokens than with logits that are written"


BENCH = Bench(
    "verify_head", __doc__ or "", specs, build, bytes_moved, flops, memory,
    vs={"torch": "over_torch", "written": "over_written"},
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    return run(BENCH, argv)


if __name__ == "__main__":
    sys.exit(main())
