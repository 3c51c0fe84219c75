"""Greedy and seeded text against plain decoding: the same token ids, whatever drafts, K or neighbours.

Where equal bits cannot be had (``scoring.why_inexact``) a text may part from plain decoding at a near-tie. Then it is
scored anew, one token at a time, with itself as history: each token's score must be the best one's up to rounding
(faults.md A1). How many texts agree says nothing (A10) and decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch

from specdec_triton.adapter import ModelAdapter
from specdec_triton.drafters import Drafter, NoDraft
from specdec_triton.engine import SpeculativeDecoder
from specdec_triton.engine.request import GenerationOutput
from specdec_triton.reference.noise import Stream, gumbel
from specdec_triton.sampling import SamplingParams
from specdec_triton.verification.check import Check
from specdec_triton.verification.scoring import Scorer, allowed_gap, why_inexact

MAX_BATCH_SIZE = 32
_EVERY_K = 8  # up to here; beyond, only doublings and the largest


def check_greedy(
    target: ModelAdapter, drafter: Drafter, prompts: Sequence[Sequence[int]], *, k: int = 4, max_new_tokens: int = 48
) -> Check:
    """Greedy text for K = 1 .. k (beyond 8: doublings, and k), each prompt alone and all of them together."""
    params = [SamplingParams(temperature=0, max_new_tokens=max_new_tokens)] * len(prompts)
    counts = sorted({*range(1, min(k, _EVERY_K) + 1), *(n for n in (16, 32) if n < k), k})
    return _check("greedy", target, drafter, prompts, params, counts)


def check_seeds(
    target: ModelAdapter,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    k: int = 4,
    max_new_tokens: int = 48,
    temperature: float = 0.7,
    seed: int = 0,
) -> Check:
    """Sampled text of the seeds ``seed``, ``seed + 1``, ... (one a prompt) for K = 1, 2 and k, alone and together."""
    params = [
        SamplingParams(temperature=temperature, seed=seed + i, max_new_tokens=max_new_tokens)
        for i in range(len(prompts))
    ]
    return _check("seeds", target, drafter, prompts, params, sorted({1, min(2, k), k}))


@dataclass(frozen=True)
class _Difference:
    """Where a text parts from plain decoding; ``got``, ``expected``: a token id, None at a text's end."""

    prompt: int
    k: int
    together: bool
    at: int
    got: int | None
    expected: int | None

    def __str__(self) -> str:
        got, expected = ("the end" if token is None else str(token) for token in (self.got, self.expected))
        where = f"prompt {self.prompt + 1}, K = {self.k}, {'together' if self.together else 'alone'}"
        return f"{where}: token {self.at + 1} is {got}, plain decoding writes {expected}"

    @property
    def facts(self) -> dict[str, Any]:
        place = {"prompt": self.prompt + 1, "k": self.k, "together": self.together, "token": self.at + 1}
        return place | {"got": self.got, "expected": self.expected}


def _check(
    name: str,
    target: ModelAdapter,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    counts: Sequence[int],
) -> Check:
    of = type(drafter).__name__
    inexact = why_inexact(target) is not None
    plain = _alone(_decoder(target, NoDraft(), 0, 1, inexact), prompts, params)
    for i, output in enumerate(plain):
        if output.error is not None:
            return Check(name, False, f"plain decoding of prompt {i + 1} failed: {output.error}", of)
    texts = drafted = accepted = ties = 0
    largest = 0.0
    for k, together, outputs in _runs(target, drafter, prompts, params, counts, inexact):
        for i, (output, want) in enumerate(zip(outputs, plain, strict=True)):
            texts += 1
            drafted += output.stats.drafted
            accepted += output.stats.accepted
            if output.error is not None:
                return Check(name, False, f"prompt {i + 1}, K = {k}: {output.error}", of)
            at = _parting(output.token_ids, want.token_ids)
            if at is None:
                continue
            got, expected = (dict(enumerate(ids)).get(at) for ids in (output.token_ids, want.token_ids))
            difference = _Difference(i, k, together, at, got, expected)
            if not inexact or got is None or expected is None:
                return Check(name, False, str(difference), of, difference.facts)
            ties += 1
            gap, allowed, token = worst_gap(target, prompts[i], output.token_ids, params[i])
            if not gap <= allowed:  # NaN neither
                detail = (
                    f"{difference}; token {token + 1} lies {gap:.3g} below the best, rounding explains {allowed:.3g}"
                )
                return Check(name, False, detail, of, difference.facts | {"gap": gap, "allowed": allowed})
            largest = max(largest, gap)
    facts = {"texts": texts, "drafted": drafted, "accepted": accepted, "k": list(counts), "rounding": inexact}
    if not drafted:
        return Check(name, None, "nothing was drafted on these prompts", of, facts)
    kept = f"{accepted} of {drafted} drafts accepted"
    if not ties:
        return Check(name, True, f"{texts} texts identical to plain decoding; {kept}", of, facts)
    detail = f"{ties} of {texts} texts part from plain decoding, at near-ties only (largest gap {largest:.3g}); {kept}"
    return Check(name, True, detail, of, facts | {"near_ties": ties, "gap": largest})


