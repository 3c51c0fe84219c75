"""How near to reading the nodes' logits once is judging a round of trees?

    python -m bench.bench_accept_tree --out bench/results/accept_tree.jsonl
    python -m bench.bench_accept_tree --quick
    TRITON_INTERPRET=1 python -m bench.bench_accept_tree      # launches and bytes

``torch`` does what the reference implementations of Medusa and EAGLE do: probabilities of all nodes, then a walk on the host; for one
request after the other, and without the exactness of ours where children were drawn (EAGLE-2's sampled trees renormalise the target's
probabilities without the residual). SGLang's kernels, where they are installed, judge greedy trees.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.micro import OURS, Bench, Problem, Provider, Skip, backend, normal, run
from specdec_triton import SamplingParams, ops
from specdec_triton.audit import traffic
from specdec_triton.audit.traffic import Traffic
from specdec_triton.kernels._config import Chip
from specdec_triton.ops import SamplingBatch
from specdec_triton.testing import unexplained

SHAPES = {"qwen3": 151_936, "llama3": 128_256, "smollm2": 49_152}
_GATED = 4  # requests that the reference judges too


@dataclass(frozen=True)
class Spec:
    """``drawn``: whether the distributions that children were drawn from are given."""

    shape: str
    batch: int
    nodes: int
    method: str
    drawn: bool = False
    dtype: str = "bfloat16"

    @property
    def vocab(self) -> int:
        return SHAPES[self.shape]


def specs(machine: str, quick: bool) -> list[Spec]:
    kinds = [("coupled", False), ("greedy", False), ("rejection", True), ("typical", False)]
    if machine == "interpreter":
        return [Spec("smollm2", 1, 4, *kind) for kind in kinds[: 1 if quick else 4]]
    if machine == "cpu":
        return [Spec("smollm2", 1, 8 if quick else 25, *kind) for kind in kinds[: 2 if quick else 4]]
    if quick:
        return [Spec("qwen3", 16, 60, *kind) for kind in kinds]
    return [Spec("qwen3", batch, nodes, *kind) for batch, nodes in ((16, 60), (1, 60), (64, 8)) for kind in kinds]


def bytes_moved(spec: Spec, chip: Chip) -> Traffic:
    itemsize = getattr(torch, spec.dtype).itemsize
    return traffic.accept_tree(spec.batch, spec.nodes, spec.vocab, itemsize, drawn=spec.drawn, filters=False)


def flops(spec: Spec) -> int:
    """None to speak of: the op reads."""
    return 0


def memory(spec: Spec) -> int:
    """Logits, and the baseline's probabilities in fp32."""
    return spec.batch * spec.nodes * spec.vocab * (2 * (2 if spec.drawn else 1) + 4 * 3)


def build(spec: Spec, device: torch.device) -> Problem:
    x = Tensors(spec, device)
    return Problem(
        {"torch": Provider(x.torch, graph=False), "sglang": Provider(x.sglang), OURS: Provider(x.ours)}, x.gate
    )


