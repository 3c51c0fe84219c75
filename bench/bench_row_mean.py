"""What does a mean of each row cost, in an order that does not depend on the number of rows?

    python -m bench.bench_row_mean --out bench/results/row_mean.jsonl
    python -m bench.bench_row_mean --quick
    TRITON_INTERPRET=1 python -m bench.bench_row_mean      # launches and bytes

``torch``: ``x.mean(-1)``. The calls are short: a launch is most of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.micro import OURS, Bench, Problem, Provider, backend, normal, run
from specdec_triton import ops
from specdec_triton.audit import traffic
from specdec_triton.audit.traffic import Traffic
from specdec_triton.kernels._config import Chip

SHAPES = {"llama3-8b": 4096, "gemma3-4b": 2560, "smollm2-135m": 576, "qwen3-0.6b-head": 128}


@dataclass(frozen=True)
class Spec:
    shape: str
    rows: int
    dtype: str = "float32"  # in which norms square

    @property
    def width(self) -> int:
        return SHAPES[self.shape]


def specs(machine: str, quick: bool) -> list[Spec]:
    if machine != "gpu":
        found = [Spec("smollm2-135m", 5), Spec("qwen3-0.6b-head", 80)]
        return found[:1] if quick else found
    found = [Spec("llama3-8b", rows) for rows in (40, 1, 512)]
    return (
        found[:1] if quick else [*found, Spec("gemma3-4b", 40), Spec("qwen3-0.6b-head", 640), Spec("smollm2-135m", 5)]
    )


def bytes_moved(spec: Spec, chip: Chip) -> Traffic:
    return traffic.row_mean(spec.rows, spec.width, getattr(torch, spec.dtype).itemsize)


def flops(spec: Spec) -> int:
    """None to speak of: the op reads."""
    return 0


def memory(spec: Spec) -> int:
    return 16 * spec.rows * spec.width


def build(spec: Spec, device: torch.device) -> Problem:
    x = normal(spec.rows, spec.width, device=device).square().to(getattr(torch, spec.dtype))

    def ours() -> Callable[[], torch.Tensor]:
        return lambda: ops.row_mean(x, backend=backend())

    def gate() -> str | None:
        """At most twice as far from fp64 as PyTorch, or four roundings."""
        got, plain, truth = ours()(), x.mean(-1), x.double().mean(-1)
        error, allowed = (float((out.double() - truth).abs().max()) for out in (got, plain))
        allowed = max(2 * allowed, 4 * torch.finfo(x.dtype).eps * float(truth.max()))
        return None if error <= allowed else f"{error:.2e} from fp64, allowed {allowed:.2e}"

    return Problem({"torch": Provider(lambda: lambda: x.mean(-1)), OURS: Provider(ours)}, gate)


BENCH = Bench("row_mean", __doc__ or "", specs, build, bytes_moved, flops, memory, vs={"torch": "over_torch"})


def main(argv: list[str] | None = None) -> int:
    return run(BENCH, argv)


if __name__ == "__main__":
    sys.exit(main())
