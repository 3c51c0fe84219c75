"""Every sampling option in the decoder: the text is that of the option applied by hand, a token at a time, whatever is drafted.

faults.md H1, H3, H4: rows of drafts see the option too, and its state is that of the committed text; D2: stop strings; H6:
grammars; H7: log-probabilities.
"""

from __future__ import annotations

import random
import warnings
from functools import lru_cache

import pytest
import torch
from rules_oracle import ruled
from transformers import PreTrainedTokenizerFast

from specdec_triton import DraftModel, PromptLookup, SamplingParams, SpeculativeDecoder, ops
from specdec_triton.testing import (
    TOY_VOCAB,
    always_right,
    always_wrong,
    assert_follows,
    batch_of,
    own_logits,
    random_drafts,
    toy_adapter,
    toy_model,
)

PROMPT = [3, 5, 7, 3, 5, 7, 3, 5, 7, 1, 3]
NEW = 16
MODES = pytest.mark.parametrize("mode", ["reads", "device"])
SAMPLED = {"temperature": 0.8, "seed": 4}
GREEDY = {"temperature": 0.0}

target = lru_cache(toy_adapter)


# Strong enough to change what the toy model writes.
RULES = {
    "nothing": {},
    "repetition": {"repetition_penalty": 3.0},
    "presence": {"presence_penalty": 9.0},
    "frequency": {"frequency_penalty": 9.0},
    "frequency-negative": {"frequency_penalty": -4.0},
    "bias": {"logit_bias": {64: -3.0, 83: -9.0, 5: 6.0}},
    "allowed": {"allowed_token_ids": range(40, 60)},
    "banned": {"banned_token_ids": [64, 83, 3]},
    "min-new": {"min_new_tokens": 9, "stop_token_ids": [41, 63, 64, 7]},
    "no-repeat-1": {"no_repeat_ngram_size": 1},
    "no-repeat-2": {"no_repeat_ngram_size": 2, "logit_bias": {9: 5.0, 64: 2.0}},
    "all": {
        "repetition_penalty": 1.4,
        "presence_penalty": 0.8,
        "frequency_penalty": 0.5,
        "logit_bias": {64: 2.0, 44: 3.0, 3: -1.0},
        "banned_token_ids": [41, 83],
        "allowed_token_ids": range(1, 90),
        "min_new_tokens": 4,
        "stop_token_ids": [44, 63],
        "no_repeat_ngram_size": 2,
    },
}


def decoder(mode="reads", drafter=None, k=4, **options):
    options = {"exact": False, "adaptive": False, "page_size": 5, **options}
    return SpeculativeDecoder(target(mode), drafter, num_draft_tokens=k, **options)


def params_of(name, sampling):
    return SamplingParams(**RULES[name], **sampling, max_new_tokens=NEW)


def by_hand(params, prompt=PROMPT):
    """The text of the module's own logits under the rules, a token at a time."""
    new = []
    while len(new) < params.max_new_tokens:
        row = ruled(own_logits(target().model, [*prompt, *new])[-1], params, prompt, new)
        one = batch_of(1, seed=params.seed or 0, position=len(prompt) + len(new), temperature=params.temperature)
        new.append(ops.sample(row.float()[None], params=one).item())
        if new[-1] in params.stop_token_ids:
            break
    return new


@lru_cache
def text_of(name, sampled):
    return by_hand(params_of(name, SAMPLED if sampled else GREEDY))


@MODES
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "coupled"])
@pytest.mark.parametrize("name", RULES)
def test_text_under_rules(name, sampled, mode):
    """Drafts that are right, wrong or both, and no drafts: the text is the one written by hand."""
    want = text_of(name, sampled)
    params = params_of(name, SAMPLED if sampled else GREEDY)
    whole = [PROMPT + want]
    for drafter in (None, always_right(whole), always_wrong(whole), random_drafts(whole)):
        out = decoder(mode, drafter).generate([PROMPT], params)[0]
        assert out.token_ids == want
    assert name == "nothing" or want != text_of("nothing", sampled)


