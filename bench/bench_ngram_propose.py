"""What does looking up the text's tail cost, from a short chat to 32K tokens, for one request and for many?

    python -m bench.bench_ngram_propose --out bench/results/ngram_propose.jsonl
    python -m bench.bench_ngram_propose --quick
    TRITON_INTERPRET=1 python -m bench.bench_ngram_propose      # launches and bytes

``transformers``: its prompt lookup, one request after another; it takes the *first* occurrence, and reads results on the host.
vLLM's proposer runs on the CPU, on texts that lie there already. The floor is one read of the texts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.micro import OURS, Bench, Problem, Provider, backend, generator, installed, run
from specdec_triton import ops
from specdec_triton.audit import traffic
from specdec_triton.audit.traffic import Traffic
from specdec_triton.kernels._config import Chip

SHAPES = {"qwen3": 151_936, "smollm2": 49_152}  # vocabularies
MAX_NGRAM = 3


@dataclass(frozen=True)
class Spec:
    """``repeats``: tokens come from so few that every tail has occurred; else only the lookup's last part matches."""

    shape: str
    batch: int
    length: int
    repeats: bool = False
    k: int = 5


def specs(machine: str, quick: bool) -> list[Spec]:
    if machine != "gpu":
        found = [Spec("smollm2", batch, length) for batch in (1, 8) for length in (512, 4096)]
        return [found[0], Spec("smollm2", 2, 512, repeats=True)] if quick else [*found, Spec("smollm2", 1, 32768)]
    if quick:
        return [Spec("qwen3", 64, 4096), Spec("qwen3", 1, 32768)]
    return [
        *(Spec("qwen3", batch, length) for length in (32768, 4096, 512) for batch in (1, 64, 8)),
        Spec("qwen3", 64, 32768, repeats=True),
    ]


def bytes_moved(spec: Spec, chip: Chip) -> Traffic:
    return traffic.ngram_propose(spec.batch, spec.length)


def flops(spec: Spec) -> int:
    """None: the op compares."""
    return 0


def memory(spec: Spec) -> int:
    return spec.batch * spec.length * 8 * 4


def build(spec: Spec, device: torch.device) -> Problem:
    x = Tensors(spec, device)
    return Problem(
        {
            "transformers": Provider(x.transformers, graph=False),
            "vllm": Provider(x.vllm, graph=False),
            OURS: Provider(x.ours),
        },
        x.gate,
    )


class Tensors:
    def __init__(self, spec: Spec, device: torch.device) -> None:
        self.spec = spec
        most = 20 if spec.repeats else SHAPES[spec.shape]
        shape = (spec.batch, spec.length)
        self.tokens = torch.randint(0, most, shape, generator=generator(device), device=device)
        # The tail of two tokens occurs once before, a tenth into the text.
        at = spec.length // 10
        self.tokens[:, -2:] = self.tokens[:, at : at + 2]
        self.lens = torch.full((spec.batch,), spec.length, dtype=torch.int32, device=device)

    def ours(self) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        args = (self.tokens, self.lens, self.spec.k, 1, MAX_NGRAM)
        return lambda: ops.ngram_propose(*args, backend=backend())

    def gate(self) -> str | None:
        """The reference's integers, and for the first request those of a search from the definition."""
        got = self.ours()()
        want = ops.ngram_propose(self.tokens, self.lens, self.spec.k, 1, MAX_NGRAM, backend="torch")
        if not all(torch.equal(a, b) for a, b in zip(got, want, strict=True)):
            return "other integers than the reference"
        text = self.tokens[0].tolist()
        found = search(text, self.spec.k)
        return None if got[0][0, : len(found)].tolist() == found else "not what the definition proposes"

    def transformers(self) -> Callable[[], object]:
        from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

        lookup = PromptLookupCandidateGenerator(
            num_output_tokens=self.spec.k, max_matching_ngram_size=MAX_NGRAM, max_length=1 << 30
        )
        texts = self.tokens.split(1)
        return lambda: [lookup.get_candidates(text)[0] for text in texts]

    def vllm(self) -> Callable[[], object]:
        module: Any = installed("vllm.v1.spec_decode.ngram_proposer")
        propose = module._find_longest_matched_ngram_and_propose_tokens
        texts = [text.int().numpy() for text in self.tokens.cpu()]
        return lambda: [propose(text, 1, MAX_NGRAM, 1 << 30, self.spec.k) for text in texts]


def search(text: list[int], k: int) -> list[int]:
    """What followed the most recent occurrence of the longest tail."""
    for n in range(MAX_NGRAM, 0, -1):
        tail = text[-n:]
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == tail:
                return text[end : end + k]
    return []


BENCH = Bench(
    "ngram_propose", __doc__ or "", specs, build, bytes_moved, flops, memory, vs={"transformers": "over_transformers"}
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    return run(BENCH, argv)


if __name__ == "__main__":
    sys.exit(main())
