"""``generate(custom_generate=speculative(...))`` against plain ``generate``.

Equal means: the same tensor for every option that can be honoured, the same calls of streamer and criteria, the same
distribution when sampling. What cannot be honoured is an error that names the option.
"""

from __future__ import annotations

import gc
import weakref
from threading import Thread

import pytest
import torch
from transformers import (
    DynamicCache,
    EpsilonLogitsWarper,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    PreTrainedTokenizerFast,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkingConfig,
    T5Config,
    T5ForConditionalGeneration,
    TemperatureLogitsWarper,
    TextIteratorStreamer,
    TextStreamer,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    WatermarkingConfig,
)
from transformers.generation import BaseStreamer

from specdec_triton import DraftModel, NoDraft, PromptLookup, hf, speculative
from specdec_triton.hf_processors import split_rules, split_sampling
from specdec_triton.testing import (
    TOY_VOCAB,
    ScriptedDrafter,
    always_right,
    always_wrong,
    assert_follows,
    exact_probs,
    own_logits,
    plain_greedy,
    random_drafts,
    toy_model,
)

NEW = 16
PROMPT = [5, 17, 29, 41, 17, 29]
IDS = torch.tensor([PROMPT])
LEFT = torch.tensor([[0, 0, 0, 8, 17, 29], PROMPT, [0, 61, 17, 29, 41, 17]])
RIGHT = torch.tensor([[8, 17, 29, 0, 0, 0], PROMPT, [61, 17, 29, 41, 17, 0]])
BATCHES = {"one": IDS, "left-padded": LEFT}


def tiny(seed=3, **config):
    return toy_model(num_hidden_layers=1, seed=seed, **config)


def quick(drafter=None, k=4, **options):
    """Without the probe for row counts that give equal bits: most of what a short text costs."""
    return speculative(drafter, k, **{"exact": False, "adaptive": False, **options})


@pytest.fixture(scope="module")
def model():
    return tiny()


@pytest.fixture(scope="module")
def text(model):
    """Plain greedy text of PROMPT."""
    return plain_greedy(model, PROMPT, 2 * NEW)


def mask_of(ids):
    return (ids != 0).long()


def plain(model, ids, **options):
    return model.generate(ids, attention_mask=mask_of(ids), **{"max_new_tokens": NEW, **options})


def ours(model, ids, fast, **options):
    return plain(model, ids, custom_generate=fast, **options)


def knowing(ids, sequences):
    """Drafts that are mostly right: ``sequences`` is what plain decoding gave for ``ids``."""
    known = sequences.tolist()
    texts = [[t for t in row[: ids.shape[1]] if t] + row[ids.shape[1] :] for row in known]
    return random_drafts(texts)


def assert_same(model, ids, **options):
    """Plain decoding and ours give the same tensor; where there was room, drafts were accepted on the way."""
    expected = plain(model, ids, **options)
    drafter = knowing(ids, expected)
    fast = quick(drafter)
    got = ours(model, ids, fast, **options)
    assert got.dtype == expected.dtype
    assert got.tolist() == expected.tolist()
    assert sum(stats.accepted for stats in fast.stats) > 0 or expected.shape[1] < ids.shape[1] + 4
    return expected


class Rowwise(LogitsProcessor):
    """Adds a bias that each row of the batch has of its own."""

    def __init__(self, rows):
        self.bias = torch.randn(rows, TOY_VOCAB, generator=torch.Generator().manual_seed(3)) * 5

    def __call__(self, input_ids, scores):
        return scores + self.bias


class WholeHistory(LogitsProcessor):
    """Favours a token that depends on every id of the row, padding included."""

    def __call__(self, input_ids, scores):
        places = torch.arange(1, input_ids.shape[1] + 1)
        favoured = (input_ids * places).sum(1) % TOY_VOCAB
        return scores.scatter_add(1, favoured[:, None], torch.full((len(scores), 1), 50.0))


