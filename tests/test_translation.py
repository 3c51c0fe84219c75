"""Draft models with another tokenizer: what the tokenizers share, drafts from it, and texts that do not depend on them (faults.md I4)."""

from __future__ import annotations

import random

import pytest

from specdec_triton import DraftModel, NoDraft, SamplingParams, SpeculativeDecoder
from specdec_triton.adapter import ModelAdapter
from specdec_triton.drafters.translation import PIECES, Recutting, Translation, same_texts, token_texts
from specdec_triton.testing import own_logits, plain_greedy, toy_model


class Words:
    """A tokenizer of given texts: what a real one does here."""

    unk_token_id = 0

    def __init__(self, texts):
        self.texts = texts

    def __len__(self):
        return len(self.texts)

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [self.texts.index("a")]}

    def decode(self, ids, **options):
        return "".join(self.texts[i] for i in ids)

    def batch_decode(self, rows, **options):
        return [self.decode(row) for row in rows]


class Greedy(Words):
    """Which cuts text into its longest tokens from left to right."""

    def __call__(self, text, add_special_tokens=True):
        ids = []
        while text:
            best = max((t for t in self.texts if t and text.startswith(t)), key=len, default=None)
            if best is None:
                best, text = self.texts[0], text[1:]
            else:
                text = text[len(best) :]
            ids.append(self.texts.index(best))
        return {"input_ids": ids}


rng = random.Random(5)
LETTERS = "abcdefghij"
TARGET = [
    "<unk>",
    *LETTERS,
    *dict.fromkeys("".join(rng.choice(LETTERS) for _ in range(rng.randint(2, 4))) for _ in range(200)),
][:97]
DRAFT = ["<unk>", *reversed(LETTERS), *rng.sample(TARGET[11:], 30), *(x + y for x in "abcd" for y in "klmno")][:60]
PROMPTS = [[5, 17, 3, 44, 8, 21, 9], [11], [60, 61, 62, 63, 20, 21, 22, 90, 91, 92, 33]]


def own_tokens(words, text):
    return [int(p) for t in text for p in words.pieces[t] if p >= 0]


def models():
    return toy_model(), toy_model(vocab_size=60, seed=1)


def test_texts_of_tokens():
    assert token_texts(Words(TARGET)) == TARGET
    assert token_texts(Words(["a", "b\ufffd", "c"])) == ["a", "", "c"]
    assert same_texts(TARGET, TARGET[:50])
    assert not same_texts(TARGET, DRAFT)
    with pytest.raises(ValueError, match="tokenizer must be a tokenizer of transformers, got int"):
        token_texts(3)


def test_translation():
    words = Translation(TARGET, DRAFT, 97, 60, 0)
    for target_id, own in zip(words.shared.tolist(), words.own.tolist(), strict=True):
        assert TARGET[target_id] == DRAFT[own]
    assert {TARGET[i] for i in words.shared.tolist()} == {*TARGET} & {*DRAFT}
    assert words.shared.tolist() == sorted({*words.shared.tolist()})
    for i, text in enumerate(TARGET):
        pieces = own_tokens(words, [i])
        assert "".join(DRAFT[p] for p in pieces) == text
        assert int(words.counts[i]) == len(pieces)
    odd = Translation(["a", "?", "", "a" * 20], ["b", "a"], 6, 2, 1)
    assert [own_tokens(odd, [i]) for i in range(6)] == [[1], [1], [1], [1] * PIECES, [1], [1]]
    with pytest.raises(ValueError, match="shares no token"):
        Translation(["a"], ["b"], 1, 1, 0)


