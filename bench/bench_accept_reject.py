"""How near to reading the logits once is judging a round of drafts, for each method, filtered or not?

    python -m bench.bench_accept_reject --out bench/results/accept_reject.jsonl
    python -m bench.bench_accept_reject --quick
    TRITON_INTERPRET=1 python -m bench.bench_accept_reject      # launches and bytes

Aim on a GPU: within 1.5 x the floor at 64 requests, K = 5, V = 151,936 (116.7 MB of bf16 target rows, read once).

``torch`` does what transformers and vLLM V1 do, for the whole batch: fp32 copies, filters by sorting, softmax of every row, a
recovered token drawn at every position, and no host read. It knows no block verification and rejects there too, and for
``coupled`` it draws every row's token. FlashInfer's and vLLM's samplers take probabilities, or processed logits, which have to be
made first: that is in their times.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
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
FILTERS = {"top_k": 50, "top_p": 0.9}
_GATED = 8  # requests that the reference judges too


@dataclass(frozen=True)
class Spec:
    """``draft``: whether the drafter's logits are given; ``lse``: and their log-sum-exp."""

    shape: str
    batch: int
    method: str
    draft: bool = False
    lse: bool = False
    filters: bool = False
    k: int = 5
    dtype: str = "bfloat16"

    @property
    def vocab(self) -> int:
        return SHAPES[self.shape]


def specs(machine: str, quick: bool) -> list[Spec]:
    kinds = [
        ("rejection", True, True, False),
        ("coupled", False, False, False),
        ("greedy", False, False, False),
        ("block", True, True, False),
        ("coupled", False, False, True),
        ("rejection", True, True, True),
        ("rejection", False, False, False),
        ("block", True, True, True),
        ("typical", False, False, False),
    ]
    if machine == "interpreter":
        found = [Spec("smollm2", 1, *kind, k=2) for kind in kinds]
        return found[1:2] if quick else found
    if machine == "cpu":
        found = [*(Spec("smollm2", 1, *kind) for kind in kinds[:7]), Spec("smollm2", 4, *kinds[0])]
        return [Spec("smollm2", 1, *kind, k=1) for kind in kinds[:3:2]] if quick else found
    if quick:
        return [Spec("qwen3", 64, *kind) for kind in kinds[:5]]
    found = [Spec("qwen3", batch, *kind) for batch in (64, 8, 1) for kind in kinds]
    return [*found, Spec("gemma3", 64, *kinds[0]), Spec("llama3", 64, *kinds[0])]


def bytes_moved(spec: Spec, chip: Chip) -> Traffic:
    return traffic.accept_reject(
        spec.batch, spec.k, spec.vocab, getattr(torch, spec.dtype).itemsize, method=spec.method, has_draft=spec.draft,
        has_lse=spec.lse, filters=spec.filters,
    )  # fmt: skip


def flops(spec: Spec) -> int:
    """None to speak of: the op reads."""
    return 0


def memory(spec: Spec) -> int:
    """Logits, and the baseline's fp32 tensors of their size: probabilities of both, sorted copies, residuals."""
    rows = spec.batch * (2 * spec.k + 1) * spec.vocab
    return rows * (2 + 4 * (10 if spec.filters else 5)) + _GATED * (2 * spec.k + 1) * spec.vocab * 80


def build(spec: Spec, device: torch.device) -> Problem:
    x = Tensors(spec, device)
    return Problem(
        {
            "torch": Provider(x.torch),
            "flashinfer": Provider(x.flashinfer),
            "vllm": Provider(x.vllm, graph=False),
            OURS: Provider(x.ours),
        },
        x.gate,
    )