@MODES
def test_a_batch_of_different_rules(mode):
    """Requests with and without rules, greedy and coupled, more of them than slots and pages: each writes its own text."""
    names = [(name, sampled) for name in RULES for sampled in (False, True)]
    random.Random(0).shuffle(names)
    wanted = [text_of(*one) for one in names]
    drafter = random_drafts([PROMPT + text for text in wanted])
    engine = decoder(mode, drafter, max_batch_size=5, num_pages=16)
    params = [params_of(name, SAMPLED if sampled else GREEDY) for name, sampled in names]
    outputs = engine.generate([PROMPT] * len(names), params)
    assert [out.token_ids for out in outputs] == wanted
    assert engine.stats.preemptions > 0


@MODES
@pytest.mark.parametrize("method", ["rejection", "block"])
def test_banned_tokens_are_never_drawn(method, mode):
    """faults.md H4: a bias of -100 on the likeliest token; a draft model proposes it all the same."""
    likeliest = text_of("nothing", False)
    params = SamplingParams(
        logit_bias={likeliest[0]: -100.0}, banned_token_ids=likeliest[1:3], seed=1, max_new_tokens=NEW
    )
    outputs = decoder(mode, DraftModel(target().model), method=method).generate([PROMPT] * 8, params)
    assert not {token for out in outputs for token in out.token_ids} & {*likeliest[:3]}


@MODES
def test_drafts_follow_the_rules_too(mode):
    """The target as its own draft model, under heavy rules: every draft is accepted, since it was drawn under them."""
    params = SamplingParams(
        frequency_penalty=1.5, repetition_penalty=1.3, banned_token_ids=[3, 5], seed=2, max_new_tokens=40
    )
    for method in ("coupled", "rejection"):
        stats = decoder(mode, DraftModel(target().model), method=method).generate([PROMPT], params)[0].stats
        assert stats.acceptance_rate == 1.0


def test_a_rule_that_leaves_a_smaller_drafter_nothing():
    """It drafts nothing, and is not said to be broken."""
    small = DraftModel(toy_model(seed=1, vocab_size=80))
    params = SamplingParams(temperature=0, allowed_token_ids=[90, 91, 92], max_new_tokens=6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = decoder(drafter=small).generate([PROMPT], params)[0]
    assert (out.finish_reason, out.stats.drafted) == ("length", 0)


def test_counts_are_those_of_the_committed_text():
    """faults.md H3: after any round, whatever was drafted and rejected."""
    params = SamplingParams(temperature=0, presence_penalty=0.5, max_new_tokens=NEW)
    want = by_hand(params)
    engine = decoder(drafter=random_drafts([PROMPT + want], right=0.5))
    handle = engine.submit(PROMPT, params)
    while engine.step():
        if handle.token_ids and handle.output is None:
            counts = engine._loop._slots.counts[handle.slot]
            written = torch.bincount(torch.tensor(handle.token_ids), minlength=TOY_VOCAB)
            assert torch.equal(counts & 0xFFFF, written.int())
            assert set((counts >> 30).nonzero().flatten().tolist()) == set(PROMPT)
    assert handle.token_ids == want


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"logit_bias": {TOY_VOCAB: 1.0}},
            f"logit_bias holds the token id {TOY_VOCAB}; ids go from 0 to {TOY_VOCAB - 1}",
        ),
        ({"allowed_token_ids": [1, 10**6]}, "allowed_token_ids holds the token id 1000000"),
        ({"banned_token_ids": [500]}, "banned_token_ids holds the token id 500"),
        ({"stop_strings": ["x"]}, "stop_strings needs the tokenizer"),
        (
            {"grammar": lambda: Words([[]], END).ended()},
            "grammar must be one that makes a new matcher for each request",
        ),
        ({"grammar": lambda: 3}, "grammar gave no matcher: TypeError: a matcher needs"),
        ({"grammar": lambda: 1 / 0}, "grammar gave no matcher: ZeroDivisionError"),
    ],
)
def test_what_cannot_be_is_refused_at_once(options, message):
    engine = decoder()
    with pytest.raises(ValueError, match=message):
        engine.submit(PROMPT, SamplingParams(**options))
    outputs = engine.generate([PROMPT, PROMPT], [SamplingParams(**options), SamplingParams(max_new_tokens=2)])
    assert [out.finish_reason for out in outputs] == ["error", "length"]


