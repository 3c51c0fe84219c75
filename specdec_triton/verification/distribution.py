"""Sampled text without a seed: how often each text is written, against its exact probability.

Two kinds of requests decode together, on one context. They may write few tokens, so that a drafter, whatever it is, often hits:

* Two of three are long, with two allowed tokens. The first token comes from the prompt's pass; then there is room for a round of
  up to four drafts, its bonus token, and one more: 128 texts.
* The others are three tokens long, with top-k of 3 of four allowed tokens: one draft, and two tokens to choose from when it is
  rejected; 27 texts.

Plain passes of the target, one token each, give the probability of each text (some more texts where logits tie). Chi-square
tests compare these with the counts of requests that went through the decoder, drafts and all.

A third test has one degree of freedom, for what goes wrong in one direction. A token is *favoured* where the drafter is likelier
to draft it than the target to write it: drafts of such tokens are rejected at times. Kept too often, rejected but drawn again, or
judged by a number that another draft has been judged by, they are written too often, wherever in the round they stand. The test
adds them up over all places and texts; that is a sum of differences of mean zero, whatever the drafter.

What 1000 samples find, in token-level verification, was tried with SmolLM2 and n-grams, and with toy models, n-grams and draft
models. An acceptance too lenient by a tenth (0.9 u for u) gave an alarm in all of nine runs, and so did 0.7 u, a wrong residual, and
all drafts kept from the second on. With SmolLM2, 0.7 u from the third draft on, all from the fourth on and one u for all did too. On
toy models they did not where late drafts are seldom judged, or where a draft model so near to the target drafts that nearly all are
right; nor did 0.9 u in block verification, mostly. 0.9 u from the third draft on is hardly found. The detail says from how far apart the
number of favoured tokens is an alarm.

The context holds what n-grams look for, and a temperature at which the allowed tokens are about equally likely makes it matter:
drafts are accepted and rejected, and many texts are written.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from specdec_triton._checks import check_integer
from specdec_triton.adapter import ModelAdapter
from specdec_triton.drafters import Drafter
from specdec_triton.engine import SpeculativeDecoder
from specdec_triton.ops import PATHLESS
from specdec_triton.sampling import SamplingParams
from specdec_triton.verification.check import Check
from specdec_triton.verification.enumeration import Tree, enumerate_texts, favoured_tokens, next_tokens
from specdec_triton.verification.fit import Text, chi_square, tail, two_sided
from specdec_triton.verification.scoring import Scorer, allowed_gap, checked, why_inexact

FALSE_ALARM = 1e-4
_DRAFTS = 4  # of a round, at most, that the long texts have room for
_TAIL = 2  # tokens of the prompt at the context's beginning
# Behind them, of the likeliest tokens: those of the short texts, then pairs of the two of the long ones, and at last as many
# that the target itself goes on with, of these two.
_PATTERN = (2, 1, 3, 0, 2, 3, 0, 0, 1, 1)
_OWN = 6
_BATCH = 32
_ALARM_DISTANCE = 4.15  # in standard deviations: the third part of FALSE_ALARM lies outside
_LEAST_VARIANCE = 25.0  # below, a sum is too far from normal for that


@dataclass(frozen=True)
class _Kind:
    """Requests of one kind.

    Attributes:
        slack: of a text's probability, relative: each of its tokens' logits may be off by a rounding.
    """

    params: SamplingParams
    tree: Tree
    slack: float


def check_distribution(
    target: ModelAdapter,
    drafter: Drafter,
    prompt: Sequence[int],
    *,
    method: str = "rejection",
    k: int = 4,
    samples: int = 1000,
    seed: int = 0,
) -> Check:
    """Texts of ``samples`` unseeded requests on one context, made of the prompt's last tokens.

    Args:
        method: ``rejection``, ``block``, or ``coupled``.
        seed: of torch's global generator, which draws the requests' own; it is put back afterwards.
    """
    [prompt] = checked(target, [prompt], k=k)
    check_integer("samples", samples, 1)
    check_integer("seed", seed, 0)
    of = f"{type(drafter).__name__}, {method}"
    inexact = why_inexact(target, drafter) is not None
    scorer = Scorer(target)
    likely = _likely(scorer.prefill(0, prompt))
    if len(likely) < 2:
        return Check("distribution", None, "the target has one token to choose from", of)
    context = _context(scorer, prompt, likely)
    long = _kind(scorer, context, likely[:2], 0, min(k, _DRAFTS) + 3, inexact)
    short = _kind(scorer, context, likely, 3, 3, inexact)
    kinds = [short if i % 3 == 2 else long for i in range(samples)]
    decoder = SpeculativeDecoder(
        target,
        drafter,
        num_draft_tokens=k,
        max_batch_size=_BATCH,
        method=method,
        exact=not inexact,
        adaptive=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        outputs = decoder.generate([context] * samples, [kind.params for kind in kinds])
    if error := next((output.error for output in outputs if output.error is not None), None):
        return Check("distribution", False, error, of)
    drafted, accepted = (sum(getattr(out.stats, name) for out in outputs) for name in ("drafted", "accepted"))
    facts = {"samples": samples, "drafted": drafted, "accepted": accepted, "rounding": inexact}
    found: list[tuple[float, str]] = []  # p-values, and what is told if they are too small
    told, degrees_of_all, favoured = [], 0, _Sum()
    for kind in (long, short):
        counts = Counter(tuple(out.token_ids) for out, its in zip(outputs, kinds, strict=True) if its is kind)
        if impossible := next((text for text in counts if text not in kind.tree.texts), None):
            detail = f"the text {list(impossible)} has probability 0 and was written {counts[impossible]} times"
            return Check("distribution", False, detail, of, facts)
        expected = {text: counts.total() * p for text, p in kind.tree.texts.items()}
        statistic, degrees = chi_square(counts, expected, kind.slack)
        worst = max(expected, key=lambda text: (counts[text] - expected[text]) ** 2 / (expected[text] or 1))
        what = f"the text {list(worst)} was written {counts[worst]} times, expected {expected[worst]:.1f}"
        found.append((tail(statistic, degrees), what))
        told.append(f"{statistic:.1f} of {degrees}")
        degrees_of_all += degrees
        if drafted and method in PATHLESS:  # coupled drafts share their noise with the text
            favoured.add(counts, kind, favoured_tokens(drafter, target, context, kind.tree, kind.params))
    tested = f"{samples} texts: chi-square {' and '.join(told)} degrees of freedom"
    if favoured.tells:
        found.append((two_sided(favoured.off, favoured.variance), favoured.text))
        tested += f"; {favoured.text} (alarm from {favoured.alarm:.1%} apart)"
    smallest, what = min(found)
    p_value = min(1.0, len(found) * smallest)
    facts |= {"texts": len(long.tree.texts) + len(short.tree.texts), "p_value": p_value, **favoured.facts}
    if p_value < FALSE_ALARM:
        return Check("distribution", False, f"{what}; p = {p_value:.1g} < {FALSE_ALARM:g}", of, facts)
    if not accepted or not degrees_of_all:
        why = "nothing was drafted" if not drafted else f"none of {drafted} drafts was accepted"
        why = why if not accepted else "too few samples for any text"
        return Check("distribution", None, why, of, facts)
    detail = f"{tested}; p = {p_value:.2g} (alarm below {FALSE_ALARM:g}); {accepted} of {drafted} drafts accepted"
    return Check("distribution", True, detail, of, facts)


@dataclass
class _Sum:
    """Favoured tokens of all texts, where drafts may have been judged."""

    count: int = 0
    expected: float = 0.0
    variance: float = 0.0
    slack: float = 0.0

    def add(self, counts: Mapping[Text, int], kind: _Kind, favoured: Mapping[Text, frozenset[int]]) -> None:
        for text, n in counts.items():
            for at in range(1, len(text) - 1):  # the prompt's pass gives the first token; there is no draft of the last
                before = text[:at]
                share = sum(kind.tree.after[before][token] for token in favoured[before])
                self.count += n * (text[at] in favoured[before])
                self.expected += n * share
                self.variance += n * share * max(1 - share, 0.0)
                self.slack += n * share * kind.slack / len(text)

    @property
    def tells(self) -> bool:
        return self.variance >= _LEAST_VARIANCE

    @property
    def off(self) -> float:
        return max(abs(self.count - self.expected) - self.slack, 0.0)

    @property
    def alarm(self) -> float:
        """How far apart, as a share of what is expected, the count must be."""
        return (self.slack + _ALARM_DISTANCE * math.sqrt(self.variance)) / self.expected

    @property
    def text(self) -> str:
        return f"tokens that drafts favour were written {self.count} times, expected {self.expected:.1f}"

    @property
    def facts(self) -> dict[str, float]:
        if not self.tells:
            return {}
        return {"favoured": self.count, "favoured_expected": self.expected, "favoured_alarm": self.alarm}


def _likely(logits: torch.Tensor) -> list[int]:
    """The four likeliest tokens, if there are so many, by logits ``[V]``."""
    values, tokens = logits.float().topk(min(1 + max(_PATTERN), len(logits)))
    return tokens[values.isfinite()].tolist()


def _context(scorer: Scorer, prompt: Sequence[int], likely: Sequence[int]) -> list[int]:
    context = [*prompt[-_TAIL:], *(likely[min(i, len(likely) - 1)] for i in _PATTERN)]
    row = scorer.prefill(0, context)
    for _ in range(_OWN):
        context.append(max(likely[:2], key=lambda token: float(row[token])))
        row = scorer.after(context[-1], len(context) - 1)
    return context


def _kind(
    scorer: Scorer, context: Sequence[int], allowed: Sequence[int], top_k: int, tokens: int, inexact: bool
) -> _Kind:
    params = SamplingParams(allowed_token_ids=allowed, top_k=top_k, max_new_tokens=tokens, ignore_eos=True)
    temperature, rounding = _temperature(scorer, context, params)
    params = replace(params, temperature=temperature)
    slack = tokens * rounding / temperature if inexact else 0.0
    return _Kind(params, enumerate_texts(scorer, context, params), slack)


def _temperature(scorer: Scorer, context: Sequence[int], params: SamplingParams) -> tuple[float, float]:
    """At which the best token is some three times as likely as the last one kept; and what rounding does to a logit."""
    row = scorer.prefill(0, context)
    gaps = []
    for at in range(params.max_new_tokens):
        kept = next_tokens(row, params)
        best = max(kept, key=lambda token: float(row[token]))
        gaps.append(max(float(row[best] - row[token]) for token in kept))
        rounding = allowed_gap(scorer.target, row) / 4
        row = scorer.after(best, len(context) + at)
    return max(sorted(gaps)[len(gaps) // 2], 0.1), rounding
