"""faults.md L4: every option of a decoder, a request and a drafter changes what happens. A new option without a case fails."""

from __future__ import annotations

import dataclasses
import inspect
from functools import lru_cache

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from specdec_triton import DraftModel, PromptLookup, SamplingParams, SpeculativeDecoder
from specdec_triton.adapter import ModelAdapter
from specdec_triton.drafters import Round, SessionOptions
from specdec_triton.sampling import SamplingBatch
from specdec_triton.testing import TOY_VOCAB, always_right, always_wrong, plain_greedy, toy_model

PROMPT = [3, 5, 7, 3, 5, 7, 3, 5, 7, 11, 3]
NEW = 24


@lru_cache
def target():
    return ModelAdapter(toy_model())


@lru_cache
def plain():
    return plain_greedy(target().model, PROMPT, NEW)


def decoder(drafter=None, **options):
    return SpeculativeDecoder(target(), drafter or always_right([PROMPT + plain()]), **{"exact": False, **options})


def output(params=None, drafter=None, **options):
    params = {"temperature": 0, "max_new_tokens": NEW} | (params or {})
    return decoder(drafter, **options).generate([PROMPT], SamplingParams(**params))[0]


def drawn(**params):
    return output({"temperature": 1.0, "seed": 0} | params).token_ids


def running_at_once(slots):
    engine = decoder(max_batch_size=slots)
    handles = [engine.submit(PROMPT, SamplingParams(temperature=0, max_new_tokens=NEW)) for _ in range(3)]
    for _ in range(3):
        engine.step()
    return sum(handle.decoding for handle in handles)


def searches_rows(exact):
    """Whether the decoder looks for row counts whose bits do not depend on them."""
    fresh = ModelAdapter(target().model)
    SpeculativeDecoder(fresh, exact=exact).generate([PROMPT], SamplingParams(temperature=0, max_new_tokens=2))
    return fresh._rows is not None


def refuses(**options):
    with pytest.raises(ValueError, match="backend"):
        decoder(**options)
    return True


def pages_of_a_text(page_size):
    engine = decoder(page_size=page_size, num_pages=64)
    engine.submit(PROMPT, SamplingParams(temperature=0, max_new_tokens=NEW))
    engine.step()
    return engine.num_pages - engine.free_pages


DECODER = {
    "target": lambda: decoder().target is target(),
    "drafter": lambda: output(drafter=always_wrong([PROMPT + plain()])).stats.accepted == 0 < output().stats.accepted,
    "num_draft_tokens": lambda: len(output(num_draft_tokens=2).stats.drafted_at) == 2,
    "max_batch_size": lambda: (running_at_once(1), running_at_once(3)) == (1, 3),
    "max_seq_len": lambda: output(max_seq_len=len(PROMPT) + 5).token_ids == plain()[:5],
    "page_size": lambda: pages_of_a_text(1) > 4 * pages_of_a_text(8) > 0,
    "num_pages": lambda: decoder(num_pages=37).num_pages == 37,
    "method": lambda: output({"temperature": 1.0}, method="greedy").token_ids == plain(),
    "exact": lambda: searches_rows(True) and not searches_rows(False),
    "backend": lambda: refuses(backend="abacus"),
    "adaptive": lambda: (
        output(drafter=always_wrong([PROMPT + plain()]), adaptive=True).stats.drafted
        < output(drafter=always_wrong([PROMPT + plain()]), adaptive=False).stats.drafted
    ),
    "tokenizer": lambda: needs_tokenizer() and REQUEST["stop_strings"](),
}
REQUEST = {
    "temperature": lambda: drawn(temperature=0) == plain() != drawn(temperature=5.0),
    "top_k": lambda: drawn(top_k=1) == plain() != drawn(),
    "top_p": lambda: drawn(top_p=0.0) == plain(),
    "min_p": lambda: drawn(min_p=1.0) == plain(),
    "seed": lambda: drawn(seed=0) == drawn(seed=0) != drawn(seed=1),
    "max_new_tokens": lambda: output({"max_new_tokens": 3}).token_ids == plain()[:3],
    "stop_token_ids": lambda: (
        output({"stop_token_ids": [plain()[4]]}).token_ids == plain()[: plain().index(plain()[4]) + 1]
    ),
    "num_draft_tokens": lambda: output({"num_draft_tokens": 0}).stats.drafted == 0,
    "ignore_eos": lambda: (stopping(False), stopping(True)) == ("stop", "length"),
    "logits_processors": lambda: set(output({"logits_processors": [only_nine]}).token_ids) == {9},
    "typical_p": lambda: drawn(typical_p=0.01) != drawn(),
    "min_new_tokens": lambda: (
        len(output({"stop_token_ids": plain()[:1]}).token_ids) == 1
        and len(output({"stop_token_ids": plain()[:1], "min_new_tokens": 7}).token_ids) >= 7
    ),
    "stop_strings": lambda: (
        output({"stop_strings": letters(plain()[2:4])}, tokenizer=tokenizer()).token_ids == plain()[:4]
    ),
    "repetition_penalty": lambda: output({"repetition_penalty": 9.0}).token_ids != plain(),
    "presence_penalty": lambda: len(set(output({"presence_penalty": 99.0}).token_ids)) == NEW,
    "frequency_penalty": lambda: len(set(output({"frequency_penalty": 99.0}).token_ids)) == NEW,
    "logit_bias": lambda: set(output({"logit_bias": {9: 99.0}}).token_ids) == {9},
    "allowed_token_ids": lambda: set(output({"allowed_token_ids": [9]}).token_ids) == {9},
    "banned_token_ids": lambda: plain()[0] not in output({"banned_token_ids": plain()[:1]}).token_ids,
    "no_repeat_ngram_size": lambda: len(set(output({"no_repeat_ngram_size": 1}).token_ids)) == NEW,
    "grammar": lambda: set(output({"grammar": OnlyNine}).token_ids) == {9},
    "logprobs": lambda: (
        output().logprobs is None
        and [len(x.top) for x in output({"logprobs": 3, "max_new_tokens": 2}).logprobs] == [3, 3]
    ),
}