def test_rules_that_leave_nothing():
    """Ends that request with an error that says whose doing it was."""
    params = SamplingParams(allowed_token_ids=[9], no_repeat_ngram_size=1, temperature=0, max_new_tokens=5)
    bad, good = decoder(drafter=PromptLookup()).generate(
        [PROMPT] * 2, [params, SamplingParams(temperature=0, max_new_tokens=5)]
    )
    assert (bad.token_ids, bad.finish_reason) == ([9], "error")
    assert "after the request's own rules (allowed_token_ids, no_repeat_ngram_size)" in bad.error
    assert good.token_ids == text_of("nothing", False)[:5]


# Where plain decoding never comes.


DEAD_ENDS = {
    "nothing-left-after-a-stop": {
        "no_repeat_ngram_size": 1,
        "allowed_token_ids": [11, 12, 13, 20],
        "stop_token_ids": [20],
    },
    "nothing-left": {"no_repeat_ngram_size": 1, "allowed_token_ids": range(11, 16)},
}


@MODES
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("rules", DEAD_ENDS.values(), ids=DEAD_ENDS)
def test_dead_ends_behind_drafts(rules, sampling, mode):
    """A row behind drafts that leaves no token says nothing of the tokens before it: the text ends where plain decoding's does."""
    params = SamplingParams(**rules, **sampling, max_new_tokens=NEW)
    plain = decoder(mode).generate([PROMPT], params)[0]
    for drafter in (
        always_right([PROMPT + plain.token_ids + [11, 12]]),
        always_right([PROMPT + [t] * 9 for t in range(11, 21)]),
    ):
        for drafts in (drafter, DraftModel(target().model), random_drafts([PROMPT + plain.token_ids])):
            out = decoder(mode, drafts, 6).generate([PROMPT], params)[0]
            assert (out.token_ids, out.finish_reason, out.error) == (plain.token_ids, plain.finish_reason, plain.error)


@MODES
@pytest.mark.parametrize("method", ["rejection", "block"])
def test_distribution_beside_dead_ends(method, mode):
    """What stands behind a draft that leads nowhere has no influence on whether that draft is accepted."""
    rules = {"no_repeat_ngram_size": 1, "allowed_token_ids": [11, 12, 13], "temperature": 3.0, "max_new_tokens": 2}
    engine = decoder(mode, DraftModel(toy_model(seed=1)), 3, method=method, max_batch_size=64)
    outputs = engine.generate([PROMPT] * 1000, SamplingParams(**rules, stop_token_ids=[12]))
    first = own_logits(target().model, PROMPT)[-1]
    expected = {}
    for i in (11, 13):
        for j in {11, 12, 13} - {i}:
            second = own_logits(target().model, [*PROMPT, i])[-1]
            others = torch.tensor([x for x in (11, 12, 13) if x != i])
            p = (first[[11, 12, 13]] / 3).softmax(0)[i - 11] * (second[others] / 3).softmax(0)[others.tolist().index(j)]
            expected[(i, j)] = p.item()
    expected[(12,)] = (first[[11, 12, 13]] / 3).softmax(0)[1].item()
    texts = sorted(expected)
    counts = torch.tensor([texts.index(tuple(out.token_ids)) for out in outputs])
    assert_follows(counts, torch.tensor([expected[text] for text in texts]))


def test_a_token_that_breaks_the_model():
    """Drafted, never chosen: the logits behind it are no numbers, and nobody minds."""
    model = toy_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[64] = float("nan")
    params = SamplingParams(temperature=0, banned_token_ids=[64], max_new_tokens=NEW)
    likely = SamplingParams(temperature=0, logit_bias={9: 2.0}, max_new_tokens=NEW)
    broken = always_right([PROMPT + [64] * NEW])
    for one in (params, likely):
        plain, drafted = (
            SpeculativeDecoder(model, drafter, exact=False, adaptive=False).generate([PROMPT], one)[0]
            for drafter in (None, broken)
        )
        assert drafted.token_ids == plain.token_ids
        assert drafted.finish_reason == plain.finish_reason


