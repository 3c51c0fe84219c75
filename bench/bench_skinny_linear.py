"""What do bits cost that do not depend on the number of rows: our linear layer against the vendor's product?

    python -m bench.bench_skinny_linear --out bench/results/skinny_linear.jsonl
    python -m bench.bench_skinny_linear --quick
    TRITON_INTERPRET=1 python -m bench.bench_skinny_linear      # launches and bytes

``torch``: ``F.linear``, whose algorithm depends on the number of rows, and a sum where there is a residual. ``batch_invariant_ops`` and vLLM have persistent Triton
products that are invariant as well, made for many rows. Rows: 1 and 5 of a request, 40 and 64 of a batch, 512 of a prompt.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.micro import OURS, Bench, Problem, Provider, Skip, backend, installed, normal, run
from specdec_triton import ops
from specdec_triton.audit import traffic
from specdec_triton.audit.cases.base import LAYERS as SHAPES
from specdec_triton.audit.traffic import Traffic
from specdec_triton.kernels._config import Chip, linear_config

_GATED = 4096  # columns that are compared with fp64


@dataclass(frozen=True)
class Spec:
    shape: str
    layer: str
    rows: int
    bias: bool = False
    residual: bool = False
    dtype: str = "bfloat16"

    @property
    def sizes(self) -> tuple[int, int]:
        """N and K."""
        return SHAPES[self.shape][self.layer]

    @property
    def stored(self) -> torch.dtype:
        return getattr(torch, self.dtype)


def specs(machine: str, quick: bool) -> list[Spec]:
    if machine != "gpu":
        found = [
            Spec("smollm2-135m", "kv", 5),
            Spec("smollm2-135m", "q", 5, bias=True),
            Spec("smollm2-135m", "down", 1, residual=True),
        ]
        return found[:1] if quick else found
    found = [Spec("llama3-8b", layer, rows) for rows in (5, 40) for layer in ("kv", "gate")]
    if quick:
        return found
    found += [Spec("llama3-8b", layer, rows) for rows in (1, 64, 512) for layer in ("kv", "q", "gate", "down")]
    found += [Spec("llama3-8b", layer, rows) for rows in (5, 40) for layer in ("qkv", "q", "down", "head")]
    found += [Spec("llama3-8b", layer, 5, residual=True) for layer in ("q", "down")]
    found += [Spec("qwen3-0.6b", layer, 5) for layer in SHAPES["qwen3-0.6b"]]
    found += [Spec("smollm2-135m", layer, 5) for layer in SHAPES["smollm2-135m"]]
    return [*found, Spec("gemma3-4b", "head", 40), Spec("llama3-8b", "q", 5, dtype="float32")]


def bytes_moved(spec: Spec, chip: Chip) -> Traffic:
    n, k = spec.sizes
    config = linear_config(n, k, spec.stored, chip)
    tiles = traffic.LinearTiles(config.block_m, config.block_n, config.splits)
    given = {"bias": spec.bias, "residual": spec.residual}
    return traffic.skinny_linear(spec.rows, n, k, spec.stored.itemsize, tiles, **given)


def flops(spec: Spec) -> int:
    return traffic.linear_flops(spec.rows, *spec.sizes)


def memory(spec: Spec) -> int:
    n, k = spec.sizes
    return 4 * (n * k + spec.rows * (n + k)) * 2 + _GATED * k * 8


def build(spec: Spec, device: torch.device) -> Problem:
    x = Tensors(spec, device)
    return Problem(
        {
            "torch": Provider(x.torch),
            "batch_invariant_ops": Provider(x.batch_invariant_ops),
            "vllm": Provider(x.vllm),
            OURS: Provider(x.ours),
        },
        x.gate,
    )


class Tensors:
    def __init__(self, spec: Spec, device: torch.device) -> None:
        n, k = spec.sizes
        self.x = normal(spec.rows, k, device=device, dtype=spec.stored)
        self.weight = normal(n, k, device=device, dtype=spec.stored, seed=1, scale=k**-0.5)
        self.bias = normal(n, device=device, dtype=spec.stored, seed=2) if spec.bias else None
        self.residual = normal(spec.rows, n, device=device, dtype=spec.stored, seed=3) if spec.residual else None

    def ours(self) -> Callable[[], torch.Tensor]:
        given = {"residual": self.residual, "backend": backend()}
        return lambda: ops.skinny_linear(self.x, self.weight, self.bias, **given)

    def torch(self) -> Callable[[], torch.Tensor]:
        product = functools.partial(torch.nn.functional.linear, self.x, self.weight, self.bias)
        return product if self.residual is None else lambda: product() + self.residual

    def batch_invariant_ops(self) -> Callable[[], object]:
        return self._persistent("batch_invariant_ops")

    def vllm(self) -> Callable[[], object]:
        return self._persistent("vllm.model_executor.layers.batch_invariant")

    def _persistent(self, package: str) -> Callable[[], object]:
        module = installed(package)
        if self.residual is not None:
            raise Skip("it adds no residual")
        return lambda: module.matmul_persistent(self.x, self.weight.t(), self.bias)

    def gate(self) -> str | None:
        """At most twice as far from fp64 as ``F.linear``; on a chip also each row's bits, alone and among the others."""
        got, plain = self.ours()(), self.torch()()
        bias = None if self.bias is None else self.bias[:_GATED].double()
        truth = torch.nn.functional.linear(self.x.double(), self.weight[:_GATED].double(), bias)
        if self.residual is not None:
            truth += self.residual[:, :_GATED].double()
        error, allowed = (float((out[:, :_GATED].double() - truth).abs().max()) for out in (got, plain))
        if not error <= 2 * allowed:
            return f"{error:.2e} from fp64, F.linear is {allowed:.2e}"
        last = None if self.residual is None else self.residual[-1:]
        alone = ops.skinny_linear(self.x[-1:], self.weight, self.bias, residual=last, backend=backend())
        if backend() == "triton" and not torch.equal(alone, got[-1:]):
            return "a row alone has other bits"
        return None


BENCH = Bench("skinny_linear", __doc__ or "", specs, build, bytes_moved, flops, memory, vs={"torch": "over_torch"})


def main(argv: list[str] | None = None) -> int:
    return run(BENCH, argv)


if __name__ == "__main__":
    sys.exit(main())