class Tensors:
    """A drafter that is often right: its logits are the target's with noise."""

    def __init__(self, spec: Spec, device: torch.device) -> None:
        self.spec = spec
        dtype, shape = getattr(torch, spec.dtype), (spec.batch, spec.k + 1, spec.vocab)
        self.target = normal(*shape, device=device, seed=1, scale=2.5).to(dtype)
        draft = self.target[:, : spec.k] + 0.5 * normal(
            spec.batch, spec.k, spec.vocab, device=device, dtype=dtype, seed=2
        )
        one = SamplingParams(temperature=0.0 if spec.method == "greedy" else 0.8, **(FILTERS if spec.filters else {}))
        self.params = SamplingBatch.from_params([one] * spec.batch, [100] * spec.batch, device, seeds=range(spec.batch))
        drawn = [
            ops.sample(draft[:, j], params=self.params, node=j, return_lse=True, backend="torch") for j in range(spec.k)
        ]
        self.drafts, lse = (torch.stack(x, 1) for x in zip(*drawn, strict=True))
        if spec.method == "greedy":
            self.drafts = draft.argmax(-1)
        self.draft = draft if spec.draft else None
        self.draft_lse = lse if spec.lse else None

    # Ours.

    def judge(self, params: SamplingBatch, requests: slice, change: Callable[..., Any], backend: str) -> Any:
        """The op on some of the requests, their logits changed."""
        draft = None if self.draft is None else change(self.draft[requests])
        lse = None if self.draft_lse is None else self.draft_lse[requests]
        return ops.accept_reject(
            self.drafts[requests], change(self.target[requests]), draft, draft_lse=lse, params=params,
            method=self.spec.method, backend=backend,
        )  # fmt: skip

    def ours(self) -> Callable[[], object]:
        return lambda: self.judge(self.params, slice(None), lambda x: x, backend())

    def gate(self) -> str | None:
        """The reference's integers, for the first requests of the batch alone; greedy: PyTorch's argmax too."""
        some = slice(0, _GATED)
        got = self.judge(self.params, slice(None), lambda x: x, backend())
        few = self.params.of(torch.arange(min(_GATED, self.spec.batch), device=self.params.seed.device))
        wrong = unexplained([x[some] for x in got], lambda change: self.judge(few, some, change, "torch"))
        if wrong:
            return f"other integers than the reference in requests {wrong}"
        if self.spec.method == "greedy" and not torch.equal(got.tokens, self.torch()()):
            return "other tokens than PyTorch's argmax"
        return "a request has status 1" if bool(got.status.any()) else None

    # The others.

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        x = logits.float() / 0.8
        if self.spec.filters:
            x = x.masked_fill(x < x.topk(FILTERS["top_k"]).values[..., -1:], float("-inf"))
            ordered, at = x.sort(-1)
            drop = ordered.softmax(-1).cumsum(-1) <= 1 - FILTERS["top_p"]
            drop[..., -1] = False
            x = x.masked_fill(drop.scatter(-1, at, drop), float("-inf"))
        return x.softmax(-1)

    def torch(self) -> Callable[[], torch.Tensor]:
        if self.spec.method == "typical":
            raise Skip("no baseline for typical acceptance")
        k = self.spec.k
        step = torch.arange(k + 1, device=self.drafts.device)

        def emit(chosen: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
            count = accepted.int().cumprod(-1).sum(-1, keepdim=True)
            kept = torch.where(step[:k] < count, self.drafts, chosen[:, :k])
            return torch.cat([kept, chosen[:, k:]], -1).masked_fill(step > count, -1)

        def draw(weights: torch.Tensor) -> torch.Tensor:
            return weights.div_(torch.empty_like(weights).exponential_()).argmax(-1)

        def greedy() -> torch.Tensor:
            chosen = self.target.argmax(-1)
            return emit(chosen, chosen[:, :k] == self.drafts)

        def sampled() -> torch.Tensor:
            p = self.probabilities(self.target)
            chosen = draw(p)
            return emit(chosen, chosen[:, :k] == self.drafts)

        def rejection() -> torch.Tensor:
            p = self.probabilities(self.target)
            p_draft = p[:, :k].gather(-1, self.drafts[..., None])[..., 0]
            if self.draft is None:
                q_draft = torch.ones_like(p_draft)
                residual = p[:, :k].scatter(-1, self.drafts[..., None], 0.0)
            else:
                q = self.probabilities(self.draft)
                q_draft = q.gather(-1, self.drafts[..., None])[..., 0]
                residual = (p[:, :k] - q).clamp_(min=0)
            accepted = torch.rand_like(p_draft) * q_draft <= p_draft
            return emit(torch.cat([draw(residual), draw(p[:, k].clone())[:, None]], -1), accepted)

        return {"greedy": greedy, "coupled": sampled}.get(self.spec.method, rejection)

    def flashinfer(self) -> Callable[[], object]:
        sampling = installed("flashinfer.sampling")
        if self.draft is None or self.spec.filters or self.spec.method != "rejection":
            raise Skip("compared on unfiltered rejection with draft probabilities alone")
        drafts, draft = self.drafts.int(), self.draft
        return lambda: sampling.chain_speculative_sampling(
            self.probabilities(draft), drafts, self.probabilities(self.target)
        )

    def vllm(self) -> Callable[[], object]:
        module = installed("vllm.v1.sample.rejection_sampler")
        if self.spec.method not in ("rejection", "greedy") or self.spec.filters:
            raise Skip("compared on unfiltered rejection and greedy alone")
        spec, device = self.spec, self.drafts.device
        counts = [spec.k] * spec.batch
        greedy = spec.method == "greedy"
        metadata = SimpleNamespace(
            all_greedy=greedy, all_random=not greedy, temperature=self.params.temperature, generators={}
        )
        arguments: dict[str, Any] = {
            "draft_token_ids": self.drafts.flatten().int(),
            "num_draft_tokens": counts,
            "max_spec_len": spec.k,
            "cu_num_draft_tokens": torch.arange(1, spec.batch + 1, dtype=torch.int32, device=device) * spec.k,
            "sampling_metadata": metadata,
        }
        known = inspect.signature(module.rejection_sample).parameters  # it differs between releases

        def call() -> object:
            scaled = self.target.float() if greedy else self.target.float() / 0.8
            rows = scaled[:, : spec.k].flatten(0, 1)
            last = scaled[:, spec.k]
            bonus = last.argmax(-1) if greedy else (last.softmax(-1) / torch.empty_like(last).exponential_()).argmax(-1)
            made = {
                "draft_probs": None if self.draft is None else self.probabilities(self.draft).flatten(0, 1),
                "target_probs": rows if greedy else rows.softmax(-1) if "target_probs" in known else None,
                "target_logits": rows,
                "bonus_token_ids": bonus[:, None].int(),
            }
            return module.rejection_sample(**{n: x for n, x in (arguments | made).items() if n in known})

        return call


BENCH = Bench(
    "accept_reject", __doc__ or "", specs, build, bytes_moved, flops, memory, vs={"torch": "over_torch"}
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    return run(BENCH, argv)


if __name__ == "__main__":
    sys.exit(main())
