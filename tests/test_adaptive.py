"""K chosen by the controller, end to end: speculation goes off where it does not pay and comes back; no text changes."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from specdec_triton import Cascade, DraftModel, NoDraft, PromptLookup, SamplingParams, SpeculativeDecoder
from specdec_triton.engine.costs import CostModel
from specdec_triton.testing import (
    ScriptedDrafter,
    always_right,
    always_wrong,
    plain_greedy,
    random_drafts,
    toy_adapter,
    toy_model,
)

PROMPTS = [[3, 5, 7, 3, 5, 7, 3, 5, 7, 11, 3], [2, 9], [60], [20, 21, 22, 23]]
NEW = 90
MODES = pytest.mark.parametrize("mode", ["reads", "device"])
DEAR = {(n, n * k): 1.0 + k for n in (1, 8) for k in (0, 4)}  # seconds: a row costs as much as a pass
CHEAP = {(n, n * k): 1.0 + 0.02 * k for n in (1, 8) for k in (0, 4)}


target = lru_cache(toy_adapter)


@lru_cache
def plain():
    return [plain_greedy(target().model, prompt, NEW) for prompt in PROMPTS]


def known():
    return [prompt + text for prompt, text in zip(PROMPTS, plain(), strict=True)]


def decoder(mode, drafter, k=4, *, costs=None, **options):
    engine = SpeculativeDecoder(target(mode), drafter, num_draft_tokens=k, page_size=5, exact=False, **options)
    if costs is not None:
        engine._loop.rounds.costs = CostModel(costs, {})
    return engine


def greedy(**params):
    return SamplingParams(**{"temperature": 0, "max_new_tokens": NEW, **params})


@MODES
def test_wrong_drafts_are_given_up(mode):
    """A few rounds, then a probe now and then; plain text all along."""
    drafter = always_wrong(known()) if mode == "reads" else DraftModel(toy_model(seed=1, num_hidden_layers=1))
    outputs = decoder(mode, drafter).generate(PROMPTS, greedy())
    assert [out.token_ids for out in outputs] == plain()
    for out in outputs:
        assert 0 < out.stats.drafted < 60
        assert out.stats.target_passes > NEW - 15


def test_right_drafts_are_all_asked_for():
    outputs = decoder("reads", always_right(known())).generate(PROMPTS, greedy())
    assert [out.token_ids for out in outputs] == plain()
    for out in outputs:
        assert out.stats.acceptance_rate == 1.0
        assert out.stats.target_passes <= 1 + -(-NEW // 5) + 3


def test_drafting_comes_back_when_it_pays_again():
    """Wrong drafts in the first half of the text, right ones in the second."""
    right, wrong = always_right(known()), always_wrong(known())
    middle = NEW // 2

    def script(text, limit):
        prompt = next(p for p in PROMPTS if text[: len(p)] == p)
        return (wrong if len(text) - len(prompt) < middle else right).script(text, limit)

    (out,) = decoder("reads", ScriptedDrafter(script)).generate([PROMPTS[0]], greedy())
    assert out.token_ids == plain()[0]
    assert out.stats.accepted > 15
    assert out.stats.target_passes < NEW - 15


@MODES
def test_costs_decide(mode):
    """The same drafts, where a row is as dear as a pass and where it is all but free."""
    for costs, drafts in ((DEAR, False), (CHEAP, True)):
        engine = decoder(mode, DraftModel(target().model), costs=costs)
        outputs = engine.generate(PROMPTS, greedy(max_new_tokens=30))
        assert [out.token_ids for out in outputs] == [text[:30] for text in plain()]
        accepted = sum(out.stats.accepted for out in outputs)
        assert (accepted > 60) == drafts
        assert (accepted < 12) == (not drafts)  # the first round does not know yet what the device wants


@MODES
def test_a_large_batch_may_not_pay(mode):
    """Rows are free in a batch of one and dear in a batch of eight: speculation goes off when the others come."""
    costs = {(1, 0): 1.0, (1, 4): 1.05, (8, 0): 1.0, (8, 32): 9.0}
    alone = decoder(mode, DraftModel(target().model), costs=costs).generate([PROMPTS[1]], greedy(max_new_tokens=30))
    together = decoder(mode, DraftModel(target().model), costs=costs).generate(
        [PROMPTS[1]] * 8, greedy(max_new_tokens=30)
    )
    assert alone[0].stats.accepted > 15
    assert sum(out.stats.accepted for out in together[1:]) < 30
    assert {tuple(out.token_ids) for out in (*alone, *together)} == {tuple(plain()[1][:30])}


@pytest.mark.parametrize("talkative", [1, len(PROMPTS)])
def test_free_drafts_are_chosen_among_those_that_were_found(talkative):
    """The first draft of a round is dear: it pays if all requests have drafts, not if only one of them finds any."""
    costs = {(n, d): 1.0 + (0.25 + 0.01 * d if d else 0.0) for n in (1, 8) for d in (0, 1, 4 * n)}
    chosen = {tuple(prompt) for prompt in PROMPTS[:talkative]}
    right = always_right(known())

    def script(text, limit):
        return right.script(text, min(limit, 1)) if any(tuple(text[: len(p)]) == p for p in chosen) else []

    outputs = decoder("reads", ScriptedDrafter(script), costs=costs).generate(PROMPTS, greedy())
    assert [out.token_ids for out in outputs] == plain()
    accepted = sum(out.stats.accepted for out in outputs)
    assert (accepted > 100) == (talkative > 1)
    assert (accepted < 10) == (talkative == 1)  # probes


@MODES
def test_a_draft_model_catches_up_before_it_drafts_again(mode):
    """faults.md E11: off for 40 tokens, then on: the cache has no hole, so every draft of the model itself is right."""
    engine = decoder(mode, DraftModel(target().model), costs=DEAR)
    handle = engine.submit(PROMPTS[0], greedy())
    while len(handle.token_ids) < 40:
        engine.step()
    behind = handle.length - handle.seen
    before = handle.stats.accepted
    engine._loop.rounds.costs = CostModel(CHEAP, {})
    engine.run()
    assert behind > 20
    assert handle.token_ids == plain()[0]
    assert handle.stats.accepted - before >= 35
    assert handle.stats.acceptance_rate == 1.0


def depths(engine):
    """K of each round, as the device got it."""
    seen = []
    run = engine._loop.rounds.run

    def noted(shape, process=None):
        seen.append(shape.k)
        return run(shape, process)

    engine._loop.rounds.run = noted
    return seen


def test_a_drafter_that_finds_nothing_costs_no_rows():
    """On a device all rows of a round are paid for, drafted or not: K goes to 0 while lookups find no match."""
    engine = SpeculativeDecoder(toy_adapter("device"), PromptLookup(max_ngram=9, min_ngram=9), exact=False)
    engine._loop.rounds.costs = CostModel({(1, 0): 1.0, (1, 4): 1.8}, {})
    seen = depths(engine)
    (out,) = engine.generate([PROMPTS[1]], greedy())
    assert out.token_ids == plain()[1]
    assert sum(k > 0 for k in seen) < len(seen) / 2


def test_newcomers_want_what_the_others_want():
    """Requests that come and go do not bring K back where drafts never pay."""
    engine = decoder("device", DraftModel(toy_model(seed=1, num_hidden_layers=1)), costs=DEAR, max_batch_size=4)
    seen = depths(engine)
    engine.generate([[i] for i in range(40)], greedy(max_new_tokens=12))
    assert sum(k > 0 for k in seen) < len(seen) / 10


@MODES
def test_texts_beyond_the_draft_models_context_cost_no_rows(mode):
    """faults.md J1."""
    draft = toy_model(seed=1, num_hidden_layers=1, max_position_embeddings=20)
    engine = decoder(mode, DraftModel(draft), costs=CHEAP, adaptive=False)
    passes = []
    forward = engine._loop.session.adapter.forward
    engine._loop.session.adapter.forward = lambda *args, **options: passes.append(1) or forward(*args, **options)
    with pytest.warns(UserWarning, match="outgrown"):
        (out,) = engine.generate([PROMPTS[3]], greedy())
    assert out.token_ids == plain()[3]
    assert len(passes) < 4 * 20


@MODES
def test_the_switch_of_a_request(mode):
    """num_draft_tokens=0 is off; its neighbours draft on."""
    params = [greedy(num_draft_tokens=0), greedy(), greedy(num_draft_tokens=0), greedy(num_draft_tokens=2)]
    outputs = decoder(mode, DraftModel(target().model), costs=CHEAP).generate(PROMPTS, params)
    assert [out.token_ids for out in outputs] == plain()
    assert [out.stats.drafted > 0 for out in outputs] == [False, True, False, True]
    assert len(outputs[3].stats.drafted_at) <= 2


@MODES
@pytest.mark.parametrize("method", ["rejection", "block"])
def test_seeded_texts_that_depend_on_k_have_a_fixed_one(method, mode):
    """faults.md C1, B17: a seed gives the same text whatever the batch and the costs are."""
    params = [SamplingParams(seed=i, max_new_tokens=20) for i in range(4)]
    drafter = DraftModel(toy_model(seed=1, num_hidden_layers=1))
    want = decoder(mode, drafter, method=method, adaptive=False, max_batch_size=1).generate(PROMPTS, params)
    for costs in (DEAR, CHEAP):
        got = decoder(mode, drafter, method=method, costs=costs).generate(PROMPTS, params)
        assert [out.token_ids for out in got] == [out.token_ids for out in want]
        assert [out.stats.drafted_at for out in got] == [out.stats.drafted_at for out in want]


def test_the_global_generator_governs_in_spite_of_what_came_before():
    """A decoder at rest forgets what it has learnt: the same call gives the same text again."""
    engine = decoder("reads", random_drafts(known()))
    texts = []
    for _ in range(3):
        torch.manual_seed(3)
        texts.append([out.token_ids for out in engine.generate(PROMPTS, SamplingParams(max_new_tokens=25))])
    assert texts[0] == texts[1] == texts[2]


def test_tuning(monkeypatch, tmp_path):
    """Measured once, kept, and found again by a later decoder; plain decoders have nothing to tune."""
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    first = decoder("reads", DraftModel(toy_model(seed=1, num_hidden_layers=1)), max_batch_size=2)
    assert not first._loop.rounds.costs.target
    costs = first.tune()
    assert {(1, 0), (1, 4), (2, 0), (2, 1), (2, 8)} <= costs.target.keys()
    assert costs.draft.keys() >= {1, 2}
    later = decoder("reads", DraftModel(toy_model(seed=1, num_hidden_layers=1)), max_batch_size=2)
    assert later._loop.rounds.costs.target == costs.target
    assert not decoder("reads", PromptLookup())._loop.rounds.costs.target  # another drafter
    for drafter, k in ((NoDraft(), 4), (PromptLookup(), 0)):
        with pytest.raises(ValueError, match="never drafts"):
            decoder("reads", drafter, k).tune()


def test_what_was_measured_of_larger_batches_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    large = decoder("reads", PromptLookup(), max_batch_size=4).tune()
    small = decoder("reads", PromptLookup(), max_batch_size=1).tune()
    assert small.target.keys() == large.target.keys()
    assert decoder("reads", PromptLookup(), max_batch_size=4)._loop.rounds.costs.target == small.target
    assert not decoder("reads", PromptLookup(), max_batch_size=8)._loop.rounds.costs.target  # larger than was measured


def test_warmup_measures_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    engine = decoder("reads", PromptLookup(), 2, max_batch_size=1)
    engine.warmup()
    measured = engine._loop.rounds.costs.target
    assert measured.keys() == {(1, 0), (1, 1), (1, 2)}
    again = decoder("reads", PromptLookup(), 2, max_batch_size=1)
    again.warmup()
    assert again._loop.rounds.costs.target == measured
    for plain_one in (decoder("reads", NoDraft()), decoder("reads", PromptLookup(), adaptive=False)):
        plain_one.warmup()
        assert not plain_one._loop.rounds.costs.target


# Memory.


def test_memory_estimate():
    """faults.md L3: both models, the pages of both, K + 1 rows of logits for every request."""
    draft = toy_model(seed=1, num_hidden_layers=1)
    engine = decoder("reads", DraftModel(draft), 7, max_batch_size=4, max_seq_len=50, num_pages=30)
    got = engine.memory_estimate()
    assert got.target_weights == sum(p.nbytes for p in target().model.parameters()) + sum(
        b.nbytes for b in target().model.buffers()
    )
    assert 0 < got.draft_weights < got.target_weights
    pools = [x for i in range(2) for x in engine._loop.cache.layer(i)]
    of_target = sum(pool.nbytes for pool in pools) // 30
    assert of_target < got.page_bytes < 2 * of_target
    assert got.pages == 30 * got.page_bytes
    assert got.logits == 4 * 8 * 97 * (4 + 4) + 4 * 7 * 97 * 4
    assert got.total == got.target_weights + got.draft_weights + got.pages + got.logits
    roomy = decoder("reads", None, 7, max_batch_size=4, max_seq_len=50).memory_estimate()
    assert roomy.pages == 4 * 10 * of_target
    assert roomy.draft_weights == 0


@pytest.mark.parametrize("ks", [(0, 4, 0, 2), (0, 0, 0, 3), (1, 0, 4, 4)])
@pytest.mark.parametrize("params", [{"temperature": 0}, {"seed": 5, "top_p": 0.9}, {"method": "rejection", "seed": 5}])
def test_requests_that_draft_are_judged_apart(params, ks):
    """faults.md G4: beside requests that do not draft, with a slot at rest between them: texts and counts are those of each alone."""
    params = dict(params)
    method = params.pop("method", "auto")
    each = [SamplingParams(**params, max_new_tokens=20 - 4 * i, num_draft_tokens=k) for i, k in enumerate(ks)]
    drafter = DraftModel(toy_model(seed=1, num_hidden_layers=1))
    options = {"method": method, "adaptive": False}
    together = decoder("reads", drafter, **options).generate(PROMPTS, each)
    for prompt, one, out in zip(PROMPTS, each, together, strict=True):
        (alone,) = decoder("reads", drafter, **options).generate([prompt], one)
        assert out.token_ids == alone.token_ids
        assert (out.stats.drafted_at, out.stats.accepted_at) == (alone.stats.drafted_at, alone.stats.accepted_at)


class Costly(ScriptedDrafter):
    """As if its drafts took passes of a model; ``asked`` counts the rounds in which it drafted."""

    def __init__(self, script):
        super().__init__(script)
        self.asked = 0

    def bind(self, target, options):
        session = super().bind(target, options)
        session.free, session.costs_like = False, "a script"
        session.drafting = lambda n: lambda: None
        propose = session.propose

        def counted(round_):
            self.asked += 1
            return propose(round_)

        session.propose = counted
        return session


def test_a_cascades_sources_are_judged_apart():
    """The free one is always right, on every other token of the text; the costly one always wrong. Only the latter is asked less and less."""
    model, prompt, new = toy_model(), [5, 17, 3], 90
    text = prompt + plain_greedy(model, prompt, new)
    right = always_right([text]).script

    def sometimes(known, limit):
        return right(known, limit)[:1] if len(known) % 4 < 2 else []

    for wrong, most in ((True, 12), (False, 90)):
        costly = Costly(always_right([text], offset=int(wrong)).script)
        decoder = SpeculativeDecoder(toy_adapter(), Cascade([ScriptedDrafter(sometimes), costly]), max_batch_size=1)
        decoder._loop.rounds.costs = CostModel({(1, 0): 1.0, (1, 4): 1.1}, {1: 0.2})
        (out,) = decoder.generate([prompt], SamplingParams(temperature=0, max_new_tokens=new))
        assert prompt + out.token_ids == text
        assert out.stats.accepted > 15
        assert costly.asked <= most
        assert costly.asked > (0 if wrong else 8)
