"""``specdec_triton.verification``: an honest decoder passes every check, and each check fails when its promise is broken.

The faults are seeded from outside: an accept rule, a target, a drafter or noise that is wrong in one way.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from verification_cases import (
    NEW,
    PROMPTS,
    distribution,
    greedy,
    mixture,
    module,
    seeds,
    similar,
    target,
    wrong_accepts,
)

from specdec_triton import DraftModel, NoDraft, PromptLookup, SamplingParams, SpeculativeDecoder, ops, passes
from specdec_triton.exactness import ExactPasses
from specdec_triton.kv_cache import KVCache
from specdec_triton.reference import noise
from specdec_triton.testing import ScriptedDrafter, own_logits
from specdec_triton.verification import (
    Check,
    check_bits,
    check_greedy,
    check_module,
    check_seeds,
    measure_acceptance,
    measure_speed,
    verdict,
)
from specdec_triton.verification.scoring import Scorer
from specdec_triton.verification.texts import worst_gap

# What is right passes.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ngrams_pass(dtype):
    of = target(dtype=dtype)
    bits = check_bits(of, PROMPTS, max_new_tokens=NEW)
    for check in (module(of), greedy(of), seeds(of), bits, distribution(of)):
        assert check.passed is True, check.detail
    assert greedy(of).facts["drafted"] > 0


@pytest.mark.parametrize("check", [greedy, seeds], ids=["greedy", "seeds"])
def test_texts_of_a_draft_model_pass(check):
    found = check(drafter=DraftModel(similar()), k=3)
    assert found.passed is True, found.detail
    assert found.facts["k"] == [1, 2, 3]


def test_every_k_up_to_8_and_then_some():
    assert greedy(k=1).facts["k"] == [1]
    assert greedy(k=40).facts["k"] == [*range(1, 9), 16, 32, 40]


def test_one_prompt_is_checked_beside_itself():
    check = check_greedy(target(), PromptLookup(), PROMPTS[3:], k=2, max_new_tokens=NEW)
    assert (check.passed, check.facts["texts"]) == (True, 7)
    check = check_seeds(target(), PromptLookup(), PROMPTS[3:], k=2, max_new_tokens=NEW)
    assert (check.passed, check.facts["texts"], check.facts["with_options"]) == (True, 7 * 4, 7 * 3)


@pytest.mark.parametrize("check", [greedy, seeds], ids=["greedy", "seeds"])
def test_some_requests_are_preempted(check):
    """faults.md C1."""
    assert check().facts["preemptions"] > 0


def test_the_module_scores_texts_past_a_chunk():
    of = target(max_position_embeddings=512)
    check = check_module(of, PROMPTS, max_new_tokens=NEW)
    assert (check.passed, check.facts["longest"]) == (True, 264 + NEW)
    assert check.facts["tokens"] == NEW * (len(PROMPTS) + 1)
    assert module().facts["longest"] == 128  # all that the model can take


def test_nothing_drafted_shows_nothing():
    for check in (greedy(drafter=NoDraft()), seeds(drafter=NoDraft()), distribution(drafter=NoDraft(), samples=50)):
        assert check.passed is None
        assert "nothing was drafted" in check.detail


def test_drafts_that_are_all_rejected_show_little():
    wrong = ScriptedDrafter(lambda text, limit: [96, 96][:limit])
    for check in (greedy(drafter=wrong), seeds(drafter=wrong), distribution(drafter=wrong, samples=50)):
        assert check.passed is None
        assert f"none of {check.facts['drafted']} drafts was accepted" in check.detail


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"target": "llama"}, r"target must be a decoder's target: SpeculativeDecoder\(model\).target, got str"),
        ({"prompts": []}, "prompts must be at least one prompt, got none"),
        ({"prompts": [[]]}, "prompt"),
        ({"prompts": [[97]]}, "97"),
        ({"prompts": ["text"]}, "prompt"),
        ({"k": 0}, "k must be"),
        ({"k": 2.5}, "k must be"),
        ({"max_new_tokens": 0}, "max_new_tokens must be"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit(arguments, said):
    values = {"target": target(), "prompts": PROMPTS, "k": 4, "max_new_tokens": NEW} | arguments
    of, prompts, k, new = values.values()
    with pytest.raises(ValueError, match=said):
        check_bits(of, prompts, k=k, max_new_tokens=new)
    for check in (check_greedy, check_seeds, measure_speed, measure_acceptance):
        with pytest.raises(ValueError, match=said):
            check(of, PromptLookup(), prompts, k=k, max_new_tokens=new)
    if "k" not in arguments:
        with pytest.raises(ValueError, match=said):
            check_module(of, prompts, max_new_tokens=new)


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


def test_a_target_that_forgets_fails(monkeypatch):
    """Attention to the last 12 tokens alone, in every pass: this package's passes agree with one another."""
    attend = passes.attend_planned

    def forgetful(q, k, v, plan, scale, window=None, *args):
        return attend(q, k, v, plan, scale, 12 if window is None else window, *args)

    monkeypatch.setattr(passes, "attend_planned", forgetful)
    check = module()
    assert check.passed is False
    assert "the module's own best is" in check.detail
    assert check.facts["gap"] > check.facts["allowed"]
    assert greedy().passed is True


