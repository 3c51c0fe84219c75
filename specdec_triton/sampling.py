"""Sampling parameters: one request's as plain Python, and a batch's as tensors on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MAX_DRAFT_TOKENS = 63  # a verify pass has at most 64 rows a request: one bit each in an int64 tree mask
MAX_LOGPROBS = 20
_LONGEST_REPR = 100
_SEED_LIMIT = 1 << 63
_LARGEST_FLOAT32 = 3.4028234663852886e38
_SMALLEST_FLOAT32 = 1.1754943508222875e-38  # below, 1 / x overflows


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded.

    Everything holds at every position, drafted or not: a draft is judged by the logits that plain decoding would have had there,
    with the text before it, the drafts before it included.

    Args:
        temperature: 0 is greedy. None (unset) means 1.0.
        top_k: keep the k most likely tokens; 0 or -1 is off, larger than the vocabulary keeps all.
        top_p: keep the smallest set of tokens with at least this probability; 1.0 is off, 0.0 keeps one.
        min_p: drop tokens less likely than this share of the most likely one; 0.0 is off.
        typical_p: of what is left, keep the tokens whose information is nearest to the expected, up to this probability
            (Meister et al. 2022, "locally typical sampling"); 1.0 is off, 0.0 keeps one.
        seed: the text becomes a function of (prompt, parameters, seed); 0 and -1 count as seeds. None draws one from
            torch's global generator. Without effect at temperature 0.
        max_new_tokens: at least 1.
        min_new_tokens: no stop token before so many new ones, and no stop string that is complete before.
        stop_token_ids: these end the text besides the model's own end-of-sequence ids; the stop token is the last
            of the output.
        stop_strings: so do these, with the token that completes one; what the prompt ends with is no part of one. The decoder
            needs a ``tokenizer`` for it.
        ignore_eos: the model's own end-of-sequence ids do not end the text; only stop_token_ids do.
        repetition_penalty: logits of tokens in prompt or output are divided by it where positive, multiplied where negative
            (Keskar et al. 2019); above 0, 1.0 is off.
        presence_penalty, frequency_penalty: are taken from the logits of tokens in the output, the second as often as they
            occur there; 0.0 is off.
        logit_bias: token id -> what is added to its logit; -inf bans it.
        allowed_token_ids: no others are written; None: all. banned_token_ids: are never written.
        no_repeat_ngram_size: no n-gram of this size occurs twice in prompt and output; 0 is off.
        grammar: called for each request, it gives a matcher that says which tokens may come next: see
            :class:`~specdec_triton.grammar.GrammarMatcher`, such as ``lambda: xgrammar.GrammarMatcher(compiled)``.
        logits_processors: callables ``(input_ids [1,L], logits [1,V]) -> logits [1,V]`` such as transformers'
            LogitsProcessor, applied one row at a time after all rules above, with the text before it (drafts included) as
            history, before temperature and filters.
        logprobs: report the log-probability of each new token, by the model's own logits, which none of the above has changed,
            and of so many of the most likely ones, 0 to 20; None: none.
        num_draft_tokens: K for this request, 0 (plain decoding) to 63; None takes the decoder's.

    Order: logit_bias, repetition_penalty, frequency and presence penalty, bans, grammar, logits_processors; then temperature,
    top_k, top_p, min_p, typical_p.

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
    typical_p: float = 1.0
    min_new_tokens: int = 0
    stop_strings: Sequence[str] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    banned_token_ids: Sequence[int] = ()
    no_repeat_ngram_size: int = 0
    grammar: Callable[[], Any] | None = field(default=None, repr=False)
    logprobs: int | None = None

    def __post_init__(self) -> None:
        self._tidy()
        allowed = self.allowed_token_ids
        most = self.max_new_tokens if _integer(self.max_new_tokens, 1) else None
        for name, holds, range_ in (
            ("logits_processors", all(map(callable, self.logits_processors)), "a list of callables"),
            ("temperature", _number(self.temperature, 0, _LARGEST_FLOAT32), "a finite number >= 0"),
            ("top_k", _integer(self.top_k, 0), "an integer >= 0 (0 or -1: off)"),
            ("top_p", _number(self.top_p, 0, 1), "from 0 to 1 (1: off)"),
            ("min_p", _number(self.min_p, 0, 1), "from 0 to 1 (0: off)"),
            ("typical_p", _number(self.typical_p, 0, 1), "from 0 to 1 (1: off)"),
            (
                "seed",
                self.seed is None or _integer(self.seed, -_SEED_LIMIT, _SEED_LIMIT - 1),
                "None or a 64-bit integer",
            ),
            ("max_new_tokens", _integer(self.max_new_tokens, 1), "an integer >= 1"),
            (
                "min_new_tokens",
                _integer(self.min_new_tokens, 0, most),
                f"an integer from 0 to max_new_tokens = {self.max_new_tokens}",
            ),
            ("stop_token_ids", _ids(self.stop_token_ids), "integers >= 0"),
            (
                "stop_strings",
                all(isinstance(x, str) and x for x in self.stop_strings),
                "a string, or a list of strings, none of them empty",
            ),
            ("ignore_eos", isinstance(self.ignore_eos, bool), "True or False"),
            (
                "repetition_penalty",
                _number(self.repetition_penalty, _SMALLEST_FLOAT32, _LARGEST_FLOAT32),
                "a finite number above 0 (1: off)",
            ),
            ("presence_penalty", _number(self.presence_penalty), "a finite number (0: off)"),
            ("frequency_penalty", _number(self.frequency_penalty), "a finite number (0: off)"),
            (
                "logit_bias",
                self.logit_bias is None or (_ids(self.logit_bias) and all(map(_bias, self.logit_bias.values()))),
                "a mapping of token ids (integers >= 0) to numbers below +inf",
            ),
            ("banned_token_ids", _ids(self.banned_token_ids), "integers >= 0"),
            (
                "allowed_token_ids",
                allowed is None or (_ids(allowed) and any(x not in self.banned_token_ids for x in allowed)),
                "None, or integers >= 0 that are not all banned",
            ),
            ("no_repeat_ngram_size", _integer(self.no_repeat_ngram_size, 0), "an integer >= 0 (0: off)"),
            (
                "grammar",
                self.grammar is None or _makes_matchers(self.grammar),
                "None or a callable that makes a new matcher for each request, such as lambda: GrammarMatcher(compiled)",
            ),
            (
                "logprobs",
                self.logprobs is None or _integer(self.logprobs, 0, MAX_LOGPROBS),
                f"None or from 0 to {MAX_LOGPROBS}",
            ),
            (
                "num_draft_tokens",
                self.num_draft_tokens is None or _integer(self.num_draft_tokens, 0, MAX_DRAFT_TOKENS),
                f"None or from 0 to {MAX_DRAFT_TOKENS}",
            ),
        ):
            _require(holds, self, name, range_)

    def _tidy(self) -> None:
        """Other ways to write the same, and lists that the caller may change later."""
        tidied: dict[str, Any] = {}
        if self.temperature is None:
            tidied["temperature"] = 1.0
        if self.top_k == -1:
            tidied["top_k"] = 0
        if isinstance(self.stop_strings, str):
            tidied["stop_strings"] = (self.stop_strings,)
        if self.logit_bias is not None:
            _require(isinstance(self.logit_bias, Mapping), self, "logit_bias", "None or a mapping")
            tidied["logit_bias"] = dict(self.logit_bias)
        names = ["stop_token_ids", "logits_processors", "stop_strings", "banned_token_ids"]
        for name in names if self.allowed_token_ids is None else [*names, "allowed_token_ids"]:
            _require(isinstance(getattr(self, name), Iterable), self, name, "a list")
            tidied.setdefault(name, tuple(getattr(self, name)))
        for name, value in tidied.items():
            object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_filters(self) -> bool:
        """Whether top-k, top-p, min-p or typical-p can remove a token (never at temperature 0)."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or self.typical_p < 1)

    @property
    def penalizes(self) -> bool:
        """Whether logits depend on how often tokens have occurred."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def biases(self) -> bool:
        """Whether something is added to logits, or tokens are banned for good."""
        return bool(self.logit_bias or self.banned_token_ids or self.allowed_token_ids is not None)

    @property
    def on_host(self) -> bool:
        """Whether the host has to look at each draft: for the request's own processors, or its grammar."""
        return bool(self.logits_processors or self.grammar)

    @property
    def rules(self) -> list[str]:
        """The options in use that change logits before temperature and filters, by name."""
        names = "logit_bias repetition_penalty frequency_penalty presence_penalty allowed_token_ids banned_token_ids"
        names += " min_new_tokens no_repeat_ngram_size grammar logits_processors"
        unused = {f.name: f.default for f in fields(self)}
        return [name for name in names.split() if getattr(self, name) != unused[name]]