class Tensors:
    """Trees of two or three children a node, of which one is often the target's own token."""

    def __init__(self, spec: Spec, device: torch.device) -> None:
        self.spec = spec
        dtype, n = getattr(torch, spec.dtype), spec.nodes
        self.logits = normal(spec.batch, n, spec.vocab, device=device, seed=1, scale=2.5).to(dtype)
        rng = random.Random(0)
        self.parents = torch.tensor(
            [[-1, *(max(0, (i - 1) // 2 - rng.randint(0, 1)) for i in range(1, n))] for _ in range(spec.batch)],
            device=device,
        )
        self.draft = None
        one = SamplingParams(temperature=0.0 if spec.method == "greedy" else 0.8)
        self.params = SamplingBatch.from_params([one] * spec.batch, [100] * spec.batch, device, seeds=range(spec.batch))
        own = self.logits.topk(3, -1).indices
        if spec.drawn:
            self.draft = (self.logits + 0.5 * normal(*self.logits.shape, device=device, dtype=dtype, seed=2)).to(dtype)
            own = self.draft.topk(3, -1).indices
        above = self.parents.clamp(min=0)
        rank = torch.tensor([[0, *(i % 3 for i in range(1, n))]], device=device).expand_as(above)
        self.tokens = own[torch.arange(spec.batch, device=device)[:, None], above, rank]

    def judge(self, params: SamplingBatch, requests: slice, change: Callable[..., Any], chosen: str) -> Any:
        """The op on some of the requests, their logits changed."""
        draft = None if self.draft is None else change(self.draft[requests])
        return ops.accept_tree(
            self.tokens[requests], change(self.logits[requests]), self.parents[requests], draft, params=params,
            method=self.spec.method, backend=chosen,
        )  # fmt: skip

    def ours(self) -> Callable[[], object]:
        return lambda: self.judge(self.params, slice(None), lambda x: x, backend())

    def gate(self) -> str | None:
        """The reference's integers, for the first requests of the batch."""
        some = slice(0, _GATED)
        got = self.judge(self.params, slice(None), lambda x: x, backend())
        few = self.params.of(torch.arange(min(_GATED, self.spec.batch), device=self.params.seed.device))
        wrong = unexplained([x[some] for x in got], lambda change: self.judge(few, some, change, "torch"))
        if wrong:
            return f"other integers than the reference in requests {wrong}"
        if self.spec.method == "greedy" and got.tokens.tolist() != self.torch()():
            return "other tokens than a walk on the host"
        return "a request has status 1" if bool(got.status.any()) else None

    # The others.

    def torch(self) -> Callable[[], list[list[int]]]:
        n, greedy = self.spec.nodes, self.spec.method == "greedy"
        if self.spec.method == "typical":
            raise Skip("no baseline for typical acceptance")

        def call() -> list[list[int]]:
            if greedy:
                chosen = self.logits.argmax(-1)
            else:
                p = (self.logits.float() / 0.8).softmax(-1)
                chosen = p.div_(torch.empty_like(p).exponential_()).argmax(-1)
            rows = []
            for own, tokens, parents in zip(chosen.tolist(), self.tokens.tolist(), self.parents.tolist(), strict=True):
                node, emitted = 0, []
                while node is not None:
                    emitted.append(own[node])
                    children = (i for i in range(1, n) if parents[i] == node and tokens[i] == own[node])
                    node = next(children, None)
                rows.append(emitted + [-1] * (n - len(emitted)))
            return rows

        return call

    def sglang(self) -> Callable[[], object]:
        try:
            from sgl_kernel import verify_tree_greedy
        except Exception as error:
            raise Skip(f"not installed ({type(error).__name__})") from error
        if self.spec.method != "greedy":
            raise Skip("compared on greedy trees alone")
        batch, n = self.tokens.shape
        device = self.tokens.device
        child = torch.full((batch, n), -1, dtype=torch.int64, device=device)
        sibling = child.clone()
        for b, parents in enumerate(self.parents.tolist()):
            for i in range(n - 1, 0, -1):
                sibling[b, i], child[b, parents[i]] = child[b, parents[i]], i
        index = torch.arange(batch * n, device=device).view(batch, n)
        predicts = torch.zeros(batch * n, dtype=torch.int32, device=device)
        path = torch.zeros(batch, n, dtype=torch.int32, device=device)
        count = torch.zeros(batch, dtype=torch.int32, device=device)

        def call() -> object:
            chosen = self.logits.argmax(-1)
            verify_tree_greedy(predicts, path, count, self.tokens, index, child, sibling, chosen)
            return predicts

        return call


BENCH = Bench("accept_tree", __doc__ or "", specs, build, bytes_moved, flops, memory, vs={"torch": "over_torch"})


def main(argv: list[str] | None = None) -> int:
    return run(BENCH, argv)


if __name__ == "__main__":
    sys.exit(main())
