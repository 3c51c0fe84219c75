"""What does the first half of a gated MLP cost in one launch: against PyTorch's product, activation and product of the halves?

    python -m bench.bench_gated_linear --out bench/results/gated_linear.jsonl
    python -m bench.bench_gated_linear --quick
    TRITON_INTERPRET=1 python -m bench.bench_gated_linear      # launches and bytes

``torch``: ``F.linear``, whose bits depend on the number of rows, then ``F.silu`` and a product. ``specdec-two``: our
``skinny_linear`` and ``gated_mlp_activation``, whose bits are those of ours, in two launches.
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
from specdec_triton.kernels._config import Chip, linear_config

SHAPES = {model: layers["gate"] for model, layers in LAYERS.items() if "gate" in layers}
_GATED = 2048  # outputs that are compared with fp64


@dataclass(frozen=True)
class Spec:
    shape: str
    rows: int
    bias: bool = False
    dtype: str = "bfloat16"

    @property
    def sizes(self) -> tuple[int, int]:
        """I and K."""
        return SHAPES[self.shape]

    @property
    def stored(self) -> torch.dtype:
        return getattr(torch, self.dtype)


def specs(machine: str, quick: bool) -> list[Spec]:
    if machine != "gpu":
        found = [Spec("smollm2-135m", 5), Spec("smollm2-135m", 1, bias=True)]
        return found[:1] if quick else found
    found = [Spec("llama3-8b", rows) for rows in (5, 40)]
    if quick:
        return found
    found += [Spec("llama3-8b", rows) for rows in (1, 64, 512)]
    return [*found, Spec("qwen3-0.6b", 5), Spec("smollm2-135m", 5), Spec("gemma3-4b", 5)]


def bytes_moved(spec: Spec, chip: Chip) -> Traffic:
    outputs, k = spec.sizes
    config = linear_config(2 * outputs, k, spec.stored, chip)
    tiles = traffic.LinearTiles(config.block_m, config.block_n, 1)
    return traffic.gated_linear(spec.rows, outputs, k, spec.stored.itemsize, tiles, bias=spec.bias)


def flops(spec: Spec) -> int:
    outputs, k = spec.sizes
    return traffic.linear_flops(spec.rows, 2 * outputs, k)


def memory(spec: Spec) -> int:
    outputs, k = spec.sizes
    return 4 * (2 * outputs * k + spec.rows * (3 * outputs + k)) * 2 + 2 * _GATED * k * 8


def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    gate, up = F.linear(x, weight, bias).chunk(2, -1)
    return F.silu(gate) * up


def build(spec: Spec, device: torch.device) -> Problem:
    outputs, k = spec.sizes
    x = normal(spec.rows, k, device=device, dtype=spec.stored)
    weight = normal(2 * outputs, k, device=device, dtype=spec.stored, seed=1, scale=k**-0.5)
    bias = normal(2 * outputs, device=device, dtype=spec.stored, seed=2) if spec.bias else None

    def ours() -> Callable[[], torch.Tensor]:
        return lambda: ops.gated_linear(x, weight, bias, backend=backend())

    def two() -> Callable[[], torch.Tensor]:
        return lambda: ops.gated_mlp_activation(
            ops.skinny_linear(x, weight, bias, backend=backend()), backend=backend()
        )

    def gate() -> str | None:
        """Bits of the two ops one after the other, and of a row alone; at most twice as far from fp64 as PyTorch."""
        got = ours()()
        if not torch.equal(got, two()()):
            return "product, then activation, has other bits"
        if backend() == "triton" and not torch.equal(
            ops.gated_linear(x[-1:], weight, bias, backend="triton"), got[-1:]
        ):
            return "a row alone has other bits"
        some = torch.arange(min(outputs, _GATED), device=device)
        some = torch.cat((some, some + outputs))
        truth = plain(x.double(), weight[some].double(), None if bias is None else bias[some].double())
        found = (float((y[:, :_GATED].double() - truth).abs().max()) for y in (got, plain(x, weight, bias)))
        error, allowed = found
        return None if error <= 2 * allowed else f"{error:.2e} from fp64, PyTorch is {allowed:.2e}"

    return Problem(
        {
            "torch": Provider(lambda: lambda: plain(x, weight, bias)),
            "specdec-two": Provider(two),
            OURS: Provider(ours),
        },
        gate,
    )


BENCH = Bench(
    "gated_linear", __doc__ or "", specs, build, bytes_moved, flops, memory,
    vs={"torch": "over_torch", "specdec-two": "over_two"},
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    return run(BENCH, argv)


if __name__ == "__main__":
    sys.exit(main())
