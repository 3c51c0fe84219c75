"""What comes in the middle of a step: cancels, warnings that are errors, Ctrl-C, failing drafters, other threads."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from functools import lru_cache

import pytest
import torch

from specdec_triton import DraftModel, PromptLookup, SamplingParams, SpeculativeDecoder
from specdec_triton.adapter import ModelAdapter
from specdec_triton.drafters import Drafter, Drafts, DraftSession
from specdec_triton.engine.interrupts import interrupts_held
from specdec_triton.engine.turns import Turns
from specdec_triton.passes import IMPLEMENTATION
from specdec_triton.testing import (
    ScriptedDrafter,
    always_right,
    assert_pages_add_up,
    plain_greedy,
    toy_adapter,
    toy_model,
)

PROMPTS = [[3, 5, 7, 3, 5, 7, 3, 5, 7, 11, 3], [2, 9], [60, 61, 60, 61, 60]]
NEW = 20
MODES = pytest.mark.parametrize("mode", ["reads", "device"])


target = lru_cache(toy_adapter)


@lru_cache
def plain():
    return [plain_greedy(target().model, prompt, NEW) for prompt in PROMPTS]


def greedy(**params):
    return SamplingParams(**{"temperature": 0, "max_new_tokens": NEW, **params})


def decoder(drafter, mode="reads", **options):
    return SpeculativeDecoder(target(mode), drafter, **{"page_size": 4, "exact": False, "adaptive": False, **options})


def finish(engine, handles):
    engine.run()
    assert engine.free_pages == engine.num_pages
    assert_pages_add_up(engine._loop.cache)
    return [handle.token_ids for handle in handles]


# Cancels.


@MODES
@pytest.mark.parametrize("victim", range(3))
def test_cancelling_inside_a_round_changes_nobody_elses_text(mode, victim):
    """Between drafting and judging, while the others' rows are packed."""
    known = always_right([prompt + text for prompt, text in zip(PROMPTS, plain(), strict=True)])
    handles = []

    def script(text, limit):
        if text[: len(PROMPTS[0])] != PROMPTS[0]:
            return []
        if len(text) > 14:
            handles[victim].cancel()
        return known.script(text, min(limit, 2))

    engine = decoder(ScriptedDrafter(script), mode)
    handles += [engine.submit(prompt, greedy()) for prompt in PROMPTS]
    texts = finish(engine, handles)
    assert handles[victim].output.finish_reason == "cancelled"
    for i, (text, want) in enumerate(zip(texts, plain(), strict=True)):
        assert text == (want[: len(text)] if i == victim else want)


def test_the_only_request_is_cancelled_inside_its_round():
    handles = []
    engine = decoder(ScriptedDrafter(lambda text, limit: handles[0].cancel() or [1] * limit))
    handles.append(engine.submit(PROMPTS[0], greedy()))
    finish(engine, handles)
    assert handles[0].output.finish_reason == "cancelled"


# Warnings.


@MODES
def test_a_warning_inside_the_models_pass_costs_no_token_and_adds_none(mode):
    """Where warnings are errors the round is run again."""
    engine, calls = decoder(PromptLookup(), mode), []

    def hook(*args):
        calls.append(1)
        if len(calls) in (4, 6):
            warnings.warn("planted", DeprecationWarning, stacklevel=1)

    removable = target(mode).model.register_forward_pre_hook(hook)
    handle, raised, working = engine.submit(PROMPTS[0], greedy()), 0, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            while working:
                try:
                    working = engine.step()
                except DeprecationWarning:
                    raised += 1
    finally:
        removable.remove()
    assert raised == 2
    assert handle.token_ids == plain()[0]


# Ctrl-C.


def test_an_interrupt_waits_for_the_end_of_the_step():
    def script(text, limit):
        if text[: len(PROMPTS[0])] == PROMPTS[0]:
            os.kill(os.getpid(), signal.SIGINT)
        return []

    engine = decoder(ScriptedDrafter(script))
    handles = [engine.submit(prompt, greedy()) for prompt in PROMPTS]
    interrupts, working, before = 0, True, signal.getsignal(signal.SIGINT)
    while working:
        try:
            working = engine.step()
        except KeyboardInterrupt:
            interrupts += 1
            assert_pages_add_up(engine._loop.cache)
            working = engine._loop.scheduler.busy
    assert interrupts >= NEW - 2
    assert signal.getsignal(signal.SIGINT) is before
    assert finish(engine, handles) == plain()


def test_a_second_interrupt_does_not_wait():
    steps = []

    def interrupted_twice():
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
            steps.append("held")
            signal.raise_signal(signal.SIGINT)
            steps.append("never")

    with pytest.raises(KeyboardInterrupt):
        interrupted_twice()
    assert steps == ["held"]


def test_interrupts_are_held_in_the_main_thread_only():
    before, seen = signal.getsignal(signal.SIGINT), []

    def other():
        with interrupts_held():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [before]