class Recorder(StoppingCriteria):
    """Has state: ends row b at its call number ``at[b]``, and remembers what it was shown."""

    def __init__(self, at):
        self.at = torch.tensor(at)
        self.calls = []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append((input_ids.tolist(), scores))
        return len(self.calls) >= self.at


class Calls(BaseStreamer):
    def __init__(self):
        self.calls = []

    def put(self, value):
        self.calls.append((value.dtype, value.device.type, value.tolist()))

    def end(self):
        self.calls.append("end")


@pytest.fixture(scope="module")
def tokenizer():
    """One character a token: chr(id + 32); id 0 is padding."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {chr(i + 32): i for i in range(TOY_VOCAB)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)


# Greedy text.


@pytest.mark.parametrize("k", [0, 4, 11], ids="k={}".format)
@pytest.mark.parametrize("name", ["none", "plain", "ngram", "model", "right", "wrong", "mixed"])
def test_any_drafter_writes_the_plain_text(model, text, name, k):
    texts = [PROMPT + text]
    drafter = {
        "none": lambda: None,
        "plain": NoDraft,
        "ngram": PromptLookup,
        "model": lambda: DraftModel(tiny(seed=1)),
        "right": lambda: always_right(texts),
        "wrong": lambda: always_wrong(texts),
        "mixed": lambda: random_drafts(texts),
    }[name]()
    fast = speculative(drafter, k, adaptive=False)
    assert ours(model, IDS, fast)[0].tolist() == PROMPT + text[:NEW]
    (stats,) = fast.stats
    if name == "right" and k:
        assert stats.target_passes <= 1 + -(-(NEW - 1) // (k + 1))


OPTIONS = {
    "max_length": {"max_new_tokens": None, "max_length": 13},
    "one_token": {"max_new_tokens": 1},
    "default_length": {"max_new_tokens": None},
    "min_new_tokens": {"eos": 3, "min_new_tokens": 9},
    "min_length": {"eos": 3, "min_length": 15},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 3.0},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad": True},
    "sequence_bias": {"sequence_bias": {(3,): 9.0, (3, 4): 20.0}},
    "suppress_tokens": {"suppressed": True},
    "begin_suppress_tokens": {"begin": True},
    "forced_eos_token_id": {"forced_eos_token_id": 7},
    "exponential_decay": {"eos": 9, "exponential_decay_length_penalty": (3, 1.5)},
    "remove_invalid_values": {"remove_invalid_values": True, "changes": False},
    "renormalize_logits": {"renormalize_logits": True, "changes": False},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=9.0)},
    "prefix_allowed_tokens_fn": {
        "prefix_allowed_tokens_fn": lambda row, ids: [t for t in range(TOY_VOCAB) if (t + row + len(ids)) % 3]
    },
    "custom_processor": {"logits_processor": LogitsProcessorList([WholeHistory()])},
    "no_cache": {"use_cache": False, "changes": False},
    "static_cache": {"cache_implementation": "static", "changes": False},
    "many": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "eos": 3, "min_new_tokens": 5, "suppressed": True},
    "sampling_options_unused": {"temperature": 0.2, "top_k": 3, "changes": False},
    "top_1": {"do_sample": True, "top_k": 1, "temperature": 3.0, "changes": False},
    "top_1_penalised": {"do_sample": True, "top_k": 1, "repetition_penalty": 1.8},
    "top_1_not_last": {"do_sample": True, "top_k": 1, "typical_p": 0.9, "changes": False},
}


@pytest.mark.filterwarnings("ignore::UserWarning:transformers")
@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("name", OPTIONS)
def test_option(model, text, name, rows):
    options = dict(OPTIONS[name])
    changes = options.pop("changes", True)
    if "eos" in options:
        options["eos_token_id"] = text[options.pop("eos")]
    if options.pop("bad", False):
        options["bad_words_ids"] = [[text[0]], text[4:6]]
    if options.pop("suppressed", False):
        options["suppress_tokens"] = [text[1], text[7]]
    if options.pop("begin", False):
        options["begin_suppress_tokens"] = [text[0]]
    got = assert_same(model, BATCHES[rows], **options)
    if rows == "one":
        assert (got[0].tolist() != PROMPT + text[:NEW]) == changes


def test_processors_may_know_the_rows_by_number(model):
    assert_same(model, LEFT, logits_processor=LogitsProcessorList([Rowwise(3), WholeHistory()]))


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "top-1"])
def test_num_return_sequences(model, sampled):
    """Rows are expanded before the decoder sees them; processors that keep the inputs see them unexpanded."""
    options = {"do_sample": True, "top_k": 1, "num_return_sequences": 2} if sampled else {}
    got = assert_same(model, LEFT, encoder_no_repeat_ngram_size=1, encoder_repetition_penalty=1.5, **options)
    assert len(got) == (6 if sampled else 3)


# Padding.


@pytest.mark.parametrize("given", [True, False], ids=["mask", "mask-inferred"])
def test_left_padding(model, given):
    expected = plain(model, LEFT)
    options = {"attention_mask": mask_of(LEFT)} if given else {}
    fast = quick(knowing(LEFT, expected))
    assert model.generate(LEFT, max_new_tokens=NEW, custom_generate=fast, **options).tolist() == expected.tolist()


def test_right_padding(model):
    """Plain decoding goes on from the padding; each row alone is what it should have written."""
    got = ours(model, RIGHT, quick(PromptLookup()))
    for given, row in zip(RIGHT.tolist(), got.tolist(), strict=True):
        assert row == given + plain_greedy(model, [t for t in given if t], NEW)


def test_masked_holes(model):
    mask = torch.tensor([[0, 1, 1, 0, 1, 1]])
    expected = model.generate(IDS, attention_mask=mask, max_new_tokens=NEW)
    got = model.generate(IDS, attention_mask=mask, max_new_tokens=NEW, custom_generate=quick(PromptLookup()))
    assert got.tolist() == expected.tolist()


def test_no_input_starts_from_bos(model):
    expected = model.generate(max_new_tokens=NEW)
    assert model.generate(max_new_tokens=NEW, custom_generate=quick()).tolist() == expected.tolist()


def test_more_rows_than_the_decoder_began_with(model):
    fast = quick(PromptLookup())
    many = torch.arange(1, 41).view(20, 2)
    for ids in (IDS, many, many[:9]):
        assert ours(model, ids, fast, max_new_tokens=6).tolist() == plain(model, ids, max_new_tokens=6).tolist()


# Ends.


@pytest.mark.parametrize("at", range(7))
def test_eos_inside_an_accepted_block(model, text, at):
    if text[at] in text[:at]:
        pytest.skip("the token occurs before")
    fast = quick(always_right([PROMPT + text]), 5)
    got = ours(model, IDS, fast, eos_token_id=text[at])
    assert got[0].tolist() == PROMPT + text[: at + 1]


@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("pad", [0, 96, None], ids="pad={}".format)
@pytest.mark.parametrize("ends", [[6], [11, 2], [2, 6, 13]], ids=str)
def test_eos_lists(model, rows, ends, pad):
    sequences = plain(model, BATCHES[rows])[:, len(PROMPT) :].tolist()
    eos = [sequences[i % len(sequences)][at] for i, at in enumerate(ends)]
    got = assert_same(model, BATCHES[rows], eos_token_id=eos if len(eos) > 1 else eos[0], pad_token_id=pad)
    assert rows != "one" or got.shape[1] < len(PROMPT) + NEW


@pytest.mark.filterwarnings("ignore::UserWarning:transformers")
@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("chosen", ["own", "another", "none"])
def test_eos_of_the_call_replaces_the_models_own(text, rows, chosen):
    model = tiny(eos_token_id=text[4])
    config = GenerationConfig(max_new_tokens=NEW, eos_token_id=text[9], pad_token_id=0)
    options = {"own": {}, "another": {"generation_config": config, "max_new_tokens": None}}.get(chosen, {})
    if chosen == "none":
        model.generation_config.eos_token_id = None
        fast = quick(PromptLookup())
        assert ours(model, BATCHES[rows], fast).shape[1] == len(PROMPT) + NEW
        model.generation_config.eos_token_id = text[4]
        assert ours(model, BATCHES[rows], fast).tolist() == plain(model, BATCHES[rows]).tolist()
        model.generation_config.eos_token_id = None
        assert ours(model, BATCHES[rows], fast).shape[1] == len(PROMPT) + NEW
    else:
        got = assert_same(model, BATCHES[rows], **options)
        assert rows != "one" or got.shape[1] == len(PROMPT) + (5 if chosen == "own" else 10)


@pytest.mark.parametrize("eos", [None, 11], ids=["no-eos", "eos"])
@pytest.mark.parametrize("at", [(2, 7, 4), (3, 3, 3), (1, 99, 1)], ids=str)
def test_stopping_criteria(model, at, eos):
    """Shown the batch after each column as in plain decoding. Without an end token finished rows go on."""
    options = {"eos_token_id": None if eos is None else plain(model, LEFT)[1, len(PROMPT) + eos].item()}
    theirs, mine = Recorder(at), Recorder(at)
    expected = plain(model, LEFT, stopping_criteria=StoppingCriteriaList([theirs]), **options)
    drafter = knowing(LEFT, plain(model, LEFT))
    got = ours(model, LEFT, quick(drafter), stopping_criteria=StoppingCriteriaList([mine]), **options)
    assert got.tolist() == expected.tolist()
    assert mine.calls == theirs.calls


def test_criterion_that_answers_with_a_bool(model, text):
    class Seen(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return input_ids[0, -1].item() == text[5]

    got = assert_same(model, IDS, stopping_criteria=StoppingCriteriaList([Seen()]))
    assert got.shape[1] <= len(PROMPT) + 6


def test_max_time(model):
    fast = quick(PromptLookup())
    assert ours(model, IDS, fast, max_time=0.0).tolist() == plain(model, IDS, max_time=0.0).tolist()
    assert ours(model, IDS, fast, max_time=600.0).tolist() == plain(model, IDS).tolist()


@pytest.mark.parametrize("rows", BATCHES)
def test_stop_strings(model, text, tokenizer, rows):
    """Two characters that are two tokens, the second inside what one round accepts."""
    stop = tokenizer.decode(text[5:7])
    assert len(stop) == 2
    strings = [stop, "no such text"]
    expected = plain(model, BATCHES[rows], stop_strings=strings, tokenizer=tokenizer)
    assert rows != "one" or expected.shape[1] < len(PROMPT) + 8
    drafter = knowing(BATCHES[rows], plain(model, BATCHES[rows]))
    got = ours(model, BATCHES[rows], quick(drafter, 5, tokenizer=tokenizer, stop_strings=strings))
    assert got.tolist() == expected.tolist()
    one = ours(model, BATCHES[rows], quick(drafter, 5, tokenizer=tokenizer, stop_strings=stop))
    assert one.tolist() == expected.tolist()


def test_text_ends_at_the_models_context():
    model = tiny(max_position_embeddings=16)
    with pytest.warns(UserWarning, match="context of 16 tokens"):
        got = ours(model, IDS, quick(PromptLookup()), max_new_tokens=30)
    assert got.tolist() == plain(model, IDS, max_new_tokens=10).tolist()
    with pytest.raises(ValueError, match="context of 16 tokens"):
        ours(model, torch.ones(1, 16, dtype=torch.int64), quick())


# Streams and outputs.


@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("eos", [None, 7], ids=["length", "eos"])
def test_streamer_gets_the_calls_of_plain_generate(model, text, rows, eos):
    options = {} if eos is None else {"eos_token_id": text[eos]}
    theirs, mine = Calls(), Calls()
    expected = plain(model, BATCHES[rows], streamer=theirs, **options)
    got = ours(model, BATCHES[rows], quick(knowing(BATCHES[rows], expected), streamer=mine), **options)
    assert got.tolist() == expected.tolist()
    assert mine.calls == theirs.calls


def test_text_streamers(model, tokenizer, capsys):
    plain(model, IDS, streamer=TextStreamer(tokenizer))
    expected = capsys.readouterr().out
    ours(model, IDS, quick(PromptLookup(), streamer=TextStreamer(tokenizer)))
    assert capsys.readouterr().out == expected
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30)
    thread = Thread(target=ours, args=(model, IDS, quick(PromptLookup(), streamer=streamer)))
    thread.start()
    streamed = "".join(streamer)
    thread.join()
    assert tokenizer.decode(PROMPT) + streamed == expected.rstrip("\n")
    with pytest.raises(ValueError, match="batch size 1"):
        ours(model, LEFT, quick(PromptLookup(), streamer=TextStreamer(tokenizer)))


def test_a_streamer_that_raises_leaves_the_decoder_free(model):
    class Broken(Calls):
        def put(self, value):
            super().put(value)
            if len(self.calls) == 4:
                raise KeyError("reader gone")

    broken = Broken()
    fast = quick(PromptLookup(), streamer=broken)
    with pytest.raises(KeyError, match="reader gone"):
        ours(model, IDS, fast)
    assert len(broken.calls) == 4
    assert ours(model, IDS, fast).tolist() == plain(model, IDS).tolist()


@pytest.mark.parametrize("rows", BATCHES)
def test_return_dict(model, rows):
    expected = plain(model, BATCHES[rows], return_dict_in_generate=True)
    got = ours(model, BATCHES[rows], quick(PromptLookup()), return_dict_in_generate=True)
    assert type(got) is type(expected)
    assert got.sequences.tolist() == expected.sequences.tolist()
    assert got.scores is None


def test_stats(model, text):
    fast = quick(always_right([PROMPT + text]), 3)
    ours(model, IDS, fast)
    (stats,) = fast.stats
    assert (stats.prompt_tokens, stats.new_tokens, stats.acceptance_rate) == (len(PROMPT), NEW, 1.0)


# Sampling.


@pytest.mark.parametrize("method", ["auto", "coupled"])
def test_manual_seed_governs(model, method):
    fast = quick(DraftModel(tiny(seed=1)), method=method)
    options = {"do_sample": True, "top_k": 0, "num_return_sequences": 3}

    def run(seed):
        torch.manual_seed(seed)
        return ours(model, IDS, fast, **options).tolist()

    first = run(0)
    assert run(0) == first
    assert run(1) != first
    assert len({tuple(row) for row in first}) == 3


SAMPLING = {
    "temperature-top_k-top_p": {"temperature": 0.6, "top_k": 5, "top_p": 0.9},
    "min_p": {"top_k": 0, "temperature": 1.5, "min_p": 0.2},
    "processor": {"top_k": 6, "temperature": 0.7, "suppress_tokens": [2, 5]},
}


@pytest.mark.parametrize(("name", "drafted"), [*((name, "model") for name in SAMPLING), ("processor", "certain")])
def test_sampled_pairs_follow_the_distribution(name, drafted):
    """The first token comes from the prompt's pass, the second is drafted: their joint distribution over 8 x 8."""
    model = tiny(vocab_size=8, initializer_range=0.12)
    ids, rows = torch.tensor([[3, 4]]), 300
    options = dict(SAMPLING[name])
    drafter = (
        DraftModel(tiny(vocab_size=8, initializer_range=0.12, seed=1))
        if drafted == "model"
        else ScriptedDrafter(lambda text, limit: [6, 1, 7][:limit])
    )
    torch.manual_seed(4)
    got = model.generate(
        ids,
        do_sample=True,
        max_new_tokens=3,
        num_return_sequences=rows,
        custom_generate=quick(drafter, 2),
        **options,
    )
    suppressed = options.pop("suppress_tokens", [])

    def next_probs(text):
        logits = own_logits(model, text)[-1].clone()
        logits[suppressed] = -torch.inf
        return exact_probs(logits, **options)

    first = next_probs([3, 4])
    pairs = torch.cat([p * next_probs([3, 4, token]) for token, p in enumerate(first)])
    assert (pairs > 0).sum() >= 9
    assert_follows(got[:, 2], first)
    assert_follows(got[:, 2] * 8 + got[:, 3], pairs)