def _runs(
    target: ModelAdapter,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    counts: Sequence[int],
    inexact: bool,
) -> Iterator[tuple[int, bool, list[GenerationOutput]]]:
    """K, whether the prompts were together, and their outputs; plain decoding together comes first."""
    yield 0, True, _together(_decoder(target, NoDraft(), 0, MAX_BATCH_SIZE, inexact), prompts, params)
    for k in counts:
        yield k, False, _alone(_decoder(target, drafter, k, 1, inexact), prompts, params)
        yield k, True, _together(_decoder(target, drafter, k, MAX_BATCH_SIZE, inexact), prompts, params)


def _decoder(target: ModelAdapter, drafter: Drafter, k: int, batch: int, inexact: bool) -> SpeculativeDecoder:
    exact = False if inexact else None  # None would warn of what is known
    return SpeculativeDecoder(target, drafter, num_draft_tokens=k, max_batch_size=batch, exact=exact, adaptive=False)


def _alone(
    decoder: SpeculativeDecoder, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[GenerationOutput]:
    return [decoder.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]


def _together(
    decoder: SpeculativeDecoder, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[GenerationOutput]:
    """In reverse order, so that a prompt's row is not its number, behind a neighbour that ends halfway, so that rows move."""
    neighbour = replace(params[0], max_new_tokens=-(-params[0].max_new_tokens // 2))
    outputs = decoder.generate([prompts[0], *prompts[::-1]], [neighbour, *params[::-1]])
    return outputs[:0:-1]


def _parting(got: Sequence[int], want: Sequence[int]) -> int | None:
    """The first place where two texts differ, the end of one included."""
    return next((at for at, (a, b) in enumerate(zip_longest(got, want)) if a != b), None)


def worst_gap(
    target: ModelAdapter, prompt: Sequence[int], text: Sequence[int], params: SamplingParams
) -> tuple[float, float, int]:
    """Score ``text`` one token at a time; of the token that is furthest from the best, for what rounding explains:

    Returns:
        how far its score lies below the best one's, how far it may, and its place. A score is a logit, at a temperature
        with the noise of the request's seed added, so that the best one is the token that plain decoding takes.
    """
    scorer = Scorer(target)
    logits = scorer.prefill(0, prompt)
    worst = 0.0, 1.0, 0
    for at, token in enumerate(text):
        if at:
            logits = scorer.after(text[at - 1], len(prompt) + at - 1)
        scores = logits.float()
        if not params.greedy:
            scores = scores + float(params.temperature or 0) * _noise(params, len(prompt) + at, scores)
        gap, allowed = float(scores.amax() - scores[token]), allowed_gap(target, logits)
        if not gap / allowed <= worst[0] / worst[1]:  # NaN is the worst
            worst = gap, allowed, at
    return worst


def _noise(params: SamplingParams, position: int, like: torch.Tensor) -> torch.Tensor:
    """What coupled sampling adds to the logits ``[V]`` of a position, over the temperature."""
    seed, at = (torch.tensor([value], device=like.device) for value in (params.seed or 0, position))
    return gumbel(seed, at, torch.zeros_like(at), Stream.COUPLED, len(like))[0]
