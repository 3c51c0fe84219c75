"""What do penalties, biases, masks and bans of repeated n-grams cost beside reading the logits once and writing them once?

    python -m bench.bench_apply_logit_rules --out bench/results/apply_logit_rules.jsonl
    python -m bench.bench_apply_logit_rules --quick
    TRITON_INTERPRET=1 python -m bench.bench_apply_logit_rules      # launches and bytes

``torch``: an operation or two for each rule, as engines without a kernel do it (vLLM's way): counts of every row by scatter, a
``where`` for each penalty and mask, one comparison of the text's windows for n-grams. All of a batch's requests have the rules,
and a least length on top.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.micro import OURS, Bench, Problem, Provider, backend, generator, normal, run
from specdec_triton import ops
from specdec_triton.audit import traffic
from specdec_triton.audit.traffic import Traffic
from specdec_triton.kernels._config import Chip
from specdec_triton.logit_rules import IN_PROMPT, LogitRules

SHAPES = {"qwen3": 151_936, "llama3": 128_256, "gemma3": 262_144, "smollm2": 49_152}
REPETITION, PRESENCE, FREQUENCY, NGRAM = 1.1, 0.4, 0.2, 3
_STOPS = 2  # ids that end a text, which is too short to end


@dataclass(frozen=True)
class Spec:
    """``text``: tokens of each text in which n-grams must not repeat; None: they may."""

    shape: str
    batch: int
    penalties: bool = False
    bias: bool = False
    mask: bool = False
    text: int | None = None
    k: int = 4
    dtype: str = "bfloat16"

    @property
    def vocab(self) -> int:
        return SHAPES[self.shape]


def specs(machine: str, quick: bool) -> list[Spec]:
    if machine != "gpu":
        name, batch = "smollm2", 4 if machine == "cpu" else 1
        found = [
            Spec(name, batch, penalties=True),
            Spec(name, batch, penalties=True, bias=True, mask=True, text=1024),
            Spec(name, batch, mask=True),
            Spec(name, batch, text=1024),
        ]
        return found[:2] if quick else found
    found = [
        Spec("qwen3", 64, penalties=True),
        Spec("qwen3", 64, mask=True),
        Spec("qwen3", 8, penalties=True, bias=True, mask=True, text=4096),
    ]
    if quick:
        return found
    return [
        *found,
        Spec("qwen3", 1, penalties=True),
        Spec("qwen3", 8, penalties=True),
        Spec("qwen3", 64, bias=True),
        Spec("qwen3", 64, text=4096),
        Spec("qwen3", 64, penalties=True, k=0),
        Spec("gemma3", 16, penalties=True, mask=True),
        Spec("llama3", 8, penalties=True, k=7),
        Spec("llama3", 8, penalties=True, dtype="float32"),
    ]


def bytes_moved(spec: Spec, chip: Chip) -> Traffic:
    rules = {"penalties": spec.penalties, "bias": spec.bias, "mask": spec.mask, "text": spec.text or 0}
    itemsize = getattr(torch, spec.dtype).itemsize
    return traffic.apply_logit_rules(spec.batch, spec.k + 1, spec.vocab, itemsize, **rules)


def flops(spec: Spec) -> int:
    """None to speak of: the op reads and writes."""
    return 0


def memory(spec: Spec) -> int:
    return spec.batch * (spec.k + 1) * (spec.vocab * 60 + (spec.text or 0) * 100)


def build(spec: Spec, device: torch.device) -> Problem:
    x = Tensors(spec, device)
    return Problem({"torch": Provider(x.torch), OURS: Provider(x.ours)}, x.gate)


class Tensors:
    def __init__(self, spec: Spec, device: torch.device) -> None:
        self.spec = spec
        batch, rows, vocab = spec.batch, spec.k + 1, spec.vocab
        random = generator(device)

        def integers(most: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.randint(0, most, shape, dtype=dtype, device=device, generator=random)

        self.logits = normal(batch, rows, vocab, device=device, scale=2.5).to(getattr(torch, spec.dtype))
        self.drafts = integers(vocab, batch, spec.k)
        length = spec.text or 1024
        rules = LogitRules(torch.full((batch,), length, dtype=torch.int32, device=device))
        rules.min_lens, rules.stop_ids = rules.lens + rows, integers(vocab, batch, _STOPS)
        if spec.penalties:
            rules.repetition_penalty, rules.presence_penalty, rules.frequency_penalty = (
                torch.full((batch,), penalty, device=device) for penalty in (REPETITION, PRESENCE, FREQUENCY)
            )
            output = integers(vocab, batch, length).sort(-1).values[:, ::2]  # some tokens more than once
            rules.counts = torch.zeros(batch, vocab, dtype=torch.int32, device=device)
            rules.counts.scatter_add_(1, output, torch.ones_like(output, dtype=torch.int32))
            rules.counts[:, : vocab // 100] += IN_PROMPT
        if spec.bias:
            rules.bias = normal(batch, vocab, device=device, seed=1)
        if spec.mask:
            rules.mask = integers(2**31, batch, rows, -(-vocab // 32), dtype=torch.int32)
        if spec.text:
            rules.ngram = torch.full((batch,), NGRAM, dtype=torch.int32, device=device)
            rules.texts, rules.max_ngram = integers(50, batch, length), NGRAM  # few kinds of tokens: they do repeat
        self.rules = rules

    def ours(self) -> Callable[[], torch.Tensor]:
        return lambda: ops.apply_logit_rules(self.logits, self.drafts, rules=self.rules, backend=backend())

    def gate(self) -> str | None:
        """The reference's bits, and what the baseline computes, which is another program: within a few roundings."""
        got = self.ours()()
        want = ops.apply_logit_rules(self.logits, self.drafts, rules=self.rules, backend="torch")
        if not torch.equal(got, want):
            return "other logits than the reference"
        return (
            None if torch.allclose(self.torch()(), got, rtol=1e-5, atol=1e-5) else "the baseline computes other logits"
        )

    def torch(self) -> Callable[[], torch.Tensor]:
        """Everything for whole ``[B,T,V]`` tensors; the text before a row is the request's and the drafts before the row."""
        rules, drafts, rows, vocab = self.rules, self.drafts, self.spec.k + 1, self.spec.vocab
        device = drafts.device
        row = torch.arange(rows, device=device)
        before = (row[: self.spec.k] < row[:, None]).int().expand(len(drafts), -1, -1)  # drafts of a row's text
        bit = torch.arange(32, device=device, dtype=torch.int32)
        minus_inf = torch.tensor(-float("inf"), device=device)

        def penalized(x: torch.Tensor) -> torch.Tensor:
            counts = rules.counts[:, None].repeat(1, rows, 1)
            counts.scatter_add_(2, drafts[:, None].expand(-1, rows, -1), before)
            written = counts & (IN_PROMPT - 1)
            factor = rules.repetition_penalty[:, None, None]
            x = torch.where(counts > 0, torch.where(x > 0, x / factor, x * factor), x)
            x = x - rules.frequency_penalty[:, None, None] * written
            return x - rules.presence_penalty[:, None, None] * (written > 0)

        def repeated(x: torch.Tensor) -> torch.Tensor:
            """All texts are equally long here, and so each row's is a slice."""
            for t in range(rows):
                text = torch.cat([rules.texts, drafts[:, :t]], 1)
                windows = text.unfold(1, NGRAM, 1)
                same = (windows[..., :-1] == text[:, None, 1 - NGRAM :]).all(-1)
                bans = torch.zeros_like(x[:, t]).scatter_reduce_(1, windows[..., -1], same.float(), "amax")
                x[:, t] = torch.where(bans > 0, minus_inf, x[:, t])
            return x

        def call() -> torch.Tensor:
            x = self.logits.float()
            if rules.bias is not None:
                x = x + rules.bias[:, None]
            if rules.counts is not None:
                x = penalized(x)
            short = (rules.lens[:, None] + row < rules.min_lens[:, None])[..., None]
            stops = rules.stop_ids[:, None].expand(-1, rows, -1)
            x = x.scatter(2, stops, torch.where(short, minus_inf, x.gather(2, stops)))
            if rules.mask is not None:
                allowed = (rules.mask[..., None] >> bit & 1).flatten(2)[..., :vocab]
                x = torch.where(allowed > 0, x, minus_inf)
            return repeated(x) if rules.texts is not None else x

        return call


BENCH = Bench("apply_logit_rules", __doc__ or "", specs, build, bytes_moved, flops, memory, vs={"torch": "over_torch"})


def main(argv: list[str] | None = None) -> int:
    return run(BENCH, argv)


if __name__ == "__main__":
    sys.exit(main())