@pytest.mark.parametrize("mode", ["reads", "device"])
def test_drafts_are_the_models(mode):
    """In every round: the likeliest shared tokens behind the whole text in the draft model's own tokens."""
    target, draft = models()
    adapter = ModelAdapter(target)
    adapter.fixed_shapes = mode == "device"
    drafter = DraftModel(draft, tokenizer=Words(DRAFT), target_tokenizer=Words(TARGET))
    decoder = SpeculativeDecoder(adapter, drafter, num_draft_tokens=3, adaptive=False)
    session, seen = decoder._loop.session, []
    propose = session.propose

    def watched(round_):
        drafts = propose(round_)
        for row, n in enumerate(round_.lens.tolist()):
            count = int(drafts.lens[row])
            seen.append((round_.texts[row, :n].tolist(), drafts.tokens[row, :count].tolist()))
        return drafts

    session.propose = watched
    outs = decoder.generate(PROMPTS, SamplingParams(temperature=0, max_new_tokens=30))
    assert [out.token_ids for out in outs] == [plain_greedy(target, prompt, 30) for prompt in PROMPTS]
    assert decoder.stats.accepted > 0
    words = Translation(TARGET, DRAFT, 97, 60, 0)
    assert sum(len(drafts) for _, drafts in seen) > 100
    for text, drafts in seen:
        for n, drafted in enumerate(drafts):
            logits = own_logits(draft, own_tokens(words, text + drafts[:n]))[-1][words.own]
            assert drafted == int(words.shared[logits.argmax()])


def test_text_is_cut_anew():
    """faults.md I4. Two drafts can be one of the target's tokens; what began before the tail's end is left alone."""
    back = Recutting(Greedy(["?", "a", "b", "ab", "c", "bc"]), ["a", "b", "", "bc", "c"])
    assert back([4], [0, 1, 4]) == [3, 4]
    assert back([4, 1], [3]) == []  # "ca" + "bc" is cut c|ab|c: not behind what is there
    assert back([4, 4], [3, 2, 0]) == [5]
    assert back([4], [9]) == []
    assert back([], [0]) == []


def test_drafts_by_text():
    """A draft model that knows the target's text, and writes it in other tokens: two for each, so that every second draft is half of one."""
    target = toy_model()
    ours = [chr(0x100 + i) + "z" for i in range(96)] + ["a"]
    theirs = ["a", "z", *(chr(0x100 + i) for i in range(96))]
    tokenizer = Greedy(ours)
    texts = [prompt + plain_greedy(target, prompt, 30) for prompt in PROMPTS]
    whole = ["".join(ours[i] for i in text) for text in texts]
    halves = toy_model(vocab_size=98, seed=1)
    session_of = {}

    class Knowing(DraftModel):
        def bind(self, target, options):
            session = super().bind(target, options)
            forward = session.adapter.forward

            def right(tokens, cache, table, context, lens=None, **options):
                logits = forward(tokens, cache, table, context, lens, **options)
                if lens is None:
                    return logits
                for row, (start, count) in enumerate(zip(context.tolist(), lens.tolist(), strict=True)):
                    known = session_of.setdefault(row, "")[:start] + "".join(
                        theirs[i] for i in tokens[row, :count].tolist()
                    )
                    session_of[row] = known
                    text = next((w for w in whole if w.startswith(known) and len(w) > len(known)), None)
                    if count and text is not None:
                        logits[row, -1] = 0.0
                        logits[row, -1, theirs.index(text[len(known)])] = 9.0
                return logits

            session.adapter.forward = right
            extend = session.extend

            def following(slot, text, start, stop):
                session_of[slot] = "".join(ours[i] for i in text[:stop].tolist())
                extend(slot, text, start, stop)

            session.extend = following
            return session

    drafter = Knowing(halves, tokenizer=Words(theirs), target_tokenizer=tokenizer, match="text")
    decoder = SpeculativeDecoder(target, drafter, num_draft_tokens=12, adaptive=False, max_batch_size=1)
    outs = [decoder.generate([prompt], SamplingParams(temperature=0, max_new_tokens=30))[0] for prompt in PROMPTS]
    assert [prompt + out.token_ids for prompt, out in zip(PROMPTS, outs, strict=True)] == texts
    assert decoder.stats.accepted > 60