@MODES
def test_processors_that_fail_where_plain_decoding_never_comes(mode):
    want = text_of("nothing", False)

    def strict(history, scores):
        text = history[0, len(PROMPT) :].tolist()
        if text != want[: len(text)]:
            raise LookupError(text)
        return scores

    params = SamplingParams(temperature=0, logits_processors=[strict], max_new_tokens=NEW)
    for drafter in (always_wrong([PROMPT + want]), random_drafts([PROMPT + want]), always_right([PROMPT + want])):
        out = decoder(mode, drafter).generate([PROMPT], params)[0]
        assert (out.token_ids, out.error) == (want, None)


@MODES
def test_a_prompt_that_is_still_processed_beside_rules(mode):
    """Its text is longer than any that is decoded; nobody's rules look at it."""
    prompts = [PROMPT, [5 + i % 60 for i in range(90)]]
    for name in ("no-repeat-2", "frequency"):
        for second in ("nothing", name):
            params = [params_of(name, GREEDY), params_of(second, GREEDY)]
            engine = decoder(mode, DraftModel(target().model))
            engine._loop.scheduler.chunk = 16
            alone = [
                decoder(mode).generate([prompt], one)[0].token_ids for prompt, one in zip(prompts, params, strict=True)
            ]
            assert [out.token_ids for out in engine.generate(prompts, params)] == alone
            assert engine._loop.drafting.on


# Log-probabilities.


@MODES
@pytest.mark.parametrize("k", [0, 3])
def test_logprobs(k, mode):
    """faults.md H7: of the model's own logits, whatever temperature, filters and rules make of them; for drafted tokens too."""
    each = [
        SamplingParams(temperature=0, logprobs=5, max_new_tokens=NEW),
        SamplingParams(temperature=0, max_new_tokens=NEW),
        SamplingParams(temperature=2.0, top_k=9, seed=1, logprobs=0, max_new_tokens=NEW),
        SamplingParams(
            temperature=0.5, seed=2, logit_bias={4: 3.0}, frequency_penalty=1.0, logprobs=20, max_new_tokens=NEW
        ),
    ]
    known = [PROMPT + out.token_ids for out in decoder().generate([PROMPT] * 4, each)]
    outputs = decoder(mode, random_drafts(known), k, max_batch_size=3).generate([PROMPT] * 4, each)
    assert outputs[1].logprobs is None
    for params, text, out in zip(each, known, outputs, strict=True):
        assert PROMPT + out.token_ids == text
        if params.logprobs is None:
            continue
        want = own_logits(target().model, text)[len(PROMPT) - 1 : -1].log_softmax(-1)
        assert [x.token_id for x in out.logprobs] == out.token_ids
        for row, got in zip(want, out.logprobs, strict=True):
            assert got.logprob == pytest.approx(row[got.token_id].item(), abs=1e-4)
            assert list(got.top) == row.topk(params.logprobs).indices.tolist()
            assert list(got.top.values()) == pytest.approx(row.topk(params.logprobs).values.tolist(), abs=1e-4)


def test_logprobs_are_bit_equal_to_plain_decodings():
    """bf16, exact passes: the same numbers whatever was drafted. Of equal logits, which bf16 has many of, the lowest id first."""
    from specdec_triton.adapter import ModelAdapter

    adapter = ModelAdapter(toy_model(dtype=torch.bfloat16))
    params = SamplingParams(temperature=0, logprobs=8, max_new_tokens=NEW)

    def run(drafter, k):
        return SpeculativeDecoder(adapter, drafter, num_draft_tokens=k, adaptive=False).generate([PROMPT], params)[0]

    plain = run(None, 0)
    for k in (1, 4, 7):
        out = run(random_drafts([PROMPT + plain.token_ids]), k)
        assert out.logprobs == plain.logprobs
        assert out.stats.accepted > 0


