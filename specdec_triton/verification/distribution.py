"""Sampled text without a seed: how often each text is written, against its exact probability.

With top-k of 3 and four new tokens there are few texts (81, or some more where logits tie), and plain passes of the target,
one token each, give the probability of each of them. A chi-square test compares these with the counts of requests that
went through the decoder, drafts and all.

A context that repeats itself makes n-grams find something, and a temperature at which the likeliest tokens are about
equally likely makes it matter: drafts are accepted and rejected, and many texts are written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from specdec_triton.adapter import ModelAdapter
from specdec_triton.drafters import Drafter
from specdec_triton.engine import SpeculativeDecoder
from specdec_triton.sampling import SamplingParams
from specdec_triton.verification.check import Check
from specdec_triton.verification.scoring import Scorer, allowed_gap, why_inexact

FALSE_ALARM = 1e-4
_TOKENS, _TOP_K = 4, 3
_TAIL = 2  # tokens of the prompt that the context repeats
_BATCH = 32
_RARE = 5.0  # texts expected less often are counted together

Text = tuple[int, ...]


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
    of = f"{type(drafter).__name__}, {method}"
    inexact = why_inexact(target) is not None
    scorer = Scorer(target)
    context = _context(scorer, prompt)
    temperature, rounding = _temperature(scorer, context)
    params = SamplingParams(temperature=temperature, top_k=_TOP_K, max_new_tokens=_TOKENS, ignore_eos=True)
    probabilities = _enumerate(scorer, context, params)
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
        outputs = decoder.generate([context] * samples, params)
    if error := next((output.error for output in outputs if output.error is not None), None):
        return Check("distribution", False, error, of)
    counts = Counter(tuple(output.token_ids) for output in outputs)
    drafted, accepted = (sum(getattr(out.stats, name) for out in outputs) for name in ("drafted", "accepted"))
    facts = {"samples": samples, "drafted": drafted, "accepted": accepted, "temperature": temperature}
    facts |= {"texts": len(probabilities), "rounding": inexact}
    if impossible := [text for text in counts if text not in probabilities]:
        detail = f"the text {list(impossible[0])} has probability 0 and was written {counts[impossible[0]]} times"
        return Check("distribution", False, detail, of, facts)
    # Of a text's probability, relative: each of its tokens' logits may be off by a rounding.
    slack = _TOKENS * rounding / temperature if inexact else 0.0
    expected = {text: samples * p for text, p in probabilities.items()}
    statistic, degrees = chi_square(counts, expected, slack)
    p_value = tail(statistic, degrees)
    facts |= {"chi_square": statistic, "degrees_of_freedom": degrees, "p_value": p_value}
    kept = f"{accepted} of {drafted} drafts accepted"
    tested = f"{samples} texts of {_TOKENS} tokens: chi-square {statistic:.1f} of {degrees} degrees of freedom"
    if p_value < FALSE_ALARM:
        worst = max(expected, key=lambda text: (counts[text] - expected[text]) ** 2 / expected[text])
        detail = f"{tested}, p = {p_value:.1g} < {FALSE_ALARM:g}; {list(worst)} was written {counts[worst]} times"
        return Check("distribution", False, f"{detail}, expected {expected[worst]:.1f}", of, facts)
    if not drafted or not degrees:
        why = "nothing was drafted" if not drafted else "too few samples for any text"
        return Check("distribution", None, why, of, facts)
    return Check("distribution", True, f"{tested}, p = {p_value:.2g} (alarm below {FALSE_ALARM:g}); {kept}", of, facts)


def chi_square(counts: Mapping[Text, int], expected: Mapping[Text, float], slack: float = 0.0) -> tuple[float, int]:
    """The statistic and its degrees of freedom, rare texts counted together.

    Args:
        expected: of every text that can be written.
        slack: a count off by no more than this share of what is expected is taken for right.
    """
    cells: list[tuple[float, float]] = []
    rare_count = rare_expected = 0.0
    for text in sorted(expected, key=lambda text: expected[text]):
        if expected[text] < _RARE or 0 < rare_expected < _RARE:  # the rare ones together may need another one
            rare_count += counts.get(text, 0)
            rare_expected += expected[text]
        else:
            cells.append((counts.get(text, 0), expected[text]))
    if rare_expected > 0:
        cells.append((rare_count, rare_expected))
    off = ((max(abs(count - mean) - slack * mean, 0.0), mean) for count, mean in cells)
    return sum(distance**2 / mean for distance, mean in off), len(cells) - 1


def tail(statistic: float, degrees: int) -> float:
    """The probability that chi-square is at least this by chance."""
    if degrees == 0:
        return 1.0
    halves = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def _context(scorer: Scorer, prompt: Sequence[int]) -> list[int]:
    """The prompt's tail, again and again, each time with another of the likeliest continuations behind it."""
    end = list(prompt[-_TAIL:])
    context, begun = list(end), set[int]()
    for _ in range(_TOP_K):
        row = scorer.prefill(0, context)
        token = next(token for token in row.argsort(descending=True).tolist() if token not in begun)
        begun.add(token)
        for _ in range(_TOKENS - 1):
            context.append(token)
            token = int(scorer.after(token, len(context) - 1).argmax())
        context += [token, *end]
    return context


def _temperature(scorer: Scorer, context: Sequence[int]) -> tuple[float, float]:
    """At which the best token is some three times as likely as the last that top-k keeps; and what rounding does to a logit."""
    row = scorer.prefill(0, context)
    gaps = []
    for at in range(_TOKENS):
        values, tokens = row.float().topk(_TOP_K)
        gaps.append(float(values[0] - values[-1]))
        rounding = allowed_gap(scorer.target, row) / 4
        row = scorer.after(int(tokens[0]), len(context) + at)
    return max(sorted(gaps)[_TOKENS // 2], 0.1), rounding


def _enumerate(scorer: Scorer, context: Sequence[int], params: SamplingParams) -> dict[Text, float]:
    """The probability of every text that can be written."""
    probabilities: dict[Text, float] = {}

    def walk(text: Text, probability: float, row: torch.Tensor) -> None:
        if len(text) == params.max_new_tokens:
            probabilities[text] = probability
            return
        scaled = row.double() / float(params.temperature or 1.0)
        kept = (scaled >= scaled.topk(params.top_k).values[-1]).nonzero()[:, 0]  # ties are all kept
        for token, p in zip(kept.tolist(), scaled[kept].softmax(0).tolist(), strict=True):
            last = len(text) + 1 == params.max_new_tokens
            walk((*text, token), probability * p, row if last else scorer.after(token, len(context) + len(text)))

    walk((), 1.0, scorer.prefill(0, context))
    return probabilities