def _require(holds: bool, params: SamplingParams, name: str, allowed: str) -> None:
    if not holds:
        given = repr(getattr(params, name))
        given = given if len(given) <= _LONGEST_REPR else given[:_LONGEST_REPR] + " ..."
        raise ValueError(f"SamplingParams.{name} must be {allowed}, got {given}")


def _makes_matchers(grammar: Any) -> bool:
    """A matcher is sometimes given in place of what makes one; requests would share its state."""
    return callable(grammar) and (isinstance(grammar, type) or not hasattr(grammar, "accept_token"))


def _integer(value: Any, low: int, high: int | None = None) -> bool:
    fits = isinstance(value, Integral) and not isinstance(value, bool)
    return fits and low <= value and (high is None or value <= high)


def _number(value: Any, low: float = -_LARGEST_FLOAT32, high: float = _LARGEST_FLOAT32) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and low <= float(value) <= high


def _bias(value: Any) -> bool:
    return _number(value, -math.inf)


def _ids(values: Iterable[Any]) -> bool:
    return all(_integer(token, 0) for token in values)


@dataclass
class SamplingBatch:
    """The parameters of B requests as tensors ``[B]``; what the ops take.

    Args:
        temperature, top_p, min_p, typical_p: float32; typical_p None: off for all.
        top_k: int32.
        seed, position: int64. ``position`` is the absolute position of the first drafted token (of the token being
            sampled, in :func:`specdec_triton.ops.sample`).
        has_filters: whether any row uses top-k, top-p, min-p or typical-p, known on the host; None: unknown.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor
    has_filters: bool | None = None
    typical_p: torch.Tensor | None = None

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
            typical_p=torch.tensor([p.typical_p for p in params], dtype=torch.float32, device=device)
            if any(p.typical_p < 1 for p in params)
            else None,
        )

    def of(self, requests: torch.Tensor) -> SamplingBatch:
        """The parameters of some requests, int64 ``[B']``."""
        tensors = {
            f.name: x for f in fields(self) if (x := getattr(self, f.name)) is not None and f.name != "has_filters"
        }
        return replace(self, **{name: x[requests] for name, x in tensors.items()})

    def after(self, tokens: int) -> SamplingBatch:
        """The same parameters, ``tokens`` positions later."""
        return replace(self, position=self.position + tokens)


def draw_seed() -> int:
    """A fresh seed from torch's global generator, so that ``torch.manual_seed`` governs unseeded requests."""
    import torch

    return int(torch.randint(0, _SEED_LIMIT - 1, (), dtype=torch.int64))