def test_logprobs_of_a_vocabulary_with_ties():
    from specdec_triton.logprobs import token_logprobs

    logits = torch.tensor([[1.0, 2.0, 2.0, -1.0, 2.0], [-0.0, 0.0, -5.0, 0.0, -float("inf")]]).bfloat16()
    own, ids, values = token_logprobs(logits, torch.tensor([4, 0]), 4)
    assert ids.tolist() == [[1, 2, 4, 0], [0, 1, 3, 2]]
    want = logits.float().log_softmax(-1)
    assert torch.allclose(values, want.gather(1, ids))
    assert torch.allclose(own, want[[0, 1], [4, 0]])


# Stop strings.


@lru_cache
def tokenizer():
    """Ids are the letters and pairs of letters, with nothing between them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = [chr(97 + i) for i in range(26)]
    pairs = [(a, b) for a in "xyzw" for b in letters][: TOY_VOCAB - 26]
    words = letters + [a + b for a, b in pairs]
    core = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=pairs))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)


@MODES
@pytest.mark.parametrize("start", range(1, 9))
def test_stop_strings(start, mode):
    """faults.md D2: a string that begins inside one token and ends inside another, anywhere in a block of eight: ids, log-probabilities,
    counts and reason are those of plain decoding."""
    whole = text_of("nothing", False)
    stop = tokenizer().decode(whole[start : start + 2])[1:-1]
    params = SamplingParams(temperature=0, stop_strings=["never", stop], logprobs=1, max_new_tokens=NEW)
    plain = decoder(mode, tokenizer=tokenizer()).generate([PROMPT], params)[0]
    assert plain.finish_reason == "stop"
    assert stop in tokenizer().decode(plain.token_ids)
    assert stop not in tokenizer().decode(plain.token_ids[:-1])
    for drafter in (always_right([PROMPT + whole]), random_drafts([PROMPT + whole])):
        out = decoder(mode, drafter, 8, tokenizer=tokenizer()).generate([PROMPT], params)[0]
        assert (out.token_ids, out.finish_reason) == (plain.token_ids, "stop")
        assert [x.token_id for x in out.logprobs] == plain.token_ids
        assert out.stats.new_tokens == len(plain.token_ids)
        assert out.stats.accepted <= out.stats.drafted


def test_stop_strings_of_some_requests_only():
    whole = text_of("nothing", False)
    stop = tokenizer().decode(whole[3:4])
    params = [
        SamplingParams(temperature=0, max_new_tokens=NEW),
        SamplingParams(temperature=0, stop_strings=stop, max_new_tokens=NEW),
    ]
    outputs = decoder(drafter=always_right([PROMPT + whole]), tokenizer=tokenizer()).generate([PROMPT] * 2, params)
    assert outputs[0].token_ids == whole
    assert outputs[1].token_ids == whole[: whole.index(whole[3]) + 1]


@MODES
@pytest.mark.parametrize("least", [1, 3, 4, 5, 9, NEW])
def test_stop_strings_before_min_new_tokens(least, mode):
    """They end nothing, wherever in a block they are complete."""
    whole = text_of("nothing", False)
    params = SamplingParams(
        temperature=0, stop_strings=tokenizer().decode(whole[3:5]), min_new_tokens=least, max_new_tokens=NEW
    )
    for drafter in (None, always_right([PROMPT + whole])):
        out = decoder(mode, drafter, 6, tokenizer=tokenizer()).generate([PROMPT], params)[0]
        assert (out.token_ids, out.finish_reason) == ((whole[:5], "stop") if least <= 5 else (whole, "length"))


# Grammars.


class Words:
    """A matcher: one of the given sequences, then the end. It knows nothing of rounds."""

    def __init__(self, words, end):
        self._words, self._end, self._text = words, end, []

    def _next(self):
        rest = [word[len(self._text) :] for word in self._words if list(word[: len(self._text)]) == self._text]
        return {(word[0] if word else self._end) for word in rest}

    def fill_next_token_bitmask(self, bitmask, index=0):
        assert not self.is_terminated()
        bits = torch.zeros(bitmask.shape[1] * 32, dtype=torch.int64)
        bits[list(self._next())] = 1
        bitmask[index] = (bits.view(-1, 32) << torch.arange(32)).sum(1).int()
        return True

    def accept_token(self, token_id):
        allowed = token_id in self._next()
        if allowed:
            self._text.append(token_id)
        return allowed

    def rollback(self, num_tokens):
        del self._text[len(self._text) - num_tokens :]

    def is_terminated(self):
        return self._end in self._text

    def ended(self):
        self._text.append(self._end)
        return self


END = 96
WORDS = [[11, 12, 13, 14], [11, 12, 20], [11, 30, 31, 32, 33, 34], [40]]


@MODES
@pytest.mark.parametrize("seed", [None, 0, 1, 2, 3])
def test_grammar(seed, mode):
    """faults.md H6: a mask for each row; whatever is drafted, the text is in the grammar and is plain decoding's."""
    sampling = {"temperature": 0.0} if seed is None else {"temperature": 30.0, "seed": seed}
    params = SamplingParams(grammar=lambda: Words(WORDS, END), max_new_tokens=NEW, **sampling)
    plain = decoder(mode).generate([PROMPT], params)[0]
    assert plain.finish_reason == "stop"
    assert plain.token_ids[:-1] in WORDS
    assert plain.token_ids[-1] == END
    whole = [PROMPT + plain.token_ids]
    drafters = (
        always_right(whole),
        always_wrong(whole),
        random_drafts(whole),
        always_right([PROMPT + w for w in WORDS]),
    )
    for drafter in (*drafters, DraftModel(target().model)):
        out = decoder(mode, drafter, 5).generate([PROMPT], params)[0]
        assert (out.token_ids, out.finish_reason) == (plain.token_ids, "stop")


