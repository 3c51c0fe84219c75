"""Greedy and seeded text against plain decoding: the same token ids, whatever drafts, K or neighbours.

Where equal bits cannot be had (``scoring.why_inexact``) a text may part from plain decoding at a near-tie. Then it is
scored anew, one token at a time, with itself as history: each token's score must be the best one's up to rounding
(faults.md A1). How many texts agree says nothing (A10) and decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import inf
from typing import Any

import torch

from specdec_triton._checks import check_integer
from specdec_triton.adapter import ModelAdapter
from specdec_triton.drafters import Drafter, NoDraft
from specdec_triton.engine import SpeculativeDecoder
from specdec_triton.engine.request import GenerationOutput
from specdec_triton.reference.noise import Stream, gumbel
from specdec_triton.sampling import SamplingParams
from specdec_triton.verification.check import Check
from specdec_triton.verification.scoring import Scorer, allowed_gap, checked, why_inexact

MAX_BATCH_SIZE = 32
_EVERY_K = 8  # up to here; beyond, only doublings and the largest
_TIGHT_PAGE = 4  # tokens
_LOGPROBS_APART = 1e-4


def check_greedy(
    target: ModelAdapter, drafter: Drafter, prompts: Sequence[Sequence[int]], *, k: int = 4, max_new_tokens: int = 48
) -> Check:
    """Greedy text for K = 1 .. k (beyond 8: doublings, and k), each prompt alone and all of them together."""
    prompts = checked(target, prompts, k=k, max_new_tokens=max_new_tokens)
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
    """Sampled text of the seeds ``seed``, ``seed + 1``, ... for K = 1, 2 and k, alone and together.

    Where bits are equal, all texts but every fourth are under logit rules and filters, and some have log-probabilities, which
    are compared too; fewer than four prompts are taken several times, for each kind of options.
    """
    prompts = checked(target, prompts, k=k, max_new_tokens=max_new_tokens)
    check_integer("seed", seed, 0)
    params = []
    if why_inexact(target, drafter) is None:
        prompts = [prompts[i % len(prompts)] for i in range(max(len(prompts), 4))]
        kinds = [_options(prompts[i], max_new_tokens)[i % 4] for i in range(len(prompts))]
    else:  # a near-tie of such texts cannot be judged
        kinds = [{} for _ in prompts]
    for i, options in enumerate(kinds):
        options = {"temperature": temperature, "seed": seed + i, "max_new_tokens": max_new_tokens} | options
        params.append(SamplingParams(**options))
    return _check(
        "seeds", target, drafter, prompts, params, sorted({1, min(2, k), k}), with_options=sum(map(bool, kinds))
    )


def _options(prompt: Sequence[int], new: int) -> list[dict[str, Any]]:
    """Logit rules and filters, four kinds. Those that draw from the prompt's tokens find n-grams in it."""
    own = sorted(set(prompt))
    return [
        {},
        {
            "allowed_token_ids": own,
            "repetition_penalty": 1.2,
            "frequency_penalty": 0.2,
            "top_p": 0.5,
            "logprobs": 2,
            "ignore_eos": True,
        },
        {"temperature": 0, "no_repeat_ngram_size": 3, "presence_penalty": 0.1, "logprobs": 0},
        {
            "logit_bias": dict.fromkeys(own, 5.0),
            "banned_token_ids": own[1:2],
            "stop_token_ids": prompt[-1:],  # likely by the bias, but not in the first half
            "min_new_tokens": new // 2,
            "min_p": 0.1,
            "top_k": 40,
        },
    ]


@dataclass(frozen=True)
class _Run:
    """One way to decode all prompts: K drafts, one by one or ``together``, and what is told of it."""

    k: int
    how: str
    outputs: list[GenerationOutput]

    @property
    def together(self) -> bool:
        return self.how != "alone"


@dataclass(frozen=True)
class _Difference:
    """Where a text parts from plain decoding; ``got``, ``expected``: a token id, None at a text's end."""

    prompt: int
    run: _Run
    at: int
    got: int | None
    expected: int | None

    def __str__(self) -> str:
        got, expected = ("the end" if token is None else str(token) for token in (self.got, self.expected))
        where = f"prompt {self.prompt}, K = {self.run.k}, {self.run.how}"
        return f"{where}: token {self.at + 1} is {got}, plain decoding writes {expected}"

    @property
    def facts(self) -> dict[str, Any]:
        place = {"prompt": self.prompt, "k": self.run.k, "together": self.run.together, "token": self.at + 1}
        return place | {"got": self.got, "expected": self.expected}


