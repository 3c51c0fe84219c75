"""Sampling parameters: one request's as plain Python, and a batch's as tensors on the device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MAX_DRAFT_TOKENS = 63  # a verify pass has at most 64 rows a request: one bit each in an int64 tree mask
_SEED_LIMIT = 1 << 63
_LARGEST_FLOAT32 = 3.4028234663852886e38


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded.

    Args:
        temperature: 0 is greedy. None (unset) means 1.0.
        top_k: keep the k most likely tokens; 0 or -1 is off, larger than the vocabulary keeps all.
        top_p: keep the smallest set of tokens with at least this probability; 1.0 is off, 0.0 keeps one.
        min_p: drop tokens less likely than this share of the most likely one; 0.0 is off.
        seed: the text becomes a function of (prompt, parameters, seed); 0 counts as a seed. None draws one from
            torch's global generator. Without effect at temperature 0.
        max_new_tokens: at least 1.
        stop_token_ids: these end the text besides the model's own end-of-sequence ids; the stop token is the last
            of the output.
        num_draft_tokens: K for this request, 0 (plain decoding) to 63; None takes the decoder's.
        ignore_eos: the model's own end-of-sequence ids do not end the text; only stop_token_ids do.
        logits_processors: callables ``(input_ids [1,L], logits [1,V]) -> logits [1,V]`` such as transformers'
            LogitsProcessor, applied to every position with the text before it (drafts included) as history, before
            temperature and the filters above.

    Raises:
        ValueError: a value out of its range, or NaN.

    Example:
        >>> SamplingParams(temperature=0, max_new_tokens=64).greedy
        True
    """

    temperature: float | None = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_new_tokens: int = 128
    stop_token_ids: Sequence[int] = ()
    num_draft_tokens: int | None = None
    ignore_eos: bool = False
    logits_processors: Sequence[Any] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.temperature is None:
            object.__setattr__(self, "temperature", 1.0)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        for name in ("stop_token_ids", "logits_processors"):
            _require(isinstance(getattr(self, name), Iterable), self, name, "a list")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        _require(all(map(callable, self.logits_processors)), self, "logits_processors", "a list of callables")
        _require(
            _real(self.temperature) and 0 <= float(self.temperature or 0) <= _LARGEST_FLOAT32,
            self,
            "temperature",
            "a finite number >= 0",
        )
        _require(_integer(self.top_k) and self.top_k >= 0, self, "top_k", "an integer >= 0 (0 or -1: off)")
        _require(_real(self.top_p) and 0 <= self.top_p <= 1, self, "top_p", "from 0 to 1 (1: off)")
        _require(_real(self.min_p) and 0 <= self.min_p <= 1, self, "min_p", "from 0 to 1 (0: off)")
        _require(
            self.seed is None or (_integer(self.seed) and -_SEED_LIMIT <= self.seed < _SEED_LIMIT),
            self,
            "seed",
            "None or a 64-bit integer",
        )
        _require(_integer(self.max_new_tokens) and self.max_new_tokens >= 1, self, "max_new_tokens", "an integer >= 1")
        _require(
            all(_integer(token) and token >= 0 for token in self.stop_token_ids),
            self,
            "stop_token_ids",
            "integers >= 0",
        )
        _require(isinstance(self.ignore_eos, bool), self, "ignore_eos", "True or False")
        k = self.num_draft_tokens
        _require(
            k is None or (_integer(k) and 0 <= k <= MAX_DRAFT_TOKENS),
            self,
            "num_draft_tokens",
            f"None or from 0 to {MAX_DRAFT_TOKENS}",
        )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_filters(self) -> bool:
        """Whether top-k, top-p or min-p can remove a token (never at temperature 0)."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


def _require(holds: bool, params: SamplingParams, name: str, allowed: str) -> None:
    if not holds:
        raise ValueError(f"SamplingParams.{name} must be {allowed}, got {getattr(params, name)!r}")


def _integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)


@dataclass
class SamplingBatch:
    """The parameters of B requests as tensors ``[B]``; what the ops take.

    Args:
        temperature, top_p, min_p: float32.
        top_k: int32.
        seed, position: int64. ``position`` is the absolute position of the first drafted token (of the token being
            sampled, in :func:`specdec_triton.ops.sample`).
        has_filters: whether any row uses top-k, top-p or min-p, known on the host; None: unknown.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor
    has_filters: bool | None = None

    @classmethod
    def from_params(
        cls,
        params: Sequence[SamplingParams],
        positions: Sequence[int] | torch.Tensor,
        device: str | torch.device = "cpu",
        *,
        seeds: Sequence[int] | None = None,
    ) -> SamplingBatch:
        """Build the tensors.

        Args:
            positions: absolute position of each request's first drafted token.
            seeds: used instead of the params' own; None: a request without a seed gets one from torch's global
                generator.
        """
        import torch

        if len(params) != len(positions):
            raise ValueError(f"positions must have one entry per request ({len(params)}), got {len(positions)}")
        if seeds is None:
            seeds = [draw_seed() if p.seed is None else p.seed for p in params]
        return cls(
            temperature=torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
            top_k=torch.tensor([min(p.top_k, 2**31 - 1) for p in params], dtype=torch.int32, device=device),
            top_p=torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device),
            min_p=torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device),
            seed=torch.tensor(list(seeds), dtype=torch.int64, device=device),
            position=torch.as_tensor(positions, dtype=torch.int64, device=device),
            has_filters=any(p.has_filters for p in params),
        )

    def of(self, requests: torch.Tensor) -> SamplingBatch:
        """The parameters of some requests, int64 ``[B']``."""
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
        return replace(self, **{name: getattr(self, name)[requests] for name in names})

    def after(self, tokens: int) -> SamplingBatch:
        """The same parameters, ``tokens`` positions later."""
        return replace(self, position=self.position + tokens)


def draw_seed() -> int:
    """A fresh seed from torch's global generator, so that ``torch.manual_seed`` governs unseeded requests."""
    import torch

    return int(torch.randint(0, _SEED_LIMIT - 1, (), dtype=torch.int64))