WARPERS = {
    "all": (
        [TemperatureLogitsWarper(0.5), TopKLogitsWarper(4), TopPLogitsWarper(0.8), MinPLogitsWarper(0.1)],
        0,
        {"temperature": 0.5, "top_k": 4, "top_p": 0.8, "min_p": 0.1},
    ),
    "behind-processors": ([WholeHistory(), TopKLogitsWarper(4)], 1, {"top_k": 4}),
    "twice": ([TopKLogitsWarper(9), TopKLogitsWarper(4)], 1, {"top_k": 4}),
    "other-order": ([TopPLogitsWarper(0.8), TemperatureLogitsWarper(0.5)], 1, {"temperature": 0.5}),
    "keeps-several": ([TopPLogitsWarper(0.8, min_tokens_to_keep=2)], 1, {}),
    "other-filter": ([TopKLogitsWarper(4, filter_value=-100.0)], 1, {}),
    "typical": ([TemperatureLogitsWarper(0.5), TypicalLogitsWarper(0.5)], 0, {"temperature": 0.5, "typical_p": 0.5}),
    "not-last": ([TemperatureLogitsWarper(0.5), EpsilonLogitsWarper(0.1)], 2, {}),
    "subclass": ([type("Mine", (TopKLogitsWarper,), {})(4)], 1, {}),
    "none": ([], 0, {}),
}


