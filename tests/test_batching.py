"""Many requests at once: they come, go, are cancelled, share prompts and make room; no text and no page notices.

The decoder runs both as on a CPU (values are read, rows are packed) and as on a device (fixed shapes, nothing is read back,
results come a round late), here on CPU tensors.
"""

from __future__ import annotations

import asyncio
import random
import threading
from functools import lru_cache

import pytest
import torch

from specdec_triton import DraftModel, NoDraft, PromptLookup, SamplingParams, SpeculativeDecoder
from specdec_triton.testing import TOY_VOCAB, always_right, assert_pages_add_up, plain_greedy, toy_adapter, toy_model

NEW = 24
CHUNK = 8
DRAFTERS = {"none": NoDraft, "lookup": PromptLookup, "model": lambda: DraftModel(small())}
MODES = pytest.mark.parametrize("mode", ["reads", "device"])


target = lru_cache(toy_adapter)


@lru_cache
def small():
    return toy_model(seed=1, num_hidden_layers=1)


def decoder(mode, drafter=None, k=4, **options):
    options = {"page_size": 5, "exact": False, "adaptive": False, **options}
    engine = SpeculativeDecoder(target(mode), drafter, num_draft_tokens=k, **options)
    engine._loop.scheduler.chunk = CHUNK
    return engine


def params(seed, **other):
    """Greedy without a seed."""
    return SamplingParams(temperature=0 if seed is None else 1.0, seed=seed, **{"max_new_tokens": NEW, **other})


@lru_cache
def jobs():
    """(prompt, seed, its whole text decoded alone): prompts of 1 to 40 tokens, many of which begin alike."""
    rng = random.Random(0)
    beginnings = [rng.choices(range(TOY_VOCAB), k=n) for n in (8, 19, 27)]
    prompts = [rng.choices(range(TOY_VOCAB), k=rng.choice([1, 2, 7, 8, 9, 17, 30])) for _ in range(20)]
    prompts += [rng.choice(beginnings) + rng.choices(range(TOY_VOCAB), k=rng.randint(1, 13)) for _ in range(20)]
    out = []
    for i, prompt in enumerate(prompts):
        seed = None if i % 2 else i
        alone = decoder("reads", max_batch_size=1)
        out.append((prompt, seed, alone.generate([prompt], params(seed))[0].token_ids))
    return out


def check(engine):
    """faults.md E9: after every step, in all caches."""
    for cache in (engine._loop.cache, getattr(engine._loop.session, "_cache", None)):
        if cache is not None:
            assert_pages_add_up(cache)


def test_alone_is_plain():
    for prompt, seed, text in jobs()[1::2]:
        assert seed is None
        assert text == plain_greedy(target().model, prompt, NEW)


@MODES
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_hundreds_of_requests(drafter, mode):
    """faults.md E9, E10, G1, G4: 8 slots, random lengths, random cancels, a pool that holds the longest and little more."""
    count = 120 if drafter == "model" else 300  # a draft model's rounds take four times as long
    rng = random.Random(f"{drafter} {mode}")
    engine = decoder(mode, DRAFTERS[drafter](), 3, num_pages=18, max_batch_size=8)
    submitted, waiting = [], 0
    while len(submitted) < count or waiting:
        for _ in range(rng.choice([0, 1, 2, 9]) if len(submitted) < count else 0):
            prompt, seed, text = rng.choice(jobs())
            new, k = rng.randint(1, NEW), rng.choice([None, None, 0, 1, 5])
            handle = engine.submit(prompt, params(seed, max_new_tokens=new, num_draft_tokens=k))
            submitted.append((handle, text[:new]))
        waiting = engine.step()
        check(engine)
        alive = [handle for handle, _ in submitted if handle.output is None]
        if alive and rng.random() < 0.1:
            rng.choice(alive).cancel()
            check(engine)
    assert len(submitted) >= count
    assert engine.free_pages == engine.num_pages
    ends = {"cancelled": 0, "length": 0}
    for handle, text in submitted:
        assert handle.output.error is None
        ends[handle.output.finish_reason] += 1
        if handle.output.finish_reason == "length":
            assert handle.output.token_ids == text
        else:
            assert handle.output.token_ids == text[: len(handle.output.token_ids)]
    assert min(ends.values()) > count // 25
    assert engine.stats.requests == ends
    assert engine.stats.preemptions > count // 25
    assert engine.stats.shared_tokens > 2 * count // 5
    assert engine.stats.pages_in_use == 0


@MODES
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_preempted_request_goes_on_bit_for_bit(drafter, mode):
    """faults.md E10: keys, drafts and acceptance are those of a request that never had to leave."""
    prompts = [prompt for prompt, *_ in jobs()[:6]]
    for method in ("greedy", "coupled", "rejection"):
        each = [params(7 + i, max_new_tokens=20) for i in range(6)]
        roomy = decoder(mode, DRAFTERS[drafter](), method=method).generate(prompts, each)
        tight = decoder(mode, DRAFTERS[drafter](), method=method, num_pages=14)
        outputs = tight.generate(prompts, each)
        assert tight.stats.preemptions > 0
        for out, want in zip(outputs, roomy, strict=True):
            assert out.token_ids == want.token_ids
            assert (out.stats.drafted_at, out.stats.accepted_at) == (want.stats.drafted_at, want.stats.accepted_at)


