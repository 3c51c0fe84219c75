"""The decoder: its text equals its own K = 0 run, token for token, whatever is drafted, batched or cut short."""

from __future__ import annotations

import asyncio
import itertools
import re
import warnings
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch

from specdec_triton import DraftModel, NoDraft, PromptLookup, SamplingParams, SpeculativeDecoder
from specdec_triton.adapter import ModelAdapter
from specdec_triton.errors import OutOfPagesError
from specdec_triton.ops import METHODS
from specdec_triton.testing import (
    INF,
    NAN,
    TOY_VOCAB,
    Alternating,
    ScriptedDrafter,
    always_right,
    always_wrong,
    assert_follows,
    assert_pages_add_up,
    exact_probs,
    own_logits,
    plain_greedy,
    random_drafts,
    toy_model,
)

PROMPTS = [[3, 5, 7, 3, 5, 7, 3, 5, 7, 11, 3], [2, 9], [60], list(range(20, 50))]
NEW = 18


@lru_cache
def target():
    return toy_model()


@lru_cache
def small():
    """Another model, to draft with."""
    return toy_model(seed=1, num_hidden_layers=1)


def greedy(**params):
    return SamplingParams(**{"temperature": 0, "max_new_tokens": NEW, **params})


@lru_cache
def checked():
    """The target after its start-up checks, which need not be repeated for every decoder here."""
    return ModelAdapter(target())


def decoder(drafter=None, k=4, model=None, **options):
    options = {"page_size": 5, "exact": False, "adaptive": False, **options}
    return SpeculativeDecoder(model or checked(), drafter, num_draft_tokens=k, **options)


def texts(engine, prompts, params):
    return [out.token_ids for out in engine.generate(prompts, params)]


@lru_cache
def plain(prompts=None):
    """The K = 0 run, one request at a time."""
    return [texts(decoder(), [list(prompt)], greedy())[0] for prompt in prompts or map(tuple, PROMPTS)]


@lru_cache
def whole():
    return [prompt + text for prompt, text in zip(PROMPTS, plain(), strict=True)]


def run_checked(engine):
    """Step to the end; after every step all pages are accounted for (faults.md E9)."""
    work = True
    while work:
        work = engine.step()
        assert_pages_add_up(engine._loop.cache)
        lens = {handle.slot: handle.length for handle in engine._loop.scheduler.running}
        for slot in range(len(engine._loop.cache.block_table)):
            assert (
                engine._loop.cache.capacity(slot) >= lens.get(slot, 1) - 1
            )  # the last token's key comes with the next pass
            assert slot in lens or engine._loop.cache.capacity(slot) == 0
    assert engine.free_pages == engine.num_pages


# Greedy text.


def test_plain_decoding_equals_transformers():
    """faults.md A6 included: the first token comes from the prompt's pass."""
    assert plain() == [plain_greedy(target(), prompt, NEW) for prompt in PROMPTS]
    assert all(len(set(text)) > 3 for text in plain())


DRAFTERS = {
    "right": lambda: always_right(whole()),
    "wrong": lambda: always_wrong(whole()),
    "random": lambda: random_drafts(whole()),
    "lookup": PromptLookup,
    "model": lambda: DraftModel(small()),
    "itself": lambda: DraftModel(target()),
}


@pytest.mark.parametrize("k", range(1, 9))
def test_text_does_not_depend_on_k(k):
    """faults.md A1, A2, A3, E1, E2, J3: whatever drafts, or finds nothing to draft; all prompts in one batch."""
    for name, make in DRAFTERS.items():
        assert texts(decoder(make(), k), PROMPTS, greedy()) == plain(), name


@pytest.mark.parametrize(("period", "on"), [(2, (1,)), (5, (0, 1)), (13, (12,))])
def test_drafting_may_pause(period, on):
    """faults.md A5, E11: proposals switched on and off."""
    for name in ("right", "random", "model", "itself"):
        assert texts(decoder(Alternating(DRAFTERS[name](), period, on)), PROMPTS, greedy()) == plain(), name


def test_batches_equal_single_requests():
    """faults.md E6, A4: in any order and any number; each row has its own lengths."""
    for order in ((0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1), (1, 1, 3, 1, 0)):
        engine = decoder(random_drafts(whole()), 3)
        got = texts(engine, [PROMPTS[i] for i in order], greedy())
        assert got == [plain()[i] for i in order]


@pytest.mark.parametrize("ks", [(0, 4, 0, 2), (0, 3, 1, 5), (8, 8, 0, 1), (0, 0, 0, 0)])
def test_k_per_request(ks):
    """faults.md A4, G4: rows that draft beside rows that do not."""
    params = [greedy(num_draft_tokens=k) for k in ks]
    for make in (DRAFTERS["right"], DRAFTERS["model"], DRAFTERS["random"]):
        outputs = decoder(make(), 2).generate(PROMPTS, params)
        assert [out.token_ids for out in outputs] == plain()
        for k, out in zip(ks, outputs, strict=True):
            assert len(out.stats.drafted_at) <= k
            assert (out.stats.drafted == 0) or k > 0