@MODES
def test_grammars_of_some_requests_only(mode):
    """Each request has a matcher of its own; a failing one ends its request alone; pages run out meanwhile."""

    class Failing(Words):
        def rollback(self, num_tokens):
            raise RuntimeError("no way back")

    free = SamplingParams(temperature=0, max_new_tokens=NEW)
    bound = [
        SamplingParams(grammar=lambda: Words(WORDS, END), temperature=30.0, seed=s, max_new_tokens=NEW)
        for s in range(6)
    ]
    failing = SamplingParams(grammar=lambda: Failing(WORDS, END), temperature=0, max_new_tokens=NEW)
    alone = [decoder(mode).generate([PROMPT], one)[0].token_ids for one in bound]
    known = [PROMPT + text for text in (*alone, text_of("nothing", False))] + [PROMPT + w for w in WORDS]
    engine = decoder(mode, always_right(known), max_batch_size=4, num_pages=16)
    outputs = engine.generate([PROMPT] * 8, [free, *bound, failing])
    assert [out.token_ids for out in outputs[:-1]] == [text_of("nothing", False), *alone]
    assert outputs[-1].finish_reason == "error"
    assert "the grammar failed: RuntimeError: no way back" in outputs[-1].error
    assert engine.free_pages == engine.num_pages


class Fragile(Words):
    """Fails after a certain text: at the mask there, or when a token is taken."""

    where, after = "fill", [11, 12]

    def fill_next_token_bitmask(self, bitmask, index=0):
        if self.where == "fill" and self._text == self.after:
            raise RuntimeError("cannot say")
        return super().fill_next_token_bitmask(bitmask, index)

    def accept_token(self, token_id):
        if self.where == "accept" and self._text == self.after:
            raise RuntimeError("cannot take")
        return super().accept_token(token_id)