def test_an_interrupt_while_attention_is_switched_leaves_the_module_usable(monkeypatch):
    adapter = ModelAdapter(toy_model())
    config = adapter._configs[0]

    class Interrupting(type(config)):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if value == IMPLEMENTATION:
                raise KeyboardInterrupt

    config.__class__ = Interrupting
    with pytest.raises(KeyboardInterrupt):
        SpeculativeDecoder(adapter, exact=False).generate([PROMPTS[0]], greedy())
    assert config._attn_implementation_internal != IMPLEMENTATION
    assert adapter.model(torch.tensor([[1, 2]])).logits.isfinite().all()


# Drafters.


class Failing(Drafter):
    """A lookup one of whose hooks raises in its n-th call and later, or only then."""

    def __init__(self, hook, nth, always):
        self.hook, self.nth, self.always, self.calls = hook, nth, always, 0

    def bind(self, target, options):
        session = PromptLookup().bind(target, options)
        inner = getattr(session, self.hook)

        def hook(*args):
            self.calls += 1
            if self.calls == self.nth or (self.always and self.calls > self.nth):
                raise RuntimeError("planted")
            return inner(*args)

        setattr(session, self.hook, hook)
        return session


@MODES
@pytest.mark.parametrize("always", [False, True], ids=["once", "always"])
@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("hook", ["reserve", "move", "release", "swap_out", "swap_in", "propose"])
def test_whatever_a_session_fails_in_it_is_left_out(mode, hook, nth, always):
    """A pool that forces preemption; all texts are written, all pages come back, and there is one warning."""
    drafter = Failing(hook, nth, always)
    engine = decoder(drafter, mode, num_pages=12)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            handles = [engine.submit(prompt, greedy()) for prompt in PROMPTS]
            assert finish(engine, handles) == plain()
    failed = [str(w.message) for w in caught if "goes on without it: RuntimeError: planted" in str(w.message)]
    assert len(failed) == (drafter.calls >= nth)
    if failed:
        assert engine.generate([PROMPTS[0]], greedy())[0].stats.drafted == 0


def test_what_is_no_session():
    class Nothing(Drafter):
        def bind(self, target, options):
            return None

    with pytest.raises(ValueError, match=r"Nothing.bind's result must be a DraftSession, got NoneType"):
        decoder(Nothing())


def test_ids_outside_the_vocabulary_are_told_of():
    with pytest.warns(UserWarning, match="ids outside the target's vocabulary"):
        decoder(ScriptedDrafter(lambda text, limit: [10**6] * limit)).generate(PROMPTS, greedy())


def test_a_session_may_spoil_what_it_is_shown_of_lengths():
    class Careless(DraftSession):
        def propose(self, round_):
            assert round_.k >= 1
            round_.lens.clamp_(min=5)
            drafts = Drafts(torch.ones(len(round_.lens), round_.k, dtype=torch.int64), round_.limits.clone())
            round_.limits.zero_()
            return drafts

    class Spoils(Drafter):
        def bind(self, target, options):
            return Careless()

    for mode in ("reads", "device"):
        outputs = decoder(Spoils(), mode).generate(PROMPTS, greedy())
        assert [out.token_ids for out in outputs] == plain()


@MODES
def test_decoded_alike_whatever_came_before(mode):
    """Drafted as well, not only written: no report of the last requests is read after their queue has emptied."""
    engine = decoder(DraftModel(target().model), mode, adaptive=True)
    params = [greedy(num_draft_tokens=0), greedy(), greedy()]
    counts = []
    for _ in range(3):
        outputs = engine.generate(PROMPTS, params)
        assert [out.token_ids for out in outputs] == plain()
        counts.append([(out.stats.target_passes, out.stats.drafted) for out in outputs])
    assert counts[0] == counts[1] == counts[2]


# Threads.


def test_turns_are_taken_in_order():
    turns, order = Turns(), []
    turns.take()

    def wait(i):
        turns.take()
        order.append(i)
        turns.give()

    threads = []
    for i in range(4):
        threads.append(threading.Thread(target=wait, args=(i,)))
        threads[-1].start()
        while len(turns._waiting) <= i:
            time.sleep(0.001)
    assert turns.mine
    assert not order
    turns.give()
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3]
    assert turns.owner is None
    assert turns.take(wait=False)


def test_looking_at_the_statistics_waits_for_one_step():
    """Beside run(), which takes the decoder again as soon as a step has ended."""
    engine = decoder(PromptLookup())
    handle = engine.submit(PROMPTS[0], greedy(max_new_tokens=300, num_draft_tokens=0))
    thread = threading.Thread(target=engine.run)
    thread.start()
    waited = []
    while thread.is_alive():
        before = len(handle.token_ids)
        _ = engine.stats
        waited.append(len(handle.token_ids) - before)
    thread.join()
    assert len(waited) > 10
    assert sorted(waited)[len(waited) * 9 // 10] <= 2
