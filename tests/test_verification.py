"""``specdec_triton.verification``: an honest decoder passes every check, and each check fails when its promise is broken.

The faults are seeded from outside: an accept rule, a target, a drafter or noise that is wrong in one way.
"""

from __future__ import annotations

import math
from functools import lru_cache

import pytest
import torch

from specdec_triton import DraftModel, NoDraft, PromptLookup, SamplingParams, SpeculativeDecoder, ops
from specdec_triton.adapter import ModelAdapter
from specdec_triton.drafters import Drafter
from specdec_triton.exactness import ExactPasses
from specdec_triton.reference import noise
from specdec_triton.testing import ScriptedDrafter, own_logits, toy_model
from specdec_triton.verification import (
    Check,
    check_bits,
    check_distribution,
    check_greedy,
    check_seeds,
    measure_acceptance,
    measure_speed,
    verdict,
)
from specdec_triton.verification.distribution import FALSE_ALARM, chi_square, tail
from specdec_triton.verification.scoring import Scorer
from specdec_triton.verification.texts import worst_gap

PROMPTS = [[3, 5, 7, 3, 5, 7, 3, 5, 7, 11, 3], [2, 9, 2, 9, 2], [*range(20, 40)]]
NEW = 12
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


@lru_cache
@torch.inference_mode()
def target(kind="llama", dtype=torch.float32, **config):
    return ModelAdapter(toy_model(kind, dtype=dtype, **config))


@lru_cache
@torch.inference_mode()
def mixture():
    return target("mixtral", **EXPERTS)


