"""Logit rules: penalties, biases and bans of a batch of requests, as tensors on the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from specdec_triton.sampling import SamplingParams

IN_PROMPT = 1 << 30  # in ``counts``: the token occurs in the prompt


@dataclass
class LogitRules:
    """What B requests do to their logits before they sample; what ``ops.apply_logit_rules`` takes. None: no request does that.

    Args:
        lens: int32 ``[B]``, tokens of each text, prompt and output, before the first draft.
        repetition_penalty, presence_penalty, frequency_penalty: fp32 ``[B]``, together with counts or not at all; see
            :class:`~specdec_triton.SamplingParams`.
        counts: int32 ``[B,V]``, how often each token occurs in the output, plus 2^30 if it occurs in the prompt.
        bias: fp32 ``[B,V]``, added to the logits; -inf bans.
        mask: int32 ``[B,T,ceil(V/32)]``, for each position the tokens that may come: bit ``v % 32`` of word ``v // 32``.
        min_lens: int32 ``[B]``, and stop_ids: int64 ``[B,S]`` padded with -1: these tokens are banned while the text is shorter.
        ngram: int32 ``[B]``, the size of n-grams that must not occur again, 0: any may. texts: int64 ``[B,L]``. max_ngram: the
            largest of these sizes, known on the host.
    """

    lens: torch.Tensor
    repetition_penalty: torch.Tensor | None = None
    presence_penalty: torch.Tensor | None = None
    frequency_penalty: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    min_lens: torch.Tensor | None = None
    stop_ids: torch.Tensor | None = None
    ngram: torch.Tensor | None = None
    texts: torch.Tensor | None = None
    max_ngram: int = 0

    @classmethod
    def from_params(
        cls,
        params: Sequence[SamplingParams],
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        vocab_size: int,
        device: str | torch.device = "cpu",
    ) -> LogitRules:
        """Build the tensors from token ids.

        Args:
            prompts, outputs: of each request. Of params ``stop_token_ids`` are what ``min_new_tokens`` bans.

        Raises:
            ValueError: lists that do not fit, a token id outside the vocabulary, or params with a grammar or processors, which
                are no tensors (a grammar's are the caller's to put into ``mask``).
        """
        import torch

        prompts, outputs = _check(params, prompts, outputs, vocab_size)
        texts = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]

        def row(values: Any, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        def padded(rows: Sequence[Sequence[int]]) -> torch.Tensor:
            width = max(map(len, rows), default=0)
            return row([[*x, *[-1] * (width - len(x))] for x in rows], torch.int64).view(len(rows), width)

        rules = cls(row(list(map(len, texts)), torch.int32))
        if any(p.penalizes for p in params):
            for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
                setattr(rules, name, row([getattr(p, name) for p in params], torch.float32))
            each = zip(prompts, outputs, strict=True)
            rules.counts = torch.stack([count_tokens(*one, vocab_size) for one in each]).to(device)
        if any(p.biases for p in params):
            rules.bias = torch.stack([bias_of(p, vocab_size) for p in params]).to(device)
        if any(p.min_new_tokens for p in params):
            least = [len(prompt) + p.min_new_tokens for p, prompt in zip(params, prompts, strict=True)]
            rules.min_lens, rules.stop_ids = row(least, torch.int32), padded([p.stop_token_ids for p in params])
        if any(p.no_repeat_ngram_size for p in params):
            rules.ngram = row([p.no_repeat_ngram_size for p in params], torch.int32)
            rules.texts = padded(texts)
            rules.max_ngram = max(p.no_repeat_ngram_size for p in params)
        return rules

    def of(self, requests: torch.Tensor) -> LogitRules:
        """The rules of some requests, int64 ``[B']``."""
        tensors = {
            f.name: x for f in fields(self) if (x := getattr(self, f.name)) is not None and f.name != "max_ngram"
        }
        return replace(self, **{name: x[requests] for name, x in tensors.items()})


def _check(
    params: Sequence[SamplingParams], prompts: Sequence[Any], outputs: Sequence[Any], vocab_size: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and outputs as lists."""
    from specdec_triton._checks import check_integer, require

    def ids(name: str, tokens: Any) -> list[int]:
        require(isinstance(tokens, Iterable), name, "of lists of token ids", type(tokens).__name__)
        values = [int(token) for token in tokens]
        bad = next((token for token in values if not 0 <= token < vocab_size), None)
        require(bad is None, name, f"of token ids from 0 to {vocab_size - 1}", bad)
        return values

    check_integer("vocab_size", vocab_size, 1)
    require(isinstance(params, Sequence), "params", "a list of SamplingParams", type(params).__name__)
    for name, rows in (("prompts", prompts), ("outputs", outputs)):
        require(len(rows) == len(params), name, f"one entry per request ({len(params)})", len(rows))
    for one in params:
        require(not one.on_host, "params", "without grammar and logits_processors", one.rules)
        ids("params", (*(one.logit_bias or ()), *(one.allowed_token_ids or ()), *one.banned_token_ids))
    return [ids("prompts", row) for row in prompts], [ids("outputs", row) for row in outputs]


def count_tokens(prompt: Sequence[int], output: Sequence[int], vocab_size: int) -> torch.Tensor:
    """A row of ``counts``: int32 ``[V]`` on the host."""
    import torch

    counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=vocab_size).int()
    counts[torch.tensor(prompt, dtype=torch.int64).unique()] += IN_PROMPT
    return counts


def bias_of(params: SamplingParams, vocab_size: int) -> torch.Tensor:
    """A row of ``bias``: fp32 ``[V]`` on the host."""
    import torch

    def ids(tokens: Sequence[int]) -> torch.Tensor:
        return torch.tensor(tokens, dtype=torch.int64)

    bias = torch.zeros(vocab_size)
    if params.allowed_token_ids is not None:
        bias = torch.full_like(bias, float("-inf"))
        bias[ids(params.allowed_token_ids)] = 0.0
    if params.logit_bias:
        bias[ids(list(params.logit_bias))] += torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
    bias[ids(params.banned_token_ids)] = float("-inf")
    return bias
