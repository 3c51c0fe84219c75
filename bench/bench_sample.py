"""How near to reading the logits once is drawing a token for each request, filtered or not?

    python -m bench.bench_sample --out bench/results/sample.jsonl
    python -m bench.bench_sample --quick
    TRITON_INTERPRET=1 python -m bench.bench_sample      # launches and bytes

``transformers``: its own warpers for temperature, top-k and top-p, softmax, ``torch.multinomial``. ``torch``: the same with an
exponential race in place of the multinomial. FlashInfer samples from logits; vLLM filters and races.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.micro import OURS, Bench, Problem, Provider, Skip, backend, installed, normal, run
from specdec_triton import SamplingParams, ops
from specdec_triton.audit import traffic
from specdec_triton.audit.traffic import Traffic
from specdec_triton.kernels._config import Chip
from specdec_triton.ops import SamplingBatch
from specdec_triton.testing import unexplained

SHAPES = {"qwen3": 151_936, "llama3": 128_256, "gemma3": 262_144, "smollm2": 49_152}
TEMPERATURE, TOP_K, TOP_P = 0.8, 50, 0.9
_GATED = 8  # requests that the reference judges too


@dataclass(frozen=True)
class Spec:
    shape: str
    batch: int
    greedy: bool = False
    filters: bool = False
    dtype: str = "bfloat16"

    @property
    def vocab(self) -> int:
        return SHAPES[self.shape]


def specs(machine: str, quick: bool) -> list[Spec]:
    if machine != "gpu":
        name = "smollm2"
        batch = 4 if machine == "cpu" else 1
        found = [Spec(name, batch), Spec(name, batch, filters=True), Spec(name, batch, greedy=True), Spec(name, 1)]
        return [Spec(name, 1), Spec(name, 1, greedy=True)] if quick else found[: 4 if machine == "cpu" else 3]
    if quick:
        return [Spec("qwen3", 64), Spec("qwen3", 64, filters=True), Spec("qwen3", 1)]
    return [
        *(
            Spec("qwen3", batch, greedy, filters)
            for batch in (64, 1, 8, 16, 4, 32)
            for greedy, filters in ((False, False), (False, True), (True, False))
        ),
        *(Spec(name, 64, filters=filters) for name in ("gemma3", "llama3") for filters in (False, True)),
    ]


def bytes_moved(spec: Spec, chip: Chip) -> Traffic:
    return traffic.sample(spec.batch, spec.vocab, getattr(torch, spec.dtype).itemsize, filters=spec.filters)


def flops(spec: Spec) -> int:
    """None to speak of: the op reads."""
    return 0


def memory(spec: Spec) -> int:
    return spec.batch * spec.vocab * 80 + _GATED * spec.vocab * 200


def build(spec: Spec, device: torch.device) -> Problem:
    x = Tensors(spec, device)
    return Problem(
        {
            "transformers": Provider(x.transformers),
            "torch": Provider(x.torch),
            "flashinfer": Provider(x.flashinfer),
            "vllm": Provider(x.vllm),
            OURS: Provider(x.ours),
        },
        x.gate,
    )


class Tensors:
    def __init__(self, spec: Spec, device: torch.device) -> None:
        self.spec = spec
        self.logits = normal(spec.batch, spec.vocab, device=device, scale=2.5).to(getattr(torch, spec.dtype))
        filters = {"top_k": TOP_K, "top_p": TOP_P} if spec.filters else {}
        one = SamplingParams(temperature=0.0 if spec.greedy else TEMPERATURE, **filters)
        self.params = SamplingBatch.from_params([one] * spec.batch, [100] * spec.batch, device, seeds=range(spec.batch))

    def ours(self) -> Callable[[], torch.Tensor]:
        return lambda: ops.sample(self.logits, params=self.params, backend=backend())

    def gate(self) -> str | None:
        """The reference's tokens, for the first requests of the batch alone; greedy: PyTorch's argmax."""
        got = self.ours()()
        if self.spec.greedy:
            return None if torch.equal(got, self.logits.argmax(-1)) else "other tokens than PyTorch's argmax"
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
        few = replace(self.params, **{name: getattr(self.params, name)[:_GATED] for name in names})

        def judge(change: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
            return [ops.sample(change(self.logits[:_GATED]), params=few, backend="torch")]

        wrong = unexplained([got[:_GATED]], judge)
        return f"other tokens than the reference in requests {wrong}" if wrong else None

    def warped(self) -> torch.Tensor:
        from transformers import generation

        x = generation.TemperatureLogitsWarper(TEMPERATURE)(None, self.logits.float())
        if self.spec.filters:
            x = generation.TopKLogitsWarper(TOP_K)(None, x)
            x = generation.TopPLogitsWarper(TOP_P)(None, x)
        return x

    def transformers(self) -> Callable[[], object]:
        if self.spec.greedy:
            return lambda: self.logits.float().argmax(-1)
        return lambda: torch.multinomial(self.warped().softmax(-1), 1)

    def torch(self) -> Callable[[], object]:
        if self.spec.greedy:
            return lambda: self.logits.argmax(-1)

        def call() -> torch.Tensor:
            p = self.warped().softmax(-1)
            return p.div_(torch.empty_like(p).exponential_()).argmax(-1)

        return call

    def flashinfer(self) -> Callable[[], object]:
        sampling = installed("flashinfer.sampling")
        if self.spec.greedy:
            raise Skip("it samples")
        if self.spec.filters:
            return lambda: sampling.top_k_top_p_sampling_from_logits(self.logits.float() / TEMPERATURE, TOP_K, TOP_P)
        return lambda: sampling.sampling_from_logits(self.logits.float() / TEMPERATURE)

    def vllm(self) -> Callable[[], object]:
        module: Any = installed("vllm.v1.sample.ops.topk_topp_sampler")
        if self.spec.greedy:
            raise Skip("greedy is its argmax")
        count, device = self.spec.batch, self.logits.device
        k = torch.full((count,), TOP_K, device=device) if self.spec.filters else None
        p = torch.full((count,), TOP_P, device=device) if self.spec.filters else None

        def call() -> object:
            x = self.logits.float() / TEMPERATURE
            if k is not None:
                x = module.apply_top_k_top_p(x, k, p)
            return module.random_sample(x.softmax(-1, dtype=torch.float32), {})

        return call


BENCH = Bench(
    "sample", __doc__ or "", specs, build, bytes_moved, flops, memory,
    vs={"transformers": "over_transformers", "torch": "over_torch"},
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    return run(BENCH, argv)


if __name__ == "__main__":
    sys.exit(main())