@pytest.mark.parametrize("page_size", range(1, 18))
def test_page_sizes(page_size):
    """faults.md E7: drafts cross page ends at every phase."""
    engine = decoder(random_drafts(whole()), 4, page_size=page_size)
    assert texts(engine, PROMPTS, greedy()) == plain()


def test_long_prompts_are_prefilled_in_chunks(monkeypatch):
    """faults.md A6: chunks at absolute boundaries, the same with and without drafts."""
    monkeypatch.setattr("specdec_triton.engine.scheduler.PREFILL_CHUNK", 7)
    monkeypatch.setattr("specdec_triton.drafters.draft_model._CHUNK", 6)
    for drafter in (None, always_right(whole()), DraftModel(target())):
        assert texts(decoder(drafter), PROMPTS, greedy()) == plain()


def test_growing_pool(monkeypatch):
    """Requests that outgrow what was reserved for them at first."""
    monkeypatch.setattr("specdec_triton.engine.scheduler.HEADROOM", 3)
    engine = decoder(random_drafts(whole()), 4, page_size=2)
    for prompt in PROMPTS:
        engine.submit(prompt, greedy())
    run_checked(engine)


def test_logits_processors_see_each_rows_own_history():
    """faults.md H1, H4: a rule on (history, logits) gives the K = 0 text."""

    def no_repeats(history, logits):
        return logits.scatter(1, history[:, -6:], -INF)

    params = greedy(logits_processors=[no_repeats])
    want = texts(decoder(), PROMPTS, params)
    assert want != plain()
    known = [prompt + text for prompt, text in zip(PROMPTS, want, strict=True)]
    for drafter in (always_right(known), random_drafts(known), PromptLookup(), DraftModel(small())):
        assert texts(decoder(drafter), PROMPTS, params) == want
    mixed = [params, greedy(), params, greedy()]
    assert texts(decoder(random_drafts(known)), PROMPTS, mixed) == [want[0], plain()[1], want[2], plain()[3]]


# Lengths and stops.


@pytest.mark.parametrize("new", [1, 2, 3])
@pytest.mark.parametrize("k", range(9))
def test_never_more_than_max_new_tokens(new, k):
    """faults.md D4, D5: exactly that many, and the counts say so."""
    for out, text in zip(
        decoder(always_right(whole()), k).generate(PROMPTS, greedy(max_new_tokens=new)), plain(), strict=True
    ):
        assert out.token_ids == text[:new]
        assert out.finish_reason == "length"
        assert out.stats.new_tokens == new


@pytest.mark.parametrize("k", [0, 1, 5])
@pytest.mark.parametrize("limit", [12, 13, 16, 20])
def test_context_limit(k, limit):
    """faults.md D7, E8: drafts stop before the limit; the text fills it exactly."""
    asked = []
    right = always_right(whole())

    def script(text, room):
        asked.append(len(text) + room)
        return right.script(text, room)

    engine = decoder(ScriptedDrafter(script), k, max_seq_len=limit)
    (out,) = engine.generate([PROMPTS[0]], greedy(max_new_tokens=100))
    assert out.token_ids == plain()[0][: limit - 11]
    assert out.finish_reason == "length"
    assert max(asked, default=0) < limit


def test_the_models_own_context_is_the_limit():
    model = toy_model(max_position_embeddings=20)
    engine = decoder(random_drafts(), 5, model, max_seq_len=1000)
    assert engine.max_seq_len == 20
    (out,) = engine.generate([PROMPTS[0]], greedy(max_new_tokens=100))
    assert out.token_ids == plain_greedy(model, PROMPTS[0], 9)


def stops(text):
    """(place, token): first occurrences, so that each is where the text would end."""
    return [(i, token) for i, token in enumerate(text) if token not in text[:i]]


@pytest.mark.parametrize("drafter", ["right", "random", "itself"])
def test_stop_token_inside_an_accepted_block(drafter):
    """faults.md D1, D5: the text ends with it, at every place of a block; nothing behind it is counted."""
    for place, token in stops(plain()[0])[:7]:
        params = greedy(stop_token_ids=[token])
        want = decoder(None).generate([PROMPTS[0]], params)[0]
        (out,) = decoder(DRAFTERS[drafter](), 8).generate([PROMPTS[0]], params)
        assert out.token_ids == want.token_ids == plain()[0][: place + 1]
        assert out.finish_reason == want.finish_reason == "stop"
        assert out.stats.new_tokens == place + 1
        if drafter != "random":
            assert out.stats.drafted == out.stats.accepted
            assert out.stats.accepted + out.stats.target_passes >= place + 1