@lru_cache
def tokenizer():
    """A character an id."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    core = Tokenizer(models.BPE(vocab={chr(i + 32): i for i in range(TOY_VOCAB)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)


def letters(ids):
    return "".join(chr(i + 32) for i in ids)


def needs_tokenizer():
    with pytest.raises(ValueError, match="needs the tokenizer"):
        output({"stop_strings": "x"})
    return True


class OnlyNine:
    """A grammar's matcher."""

    def fill_next_token_bitmask(self, bitmask, index=0):
        bitmask[index] = 0
        bitmask[index, 0] = 1 << 9
        return True

    def accept_token(self, token_id):
        return token_id == 9

    def rollback(self, num_tokens):
        pass

    def is_terminated(self):
        return False


def only_nine(history, logits):
    return torch.full_like(logits, -torch.inf).index_fill(-1, torch.tensor(9), 0.0)


def stopping(ignore_eos):
    """How a text ends whose fifth token is the model's end of sequence."""
    ending = ModelAdapter(target().model)
    ending.stop_ids = frozenset([plain()[4]])
    params = SamplingParams(temperature=0, max_new_tokens=NEW, ignore_eos=ignore_eos)
    return SpeculativeDecoder(ending, exact=False).generate([PROMPT], params)[0].finish_reason


def looked_up(text, **options):
    """The first draft of a lookup, None if there is none."""
    session = PromptLookup(**options).bind(target(), SessionOptions(slots=1))
    lens, limits = (torch.tensor([n], dtype=torch.int32) for n in (len(text), 1))
    params = SamplingBatch.from_params([SamplingParams()], [len(text)], "cpu")
    round_ = Round(1, torch.tensor([text]), lens, limits, params, draw=None, needs_logits=False, reads=True)
    drafts = session.propose(round_)
    return drafts.tokens[0, 0].item() if drafts.lens.item() else None


def drafted_by(**options):
    """The drafts of a small model with another tokenizer."""
    from test_translation import DRAFT, TARGET, Greedy, Words

    words = {"tokenizer": Words(DRAFT), "target_tokenizer": Greedy(TARGET)} | options
    drafter = DraftModel(toy_model(vocab_size=60, seed=1), **words)
    decoder = SpeculativeDecoder(toy_model(), drafter, num_draft_tokens=3, adaptive=False)
    session, seen = decoder._loop.session, []
    propose = session.propose

    def watched(round_):
        drafts = propose(round_)
        seen.append(drafts.tokens[0, : int(drafts.lens[0])].tolist())
        return drafts

    session.propose = watched
    decoder.generate([[5, 17, 3]], SamplingParams(temperature=0, max_new_tokens=8))
    return seen


def of_other_words(name):
    from test_translation import DRAFT, TARGET, Greedy, Words

    other = Words([DRAFT[0], *DRAFT[:0:-1]]) if name == "tokenizer" else Greedy([TARGET[0], *TARGET[:0:-1]])
    return drafted_by() != drafted_by(**{name: other})


DRAFTERS = {
    "DraftModel.tokenizer": lambda: of_other_words("tokenizer"),
    "DraftModel.target_tokenizer": lambda: of_other_words("target_tokenizer"),
    "DraftModel.match": lambda: drafted_by(match="text") != drafted_by(),
    "PromptLookup.max_ngram": lambda: [looked_up([1, 2, 9, 3, 2, 8, 1, 2], max_ngram=n) for n in (1, 2)] == [8, 9],
    "PromptLookup.min_ngram": lambda: [looked_up([1, 2, 9, 3, 2], min_ngram=n) for n in (1, 2)] == [9, None],
    "DraftModel.model": lambda: output(drafter=DraftModel(target().model), adaptive=False).stats.acceptance_rate == 1.0,
}


@pytest.mark.parametrize("name", inspect.signature(SpeculativeDecoder).parameters)
def test_decoder(name):
    assert DECODER[name]()


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SamplingParams)])
def test_request(name):
    assert REQUEST[name]()


@pytest.mark.parametrize(
    "name",
    [f"{kind.__name__}.{name}" for kind in (PromptLookup, DraftModel) for name in inspect.signature(kind).parameters],
)
def test_drafter(name):
    assert DRAFTERS[name]()