def _check(
    name: str,
    target: ModelAdapter,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    counts: Sequence[int],
    *,
    with_options: int = 0,
) -> Check:
    of = type(drafter).__name__
    inexact = why_inexact(target, drafter) is not None
    plain = _alone(_decoder(target, NoDraft(), 0, inexact, max_batch_size=1), prompts, params)
    for i, output in enumerate(plain):
        if output.error is not None:
            return Check(
                name, False, f"plain decoding of prompt {prompts.index(prompts[i]) + 1} failed: {output.error}", of
            )
    texts = drafted = accepted = preemptions = ties = 0
    largest = 0.0
    for run in _runs(target, drafter, prompts, params, counts, inexact):
        for i, (output, want) in enumerate(zip(run.outputs, plain, strict=True)):
            number = prompts.index(prompts[i]) + 1  # of the prompt; it may be there several times
            texts += 1
            drafted += output.stats.drafted
            accepted += output.stats.accepted
            preemptions += output.stats.preemptions
            if output.error is not None:
                return Check(name, False, f"prompt {number}, K = {run.k}, {run.how}: {output.error}", of)
            at = _parting(output.token_ids, want.token_ids)
            if at is None:
                at = None if inexact else _logprobs_part(output, want)
                if at is None:
                    continue
                detail = f"prompt {number}, K = {run.k}, {run.how}: the log-probabilities of token {at + 1} are not plain decoding's"
                return Check(name, False, detail, of)
            got, expected = (dict(enumerate(ids)).get(at) for ids in (output.token_ids, want.token_ids))
            difference = _Difference(number, run, at, got, expected)
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
    facts["preemptions"] = preemptions
    if not accepted:  # a decoder that only rejects shows half of what it does
        why = f"none of {drafted} drafts was accepted" if drafted else "nothing was drafted"
        return Check(name, None, f"{why} on these prompts", of, facts)
    kept = f"{accepted} of {drafted} drafts accepted, {preemptions} preemptions"
    if ties:
        detail = (
            f"{ties} of {texts} texts part from plain decoding, at near-ties only (largest gap {largest:.3g}); {kept}"
        )
        return Check(name, True, detail, of, facts | {"near_ties": ties, "gap": largest})
    ruled = ""
    if with_options:
        facts["with_options"] = texts // len(prompts) * with_options
        ruled = f", {facts['with_options']} of them under rules and filters"
    return Check(name, True, f"{texts} texts identical to plain decoding{ruled}; {kept}", of, facts)


def _runs(
    target: ModelAdapter,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    counts: Sequence[int],
    inexact: bool,
) -> Iterator[_Run]:
    """Plain decoding together comes first; at last the largest K as the controller likes, and with few pages."""
    yield _Run(0, "together", _together(_decoder(target, NoDraft(), 0, inexact), prompts, params))
    for k in counts:
        yield _Run(k, "alone", _alone(_decoder(target, drafter, k, inexact, max_batch_size=1), prompts, params))
        yield _Run(k, "together", _together(_decoder(target, drafter, k, inexact), prompts, params))
    k = counts[-1]
    adaptive = _decoder(target, drafter, k, inexact, adaptive=True)
    yield _Run(k, "together, adaptive", _together(adaptive, prompts, params))
    pages = _tight_pool(target, prompts, params, k)
    tight = _decoder(target, drafter, k, inexact, page_size=_TIGHT_PAGE, num_pages=pages)
    yield _Run(k, "together, few pages", _together(tight, prompts, params))


def _tight_pool(
    target: ModelAdapter, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], k: int
) -> int:
    """Pages that hold the longest text, and the beginning of another: two begin, and the newer one makes room."""
    limit = target.max_len or max(
        len(prompt) + each.max_new_tokens for prompt, each in zip(prompts, params, strict=True)
    )
    longest = max(min(len(prompt) + each.max_new_tokens, limit) for prompt, each in zip(prompts, params, strict=True))
    begun = max(min(len(prompt) + k + 1, limit) for prompt in prompts)
    return -(-longest // _TIGHT_PAGE) + -(-begun // _TIGHT_PAGE) + 1


def _logprobs_part(got: GenerationOutput, want: GenerationOutput) -> int | None:
    """The first place where two reports differ of texts that do not."""
    for at, (a, b) in enumerate(zip(got.logprobs or (), want.logprobs or (), strict=True)):
        pairs = [(a.logprob, b.logprob), *((a.top[token], b.top.get(token, inf)) for token in a.top)]
        if len(a.top) != len(b.top) or any(not abs(x - y) <= _LOGPROBS_APART for x, y in pairs):
            return at
    return None


def _decoder(
    target: ModelAdapter,
    drafter: Drafter,
    k: int,
    inexact: bool,
    *,
    max_batch_size: int = MAX_BATCH_SIZE,
    **options: Any,
) -> SpeculativeDecoder:
    exact = False if inexact else None  # None would warn of what is known
    options = {"adaptive": False} | options
    return SpeculativeDecoder(
        target, drafter, num_draft_tokens=k, max_batch_size=max_batch_size, exact=exact, **options
    )


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