def test_stop_before_the_cap_in_one_block():
    """faults.md D3: block [10, 11, STOP, 20, 21, 22] with cap 5: STOP wins; at the cap itself, stop wins too."""
    place, token = stops(plain()[0])[3]
    for cap in (place + 1, place + 2, place + 3):
        (out,) = decoder(always_right(whole()), 8).generate(
            [PROMPTS[0]], greedy(stop_token_ids=[token], max_new_tokens=cap)
        )
        assert (out.token_ids, out.finish_reason) == (plain()[0][: place + 1], "stop")
    (out,) = decoder(always_right(whole()), 8).generate(
        [PROMPTS[0]], greedy(stop_token_ids=[token], max_new_tokens=place)
    )
    assert (out.token_ids, out.finish_reason) == (plain()[0][:place], "length")


def test_end_of_sequence_of_the_model():
    """One id or a list, from the generation config; each request stops for itself; ignore_eos goes on."""
    (_, first), (place, second), *_ = stops(plain()[0])[2:]
    for eos in (second, [second, 96]):
        model = toy_model(eos_token_id=eos)
        outputs = decoder(always_right(whole()), 6, model).generate(PROMPTS, greedy())
        assert outputs[0].token_ids == plain()[0][: place + 1]
        for out, text in zip(outputs, plain(), strict=True):
            cut = next((i + 1 for i, token in enumerate(text) if token in (second, 96)), None)
            assert out.token_ids == text[:cut]
            assert out.finish_reason == ("length" if cut is None else "stop")
    assert first != second
    (out,) = decoder(always_right(whole()), 6, model).generate([PROMPTS[0]], greedy(ignore_eos=True))
    assert out.token_ids == plain()[0]


def test_stop_token_as_the_first_token():
    (out,) = decoder(PromptLookup()).generate([PROMPTS[0]], greedy(stop_token_ids=[plain()[0][0]]))
    assert (out.token_ids, out.finish_reason, out.stats.target_passes) == (plain()[0][:1], "stop", 1)


# Pages and queueing.


@pytest.mark.parametrize("max_batch_size", [1, 2, 3])
def test_requests_wait_for_a_place(max_batch_size):
    engine = decoder(random_drafts(whole()), 4, max_batch_size=max_batch_size)
    handles = [engine.submit(prompt, greedy()) for prompt in PROMPTS * 2]
    run_checked(engine)
    assert [handle.output.token_ids for handle in handles] == plain() * 2


