"""``check_distribution``: what is right passes, and what is wrong with acceptance, residuals, drafters or seeds fails."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from verification_cases import PROMPTS, distribution, greedy, similar, target

from specdec_triton import DraftModel, PromptLookup, SamplingParams
from specdec_triton.drafters import Drafter
from specdec_triton.reference import accept_reject as judging
from specdec_triton.testing import ScriptedDrafter, own_logits
from specdec_triton.verification import check_distribution
from specdec_triton.verification.distribution import FALSE_ALARM
from specdec_triton.verification.enumeration import enumerate_texts, favoured_tokens
from specdec_triton.verification.fit import chi_square, tail, two_sided
from specdec_triton.verification.scoring import Scorer


@pytest.mark.parametrize("method", ["rejection", "block", "coupled"])
def test_distribution_of_a_draft_model_passes(method):
    check = distribution(drafter=DraftModel(similar()), method=method)
    assert check.passed is True, check.detail
    assert 0 < check.facts["accepted"] < check.facts["drafted"]
    assert check.of == f"DraftModel, {method}"


def patched(monkeypatch, name, change):
    monkeypatch.setattr(judging, name, partial(change, getattr(judging, name)))


def lenient(share, first=0):
    """Uniform numbers of the drafts from ``first`` on are smaller than they should be."""

    def change(uniform, seed, position, node, stream):
        u = uniform(seed, position, node, stream)
        return torch.where(node >= first, u * share, u)

    return "uniform", change


def one_number(uniform, seed, position, node, stream):
    return uniform(seed, position, node, stream)[:, :1].expand(-1, len(node))


def all_of_p(recovering, last, *args):
    return last


def equally_likely(recovering, *args):
    return torch.where(recovering(*args) > float("-inf"), 0.0, float("-inf"))


FAULTS = {
    "u too small by a tenth": (lenient(0.9), 1000),
    "u too small by a third": (lenient(0.7), 200),
    "u too large": (lenient(1.3), 300),
    "all from the third": (lenient(1e-30, 2), 300),
    "one u for all": (("uniform", one_number), 600),
    "residual is p": (("_recovering", all_of_p), 200),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("drafter", ["n-grams", "draft model"])
def test_wrong_acceptance_fails(monkeypatch, drafter, fault):
    """faults.md B2, B5."""
    (name, change), samples = FAULTS[fault]
    patched(monkeypatch, name, change)
    drafter = PromptLookup() if drafter == "n-grams" else DraftModel(similar(apart=0.03))
    check = distribution(drafter=drafter, samples=samples)
    assert check.passed is False, check.detail
    assert check.facts["p_value"] < FALSE_ALARM


def test_the_residual_of_three_tokens_is_seen(monkeypatch):
    """Recovered tokens are drawn as if all that may come were equally likely."""
    patched(monkeypatch, "_recovering", equally_likely)
    assert distribution(samples=1500).passed is False


@pytest.mark.parametrize("vocab", [2, 3])
def test_few_tokens(vocab):
    of = target(vocab_size=vocab, pad_token_id=0)
    check = check_distribution(of, PromptLookup(), [0, 1, 1], samples=200)
    assert check.passed is True, check.detail


def test_one_token_shows_nothing(monkeypatch):
    forward = target().forward

    def masked(*args, **options):
        logits = forward(*args, **options)
        return torch.full_like(logits, float("-inf")).index_copy(-1, torch.tensor([7]), logits[..., [7]])

    monkeypatch.setattr(target(), "forward", masked)
    check = distribution(samples=20)
    assert (check.passed, check.detail) == (None, "the target has one token to choose from")


def test_texts_by_hand():
    """Two tokens of two allowed ones: the products of what the module itself says."""
    params = SamplingParams(temperature=0.5, allowed_token_ids=(4, 9), max_new_tokens=2)
    tree = enumerate_texts(Scorer(target()), PROMPTS[0], params)
    assert list(tree.after) == [(), (4,), (9,)]
    for text, p in tree.texts.items():
        rows = own_logits(target().model, [*PROMPTS[0], *text])[len(PROMPTS[0]) - 1 : -1, [4, 9]]
        after = (rows.double() / 0.5).softmax(-1)
        assert p == pytest.approx(float(after[0, [4, 9].index(text[0])] * after[1, [4, 9].index(text[1])]), rel=1e-3)


def test_favoured_tokens_are_those_that_the_draft_model_likes_more():
    params = SamplingParams(temperature=0.5, allowed_token_ids=(4, 9), max_new_tokens=3)
    tree = enumerate_texts(Scorer(target()), PROMPTS[0], params)
    found = favoured_tokens(DraftModel(similar()), target(), PROMPTS[0], tree, params)
    for text, tokens in found.items():
        of_target, of_draft = (own_logits(m, [*PROMPTS[0], *text])[-1, [4, 9]] for m in (target().model, similar()))
        assert tokens == {(4, 9)[int((of_draft.softmax(0) - of_target.softmax(0)).argmax())]}
    certain = favoured_tokens(ScriptedDrafter(lambda text, limit: [9]), target(), PROMPTS[0], tree, params)
    assert set(certain.values()) == {frozenset([9])}


def test_too_few_samples_show_nothing():
    assert distribution(samples=3).passed is None


def test_the_global_generator_is_put_back():
    before = torch.get_rng_state()
    first = distribution(samples=20)
    assert torch.equal(torch.get_rng_state(), before)
    assert distribution(samples=20) == first
    assert distribution(samples=20, seed=1) != first


class Liar(Drafter):
    """Draws its drafts greedily, and says that it drew them from the draft model's distribution (faults.md B1)."""

    def __init__(self, model):
        self.honest = DraftModel(model)

    def bind(self, target, options):
        session = self.honest.bind(target, options)
        propose = session.propose

        def lie(round_):
            round_.draw = lambda logits, j, draw=round_.draw: draw(logits, j)._replace(tokens=logits.argmax(-1))
            return propose(round_)

        session.propose = lie
        return session


@pytest.mark.parametrize("method", ["rejection", "block"])
def test_a_drafter_that_lies_about_its_probabilities_fails(method):
    check = distribution(drafter=Liar(similar()), method=method)
    assert check.passed is False
    assert check.facts["p_value"] < FALSE_ALARM
    assert "tokens that drafts favour were written" in check.detail
    assert greedy(drafter=Liar(similar())).passed is True  # what it says does not matter there


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


def test_two_sided():
    assert two_sided(2 * 1.959964, 4.0) == pytest.approx(0.05, rel=1e-4)
    assert two_sided(1.0, 0.0) == 1