@MODES
def test_the_oldest_goes_on_when_pages_run_out(mode):
    engine = decoder(mode, num_pages=10)
    handles = [engine.submit([3, 5, 7], params(None, max_new_tokens=30)) for _ in range(4)]
    written = 0
    while engine.step():
        check(engine)
        before, written = written, engine.stats.new_tokens
        assert written >= before  # the statistics of those who wait are counted too
        ended = [handle.output is not None for handle in handles]
        assert ended == sorted(ended, reverse=True)
    assert handles[0].stats.preemptions == 0
    assert sum(handle.stats.preemptions for handle in handles) > 0
    assert len({tuple(handle.token_ids) for handle in handles}) == 1


@MODES
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("page_size", [3, 8, 48])
def test_prompts_that_begin_alike_share_pages(page_size, drafter, mode):
    """The same texts and the same acceptance as alone, in fewer pages; whole chunks only."""
    beginning = list(range(20))
    prompts = [[*beginning, 40], [*beginning, 50, 51], [*beginning, 40], beginning[:12]]
    alone = [decoder(mode, DRAFTERS[drafter]()).generate([p], params(None))[0] for p in prompts]
    engine = decoder(mode, DRAFTERS[drafter](), page_size=page_size)
    handles = [engine.submit(prompt, params(None)) for prompt in prompts]
    while any(not handle.decoding for handle in handles):
        engine.step()
        check(engine)
    apart = sum(engine._loop.cache.pages_for(len(prompt)) for prompt in prompts)
    used = {page for pages in engine._loop.cache._owned for page in pages[: 20 // page_size]}
    assert len(used) < apart or page_size == 48
    engine.run()
    for handle, want in zip(handles, alone, strict=True):
        assert handle.token_ids == want.token_ids
        assert handle.stats.accepted_at == want.stats.accepted_at
        assert handle.stats.drafted_at == want.stats.drafted_at
    assert [handle.stats.shared_tokens for handle in handles] == [0, 16, 16, 8]
    assert engine.free_pages == engine.num_pages


@MODES
def test_a_long_prompt_does_not_stall_the_others(mode):
    """Its chunks and their rounds take turns: a decoding request gets a token with every chunk."""
    engine = decoder(mode)
    first = engine.submit([3, 5, 7], params(None))
    while len(first.token_ids) < 2:
        engine.step()
    long = engine.submit([1, 2] * 40, params(None))
    for i in range(80 // CHUNK - 1):
        before = len(first.token_ids)
        engine.step()
        assert long.prefilled == (i + 1) * CHUNK
        assert len(first.token_ids) == before + 1
    engine.run()
    assert long.token_ids == plain_greedy(target().model, [1, 2] * 40, NEW)


# Errors and cancels.


@MODES
def test_errors_stay_with_their_request(mode):
    """faults.md B11: numbers that are none, a failing processor; neighbours write what they write alone."""

    def breaks(history, logits):
        if history.shape[1] > 12:
            raise ValueError("planted")
        return logits

    def nan(history, logits):
        return logits * float("nan") if history.shape[1] > 9 else logits

    (one, _, text), (two, _, other) = jobs()[1], jobs()[3]
    engine = decoder(mode, PromptLookup())
    handles = [
        engine.submit(one, params(None)),
        engine.submit([4, 5, 6], params(None, logits_processors=[breaks])),
        engine.submit([7, 8, 9], params(None, logits_processors=[nan])),
        engine.submit(two, params(None)),
    ]
    while engine.step():
        check(engine)
    assert [handle.output.finish_reason for handle in handles] == ["length", "error", "error", "length"]
    assert [handles[0].token_ids, handles[3].token_ids] == [text, other]
    for handle in handles[1:3]:
        assert handle.token_ids == plain_greedy(target().model, handle.prompt, NEW)[: len(handle.token_ids)]
        assert len(handle.token_ids) >= 2  # a bad row ends its request a round ahead
    assert "planted" in handles[1].output.error
    assert "NaN" in handles[2].output.error
    assert engine.free_pages == engine.num_pages


@MODES
@pytest.mark.parametrize("k", [0, 3])
def test_a_reader_that_fails_hurts_nobody_else(k, mode):
    """A consumer of one handle raises in the middle of its iteration; the others and the decoder go on."""
    (one, _, text), (two, _, other) = jobs()[1], jobs()[3]
    engine = decoder(mode, PromptLookup(), k)
    bad, good = engine.submit(one, params(None)), engine.submit(two, params(None))

    def stream():
        for i, _ in enumerate(bad):
            if i == 3:
                raise KeyError("planted")

    with pytest.raises(KeyError):
        stream()
    bad.cancel()
    assert list(good) == other
    assert bad.output.token_ids == text[: len(bad.output.token_ids)]
    assert engine.free_pages == engine.num_pages


@MODES
def test_threads_share_a_decoder(mode):
    """Some iterate, some submit, some cancel; every text is right."""
    engine = decoder(mode, PromptLookup(), max_batch_size=3)
    failures = []

    def work(i):
        try:
            for j in range(3):
                prompt, seed, text = jobs()[(5 * i + j) % len(jobs())]
                handle = engine.submit(prompt, params(seed))
                got = []
                for token in handle:
                    got.append(token)
                    if j == 2 and len(got) == 3:
                        handle.cancel()
                assert got == text[: len(got)]
                assert len(got) == NEW or j == 2
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert engine.free_pages == engine.num_pages
    check(engine)


@MODES
def test_a_reader_that_is_cancelled_cancels_its_request(mode):
    engine = decoder(mode, PromptLookup())
    (one, _, text), (two, _, other) = jobs()[1], jobs()[3]
    bad, good = engine.submit(one, params(None)), engine.submit(two, params(None))

    async def read(handle):
        return [token async for token in handle]

    async def main():
        task = asyncio.ensure_future(read(bad))
        while len(bad.token_ids) < 3:
            await asyncio.sleep(0.001)
        task.cancel()
        return await read(good)

    assert asyncio.run(main()) == other
    assert bad.output.finish_reason == "cancelled"
    assert bad.token_ids == text[: len(bad.token_ids)]
    assert engine.free_pages == engine.num_pages


@MODES
def test_the_event_loop_stays_responsive(mode):
    """While several tasks read their tokens, another one gets its turn between any two steps, and cancels one of them."""
    engine = decoder(mode, PromptLookup())
    turns = 0

    async def read(handle):
        return [token async for token in handle]

    async def tick(handle):
        nonlocal turns
        while handle.output is None:
            turns += 1
            if len(handle.token_ids) > 8:
                handle.cancel()
            await asyncio.sleep(0)

    async def main():
        handles = [engine.submit(prompt, params(seed)) for prompt, seed, _ in jobs()[:4]]
        *texts, _ = await asyncio.gather(*map(read, handles), tick(handles[1]))
        return texts

    texts = asyncio.run(main())
    assert turns > 5
    for i, (text, (_, _, want)) in enumerate(zip(texts, jobs(), strict=False)):
        assert text == (want[: len(text)] if i == 1 else want)
    assert 8 < len(texts[1]) <= NEW
    assert engine.free_pages == engine.num_pages


# Statistics.


@MODES
def test_statistics_of_a_decoder(mode):
    """faults.md L1, L2: sums of the requests' own; None where nothing has happened."""
    engine = decoder(mode, always_right([[*p, *t] for p, _, t in jobs()[1::2]]) if mode == "reads" else PromptLookup())
    empty = engine.stats
    assert (empty.acceptance_rate, empty.tokens_per_target_pass, empty.tokens_per_second) == (None, None, None)
    assert (empty.requests, empty.rounds, empty.acceptance_by_position) == ({}, 0, [])
    handles = [engine.submit(prompt, params(None)) for prompt, *_ in jobs()[1:14:2]]
    engine.step()
    engine.step()
    running = engine.stats
    assert running.pages_in_use == engine.num_pages - engine.free_pages > 0
    handles[0].cancel()
    engine.run()
    stats = engine.stats
    for name in ("prompt_tokens", "new_tokens", "target_passes", "drafted", "accepted"):
        assert getattr(stats, name) == sum(getattr(handle.stats, name) for handle in handles), name
    assert sum(stats.drafted_at) == stats.drafted >= stats.accepted == sum(stats.accepted_at)
    assert stats.requests == {"cancelled": 1, "length": len(handles) - 1}
    assert stats.new_tokens == sum(len(handle.token_ids) for handle in handles)
    assert stats.rounds < stats.target_passes
    assert stats.pages_in_use == 0
    assert stats.tokens_per_second > 0
    assert set(stats.phase_seconds) == {"prefill", "draft", "verify", "accept"}
    assert 0 < sum(stats.phase_seconds.values()) < stats.seconds
    for handle in handles[1:]:
        assert all(0 < handle.stats.phase_seconds[name] <= stats.phase_seconds[name] for name in stats.phase_seconds)
        assert sum(handle.stats.phase_seconds.values()) < handle.stats.seconds
    if mode == "reads":
        assert stats.acceptance_rate == 1.0
        assert stats.acceptance_by_position == [1.0] * 4


def test_profilers_see_the_phases():
    with torch.profiler.profile() as profile:
        decoder("reads", PromptLookup()).generate([[3, 5, 3, 5, 3]], params(None, max_new_tokens=6))
    names = {event.key for event in profile.key_averages()}
    assert names >= {"specdec::prefill", "specdec::draft", "specdec::verify", "specdec::accept"}