def test_requests_wait_for_pages():
    """faults.md E9: a pool that holds the largest request alone; all get through, in order, with the same text."""
    longest = -(-(30 + NEW) // 5)
    engine = decoder(random_drafts(whole()), 4, num_pages=longest)
    handles = [engine.submit(prompt, greedy()) for prompt in [PROMPTS[3], *PROMPTS]]
    while engine.step():
        assert_pages_add_up(engine._loop.cache)
        assert len(engine._loop.scheduler.running) <= 3
        finished = [handle.output is not None for handle in handles]
        assert finished[0] or not any(finished)
    assert engine.num_pages == engine.free_pages == longest
    assert [handle.output.token_ids for handle in handles] == [plain()[3], *plain()]


def test_a_request_that_never_fits_is_refused_at_once():
    engine = decoder(num_pages=4)
    with pytest.raises(OutOfPagesError, match=r"need 6 pages, the pool has 4"):
        engine.submit(PROMPTS[0], greedy())
    assert engine.submit(PROMPTS[0], greedy(max_new_tokens=9)) is not None
    run_checked(engine)


def test_cancelling():
    """faults.md E5, E9: in the queue, before the first token, in the middle, at the end; twice."""
    engine = decoder(random_drafts(whole()), 4, max_batch_size=2, page_size=2)
    handles = [engine.submit(prompt, greedy()) for prompt in PROMPTS]
    handles[3].cancel()
    assert handles[3].output.finish_reason == "cancelled"
    assert handles[3].output.token_ids == []
    engine.step()
    engine.step()
    written = list(handles[0].token_ids)
    handles[0].cancel()
    assert_pages_add_up(engine._loop.cache)
    assert handles[0].output.finish_reason == "cancelled"
    assert handles[0].output.token_ids == written == plain()[0][: len(written)]
    run_checked(engine)
    for i in (1, 2):
        assert handles[i].output.token_ids == plain()[i]
        handles[i].cancel()
        assert handles[i].output.finish_reason == "length"
    handles[0].cancel()


@pytest.mark.parametrize("drafter", ["random", "itself"])
def test_cancel_everything_every_few_steps(drafter):
    engine = decoder(DRAFTERS[drafter](), 3, max_batch_size=3, page_size=1)
    for steps in range(4):
        handles = [engine.submit(prompt, greedy()) for prompt in PROMPTS]
        for _ in range(steps):
            engine.step()
        for handle in handles:
            handle.cancel()
        assert not engine.step()
        assert engine.free_pages == engine.num_pages
        assert_pages_add_up(engine._loop.cache)
    assert texts(engine, PROMPTS, greedy()) == plain()


# Errors.


@pytest.mark.parametrize("poison", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("when", [0, 1, 5])
def test_bad_logits_end_that_request_only(poison, when):
    """faults.md B11: with what it had written; the others go on unchanged."""
    start = len(PROMPTS[1])

    def spoil(history, logits):
        if history.shape[1] - start < when:
            return logits
        return torch.full_like(logits, poison) if poison == -INF else logits.index_fill(1, torch.tensor([4]), poison)

    engine = decoder(always_right(whole()), 1)
    params = [greedy(), greedy(logits_processors=[spoil]), greedy(), greedy(logits_processors=[lambda _, x: x])]
    handles = [engine.submit(prompt, p) for prompt, p in zip(PROMPTS, params, strict=True)]
    run_checked(engine)
    bad = handles[1].output
    assert bad.finish_reason == "error"
    assert "NaN" in bad.error
    assert bad.token_ids == plain()[1][: len(bad.token_ids)]
    assert when - 2 < len(bad.token_ids) <= when
    for i in (0, 2, 3):
        assert handles[i].output.token_ids == plain()[i]
        assert handles[i].output.error is None


def test_nan_weights_end_the_requests_that_meet_them():
    """A NaN in one row of the embedding: only prompts with that token fail."""
    model = toy_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[96] = NAN
    outputs = decoder(PromptLookup(), 4, model).generate([PROMPTS[0], [5, 96, 4], PROMPTS[1]], greedy())
    assert [out.finish_reason for out in outputs] == ["length", "error", "length"]
    assert outputs[1].token_ids == []
    assert [outputs[0].token_ids, outputs[2].token_ids] == plain()[:2]


@pytest.mark.parametrize("params", [greedy(), SamplingParams(seed=3, max_new_tokens=NEW)], ids=["greedy", "seeded"])
def test_a_drafter_that_fails_is_left_out(params):
    """faults.md E5, E9: one warning, and the texts go on without it; pages come back."""
    calls = itertools.count()

    def fails(text, limit):
        if next(calls) == 3:
            raise RuntimeError("planted")
        return [5] * limit

    want = texts(decoder(), PROMPTS, params)
    engine = decoder(ScriptedDrafter(fails))
    with pytest.warns(UserWarning, match="the drafter failed, and decoding goes on without it: RuntimeError: planted"):
        assert texts(engine, PROMPTS, params) == want
    assert engine.free_pages == engine.num_pages
    (out,) = engine.generate(PROMPTS[:1], params)
    assert out.token_ids == want[0]
    assert out.stats.drafted == 0


def test_a_draft_model_that_fails_over_a_prompt_is_left_out(monkeypatch):
    engine = decoder(DraftModel(small()))

    def fails(*args):
        raise MemoryError("planted")

    monkeypatch.setattr(engine._loop.session, "extend", fails)
    with pytest.warns(UserWarning, match="decoding goes on without it: MemoryError: planted"):
        assert texts(engine, PROMPTS, greedy()) == plain()
    assert engine.free_pages == engine.num_pages
    assert engine._loop.session._cache.free_pages == engine._loop.session._cache.num_pages


def test_warnings_that_are_errors_lose_nothing():
    """They are raised when the step is over: the texts are right all the same."""
    engine = decoder(always_wrong(whole()), 4)
    handles = [engine.submit(prompt, greedy(max_new_tokens=NEW)) for prompt in PROMPTS]
    raised = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        work = True
        while work:
            try:
                work = engine.step()
            except UserWarning:
                raised += 1
    assert raised == 1
    assert [handle.token_ids for handle in handles] == plain()


def test_memory_that_ends_while_the_pool_grows(monkeypatch):
    """The newest requests make room; all texts are written."""
    engine = decoder(page_size=2)
    monkeypatch.setattr("specdec_triton.engine.scheduler.HEADROOM", 0)
    grow = type(engine._loop.cache)._grow

    def limited(cache, extra):
        if max(cache.num_pages + extra, cache.num_pages * 3 // 2) > 45:
            raise torch.OutOfMemoryError("planted")
        grow(cache, extra)

    monkeypatch.setattr(type(engine._loop.cache), "_grow", limited)
    handles = [engine.submit(prompt, greedy()) for prompt in PROMPTS]
    too_long = engine.submit([1] * 120, greedy(max_new_tokens=4))
    last = engine.submit(PROMPTS[0], greedy())
    run_checked(engine)
    assert [handle.token_ids for handle in (*handles, last)] == [*plain(), plain()[0]]
    assert engine.stats.preemptions > 0
    assert "out of memory: the pages of a text of 120 tokens cannot be had" in too_long.output.error
    with pytest.raises(OutOfPagesError, match="the pool has"):
        engine.submit([1] * 120, greedy(max_new_tokens=4))


def test_one_prompt_too_large_for_the_pool_among_others():
    engine = decoder(num_pages=6)
    outputs = engine.generate([PROMPTS[1], [1] * 60], greedy())
    assert [out.finish_reason for out in outputs] == ["length", "error"]
    assert "the pool has 6" in outputs[1].error
    with pytest.raises(OutOfPagesError):
        engine.generate([[1] * 60], greedy())


WRONG_PROMPTS = {
    "empty": ([], "prompt is empty"),
    "negative": ([4, -1], "token id -1; ids go from 0 to 96"),  # faults.md G6
    "too-large": ([TOY_VOCAB], "token id 97"),
    "fills-the-context": ([1] * 128, "prompt of 128 tokens leaves no room"),
    "no-list": ("hi", "prompt must be a list of integer token ids"),
}


@pytest.mark.parametrize(("prompt", "message"), WRONG_PROMPTS.values(), ids=WRONG_PROMPTS)
def test_wrong_prompts(prompt, message):
    """Refused at once if there is nothing else to decode; among others its output says so, and the others do not notice."""
    engine = decoder()
    for refuse in (lambda: engine.submit(prompt, greedy()), lambda: engine.generate([prompt, prompt], greedy())):
        with pytest.raises(ValueError, match=message):
            refuse()
    assert not engine.step()
    assert engine.num_pages == 0
    outputs = engine.generate([PROMPTS[0], prompt, PROMPTS[1]], greedy())
    assert [outputs[0].token_ids, outputs[2].token_ids] == plain()[:2]
    assert (outputs[1].finish_reason, outputs[1].token_ids) == ("error", [])
    assert re.search(message, outputs[1].error)


def test_wrong_params():
    engine = decoder()
    with pytest.raises(ValueError, match="one per prompt"):
        engine.generate(PROMPTS, [greedy()])
    with pytest.raises(ValueError, match="must be SamplingParams, got dict"):
        engine.generate(PROMPTS, {"temperature": 0})
    with pytest.raises(ValueError, match="must be SamplingParams, got int"):
        engine.submit([1], 4)


WRONG_OPTIONS = [
    *({"num_draft_tokens": value} for value in (-1, 64, 1.0, True, None)),
    *({"max_batch_size": value} for value in (0, -1, 2.0)),
    *({"page_size": value} for value in (0, 1.5, None)),
    *({"max_seq_len": value} for value in (0, "8")),
    *({"num_pages": value} for value in (0, -3)),
    *({"method": value} for value in ("best", None)),
    *({"drafter": value} for value in ("ngram", PromptLookup, 3)),
    {"backend": "cuda"},
]


@pytest.mark.parametrize("options", WRONG_OPTIONS, ids=str)
def test_wrong_options(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"^{name} must be"):
        SpeculativeDecoder(target(), **options)


def test_nothing_to_do():
    engine = decoder()
    assert engine.generate([]) == []
    assert engine.step() is False
    engine.run()
    engine.warmup()


def test_tensor_prompts():
    assert texts(decoder(), [torch.tensor(prompt) for prompt in PROMPTS], greedy()) == plain()
    assert texts(decoder(), torch.tensor([PROMPTS[1], PROMPTS[1]]), greedy()) == [plain()[1]] * 2


WILD = {
    "beyond-the-vocabulary": lambda text, limit: [TOY_VOCAB + 5] * limit,
    "minus-1": lambda text, limit: [-1] * limit,
    "more-than-asked": lambda text, limit: [4] * (limit + 3),
    "far-beyond": lambda text, limit: [1 << 40] * limit,
}


@pytest.mark.parametrize("script", WILD.values(), ids=WILD)
def test_a_drafter_cannot_break_the_text(script):
    """faults.md B8, G6: ids outside the vocabulary never reach the embedding; drafts beyond the limit are cut."""
    engine = decoder(ScriptedDrafter(script), 4, max_seq_len=40, num_pages=40)
    for prompt in PROMPTS[:3]:
        engine.submit(prompt, greedy())
    run_checked(engine)
    assert texts(engine, PROMPTS[:3], greedy()) == plain()[:3]


# Handles.


def test_iterating_over_a_handle():
    engine = decoder(random_drafts(whole()), 4)
    handles = [engine.submit(prompt, greedy()) for prompt in PROMPTS]
    assert list(handles[0]) == plain()[0]
    assert list(handles[0]) == plain()[0]  # again, from what is stored
    assert list(zip(handles[1], handles[2], strict=True)) == list(zip(plain()[1], plain()[2], strict=True))
    assert list(handles[3]) == plain()[3]


def test_a_handle_says_how_it_stands():
    engine = decoder()
    handle = engine.submit(PROMPTS[1], greedy())
    assert repr(handle) == "<RequestHandle: waiting, 2 prompt tokens, 0 new>"
    engine.step()
    assert "running" in repr(handle)
    engine.run()
    assert repr(handle) == f"<RequestHandle: length, 2 prompt tokens, {NEW} new>"


def test_iteration_ends_with_a_cancelled_request():
    handle = decoder(random_drafts(whole()), 4).submit(PROMPTS[0], greedy())
    seen = []
    for token in handle:
        seen.append(token)
        if len(seen) == 5:
            handle.cancel()
    assert seen == handle.output.token_ids
    assert 5 <= len(seen) < NEW


def test_async_iteration():
    """Several readers share one decoder; each sees its own text."""
    engine = decoder(random_drafts(whole()), 4)
    handles = [engine.submit(prompt, greedy()) for prompt in PROMPTS]

    async def read(handle):
        return [token async for token in handle]

    async def read_all():
        return await asyncio.gather(*map(read, handles))

    assert asyncio.run(read_all()) == plain()


def test_requests_may_join_at_any_time():
    engine = decoder(random_drafts(whole()), 4, max_batch_size=3)
    handles = []
    for prompt in PROMPTS:
        handles.append(engine.submit(prompt, greedy()))
        engine.step()
        engine.step()
    run_checked(engine)
    assert [handle.output.token_ids for handle in handles] == plain()


# Sampled text.

SAMPLED = [
    SamplingParams(temperature=1.0, seed=0, max_new_tokens=NEW),
    SamplingParams(temperature=0.7, top_p=0.9, seed=42, max_new_tokens=NEW),
    SamplingParams(temperature=1.5, top_k=20, min_p=0.02, seed=-7, max_new_tokens=NEW),
    SamplingParams(temperature=1.0, seed=2**63 - 1, max_new_tokens=NEW),
]


@lru_cache
def seeded():
    """Each seeded request alone and without drafts."""
    return [texts(decoder(), [prompt], p)[0] for prompt, p in zip(PROMPTS, SAMPLED, strict=True)]


@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize("drafter", [*DRAFTERS, "pausing"])
def test_seeded_text_does_not_depend_on_the_drafter(drafter, k):
    """faults.md C1, C2, B17: coupled text is a function of prompt, parameters and seed."""
    known = [prompt + text for prompt, text in zip(PROMPTS, seeded(), strict=True)]
    make = {
        **DRAFTERS,
        "right": lambda: always_right(known),
        "wrong": lambda: always_wrong(known),
        "pausing": lambda: Alternating(DraftModel(small())),
    }[drafter]
    outputs = decoder(make(), k).generate(PROMPTS, SAMPLED)
    assert [out.token_ids for out in outputs] == seeded()
    if drafter == "right":
        assert all(out.stats.acceptance_rate == 1.0 for out in outputs)
    if drafter == "itself":  # the drafter draws with the same noise, so it draws the same
        assert all(out.stats.acceptance_rate > 0.99 for out in outputs)


@pytest.mark.parametrize(("max_batch_size", "order"), [(1, (3, 0)), (2, (0, 1, 2, 3)), (4, (3, 1, 0, 2)), (64, (1, 2))])
def test_seeded_text_does_not_depend_on_the_batch(max_batch_size, order):
    """faults.md B17, C1: nor on the order, nor on unseeded neighbours."""
    engine = decoder(DraftModel(small()), 3, max_batch_size=max_batch_size)
    prompts = [prompt for i in order for prompt in (PROMPTS[i], [8, 8])]
    unseeded = SamplingParams(max_new_tokens=7)
    got = texts(engine, prompts, [params for i in order for params in (SAMPLED[i], unseeded)])
    assert got[::2] == [seeded()[i] for i in order]


def test_first_seeds_differ():
    """faults.md C4: seeds matter when sampling, and never at temperature 0."""
    prompts = [PROMPTS[0]] * 10
    sampled = texts(decoder(), prompts, [SamplingParams(seed=seed, max_new_tokens=8) for seed in range(10)])
    assert len(set(map(tuple, sampled))) == 10
    cold = texts(decoder(max_batch_size=3), prompts, [greedy(seed=seed, max_new_tokens=8) for seed in range(10)])
    assert cold == [plain()[0][:8]] * 10


def test_unseeded_requests_follow_the_global_generator():
    def draw(seed):
        torch.manual_seed(seed)
        return texts(decoder(DraftModel(small())), [PROMPTS[0]] * 3, SamplingParams(max_new_tokens=8))

    first = draw(5)
    assert len(set(map(tuple, first))) == 3
    assert draw(5) == first
    assert draw(6) != first


def test_methods_in_one_batch():
    """Greedy, coupled and rejection side by side: the determined ones write their own text."""
    params = [greedy(), SAMPLED[1], SamplingParams(max_new_tokens=NEW), greedy()]
    for drafter in (DraftModel(small()), random_drafts(whole()), PromptLookup(), NoDraft()):
        outputs = decoder(drafter, 3).generate(PROMPTS, params)
        assert [outputs[i].token_ids for i in (0, 1, 3)] == [plain()[0], seeded()[1], plain()[3]]
        assert len(outputs[2].token_ids) == NEW


@pytest.mark.parametrize("method", METHODS)
def test_method_for_all_requests(method):
    """Temperature 0 is greedy under every method; ``greedy`` makes every request so."""
    engine = decoder(DraftModel(small()), 3, method=method)
    assert texts(engine, PROMPTS, greedy()) == plain()
    hot = texts(engine, PROMPTS, SAMPLED)
    if method == "greedy":
        assert hot == plain()
    if method == "coupled":
        assert hot == seeded()
        torch.manual_seed(0)
        unseeded = texts(engine, PROMPTS, SamplingParams(max_new_tokens=4))
        torch.manual_seed(0)
        assert texts(decoder(method=method), PROMPTS, SamplingParams(max_new_tokens=4)) == unseeded


TINY = {
    **{"vocab_size": 3, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "pad_token_id": None},
    **{"num_attention_heads": 1, "num_key_value_heads": 1},
}


@pytest.mark.parametrize(
    ("method", "drafter", "params"),
    [
        ("auto", "model", {"temperature": 1.5, "top_p": 0.95}),
        ("auto", "certain", {"temperature": 1.0}),
        ("block", "model", {"temperature": 1.2, "min_p": 0.02}),
    ],
    ids=["model-filtered", "certain", "block"],
)
def test_drawn_texts_follow_the_models_distribution(method, drafter, params):
    """faults.md B1 to B6, B16, end to end: the first three tokens against exact enumeration."""
    model, prompt = toy_model(**TINY), [1, 2, 0]
    draft = DraftModel(toy_model(**TINY, seed=5)) if drafter == "model" else random_drafts(vocab=3)
    engine = decoder(draft, 2, model, max_batch_size=250, page_size=8, method=method)
    outputs = engine.generate([prompt] * 700, SamplingParams(**params, max_new_tokens=4))
    expected = torch.zeros(3, 3, 3, dtype=torch.float64)
    for a, b in itertools.product(range(3), repeat=2):
        p, q, r = (exact_probs(row, **params) for row in own_logits(model, [*prompt, a, b])[-3:])
        expected[a, b] = p[a] * q[b] * r
    triples = torch.tensor([out.token_ids[:3] for out in outputs])
    assert_follows((triples * torch.tensor([9, 3, 1])).sum(1), expected.flatten())
    rate = sum(out.stats.accepted for out in outputs) / sum(out.stats.drafted for out in outputs)
    assert 0.1 < rate < 0.95


# Statistics.


def test_statistics_of_right_drafts():
    """faults.md L1: 11 tokens are the prompt's 1 and two rounds of 4 + 1."""
    (out,) = decoder(always_right(whole()), 4).generate([PROMPTS[0]], greedy(max_new_tokens=11))
    stats = out.stats
    assert (stats.prompt_tokens, stats.new_tokens, stats.target_passes) == (11, 11, 3)
    assert (stats.drafted, stats.accepted, stats.acceptance_rate) == (8, 8, 1.0)
    assert stats.drafted_at == stats.accepted_at == [2, 2, 2, 2]
    assert stats.tokens_per_target_pass == pytest.approx(11 / 3)
    assert stats.seconds > 0
    assert stats.tokens_per_second > 0


def test_statistics_of_wrong_drafts():
    drafter = always_wrong(whole())
    (out,) = decoder(drafter, 3).generate([PROMPTS[0]], greedy(max_new_tokens=6))
    assert (out.stats.target_passes, out.stats.accepted, out.stats.acceptance_rate) == (6, 0, 0.0)
    assert out.stats.drafted == 3 + 3 + 2 + 1
    assert out.stats.drafted_at == [4, 3, 2]
    assert out.stats.accepted_at == [0, 0, 0]


def test_statistics_without_drafts():
    """faults.md L2: None, never NaN."""
    for engine in (decoder(), decoder(always_right(whole()), 0)):
        (out,) = engine.generate([PROMPTS[0]], greedy())
        assert (out.stats.drafted, out.stats.acceptance_rate, out.stats.tokens_per_target_pass) == (0, None, 1.0)
    handle = decoder().submit(PROMPTS[0])
    handle.cancel()
    stats = handle.output.stats
    assert (stats.acceptance_rate, stats.tokens_per_target_pass, stats.tokens_per_second) == (None, None, None)


def test_statistics_add_up():
    """faults.md L1, D5: K_i = [0, 2, 4, 7], random drafts, cut by stop tokens and limits."""
    stop = stops(plain()[2])[5][1]
    params = [greedy(num_draft_tokens=k, stop_token_ids=[stop], max_new_tokens=13 + k) for k in (0, 2, 4, 7)]
    for out in decoder(random_drafts(whole()), 1).generate(PROMPTS, params):
        stats = out.stats
        assert stats.new_tokens == len(out.token_ids)
        assert sum(stats.drafted_at) == stats.drafted
        assert sum(stats.accepted_at) == stats.accepted <= stats.drafted
        assert all(a <= d for a, d in zip(stats.accepted_at, stats.drafted_at, strict=True))
        assert stats.drafted_at == sorted(stats.drafted_at, reverse=True)
        assert stats.new_tokens in (stats.accepted + stats.target_passes, stats.accepted + stats.target_passes - 1)


def test_a_failing_processor_ends_its_own_request():
    """With its text so far; neighbours go on, pages come back."""

    def fails(ids, logits):
        if ids.shape[1] >= 14:
            raise ZeroDivisionError("no")
        return logits

    engine = decoder(NoDraft())
    bad = engine.submit(PROMPTS[0], SamplingParams(temperature=0, max_new_tokens=20, logits_processors=[fails]))
    good = engine.submit(PROMPTS[1], SamplingParams(temperature=0, max_new_tokens=NEW))
    engine.run()
    assert bad.output.finish_reason == "error"
    assert isinstance(bad.exception, ZeroDivisionError)
    assert "the logits processor fails failed: ZeroDivisionError: no" in bad.output.error
    assert bad.output.token_ids == plain_greedy(target(), PROMPTS[0], 20)[: len(bad.output.token_ids)]
    assert len(bad.output.token_ids) >= 2
    assert good.output.token_ids == plain_greedy(target(), PROMPTS[1], NEW)
    assert_pages_add_up(engine._loop.cache)


def test_cancel_and_step_from_inside_a_round():
    handles = []

    def cancels(ids, logits):
        if ids.shape[1] >= 14:
            handles[0].cancel()
        return logits

    def steps(ids, logits):
        engine.step()

    engine = decoder(PromptLookup())
    handles.append(engine.submit(PROMPTS[0], SamplingParams(temperature=0, logits_processors=[cancels])))
    engine.run()
    assert handles[0].output.finish_reason == "cancelled"
    handle = engine.submit(PROMPTS[0], SamplingParams(temperature=0, logits_processors=[steps]))
    engine.run()
    assert "in the middle of a round" in handle.output.error
    assert_pages_add_up(engine._loop.cache)


def test_drafts_outside_the_vocabulary_are_not_counted():
    """faults.md B8, L1."""
    for wrong in (-1, TOY_VOCAB, 2**62):
        out = decoder(ScriptedDrafter(lambda text, limit, wrong=wrong: [wrong] * limit)).generate(
            PROMPTS[:1], SamplingParams(temperature=0, max_new_tokens=NEW)
        )[0]
        assert out.token_ids == plain_greedy(target(), PROMPTS[0], NEW)
        assert (out.stats.drafted, out.stats.acceptance_rate) == (0, None)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: None, "must be Drafts, got NoneType"),
        (lambda d: replace(d, tokens=d.tokens.float()), "tokens must be int64"),
        (lambda d: replace(d, tokens=d.tokens.repeat(2, 1)), r"tokens must be of shape \[1"),
        (lambda d: replace(d, lens=d.lens - 9), r"lens must be from 0 to \d, got \[-"),
        (lambda d: replace(d, lens=d.lens + 99), r"lens must be from 0 to \d"),
        (lambda d: replace(d, lens=d.lens.long()), "lens must be int32"),
        (lambda d: replace(d, lens=[1]), "lens must be a tensor"),
    ],
)
def test_a_drafter_that_breaks_the_protocol(monkeypatch, spoil, message):
    engine = decoder(random_drafts())
    propose = engine._loop.session.propose
    monkeypatch.setattr(engine._loop.session, "propose", lambda round_: spoil(propose(round_)))
    with pytest.warns(UserWarning, match=f"goes on without it: .*drafts.*{message}"):
        assert texts(engine, PROMPTS[:1], greedy()) == plain()[:1]