@pytest.mark.parametrize(("processors", "left", "params"), WARPERS.values(), ids=WARPERS)
def test_warpers_are_applied_once(processors, left, params):
    assert split_sampling(processors, True) == (processors[:left], params)
    assert split_sampling(processors, False) == (processors, {"temperature": 0.0})


STOPS = {7, 9}
AS_RULES = {
    "repetition": ([RepetitionPenaltyLogitsProcessor(1.5)], 0, {"repetition_penalty": 1.5}),
    "part-of-the-prompt": ([RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=2)], 1, {}),
    "ngrams": ([NoRepeatNGramLogitsProcessor(3)], 0, {"no_repeat_ngram_size": 3}),
    "suppressed": ([SuppressTokensLogitsProcessor([4, 5])], 0, {"banned_token_ids": [4, 5]}),
    "suppressed-foreign": ([SuppressTokensLogitsProcessor([4, -1, 50])], 0, {"banned_token_ids": [4]}),
    "min-new": ([MinNewTokensLengthLogitsProcessor(6, 4, [9, 7])], 0, {"min_new_tokens": 4}),
    "min-length": ([MinLengthLogitsProcessor(8, [9, 7])], 0, {"min_new_tokens": 2}),
    "min-length-reached": ([MinLengthLogitsProcessor(3, [9, 7])], 0, {"min_new_tokens": 0}),
    "min-beyond-the-end": ([MinNewTokensLengthLogitsProcessor(6, 99, [9, 7])], 0, {"min_new_tokens": 20}),
    "min-of-another-prompt": ([MinNewTokensLengthLogitsProcessor(5, 4, [9, 7])], 1, {}),
    "min-of-other-stops": ([MinNewTokensLengthLogitsProcessor(6, 4, [9])], 1, {}),
    "several": (
        [RepetitionPenaltyLogitsProcessor(1.5), NoRepeatNGramLogitsProcessor(3), SuppressTokensLogitsProcessor([4])],
        0,
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 3, "banned_token_ids": [4]},
    ),
    "twice": ([NoRepeatNGramLogitsProcessor(3), NoRepeatNGramLogitsProcessor(2)], 1, {"no_repeat_ngram_size": 3}),
    "behind-others": ([WholeHistory(), NoRepeatNGramLogitsProcessor(2)], 2, {}),
    "subclass": ([type("Mine", (NoRepeatNGramLogitsProcessor,), {})(2)], 1, {}),
}