@lru_cache
def similar():
    """A draft model whose distributions resemble the target's."""
    model, generator = toy_model(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
    return model


def greedy(of=None, drafter=None, **options):
    return check_greedy(of or target(), drafter or PromptLookup(), PROMPTS, max_new_tokens=NEW, **options)


def seeds(of=None, drafter=None, **options):
    return check_seeds(of or target(), drafter or PromptLookup(), PROMPTS, max_new_tokens=NEW, **options)


def distribution(of=None, drafter=None, samples=400, **options):
    return check_distribution(of or target(), drafter or PromptLookup(), PROMPTS[0], samples=samples, **options)


# What is right passes.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ngrams_pass(dtype):
    of = target(dtype=dtype)
    for check in (greedy(of), seeds(of), check_bits(of, PROMPTS, max_new_tokens=NEW), distribution(of)):
        assert check.passed is True, check.detail
    assert greedy(of).facts["drafted"] > 0


@pytest.mark.parametrize("method", ["rejection", "block", "coupled"])
def test_distribution_of_a_draft_model_passes(method):
    check = distribution(drafter=DraftModel(similar()), method=method)
    assert check.passed is True, check.detail
    assert 0 < check.facts["accepted"] < check.facts["drafted"]
    assert check.of == f"DraftModel, {method}"


@pytest.mark.parametrize("check", [greedy, seeds], ids=["greedy", "seeds"])
def test_texts_of_a_draft_model_pass(check):
    found = check(drafter=DraftModel(similar()), k=3)
    assert found.passed is True, found.detail
    assert found.facts["k"] == [1, 2, 3]


def test_every_k_up_to_8_and_then_some():
    assert greedy(k=1).facts["k"] == [1]
    assert greedy(k=40).facts["k"] == [*range(1, 9), 16, 32, 40]


def test_one_prompt_is_checked_beside_itself():
    check = check_greedy(target(), PromptLookup(), PROMPTS[:1], k=2, max_new_tokens=NEW)
    assert (check.passed, check.facts["texts"]) == (True, 5)


def test_nothing_drafted_shows_nothing():
    for check in (greedy(drafter=NoDraft()), seeds(drafter=NoDraft()), distribution(drafter=NoDraft(), samples=50)):
        assert check.passed is None
        assert "nothing was drafted" in check.detail


def test_too_few_samples_show_nothing():
    assert distribution(samples=3).passed is None


def test_the_global_generator_is_put_back():
    before = torch.get_rng_state()
    first = distribution(samples=20)
    assert torch.equal(torch.get_rng_state(), before)
    assert distribution(samples=20) == first
    assert distribution(samples=20, seed=1) != first


def test_measurements_inform():
    speed = measure_speed(target(), PromptLookup(), PROMPTS, max_new_tokens=NEW, runs=1)
    assert speed.passed is None
    assert speed.facts["exact_tokens_per_second"] > 0
    check = measure_acceptance(
        target(), DraftModel(similar()), PROMPTS, max_new_tokens=NEW, methods=("coupled", "rejection", "block")
    )
    assert check.passed is None
    for method in ("coupled", "rejection", "block"):
        assert check.facts[method]["rate"] == check.facts[method]["accepted"] / check.facts[method]["drafted"]
        assert method in check.detail
    assert len({check.facts[method]["rate"] for method in ("coupled", "rejection", "block")}) == 3
    nothing = measure_acceptance(target(), NoDraft(), PROMPTS, max_new_tokens=NEW)
    assert nothing.facts["coupled"]["rate"] is None


# What is wrong fails.


def wrong_accepts(monkeypatch, method=None):
    """An accept rule that keeps one draft more than it may."""
    accept = ops.accept_reject

    def lenient(draft_tokens, *args, draft_lens, **options):
        tokens, accepted, status = accept(draft_tokens, *args, draft_lens=draft_lens, **options)
        more = (accepted < draft_lens) & (method in (None, options["method"]))
        for b in more.nonzero()[:, 0].tolist():
            at = int(accepted[b])
            tokens[b, at : at + 2] = torch.stack([draft_tokens[b, at], tokens[b, at]])
        return ops.AcceptResult(tokens, accepted + more, status)

    monkeypatch.setattr(ops, "accept_reject", lenient)


@pytest.mark.parametrize("check", [greedy, seeds, distribution], ids=["greedy", "seeds", "distribution"])
def test_accepting_wrong_drafts_fails(monkeypatch, check):
    """faults.md A3, B5."""
    wrong_accepts(monkeypatch)
    assert check().passed is False


def test_a_difference_is_described(monkeypatch):
    wrong_accepts(monkeypatch)
    drafter = ScriptedDrafter(lambda text, limit: [96] if len(text) == len(PROMPTS[1]) + 4 else [])
    want = SpeculativeDecoder(target()).generate(PROMPTS, SamplingParams(temperature=0, max_new_tokens=NEW))
    check = greedy(drafter=drafter)
    expected = want[1].token_ids[4]
    assert check.detail == f"prompt 2, K = 1, alone: token 5 is 96, plain decoding writes {expected}"
    assert check.facts == {"prompt": 2, "k": 1, "together": False, "token": 5, "got": 96, "expected": expected}


def row_dependent(of, monkeypatch, size=1.0):
    """The target's logits depend on how many rows are scored together."""
    forward = of.forward

    def rounded(tokens, cache, table, context, query_lens=None, **options):
        logits = forward(tokens, cache, table, context, query_lens, **options)
        rows = tokens.numel() if query_lens is None else int(query_lens.sum())
        generator = torch.Generator().manual_seed(rows)
        return logits + size * torch.randn(logits.shape[-1], generator=generator) * (rows > 1)

    monkeypatch.setattr(of, "forward", rounded)


def test_logits_that_depend_on_the_rows_fail(monkeypatch):
    """faults.md A7: by a bit that flips no token, and by more. That the machine can do better is pretended."""
    monkeypatch.setattr(ExactPasses, "pad", lambda self, rows: None)
    row_dependent(target(), monkeypatch, 1e-5)
    check = check_bits(target(), PROMPTS, max_new_tokens=NEW)
    assert check.passed is False
    assert check.detail.startswith("prompt 1: the logits after new token 2 ")
    row_dependent(target(), monkeypatch)
    assert greedy().passed is False
    assert seeds().passed is False


def test_logits_that_depend_on_the_neighbours_fail(monkeypatch):
    """Alone every pass agrees; the place in the batch shows."""
    forward = target().forward

    def neighbourly(tokens, *args, **options):
        logits = forward(tokens, *args, **options)
        return logits + 1e-4 * torch.arange(len(logits))[:, None, None]

    monkeypatch.setattr(target(), "forward", neighbourly)
    check = check_bits(target(), PROMPTS, max_new_tokens=NEW)
    assert (check.passed, check.facts["prompt"], check.facts["together"]) == (False, 2, True)


class Liar(Drafter):
    """Draws its drafts greedily, and says that it drew them from the draft model's distribution (faults.md B1)."""

    def __init__(self, model):
        self.honest = DraftModel(model)

    def bind(self, target, options):
        session = self.honest.bind(target, options)
        propose = session.propose

        def lie(round_):
            round_.draw = lambda logits, j, draw=round_.draw: (logits.argmax(-1), draw(logits, j)[1], logits)
            return propose(round_)

        session.propose = lie
        return session


@pytest.mark.parametrize("method", ["rejection", "block"])
def test_a_drafter_that_lies_about_its_probabilities_fails(method):
    check = distribution(drafter=Liar(similar()), method=method)
    assert check.passed is False
    assert check.facts["p_value"] < FALSE_ALARM
    assert "was written" in check.detail
    assert greedy(drafter=Liar(similar())).passed is True  # what it says does not matter there


def test_noise_keyed_by_the_batch_row_fails(monkeypatch):
    """faults.md B17, C1."""
    race = noise.race

    def by_row(logits, seed, *args):
        return race(logits, seed + torch.arange(len(seed)), *args)

    monkeypatch.setattr("specdec_triton.reference.accept_reject.race", by_row)
    check = seeds()
    assert check.passed is False
    assert "together" in check.detail
    assert greedy().passed is True


def test_one_seed_for_all_requests_fails(monkeypatch):
    """Each text has the right distribution; together they do not."""
    monkeypatch.setattr("specdec_triton.engine.decoder.draw_seed", lambda: 5)
    assert distribution().passed is False


def test_impossible_text_fails(monkeypatch):
    """Beside other requests the target takes the last token for the first."""
    forward = target().forward

    def reversing(tokens, *args, **options):
        logits = forward(tokens, *args, **options)
        return logits.flip(-1) if len(tokens) > 1 else logits

    monkeypatch.setattr(target(), "forward", reversing)
    check = distribution(samples=100)
    assert check.passed is False
    assert "has probability 0" in check.detail


@pytest.mark.parametrize("check", [greedy, seeds, distribution], ids=["greedy", "seeds", "distribution"])
def test_requests_that_end_with_an_error_fail(monkeypatch, check):
    forward = target().forward

    def broken(tokens, cache, table, context, *args, **options):
        logits = forward(tokens, cache, table, context, *args, **options)
        return logits * math.nan if tokens.shape[1] > 1 and int(context.min()) > 0 else logits

    monkeypatch.setattr(target(), "forward", broken)
    found = check()
    assert found.passed is False
    assert "NaN" in found.detail


def test_plain_decoding_that_fails_is_named(monkeypatch):
    forward = target().forward
    monkeypatch.setattr(target(), "forward", lambda *args, **options: forward(*args, **options) * math.nan)
    assert greedy().detail.startswith("plain decoding of prompt 1 failed: ")


# Where there are no equal bits.


def test_mixtures_are_judged_by_teacher_forcing():
    """faults.md A1, A10."""
    assert check_bits(mixture(), PROMPTS).detail.startswith("not available: exact=True is not available for mixture")
    for check in (greedy(mixture()), seeds(mixture()), distribution(mixture(), samples=100)):
        assert check.passed is True, check.detail
        assert check.facts["rounding"]
    assert measure_speed(mixture(), PromptLookup(), PROMPTS).passed is None


@pytest.mark.parametrize("check", [greedy, seeds], ids=["greedy", "seeds"])
def test_what_rounding_explains_passes_and_more_fails(monkeypatch, check):
    row_dependent(mixture(), monkeypatch, 0.1)
    far = check(mixture())
    assert far.passed is False
    assert far.facts["gap"] > far.facts["allowed"]
    assert "below the best, rounding explains" in far.detail
    monkeypatch.setattr("specdec_triton.verification.texts.allowed_gap", lambda *args: 1.0)
    near = check(mixture())
    assert near.passed is True, near.detail
    assert near.facts["near_ties"] > 0
    assert 0 < near.facts["gap"] < 1


def test_without_equal_bits_an_early_end_is_no_near_tie(monkeypatch):
    """However close the tokens before it were."""
    generate = SpeculativeDecoder.generate

    def cut(self, *args):
        outputs = generate(self, *args)
        if self.num_draft_tokens:
            outputs[-1].token_ids.pop()
        return outputs

    monkeypatch.setattr(SpeculativeDecoder, "generate", cut)
    assert "is the end, plain decoding writes" in greedy(mixture()).detail


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(temperature=0.8, seed=-3)], ids=str)
def test_plain_text_has_no_gap(params):
    """Its scores, with the noise of its seed, are those that plain decoding took the best of; another text's are not."""
    text = SpeculativeDecoder(target()).generate(PROMPTS[:1], params)[0].token_ids
    assert worst_gap(target(), PROMPTS[0], text, params)[0] == 0
    gap, allowed, at = worst_gap(target(), PROMPTS[0], [*text[:9], (text[9] + 1) % 97], params)
    assert gap > allowed
    assert at == 9