@MODES
@pytest.mark.parametrize("where", ["fill", "accept"])
@pytest.mark.parametrize("drafted", range(len(WORDS)))
def test_grammars_that_fail_somewhere(drafted, where, mode):
    """A failure ends the text where it ends without drafts, or not at all if the text does not come there."""

    class Here(Fragile):
        pass

    Here.where = where
    for bias in ({}, {30: 60.0}, {40: 60.0}):
        params = SamplingParams(
            grammar=lambda: Here(WORDS, END), temperature=0, logit_bias={11: 30.0, 12: 30.0} | bias, max_new_tokens=NEW
        )
        plain = decoder(mode).generate([PROMPT], params)[0]
        out = decoder(mode, always_right([PROMPT + WORDS[drafted] + [END]]), 5).generate([PROMPT], params)[0]
        assert (out.token_ids, out.finish_reason, out.error) == (plain.token_ids, plain.finish_reason, plain.error)


@MODES
def test_matchers_that_lie(mode):
    """A token that the mask allowed and the matcher refuses is not part of the text, whatever was drafted."""

    class Liar(Words):
        def fill_next_token_bitmask(self, bitmask, index=0):
            return False

    params = SamplingParams(grammar=lambda: Liar(WORDS, END), temperature=0, max_new_tokens=NEW)
    plain = decoder(mode).generate([PROMPT], params)[0]
    assert (plain.token_ids, plain.finish_reason) == ([], "error")
    assert "refuses the token 64, which its mask had allowed" in plain.error
    steered = SamplingParams(grammar=lambda: Liar(WORDS, END), temperature=0, logit_bias={11: 90.0}, max_new_tokens=NEW)
    for drafter in (None, always_right([[*PROMPT, 11, 11, 11]])):
        out = decoder(mode, drafter).generate([PROMPT], steered)[0]
        assert (out.token_ids, out.finish_reason) == ([11], "error")


def test_a_matcher_belongs_to_one_request():
    shared = Words(WORDS, END)
    params = SamplingParams(grammar=lambda: shared, temperature=0, max_new_tokens=NEW)
    outputs = decoder().generate([PROMPT] * 2, params)
    assert outputs[0].token_ids[:-1] in WORDS
    assert "another request has: make a new one in each call" in outputs[1].error


def test_a_grammar_and_the_other_rules_together():
    """The mask, a bias and a processor, one after another."""
    params = SamplingParams(
        grammar=lambda: Words(WORDS, END),
        temperature=0,
        logit_bias={40: -50.0, 12: -50.0},
        logits_processors=[lambda ids, scores: scores],
        max_new_tokens=NEW,
        logprobs=0,
    )
    out = decoder(drafter=always_right([PROMPT + WORDS[0]])).generate([PROMPT], params)[0]
    assert out.token_ids == [*WORDS[2], END]
    want = own_logits(target().model, PROMPT + out.token_ids)[len(PROMPT) - 1 : -1].log_softmax(-1)
    assert [x.logprob for x in out.logprobs] == pytest.approx(
        [row[t].item() for row, t in zip(want, out.token_ids, strict=True)], abs=1e-4
    )


JSON = '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"]}'


@MODES
@pytest.mark.parametrize("seed", range(4))
def test_xgrammar(seed, mode):
    """A well-known library's matcher, as it is: JSON by a schema, written by a model that knows no JSON."""
    import json

    xgrammar = pytest.importorskip("xgrammar")
    from specdec_triton.adapter import ModelAdapter

    characters = [chr(32 + i) for i in range(95)] + ["<unk>", "<end>"]
    info = xgrammar.TokenizerInfo(characters, vocab_size=TOY_VOCAB, stop_token_ids=[END])
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(JSON, any_whitespace=False)
    model = target(mode)
    assert isinstance(model, ModelAdapter)
    params = SamplingParams(
        grammar=lambda: xgrammar.GrammarMatcher(compiled),
        temperature=5.0,
        seed=seed,
        stop_token_ids=[END],
        max_new_tokens=60,
    )
    plain = decoder(mode).generate([PROMPT], params)[0]
    drafted = decoder(mode, random_drafts([PROMPT + plain.token_ids]), 6).generate([PROMPT], params)[0]
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.accepted > 0
    if plain.finish_reason == "stop":
        value = json.loads("".join(characters[i] for i in plain.token_ids[:-1]))
        assert value["b"] in ("x", "y")