@pytest.mark.parametrize(("processors", "left", "rules"), AS_RULES.values(), ids=AS_RULES)
def test_processors_that_are_rules(processors, left, rules):
    """Those at the front, with a prompt of six tokens and twenty new ones at most."""
    assert split_rules(processors, 6, STOPS, 20, 50) == (processors[len(processors) - left :], rules)


# What cannot be honoured.

REFUSED = {
    "num_beams": {"num_beams": 2},
    "output_scores": {"output_scores": True, "return_dict_in_generate": True},
    "output_logits": {"output_logits": True, "return_dict_in_generate": True},
    "output_attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "output_hidden_states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "assistant_early_exit": {"assistant_early_exit": 1},
    "guidance_scale": {"guidance_scale": 1.5},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "dola_layers": {"dola_layers": "low"},
    "inputs_embeds": {"inputs_embeds": torch.zeros(1, 6, 64)},
    "position_ids": {"position_ids": torch.arange(1, 7)[None]},
    "watermarking_config": {
        "watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2], ngram_len=2, sampling_table_size=16),
        "do_sample": True,
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(model, name):
    with pytest.raises(ValueError, match=name):
        ours(model, IDS, quick(PromptLookup()), **REFUSED[name])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("synced_gpus", {"synced_gpus": True}),
        ("token_type_ids", {"token_type_ids": torch.zeros_like(IDS)}),
        ("assistant_model", {"assistant_model": object()}),
        ("is_assistant", {"generation_config": GenerationConfig(is_assistant=True, max_length=9)}),
        ("quantized", {"generation_config": GenerationConfig(cache_implementation="quantized", max_length=9)}),
        ("attention_mask", {"attention_mask": torch.ones(1, 9)}),
        ("attention_mask", {"attention_mask": torch.full_like(IDS, 2)}),
        ("attention_mask", {"attention_mask": torch.zeros_like(IDS)}),
    ],
    ids=["synced_gpus", "token_type_ids", "assistant_model", "is_assistant", "quantized", "wide", "twos", "empty"],
)
def test_refused_when_called_directly(model, name, options):
    with pytest.raises(ValueError, match=name):
        quick(PromptLookup())(model, IDS, **options)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_cache_with_tokens_is_refused(model):
    cache = DynamicCache(config=model.config)
    fast = quick(PromptLookup())
    assert ours(model, IDS, fast, past_key_values=cache).tolist() == plain(model, IDS).tolist()
    model(input_ids=IDS[:, :3], past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match="past_key_values"):
        ours(model, IDS, fast, past_key_values=cache)


