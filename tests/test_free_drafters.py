"""Suffix decoding and cascades: what they draft, and that texts do not depend on it."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from specdec_triton import Cascade, DraftModel, NoDraft, PromptLookup, SamplingParams, SpeculativeDecoder, SuffixDrafter
from specdec_triton.adapter import ModelAdapter
from specdec_triton.drafters import SessionOptions
from specdec_triton.drafters.base import Round
from specdec_triton.drafters.suffix_automaton import ROOT, SuffixAutomaton
from specdec_triton.testing import batch_of, toy_model


def texts(count: int, length: int, alphabet: int):
    rng = random.Random(alphabet * length)
    return [[rng.randrange(alphabet) for _ in range(rng.randrange(length + 1))] for _ in range(count)]


def substrings(text: list[int]) -> Counter[tuple[int, ...]]:
    return Counter(tuple(text[i:j]) for i in range(len(text)) for j in range(i + 1, len(text) + 1))


def walk(automaton: SuffixAutomaton, part: tuple[int, ...]) -> int | None:
    state = ROOT
    for token in part:
        if (following := automaton._next[state].get(token)) is None:
            return None
        state = following
    return state


@pytest.mark.parametrize("alphabet", [1, 2, 4])
def test_the_automaton_knows_all_substrings_and_how_often(alphabet):
    for text in texts(60, 14, alphabet):
        automaton, counts = SuffixAutomaton(text), substrings(text)
        for part, count in counts.items():
            state = walk(automaton, part)
            assert state is not None
            assert automaton._count[state] == count
        absent = [part for part in substrings([*text, alphabet]) if part not in counts]
        assert all(walk(automaton, part) is None for part in absent)


@pytest.mark.parametrize("alphabet", [1, 2, 4])
def test_the_longest_repeated_end(alphabet):
    for text in texts(60, 20, alphabet):
        automaton, counts = SuffixAutomaton(text), substrings(text)
        ends = [n for n in range(1, len(text) + 1) if counts[tuple(text[-n:])] > 1]
        assert automaton.repeated()[1] == max(ends, default=0)


def test_several_texts_are_kept_apart():
    automaton = SuffixAutomaton()
    both: Counter[tuple[int, ...]] = Counter()
    for text in texts(8, 9, 2):
        automaton.start()
        for token in text:
            automaton.add(token)
        both += substrings(text)
    for part, count in both.items():
        state = walk(automaton, part)
        assert state is not None
        assert automaton._count[state] == count
    # Another text, followed through them: its longest end that occurs in one of them.
    state = matched = 0
    text = texts(1, 60, 2)[0] + [0, 1, 1, 0, 1, 0, 0, 0, 1, 1]
    for i, token in enumerate(text):
        state, matched = automaton.follow(state, matched, token)
        longest = max((n for n in range(i + 2) if n == 0 or tuple(text[i + 1 - n : i + 1]) in both), default=0)
        assert matched == longest


def test_a_long_text_of_one_token_is_no_trouble():
    automaton = SuffixAutomaton([7] * 3000)
    assert automaton.repeated()[1] == 2999
    assert len(automaton._length) == 3001


def propose(drafter, text, k, fixed=False):
    adapter = ModelAdapter(toy_model())
    adapter.fixed_shapes = fixed
    session = drafter.bind(adapter, SessionOptions(1))
    lens, limits = torch.tensor([len(text)], dtype=torch.int32), torch.tensor([k], dtype=torch.int32)
    rows = torch.tensor([list(text) + [0] * 4])
    drafts = session.propose(Round(k, rows, lens, limits, batch_of(1), None, needs_logits=False, reads=not fixed))
    return drafts.tokens[0, : int(drafts.lens[0])].tolist()


def test_what_mostly_followed_is_drafted():
    often, once = [5, 6, 7, 8, 9], [5, 6, 1, 2]
    assert propose(SuffixDrafter(), [*often, 3, *often, 4, *once, 5, 6], 3) == [7, 8, 9]
    assert propose(SuffixDrafter(), [1, 2, 3, 4], 3) == []
    # The longest end decides, however often a shorter one was followed by something else.
    assert propose(SuffixDrafter(), [9, 5, 1, 5, 2, 5, 2, 5, 2, 9, 5], 1) == [1]


def test_drafts_end_where_they_are_unlikely():
    text = [1, 2, 1, 3, 1, 4, 1, 5, 1]
    assert propose(SuffixDrafter(min_confidence=0.2), text, 4) == [5, 1]
    assert propose(SuffixDrafter(min_confidence=0.3), text, 4) == []
    assert propose(SuffixDrafter(min_match=2, min_confidence=0.0), text, 4) == []


def test_a_repetition_goes_on():
    assert propose(SuffixDrafter(), [1, 2, 3] * 4, 7) == [1, 2, 3, 1, 2, 3, 1]


def test_a_corpus_is_looked_in():
    drafter = SuffixDrafter([[4, 5, 6, 7, 8], [4, 5, 6, 7, 9], [1, 4, 5, 6, 7, 9]])
    assert propose(drafter, [2, 4, 5, 6], 3) == [7, 9]
    assert propose(drafter, [2, 3], 3) == []


def test_on_a_device_the_last_occurrence_is_drafted():
    assert propose(SuffixDrafter(), [1, 2, 3, 4, 1, 2, 3], 2, fixed=True) == [4, 1]
    adapter = ModelAdapter(toy_model())
    adapter.fixed_shapes = True
    with pytest.raises(ValueError, match="corpus for SuffixDrafter needs a target on the CPU"):
        SuffixDrafter([[1, 2]]).bind(adapter, SessionOptions(1))


PROMPTS = [[3, 4, 5, 3, 4, 5, 3], [9], [11, 12, 13, 14, 11, 12], [7] * 9]
PARAMS = [SamplingParams(seed=i, max_new_tokens=25 + 5 * i, temperature=0.7) for i in range(4)]


def decode(drafter, params=PARAMS, **options):
    decoder = SpeculativeDecoder(toy_model(), drafter, **options)
    return [out.token_ids for out in decoder.generate(PROMPTS, params)], decoder


def small():
    return DraftModel(toy_model(seed=0))  # the target's twin: its drafts are right


DRAFTERS = {
    "suffix": lambda: SuffixDrafter(),
    "suffix-corpus": lambda: SuffixDrafter([list(range(3, 40))], remember=True),
    "cascade": lambda: Cascade([SuffixDrafter(min_match=2), small()]),
    "cascade-of-free": lambda: Cascade([SuffixDrafter(min_match=3), PromptLookup()]),
    "cascade-of-one": lambda: Cascade([small()]),
}


@pytest.mark.parametrize("options", [{}, {"max_batch_size": 2}, {"num_pages": 24, "page_size": 4}], ids=str)
@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
def test_seeded_texts_do_not_depend_on_the_drafter(drafter, options):
    want, _ = decode(NoDraft())
    got, decoder = decode(drafter(), adaptive=False, **options)
    assert got == want
    assert decoder.stats.drafted > 0


def test_a_cascade_asks_the_next_where_the_first_is_silent():
    """Few ends repeat in these texts, so the model drafts, and rightly."""
    _, decoder = decode(Cascade([SuffixDrafter(min_match=40), small()]), adaptive=False)
    _, alone = decode(small(), adaptive=False)
    assert decoder.stats.accepted == alone.stats.accepted > 50


@pytest.mark.parametrize("method", ["rejection", "block"])
def test_a_cascade_of_certain_and_drawn_drafts(method):
    """Under methods that look at probabilities: both kinds in one round."""
    params = [SamplingParams(max_new_tokens=30, temperature=0.8) for _ in PROMPTS]
    torch.manual_seed(0)
    _, decoder = decode(Cascade([PromptLookup(), small()]), params, method=method, adaptive=False)
    assert decoder.stats.drafted > 100
    assert decoder.stats.accepted > 20


def test_cascades_refuse():
    for bad in ([], None, [None], PromptLookup()):
        with pytest.raises(ValueError, match="drafters must be a list of drafters"):
            Cascade(bad)
    with pytest.raises(ValueError, match="ordered so that only the last costs something, got DraftModel earlier"):
        SpeculativeDecoder(toy_model(), Cascade([small(), PromptLookup()]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"min_match": 0}, "min_match"), ({"min_confidence": 2}, "min_confidence"), ({"corpus": ["text"]}, "token ids")],
    ids=str,
)
def test_suffix_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        SuffixDrafter(**changes)