@pytest.mark.parametrize(
    "prompts",
    [
        "hello",
        None,
        {"input_ids": [1]},
        5,
        [1, 2],
        torch.tensor([1, 2]),
        [[1.7, 2.2]],
        [[True]],
        ["hi"],
        [[[1, 2]]],
        [None],
    ],
    ids=repr,
)
def test_prompts_that_are_none(prompts):
    with pytest.raises(ValueError, match=r"prompts? must be a list of"):
        decoder(NoDraft()).generate(prompts)


def test_prompts_may_be_tensors_and_arrays():
    params = SamplingParams(temperature=np.float32(0), max_new_tokens=np.int64(4), seed=np.int64(3))
    want = [plain_greedy(target(), prompt, 4) for prompt in PROMPTS[:2]]
    for kind in (torch.tensor, np.array, tuple):
        outs = decoder(NoDraft()).generate([kind(prompt) for prompt in PROMPTS[:2]], params)
        assert [out.token_ids for out in outs] == want
    square = torch.tensor([PROMPTS[0], PROMPTS[0]])
    assert [out.token_ids for out in decoder(NoDraft()).generate(square, params)] == [want[0]] * 2


def test_a_handle_of_another_decoder_cannot_be_cancelled():
    handle = decoder(NoDraft()).submit(PROMPTS[0])
    with pytest.raises(ValueError, match="a request of this decoder"):
        decoder(NoDraft()).cancel(handle)