def test_encoder_decoders_are_refused():
    config = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    with pytest.raises(ValueError, match="encoder-decoder"):
        T5ForConditionalGeneration(config).generate(IDS[:, :1], max_new_tokens=4, custom_generate=quick())


def test_arguments_of_speculative(model, tokenizer):
    for options, name in (
        ({"drafter": "ngram"}, "drafter"),
        ({"num_draft_tokens": 64}, "num_draft_tokens"),
        ({"num_draft_tokens": True}, "num_draft_tokens"),
        ({"method": "fastest"}, "method"),
        ({"stop_strings": "x"}, "tokenizer"),
        ({"stop_strings": 5}, "stop_strings must be None, a string"),
        ({"stop_strings": ["x", ""]}, "stop_strings must be None, a string"),
        ({"streamer": 5}, "streamer must be None or a streamer"),
    ):
        with pytest.raises(ValueError, match=name):
            speculative(**options)
    with pytest.raises(ValueError, match="do_sample"):
        ours(model, IDS, quick(method="greedy"), do_sample=True)
    with pytest.raises(ValueError, match="streamer"):
        quick(streamer=Calls())(model, IDS, streamer=Calls())


def test_errors_on_the_way_are_raised_and_leave_the_decoder_free(model):
    class Broken(LogitsProcessor):
        def __init__(self, fails):
            self.fails = fails

        def __call__(self, input_ids, scores):
            if input_ids.shape[1] > 9 and self.fails:
                raise KeyError("no such state")
            return scores * torch.nan if input_ids.shape[1] > 9 else scores

    fast = quick(PromptLookup())
    with pytest.raises(RuntimeError, match="NaN"):
        ours(model, LEFT, fast, logits_processor=LogitsProcessorList([Broken(False)]))
    with pytest.raises(KeyError, match="no such state"):
        ours(model, LEFT, fast, logits_processor=LogitsProcessorList([Broken(True)]))
    assert ours(model, LEFT, fast).tolist() == plain(model, LEFT).tolist()