@pytest.mark.parametrize("mode", ["reads", "device"])
def test_seeded_texts_do_not_depend_on_it(mode):
    target, draft = models()

    def decode(drafter, **options):
        adapter = ModelAdapter(target)
        adapter.fixed_shapes = mode == "device"
        decoder = SpeculativeDecoder(adapter, drafter, **options)
        params = [SamplingParams(seed=i, temperature=0.8, max_new_tokens=20 + 9 * i) for i in range(len(PROMPTS))]
        return [out.token_ids for out in decoder.generate(PROMPTS, params)], decoder.stats

    want, _ = decode(NoDraft())
    drafter = DraftModel(draft, tokenizer=Words(DRAFT), target_tokenizer=Words(TARGET))
    by_text = DraftModel(draft, tokenizer=Words(DRAFT), target_tokenizer=Greedy(TARGET), match="text")
    if mode == "device":
        with pytest.raises(ValueError, match="match must be 'tokens' on a device"):
            decode(by_text)
    else:
        assert decode(by_text, adaptive=False)[0] == want
    for options in ({}, {"max_batch_size": 2}, {"num_pages": 20, "page_size": 4}):
        got, stats = decode(drafter, adaptive=False, **options)
        assert got == want
        assert stats.drafted > 30


def test_sampled_texts_follow_the_target():
    from specdec_triton.verification import check_distribution

    target, draft = models()
    drafter = DraftModel(draft, tokenizer=Words(DRAFT), target_tokenizer=Words(TARGET))
    report = check_distribution(ModelAdapter(target), drafter, PROMPTS[0], samples=400)
    assert report.passed, report


def test_texts_that_outgrow_the_model():
    """Own tokens beyond its context, or beyond two for each of the target's: no drafts from there on."""
    target, _ = models()
    short = toy_model(vocab_size=60, seed=1, max_position_embeddings=24)
    longest = max(range(97), key=lambda i: len(TARGET[i]))
    for prompt in (PROMPTS[0], [longest] * 40):
        drafter = DraftModel(short, tokenizer=Words(DRAFT), target_tokenizer=Words(TARGET))
        decoder = SpeculativeDecoder(target, drafter, num_draft_tokens=4, adaptive=False)
        (out,) = decoder.generate([prompt], SamplingParams(temperature=0, max_new_tokens=40))
        assert out.token_ids == plain_greedy(target, prompt, 40)
    letters = DraftModel(toy_model(vocab_size=11, seed=1), tokenizer=Words(DRAFT[:11]), target_tokenizer=Words(TARGET))
    prompt = [i for i in range(97) if len(TARGET[i]) == 4][:30] * 2
    (out,) = SpeculativeDecoder(target, letters, adaptive=False).generate(
        [prompt], SamplingParams(temperature=0, max_new_tokens=40)
    )
    assert out.token_ids == plain_greedy(target, prompt, 40)


def test_the_same_tokenizer_needs_no_translation():
    """Padding, or more special tokens, are no other vocabulary."""
    target = toy_model()
    drafter = DraftModel(toy_model(vocab_size=90), tokenizer=Words(TARGET[:90]), target_tokenizer=Words(TARGET))
    session = SpeculativeDecoder(target, drafter)._loop.session
    assert type(session).__module__.endswith("draft_model")
    with pytest.raises(ValueError, match="tokenizer must be given together with target_tokenizer"):
        DraftModel(target, tokenizer=Words(TARGET))
    with pytest.raises(ValueError, match="give tokenizer= and target_tokenizer="):
        SpeculativeDecoder(target, DraftModel(toy_model(vocab_size=2000)))


def test_real_tokenizers():
    """A byte-level one and one that marks words, as they are on disk."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("\u0120", "a"), ("a", "b"), ("\u0120", "c")]
    vocab = {token: i for i, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    bpe = Tokenizer(models.BPE(vocab, merges))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bytes_ = PreTrainedTokenizerFast(tokenizer_object=bpe)
    metaspace = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<unk>", "a", "\u2581a", "ab", "b"])}, "<unk>"))
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace()
    metaspace.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()])
    words = PreTrainedTokenizerFast(tokenizer_object=metaspace, unk_token="<unk>")
    ours, theirs = token_texts(bytes_), token_texts(words)
    assert theirs[1:] == ["a", " a", "ab", "b"]
    found = Translation(ours, theirs, len(ours), len(theirs), 0)
    pairs = {ours[i]: theirs[j] for i, j in zip(found.shared.tolist(), found.own.tolist(), strict=True)}
    assert pairs == {text: text for text in ("a", " a", "ab", "b")}
    assert ours[vocab["\u00e4"]] == ""  # half of a character
