"""What exactness costs, and how many drafts each rule accepts: for information."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from specdec_triton._checks import check_integer
from specdec_triton.adapter import ModelAdapter
from specdec_triton.drafters import Drafter
from specdec_triton.engine import SpeculativeDecoder
from specdec_triton.sampling import SamplingParams
from specdec_triton.verification.check import Check
from specdec_triton.verification.scoring import checked, why_inexact
from specdec_triton.verification.texts import MAX_BATCH_SIZE


def measure_speed(
    target: ModelAdapter,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    k: int = 4,
    max_new_tokens: int = 48,
    runs: int = 3,
) -> Check:
    """Tokens per second of greedy text, one prompt after the other, with bits that are the same in every pass and without.

    Medians of ``runs`` runs over the prompts, the two in turn, after one of each that is not counted. Prompts' passes
    included. Where the texts differ, so do the passes that they take: the cost is of a pass.
    """
    prompts = checked(target, prompts, k=k, max_new_tokens=max_new_tokens)
    check_integer("runs", runs, 1)
    of = type(drafter).__name__
    if why_inexact(target, drafter) is not None:
        return Check("speed", None, "exact passes are not available: there is nothing to compare", of)
    params = SamplingParams(temperature=0, max_new_tokens=max_new_tokens)
    decoders = {
        exact: SpeculativeDecoder(target, drafter, num_draft_tokens=k, max_batch_size=1, exact=exact, adaptive=False)
        for exact in (True, False)
    }
    tokens: dict[bool, list[float]] = {exact: [] for exact in decoders}  # a second, like the passes
    passes: dict[bool, list[float]] = {exact: [] for exact in decoders}
    texts: dict[bool, list[list[int]]] = {}
    for turn in range(runs + 1):
        for exact, decoder in decoders.items():
            outputs = [decoder.generate([prompt], params)[0] for prompt in prompts]
            texts[exact] = [output.token_ids for output in outputs]
            if turn:
                seconds = sum(output.stats.seconds for output in outputs)
                tokens[exact].append(sum(output.stats.new_tokens for output in outputs) / seconds)
                passes[exact].append(sum(output.stats.target_passes for output in outputs) / seconds)
    on, off = median(tokens[True]), median(tokens[False])
    cost = 1 - median(passes[True]) / median(passes[False])
    differing = sum(a != b for a, b in zip(texts[True], texts[False], strict=True))
    others = f", {differing} of {len(prompts)} texts differ" if differing else ""
    detail = f"{on:.1f} tokens/s with exact passes, {off:.1f} without{others}: exactness costs {max(cost, 0):.0%} of the passes' speed"
    facts = {
        "exact_tokens_per_second": on,
        "inexact_tokens_per_second": off,
        "cost": cost,
        "texts_differing": differing,
    }
    return Check("speed", None, detail, of, facts)


def measure_acceptance(
    target: ModelAdapter,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    methods: Sequence[str] = ("coupled", "rejection"),
    k: int = 4,
    max_new_tokens: int = 48,
    temperature: float = 0.7,
    seed: int = 0,
) -> Check:
    """The share of drafts that each method accepts on the same prompts, together, K drafts a round."""
    prompts = checked(target, prompts, k=k, max_new_tokens=max_new_tokens)
    of = type(drafter).__name__
    params = [
        SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed + i)
        for i in range(len(prompts))
    ]
    facts: dict[str, Any] = {"temperature": temperature}
    shown = []
    for method in methods:
        decoder = SpeculativeDecoder(
            target,
            drafter,
            num_draft_tokens=k,
            max_batch_size=MAX_BATCH_SIZE,
            method=method,
            exact=False,
            adaptive=False,
        )
        stats = [output.stats for output in decoder.generate(prompts, params)]
        drafted, accepted = (sum(getattr(s, name) for s in stats) for name in ("drafted", "accepted"))
        rate = accepted / drafted if drafted else None
        facts[method] = {"drafted": drafted, "accepted": accepted, "rate": rate}
        shown.append(f"{method} {'-' if rate is None else format(rate, '.0%')} of {drafted}")
    return Check("acceptance", None, f"drafts accepted at temperature {temperature:g}: {', '.join(shown)}", of, facts)