# The model and the decoder between calls.


def test_the_model_generates_as_before(model):
    before = plain(model, LEFT)
    implementation = model.config._attn_implementation
    fast = speculative(PromptLookup())
    for options in ({}, {"num_beams": 2}, {"do_sample": True}):
        try:
            ours(model, LEFT, fast, **options)
        except ValueError:
            pass
        assert plain(model, LEFT).tolist() == before.tolist()
    assert model.config._attn_implementation == implementation
    expected = model.generate(IDS, max_new_tokens=NEW, num_beams=2)
    ours(model, IDS, fast)
    assert model.generate(IDS, max_new_tokens=NEW, num_beams=2).tolist() == expected.tolist()


@pytest.fixture
def built(monkeypatch):
    """The names of what has been built: decoders, and adapters, which examine the model."""
    names = []

    def count(name):
        original = getattr(hf, name)
        monkeypatch.setattr(hf, name, lambda *args, **kwargs: names.append(name) or original(*args, **kwargs))

    count("SpeculativeDecoder")
    count("ModelAdapter")
    return names


def test_one_decoder_a_model(built):
    models = [tiny(seed=seed) for seed in (3, 1)]
    fast = speculative(PromptLookup())
    for _ in range(2):
        for model in models:
            assert ours(model, IDS, fast, max_new_tokens=4).tolist() == plain(model, IDS, max_new_tokens=4).tolist()
    assert sorted(built) == ["ModelAdapter"] * 2 + ["SpeculativeDecoder"] * 2


