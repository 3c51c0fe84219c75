"""What does an RMS norm cost together with the sum before it or after it, against PyTorch's operations?

    python -m bench.bench_rms_norm --out bench/results/rms_norm.jsonl
    python -m bench.bench_rms_norm --quick
    TRITON_INTERPRET=1 python -m bench.bench_rms_norm      # launches and bytes

``torch``: ``F.rms_norm`` and a sum, two launches. The calls are short: launches are most of them.
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
from specdec_triton.kernels._config import Chip, norm_config

SHAPES = {"llama3-8b": 4096, "gemma3-4b": 2560, "smollm2-135m": 576, "qwen3-0.6b-head": 128}
_EPS = 1e-6


@dataclass(frozen=True)
class Spec:
    shape: str
    rows: int
    sums: str = "none"  # or before, after
    dtype: str = "bfloat16"

    @property
    def width(self) -> int:
        return SHAPES[self.shape]

    @property
    def stored(self) -> torch.dtype:
        return getattr(torch, self.dtype)


def specs(machine: str, quick: bool) -> list[Spec]:
    if machine != "gpu":
        found = [Spec("smollm2-135m", 5, "before"), Spec("gemma3-4b", 5, "after"), Spec("qwen3-0.6b-head", 80)]
        return found[:1] if quick else found
    found = [Spec("llama3-8b", rows, "before") for rows in (5, 1, 40, 512)]
    if quick:
        return found[:1]
    found += [Spec("gemma3-4b", 5, "after"), Spec("smollm2-135m", 5, "before"), Spec("qwen3-0.6b-head", 120)]
    return [*found, Spec("llama3-8b", 5), Spec("llama3-8b", 40, "before", "float32")]


def bytes_moved(spec: Spec, chip: Chip) -> Traffic:
    block, size = norm_config(spec.width, chip).block_d, spec.stored.itemsize
    sums = {"residual": spec.sums != "none", "after": spec.sums == "after"}
    return traffic.rms_norm(spec.rows, spec.width, size, size, block=block, **sums)


def flops(spec: Spec) -> int:
    """None to speak of."""
    return 0


def memory(spec: Spec) -> int:
    return 32 * spec.rows * spec.width


def build(spec: Spec, device: torch.device) -> Problem:
    x, residual = (normal(spec.rows, spec.width, device=device, dtype=spec.stored, seed=seed) for seed in (0, 1))
    weight = 1 + normal(spec.width, device=device, dtype=spec.stored, seed=2, scale=0.1)
    given = {} if spec.sums == "none" else {"residual": residual, "residual_after": spec.sums == "after"}

    def ours() -> Callable[[], object]:
        return lambda: ops.rms_norm(x, weight, eps=_EPS, backend=backend(), **given)

    def one_by_one(h: torch.Tensor, scale: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        h = h + beside if spec.sums == "before" else h
        out = torch.nn.functional.rms_norm(h, scale.shape, scale, _EPS)
        return beside + out if spec.sums == "after" else out

    def plain() -> Callable[[], torch.Tensor]:
        return lambda: one_by_one(x, weight, residual)

    def gate() -> str | None:
        """At most twice as far from fp64, the sum before the norm rounded, as PyTorch; the sum is PyTorch's."""
        got = ours()()
        out, total = got if isinstance(got, tuple) else (got, None)
        if total is not None and not torch.equal(total, x + residual):
            return "the sum differs"
        h, beside = (x + residual, torch.zeros_like(x)) if spec.sums == "before" else (x, residual)
        truth = one_by_one(h.double(), weight.double(), beside.double())
        error, allowed = (float((y.double() - truth).abs().max()) for y in (out, plain()()))
        return None if error <= 2 * allowed else f"{error:.2e} from fp64, PyTorch is {allowed:.2e}"

    return Problem({"torch": Provider(plain), OURS: Provider(ours)}, gate)


BENCH = Bench("rms_norm", __doc__ or "", specs, build, bytes_moved, flops, memory, vs={"torch": "over_torch"})


def main(argv: list[str] | None = None) -> int:
    return run(BENCH, argv)


if __name__ == "__main__":
    sys.exit(main())
