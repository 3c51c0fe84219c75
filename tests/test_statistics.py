"""The distribution of whole texts, through the engine's own rounds: 200,000 draws a test against exact enumeration.

Every fault of faults.md group B, and C's first two. The level of a check, and why the suite raises a false alarm with a
probability of at most 1e-3: ``statistics_checks.py``. That it would find what it looks for: ``test_mutations.py``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import statistics_cases as cases
import torch
from statistics_cases import DRAFT, LOSSLESS, TARGET
from statistics_checks import (
    LEVEL,
    accepted_probs,
    assert_failures_stay_alone,
    assert_never_accepted,
    assert_one_path,
    assert_open_interval,
    assert_same_in_any_order,
    codes,
    fit,
    follows,
    sequence_probs,
    tokens_follow,
)
from statistics_engine import CertainDrafter, Request, Setting, TableDrafter, decode, random_table

from specdec_triton import NoDraft, SamplingParams
from specdec_triton._library import why_not_triton
from specdec_triton.testing import NAN

DRAWS = 200_000
MODES = {"reads": False, "device": True}


def test_the_level_of_the_suite(request):
    here = sum(item.path == request.path for item in request.session.items)
    assert here * LEVEL <= 1e-3


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("method", LOSSLESS)
def test_chains(method, k):
    """faults.md B6, B7: several rounds, and both kinds of them."""
    assert follows(cases.chain(method, k, device=k % 2 == 0), DRAWS) > LEVEL


@pytest.mark.parametrize("device", MODES.values(), ids=MODES)
def test_a_batch_of_everything(device):
    """faults.md A4, A9, G4."""
    assert follows(cases.mixed(device=device), DRAWS) > LEVEL


@pytest.mark.parametrize("method", LOSSLESS)
def test_parameters_on_both_sides(method):
    assert follows(cases.grid(method), DRAWS) > LEVEL


@pytest.mark.parametrize("device", MODES.values(), ids=MODES)
@pytest.mark.parametrize("method", LOSSLESS)
def test_texts_that_end(method, device):
    assert follows(cases.stopping(method, device=device), DRAWS // 2, acceptance=False) > LEVEL


@pytest.mark.parametrize("name", cases.ADVERSARIES)
def test_adversaries(name):
    device = list(cases.ADVERSARIES).index(name) % 2 == 1
    enumerable = name != "not-a-number"  # there it depends on the drafts how many there are
    assert follows(cases.adversary(name, device=device), DRAWS // 2, acceptance=enumerable) > LEVEL


@pytest.mark.parametrize("name", cases.PUBLISHED)
def test_published_cases(name):
    assert follows(cases.published(name), DRAWS // 2) > LEVEL


@pytest.mark.parametrize("vocab", [1, 2, 3, 4, 5, 31, 33])
def test_vocabularies_around_the_edges_of_groups(vocab):
    """Kernels work in lanes of 4 tokens, and bound filters by groups of 32."""
    assert follows(cases.wide(vocab), 30_000) > LEVEL


@pytest.mark.parametrize(("vocab", "full"), [(4095, False), (4096, False), (4097, False), (8193, False), (4097, True)])
def test_vocabularies_around_the_edges_of_blocks(vocab, full):
    """Kernels split a vocabulary into parts of 4096. Where most of it is masked, the noise of the rest alone is made."""
    setting = cases.wide(vocab, full=full)
    assert tokens_follow(setting, 1_000 if full else 2_000, cases.edge_bins(vocab)) > LEVEL


def test_ties_go_to_the_lowest_id():
    """faults.md A2."""
    assert follows(cases.tied(), 100) > LEVEL


def test_impossible_drafts_are_never_accepted():
    assert_never_accepted(cases.lying(), 20_000)


def test_noise_lies_in_the_open_interval():
    assert_open_interval()


@pytest.mark.parametrize("device", MODES.values(), ids=MODES)
def test_a_failing_request_leaves_the_others_alone(device):
    setting = cases.adversary("equal", device=device)
    bad = torch.tensor([2])
    spoiled = cases.changed(setting.target, lambda rows: rows.index_fill(0, bad, NAN))
    assert_failures_stay_alone(setting, replace(setting, target=spoiled), bad, 10_000)


@pytest.mark.parametrize("device", MODES.values(), ids=MODES)
def test_texts_do_not_depend_on_the_batch(device):
    assert_same_in_any_order(cases.mixed(TableDrafter(DRAFT), device=device), 6_000)


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.8, top_p=0.9)], ids=["plain", "top-p"]
)
def test_coupled_texts_do_not_depend_on_how_they_are_drafted(params):
    plain = Setting(TARGET, NoDraft(), [Request("coupled", params)], k=0)
    others = [Setting(TARGET, TableDrafter(DRAFT), (), k=k, device=k % 2 == 1) for k in (1, 2, 3, 4)]
    others += [Setting(TARGET, drafter, ()) for drafter in (CertainDrafter(DRAFT), cases.RAGGED)]
    assert_one_path(plain, others, 5_000)


# What is expected.


def mean(probs):
    return float((probs * torch.arange(len(probs))).sum())


def test_enumerated_acceptance():
    """The example of Sun et al. 2024; sum of min(p, q); the formula for shared noise by hand; p(x) of a certain draft."""
    plain = SamplingParams()
    target, draft = cases.PUBLISHED["block"]
    assert mean(accepted_probs("rejection", target, draft, plain, 2)) == pytest.approx(10 / 9)
    assert mean(accepted_probs("block", target, draft, plain, 2)) == pytest.approx(11 / 9)
    target, draft = cases.PUBLISHED["third"]
    assert mean(accepted_probs("rejection", target, draft, plain, 1)) == pytest.approx(0.2 + 0.3 + 0.1)
    assert mean(accepted_probs("coupled", target, draft, plain, 1)) == pytest.approx(1 / 5 + 1 / 3.6 + 1 / 10)
    for method in LOSSLESS:
        certain = accepted_probs(method, target, cases.table([0.0, 1.0, 0.0]), plain, 2)
        assert certain.tolist() == pytest.approx([0.5, 0.25, 0.25])


def test_enumerated_texts():
    tokens = cases.table([0.7, 0.3], [0.4, 0.6])
    want = [0.49, 0.21, 0.0, 0.12, 0.18, 0.0, 0.0, 0.0, 0.0]  # 00 01 0. 10 11 1. .0 .1 ..
    assert sequence_probs(tokens, SamplingParams(), 2).tolist() == pytest.approx(want)
    want = [0.49, 0.21, 0.0, 0.0, 0.0, 0.3, 0.0, 0.0, 0.0]
    assert sequence_probs(tokens, SamplingParams(stop_token_ids=[1]), 2).tolist() == pytest.approx(want)
    assert codes(torch.tensor([[0, 1], [1, -1]]), 2).tolist() == [1, 5]


def test_goodness_of_fit():
    """Chi-square 4 with one degree of freedom; what cannot be."""
    outcomes = torch.tensor([0] * 60 + [1] * 40)
    assert fit(outcomes, torch.tensor([0.5, 0.5], dtype=torch.float64)) == pytest.approx(0.0455, abs=1e-4)
    assert fit(outcomes, torch.tensor([1.0, 0.0], dtype=torch.float64)) == 0.0
    assert fit(outcomes, torch.tensor([1.0], dtype=torch.float64)) == 0.0


@pytest.mark.parametrize("params", cases.GRID[:30:5], ids=range(6))
def test_block_verification_never_accepts_fewer(params):
    """Any number of drafts is kept with at least the probability that token-level verification keeps it with."""
    for seed in range(5):
        target = random_table(3, seed=seed, spread=1.5)
        draft = random_table(3, seed=seed + 100, near=target)
        for k in (1, 2, 4):
            block, token = (accepted_probs(method, target, draft, params, k) for method in ("block", "rejection"))
            assert (block.cumsum(0) <= token.cumsum(0) + 1e-12).all()


# Kernels.

KERNEL_CASES = {
    "mixed": cases.mixed(device=False),
    "device": cases.mixed(device=True),
    "certain": cases.adversary("certain"),
    "foreign-ids": cases.adversary("foreign-ids"),
    "not-a-number": cases.adversary("not-a-number"),
    "wide": cases.wide(4097),
}


@pytest.mark.skipif(why_not_triton("accept_reject", "cpu") is not None, reason="no interpreter")
@pytest.mark.parametrize("setting", KERNEL_CASES.values(), ids=KERNEL_CASES)
def test_kernels_write_the_same_texts(setting):
    seeds = torch.arange(10 if setting.target.vocab < 100 else 6)
    want, got = (
        decode(replace(setting, length=4, rounds=1, backend=backend), seeds) for backend in ("torch", "triton")
    )
    for mine, theirs in zip(got.fields, want.fields, strict=True):
        assert torch.equal(mine, theirs)