def test_models_are_examined_once(built):
    model = tiny()
    for k in (2, 3, 4):
        ours(model, IDS, speculative(PromptLookup(), k), max_new_tokens=4)
    assert sorted(built) == ["ModelAdapter"] + ["SpeculativeDecoder"] * 3


def test_a_changed_model_is_examined_again(built):
    model = tiny()
    fast = speculative(PromptLookup())
    ours(model, IDS, fast, max_new_tokens=4)
    model.to(torch.bfloat16)
    ours(model, IDS, fast, max_new_tokens=4)
    model.resize_token_embeddings(TOY_VOCAB + 3)
    ours(model, IDS, fast, max_new_tokens=4)
    assert sorted(built) == ["ModelAdapter"] * 3 + ["SpeculativeDecoder"] * 3


def test_a_call_within_a_call(model):
    """A criterion that generates with the same model."""
    fast = quick(PromptLookup())

    class Nested(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            ours(model, IDS, quick(PromptLookup()), max_new_tokens=2)
            return False

    got = ours(model, IDS, fast, stopping_criteria=StoppingCriteriaList([Nested()]))
    assert got.tolist() == plain(model, IDS).tolist()


def test_the_model_is_not_kept_alive():
    model = tiny()
    fast = speculative(PromptLookup())
    ours(model, IDS, fast, max_new_tokens=4)
    model, seen = None, weakref.ref(model)
    gc.collect()
    assert seen() is None
    assert len(fast._decoders) == 0