def test_rules_that_miss_drafted_rows_fail(monkeypatch):
    """faults.md F1: penalties, bans and biases hold where nothing was drafted."""
    apply = ops.apply_logit_rules

    def missing(logits, *args, **options):
        return logits if logits.shape[1] > 1 else apply(logits, *args, **options)

    monkeypatch.setattr(ops, "apply_logit_rules", missing)
    assert seeds().passed is False
    assert greedy().passed is True


def test_filters_that_miss_drafted_rows_fail(monkeypatch):
    accept = ops.accept_reject

    def missing(draft_tokens, *args, params, **options):
        if draft_tokens.shape[1]:
            params = replace(params, top_k=params.top_k * 0, top_p=params.top_p * 0 + 1, min_p=params.min_p * 0)
        return accept(draft_tokens, *args, params=params, **options)

    monkeypatch.setattr(ops, "accept_reject", missing)
    assert seeds().passed is False
    assert greedy().passed is True


def test_other_logprobs_fail(monkeypatch):
    generate = SpeculativeDecoder.generate

    def shifted(self, *args):
        outputs = generate(self, *args)
        for output in outputs if self.num_draft_tokens else ():
            if output.logprobs and output.logprobs[3].top:
                output.logprobs[3] = replace(output.logprobs[3], logprob=output.logprobs[3].logprob + 1e-3)
        return outputs

    monkeypatch.setattr(SpeculativeDecoder, "generate", shifted)
    assert seeds().detail == "prompt 2, K = 1, alone: the log-probabilities of token 4 are not plain decoding's"


def test_pages_that_come_back_wrong_fail(monkeypatch):
    swap_in = KVCache.swap_in

    def spoiled(self, slot, saved):
        swap_in(self, slot, saved)
        self.layer(0)[1][self.block_table[slot, 0]] = 0

    monkeypatch.setattr(KVCache, "swap_in", spoiled)
    check = greedy()
    assert check.passed is False
    assert "few pages" in check.detail


def test_adaptive_rounds_that_go_wrong_fail(monkeypatch):
    generate = SpeculativeDecoder.generate

    def cut(self, *args):
        outputs = generate(self, *args)
        if self._adaptive and self.num_draft_tokens:
            outputs[-1].token_ids.pop()
        return outputs

    monkeypatch.setattr(SpeculativeDecoder, "generate", cut)
    assert "together, adaptive: token 12 is the end" in greedy().detail


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
    assert check_bits(
        target(), PROMPTS, max_new_tokens=NEW
    ).passed  # row counts are tested here: later they would be refused
    forward = target().forward

    def neighbourly(tokens, *args, **options):
        logits = forward(tokens, *args, **options)
        return logits + 1e-4 * torch.arange(len(logits))[:, None, None]

    monkeypatch.setattr(target(), "forward", neighbourly)
    check = check_bits(target(), PROMPTS, max_new_tokens=NEW)
    assert (check.passed, check.facts["prompt"], check.facts["together"]) == (False, 2, True)


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
    of = mixture()
    for check in (greedy(of), seeds(of, DraftModel(of.model)), distribution(of, samples=100)):
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
