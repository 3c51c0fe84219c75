"""What does the activation of a gated MLP cost, against PyTorch's activation and product?

    python -m bench.bench_gated_mlp_activation --out bench/results/gated_mlp_activation.jsonl
    python -m bench.bench_gated_mlp_activation --quick
    TRITON_INTERPRET=1 python -m bench.bench_gated_mlp_activation      # launches and bytes

``torch``: ``F.silu`` or ``F.gelu``, and a product, two launches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from bench.micro import OURS, Bench, Problem, Provider, backend, normal, run
from specdec_triton import ops
from specdec_triton.audit import traffic
from specdec_triton.audit.cases.base import LAYERS
from specdec_triton.audit.traffic import Traffic
from specdec_triton.kernels._config import Chip

SHAPES = {model: layers["gate"][0] for model, layers in LAYERS.items() if "gate" in layers}
_PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
}


@dataclass(frozen=True)
class Spec:
    shape: str
    rows: int
    activation: str = "silu"
    dtype: str = "bfloat16"

    @property
    def outputs(self) -> int:
        return SHAPES[self.shape]

    @property
    def stored(self) -> torch.dtype:
        return getattr(torch, self.dtype)


def specs(machine: str, quick: bool) -> list[Spec]:
    if machine != "gpu":
        found = [Spec("smollm2-135m", 5), Spec("gemma3-4b", 1, "gelu_tanh")]
        return found[:1] if quick else found
    found = [Spec("llama3-8b", rows) for rows in (5, 1, 40, 512)]
    return found[:1] if quick else [*found, Spec("gemma3-4b", 5, "gelu_tanh"), Spec("smollm2-135m", 5)]


def bytes_moved(spec: Spec, chip: Chip) -> Traffic:
    return traffic.gated_mlp_activation(spec.rows, spec.outputs, spec.stored.itemsize)


def flops(spec: Spec) -> int:
    """None to speak of."""
    return 0


def memory(spec: Spec) -> int:
    return 64 * spec.rows * spec.outputs


def plain(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return _PLAIN[activation](gate) * up


def build(spec: Spec, device: torch.device) -> Problem:
    x = normal(spec.rows, 2 * spec.outputs, device=device, dtype=spec.stored)

    def ours() -> Callable[[], torch.Tensor]:
        return lambda: ops.gated_mlp_activation(x, activation=spec.activation, backend=backend())

    def gate() -> str | None:
        """At most twice as far from fp64 as PyTorch."""
        truth = plain(x.double(), spec.activation)
        found = (float((y.double() - truth).abs().max()) for y in (ours()(), plain(x, spec.activation)))
        error, allowed = found
        return None if error <= 2 * allowed else f"{error:.2e} from fp64, PyTorch is {allowed:.2e}"

    return Problem({"torch": Provider(lambda: lambda: plain(x, spec.activation)), OURS: Provider(ours)}, gate)


BENCH = Bench(
    "gated_mlp_activation", __doc__ or "", specs, build, bytes_moved, flops, memory, vs={"torch": "over_torch"}
)


def main(argv: list[str] | None = None) -> int:
    return run(BENCH, argv)


if __name__ == "__main__":
    sys.exit(main())
