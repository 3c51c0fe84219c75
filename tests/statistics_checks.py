"""What texts must look like, by enumeration; how far they are from it, as p-values.

A check is a function that returns a p-value, or raises AssertionError where chance plays no part. ``test_statistics.py``
asserts them, ``test_mutations.py`` shows that they fail when the code is wrong. Nothing here calls an op.

The level. A check fails below ``LEVEL`` = 1e-6; of several p-values it gives the smallest times their number (Bonferroni).
So correct code fails a suite of up to 1000 checks with a probability of at most 1e-3, over the choice of seeds. They are
fixed: a suite that passes passes always.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from statistics_engine import CertainDrafter, Setting, Table, Tampered, Texts, decode, decode_many

from specdec_triton import SamplingParams
from specdec_triton.engine.slots import ERROR, LENGTH, RUNNING, STOP
from specdec_triton.ops import PAD
from specdec_triton.reference.noise import _to_gumbel, to_uniform

LEVEL = 1e-6
_RARE = 10  # outcomes expected less often are counted together

Check = Callable[[], float]

# Goodness of fit.


def fit(outcomes: torch.Tensor, probs: torch.Tensor) -> float:
    """Chi-square goodness of fit of outcomes int64 ``[N]`` with fp64 ``[C]``; 0 if an impossible one occurred."""
    counts = torch.bincount(outcomes, minlength=len(probs)).double()
    if len(counts) > len(probs) or bool((counts[probs <= 0] > 0).any()):
        return 0.0
    expected = probs / probs.sum() * len(outcomes)
    rare = expected < _RARE
    counts, expected = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, expected))
    counts, expected = counts[expected > 0], expected[expected > 0]
    if len(counts) < 2:
        return 1.0
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=torch.float64), statistic / 2))


def worst(p_values: Iterable[float]) -> float:
    """Of several p-values, as one."""
    values = list(p_values)
    return min(1.0, len(values) * min(values, default=1.0))


# Enumeration.


def sequence_probs(table: Table, params: SamplingParams, length: int) -> torch.Tensor:
    """The distribution over all texts of up to ``length`` tokens, fp64 ``[(V+1) ** length]``.

    A text is a number in base V + 1 (:func:`codes`), whose digits are tokens. Behind a stop token, or the last that the
    parameters allow, comes the digit V.
    """
    after, end, base = table.probs(params), table.vocab, table.vocab + 1
    token = torch.arange(table.vocab)
    stops = torch.isin(token, torch.tensor([*params.stop_token_ids, PAD]))
    # One entry for each text so far and row of the table that follows it.
    prob, code, row = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64), table.start
    done = torch.zeros(1, dtype=torch.bool)
    for place in range(length):
        last = place + 1 == params.max_new_tokens
        on = [
            (prob[:, None] * after[row]).masked_fill(done[:, None], 0.0),
            code[:, None] * base + token,
            table.next_row(row[:, None], token),
            (stops | last).expand(len(row), -1),
        ]
        prob, code, row, done = (
            torch.cat([x.flatten(), y])
            for x, y in zip(on, (prob * done, code * base + end, torch.zeros_like(row), done), strict=True)
        )
        key, inverse = ((code * len(table.rows) + row) * 2 + done).unique(return_inverse=True)
        prob = torch.zeros(len(key), dtype=torch.float64).index_add_(0, inverse, prob)
        code, row, done = key // 2 // len(table.rows), key // 2 % len(table.rows), key % 2 > 0
    return torch.zeros(base**length, dtype=torch.float64).index_add_(0, code, prob)


def codes(tokens: torch.Tensor, vocab: int) -> torch.Tensor:
    """The numbers by which :func:`sequence_probs` calls texts ``[B,N]``."""
    digits = torch.where(tokens == PAD, vocab, tokens)
    return (digits * (vocab + 1) ** torch.arange(tokens.shape[1] - 1, -1, -1)).sum(1)


def accepted_probs(method: str, target: Table, draft: Table, params: SamplingParams, k: int) -> torch.Tensor:
    """How many of a round's k drafts are accepted, fp64 ``[k+1]``, by enumeration of all that may be drafted.

    With p and q the distributions at a place and x the draft:

    * rejection: x stays with probability min(1, p(x) / q(x)), so a draft does with sum_x min(p(x), q(x)).
    * coupled: token v wins the race for p if E_v / p(v) is the smallest, E being the exponential numbers that the race for q
      uses as well. x wins both if E_v > E_x max(p(v) / p(x), q(v) / q(x)) for all v: E_x is then the first of independent
      exponentials of those rates (1 for v = x), which has probability 1 / sum_v max(p(v) / p(x), q(v) / q(x)). Given
      that x was drafted it is that over q(x). With q one-hot at x it is p(x).
    * block: the longest prefix i with u_i < h_i stays; h as in kernels/README.md.
    """
    p_after, q_after = target.probs(params), draft.probs(params)
    drafts = torch.cartesian_prod(*[torch.arange(target.vocab)] * k).view(-1, k)
    row, other = target.start.expand(len(drafts)), draft.start.expand(len(drafts))
    p, q = [], []
    for x in drafts.unbind(1):
        p.append(p_after[row])
        q.append(q_after[other])
        row, other = target.next_row(row, x), draft.next_row(other, x)
    p, q = torch.stack(p, 1), torch.stack(q, 1)  # [M,k,V]
    px, qx = (y.gather(2, drafts[:, :, None])[:, :, 0] for y in (p, q))
    drawn = qx.prod(1)
    p, q, px, qx, drawn = (y[drawn > 0] for y in (p, q, px, qx, drawn))
    one, zero = torch.ones_like(drawn)[:, None], torch.zeros_like(drawn)[:, None]
    if method == "block":
        w, h = one[:, 0], [one[:, 0]]
        for i in range(k):
            if i:
                mass = (w[:, None] * p[:, i] - q[:, i]).clamp(min=0).sum(1)
                h.append(torch.where(w < 1, mass / (mass + 1 - w), 1.0))
            w = (w * px[:, i] / qx[:, i]).clamp(max=1)
        h = torch.stack([*h, w], 1)
        none_later = torch.cat([(1 - h).flip(1).cumprod(1).flip(1)[:, 1:], one], 1)
        exactly = h * none_later
    else:
        keep = (px / qx).clamp(max=1)
        if method == "coupled":
            rates = torch.maximum(p / px[..., None], q / qx[..., None]).nan_to_num(nan=0.0)  # 0 / 0: neither may win
            keep = (px > 0) / rates.sum(2) / qx
        at_least = torch.cat([one, keep.cumprod(1), zero], 1)
        exactly = at_least[:, :-1] - at_least[:, 1:]
    return (drawn[:, None] * exactly).sum(0)


# Checks of a setting.


def texts_fit(setting: Setting, texts: Texts) -> float:
    """Whole texts of each kind of request follow the target, and end where and why they must."""
    vocab, p_values = setting.target.vocab, []
    for kind, request in enumerate(setting.requests):
        some = texts.of(texts.kinds == kind)
        if request is None:
            assert bool((some.tokens == PAD).all()), "a slot at rest wrote something"
            continue
        probs = sequence_probs(setting.target, request.params, setting.length)
        p_values.append(fit(codes(some.tokens, vocab), probs))
        assert_reasons(some, request.params)
    return worst(p_values)


def assert_reasons(texts: Texts, params: SamplingParams) -> None:
    """STOP behind a stop token, LENGTH behind the last that is allowed, else none; of what is looked at."""
    length = texts.tokens.shape[1]
    stops = torch.isin(texts.tokens, torch.tensor([*params.stop_token_ids, -2])).any(1)
    want = torch.where(stops, STOP, LENGTH if params.max_new_tokens <= length else RUNNING)
    ended = (texts.reasons != RUNNING) & (want == RUNNING)  # behind what is looked at
    assert torch.equal(torch.where(ended, RUNNING, texts.reasons), want), "texts end for another reason"


def drafts_of(setting: Setting) -> Table | None:
    """The table from which drafts are drawn; of a certain drafter, one that leaves one token."""
    drafter = setting.drafter
    while isinstance(drafter, Tampered):
        drafter = drafter.drafter
    if isinstance(drafter, CertainDrafter):
        best = torch.nn.functional.one_hot(drafter.table.rows.argmax(-1), drafter.table.vocab)
        return Table(best.double().log(), drafter.table.prompt)
    return None if drafter is None else drafter.table


def acceptance_fits(setting: Setting, texts: Texts) -> float:
    """By kind of request and number of drafts, the first round accepts as many as the enumeration says."""
    p_values, draft = [], drafts_of(setting)
    for kind, request in enumerate(setting.requests):
        for k in range(1, setting.k + 1):
            some = texts.of((texts.kinds == kind) & (texts.drafted == k))
            if len(some.kinds) and request is not None:
                probs = accepted_probs(request.method, setting.target, draft, request.params, k)
                p_values.append(fit(some.accepted, probs))
    assert p_values, "nobody drafted"
    return worst(p_values)


def follows(setting: Setting, count: int, *, acceptance: bool = True) -> float:
    """Texts and acceptance of ``count`` texts."""
    texts = decode_many(setting, count)
    p_values = [texts_fit(setting, texts)]
    return worst([*p_values, acceptance_fits(setting, texts)] if acceptance else p_values)


def tokens_follow(setting: Setting, count: int, bins: torch.Tensor) -> float:
    """Of a target with one row and requests without filters: all tokens of ``count`` texts are drawn from it, whatever
    came before. By bins int64 ``[V]``, for vocabularies whose texts are too many to be enumerated."""
    texts = decode_many(setting, count, batch=250)  # rows are long
    probs = setting.target.probs(SamplingParams())[0]
    binned = torch.zeros(int(bins.max()) + 1, dtype=torch.float64).index_add_(0, bins, probs)
    return fit(bins[texts.tokens].flatten(), binned)


def assert_never_accepted(setting: Setting, count: int) -> None:
    """faults.md B9: no request keeps a draft of the first round."""
    texts = decode(setting, torch.arange(count))
    assert bool((texts.drafted > 0).all()), "nobody drafted"
    assert not bool(texts.accepted.any()), "impossible drafts are accepted"


def assert_failures_stay_alone(setting: Setting, spoiled: Setting, bad: torch.Tensor, count: int) -> None:
    """faults.md B11: with rows ``bad`` of the target spoiled, requests that need one fail, the others write the same."""
    seeds = torch.arange(count)
    clean, broken = decode(setting, seeds), decode(spoiled, seeds)
    failed = broken.reasons == ERROR
    row, needs = setting.target.start.expand(count), torch.zeros(count, dtype=torch.bool)
    for token in clean.tokens.unbind(1):
        needs |= torch.isin(row, bad)
        row = setting.target.next_row(row, token)
    assert 0 < int(failed.sum()) < count, "all or none failed"
    assert bool(failed[needs].all()), "a request went on without its logits"
    assert torch.equal(broken.tokens[~failed], clean.tokens[~failed]), "another request's logits changed a text"
    written = broken.tokens != PAD
    assert torch.equal(broken.tokens[written], clean.tokens[written]), "a request failed too late"


def assert_open_interval() -> None:
    """faults.md B5, B10: no word of the generator gives u = 0 or 1, or noise that beats all logits."""
    words = torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1])
    u = to_uniform(words)
    assert bool(((u > 0) & (u < 1)).all()), "u may be 0 or 1"
    assert bool(_to_gumbel(words).isfinite().all()), "noise may be infinite"


def assert_same_in_any_order(setting: Setting, count: int) -> None:
    """faults.md A4, C1: a request writes the same text at any place of any batch, and twice the same."""
    kinds, seeds = torch.arange(count) % len(setting.requests), torch.arange(count) // 2
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    together = decode(setting, seeds, kinds)
    for some in (order, order[: count // 3]):
        for mine, theirs in zip(decode(setting, seeds[some], kinds[some]).fields, together.fields, strict=True):
            assert torch.equal(mine, theirs[some]), "a text depends on its place in the batch, or on its neighbours"


def assert_one_path(setting: Setting, settings: Iterable[Setting], count: int) -> None:
    """Other drafters, numbers of drafts and modes write the texts of ``setting``."""
    seeds = torch.arange(count)
    want = decode(setting, seeds).tokens
    for other in settings:
        got = decode(replace(other, requests=setting.requests), seeds).tokens
        assert torch.equal(got, want), "the text depends on how it was drafted"