# The parts.


def assert_near(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("length", [5, 256, 300])
def test_scorer_agrees_with_the_module(length):
    """Prompts in chunks; then chains, one of them empty, that replace what the slots held."""
    of = target(max_position_embeddings=512)
    texts = [[(7 * i + b) % 97 for i in range(length + 6)] for b in range(3)]
    want = [own_logits(of.model, text) for text in texts]
    scorer = Scorer(of, 3)
    for slot in (0, 1, 2):
        scorer.prefill(slot, [1, 2, 3])
        assert_near(scorer.prefill(slot, texts[slot][:length]), want[slot][length - 1])
    scorer.score([[1] * 6] * 3, [length] * 3)
    got = scorer.score([texts[0][length : length + 4], [], texts[2][length : length + 6]], [length] * 3)
    assert [len(rows) for rows in got] == [4, 0, 6]
    assert_near(got[0], want[0][length : length + 4])
    assert_near(got[2], want[2][length : length + 6])
    assert_near(scorer.after(texts[1][length], length, 1), want[1][length])


def test_chi_square_by_hand():
    expected = {(0,): 50.0, (1,): 30.0, (2,): 12.0, (3,): 4.0, (4,): 4.0}
    counts = {(0,): 40, (1,): 36, (2,): 12, (3,): 9, (4,): 3}
    statistic, degrees = chi_square(counts, expected)
    assert (statistic, degrees) == (pytest.approx(100 / 50 + 36 / 30 + 0 + 16 / 8), 3)
    assert chi_square(counts, expected, slack=0.1)[0] == pytest.approx(25 / 50 + 9 / 30 + 3.2**2 / 8)
    # Rare ones that are not enough together take the next.
    assert chi_square({(0,): 7, (1,): 2, (2,): 0}, {(0,): 5.0, (1,): 3.0, (2,): 1.0})[1] == 0
    assert chi_square({(0,): 9}, {(0,): 9.0}) == (0.0, 0)


@pytest.mark.parametrize(
    ("statistic", "degrees", "p"), [(3.841459, 1, 0.05), (18.30704, 10, 0.05), (62.16, 26, 9.0e-5)]
)
def test_tail_of_chi_square(statistic, degrees, p):
    assert tail(statistic, degrees) == pytest.approx(p, rel=0.1)
    assert tail(0.0, degrees) == 1
    assert tail(5.0, 0) == 1


def check(name, passed, **facts):
    return Check(name, passed, "", "PromptLookup", facts)


@pytest.mark.parametrize(
    ("checks", "lossless", "parts"),
    [
        (
            [check(name, True) for name in ("greedy", "bits", "seeds", "distribution")],
            True,
            ["lossless: greedy, seeded and sampled text is what the target alone writes"],
        ),
        (
            [check("greedy", True), check("seeds", None), check("speed", None)],
            True,
            ["lossless: greedy text", "seeded and sampled text is not checked"],
        ),
        ([check("greedy", True, rounding=True), check("bits", None)], True, ["up to rounding", "near-ties"]),
        ([check("greedy", True), check("bits", False)], False, ["NOT lossless: bits, PromptLookup failed"]),
        (
            [check("greedy", False), check("bits", False), check("seeds", True)],
            False,
            ["NOT lossless: greedy, PromptLookup and bits, PromptLookup failed"],
        ),
        ([check("greedy", None), check("bits", True)], None, ["nothing is shown"]),
        ([], None, ["nothing is shown"]),
    ],
    ids=["all", "some", "rounding", "one failed", "two failed", "no drafts", "none"],
)
def test_verdict(checks, lossless, parts):
    found, sentence = verdict(checks)
    assert found is lossless
    for part in parts:
        assert part in sentence
