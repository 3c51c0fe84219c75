"""The drafters: no draft changes a text, and a draft model's cache equals a fresh pass after every round."""

from __future__ import annotations

import warnings
from functools import lru_cache

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec_triton import DraftModel, NoDraft, PromptLookup, SamplingParams, SpeculativeDecoder
from specdec_triton.adapter import ModelAdapter
from specdec_triton.drafters.base import Round, SessionOptions
from specdec_triton.errors import UnsupportedModelError
from specdec_triton.models import load_model
from specdec_triton.sampling import SamplingBatch
from specdec_triton.testing import (
    NAN,
    TOY_VOCAB,
    Alternating,
    always_wrong,
    assert_pages_add_up,
    own_logits,
    plain_greedy,
    random_drafts,
    toy_model,
)

PROMPTS = [[3, 5, 7, 3, 5, 7, 3, 5, 7, 11, 3], [2, 9], [60]]
NEW = 16


@lru_cache
def target():
    return toy_model()


@lru_cache
def small():
    return toy_model(seed=1, num_hidden_layers=1)


@lru_cache
def plain():
    return [plain_greedy(target(), prompt, NEW) for prompt in PROMPTS]


def greedy(**params):
    return SamplingParams(**{"temperature": 0, "max_new_tokens": NEW, **params})


@lru_cache
def checked():
    """The target after its start-up checks, which need not be repeated for every decoder here."""
    return ModelAdapter(target())


def decoder(drafter, k=4, **options):
    return SpeculativeDecoder(
        checked(), drafter, num_draft_tokens=k, page_size=5, exact=False, **{"adaptive": False, **options}
    )


def texts(engine, params):
    return [out.token_ids for out in engine.generate(PROMPTS, params)]


# A draft model's cache.


def assert_caches_hold_the_texts(engine, drafting):
    """Both caches agree with a fresh pass on all that is committed (faults.md E1, E2, E11): the next pass's logits
    equal the module's own, the draft model's from wherever its cache ends."""
    session = engine._loop.session
    for slot, handle in enumerate(engine._loop.scheduler.running):
        text = handle.prompt + handle.token_ids
        kept = {engine.target: (engine._loop.cache, len(text) - 1)}
        if (seen := int(session.seen[slot])) > 0:
            kept[session.adapter] = (session._cache, min(seen, len(text) - 1))
            if drafting:  # every committed token but the last two has its key, also after full acceptance
                assert seen >= len(text) - 2
        for adapter, (cache, n) in kept.items():
            new, context = torch.tensor([text[n:]]), torch.tensor([n], dtype=torch.int32)
            logits = adapter.forward(new, cache, cache.block_table[slot : slot + 1], context)[0, -1]
            want = own_logits(adapter.model, text)[-1]
            assert torch.allclose(logits, want, rtol=0, atol=3e-5 * float(want.abs().max()))


@pytest.mark.parametrize("draft", ["itself", "another"])
@pytest.mark.parametrize("pauses", [(1, (0,)), (2, (1,)), (14, (0, 13))], ids=["never", "every-second", "long"])
@pytest.mark.parametrize("k", [1, 4])
def test_caches_after_every_round(draft, pauses, k):
    """K = 4 with all accepted twice and more (E2), with few accepted (E1), and 4 -> 0 -> 4 (E11)."""
    model = target() if draft == "itself" else small()
    engine = decoder(Alternating(DraftModel(model), *pauses), k)
    handles = [engine.submit(prompt, greedy()) for prompt in PROMPTS]
    while engine.step():
        assert_caches_hold_the_texts(engine, drafting=pauses[0] == 1)
        assert_pages_add_up(engine._loop.cache)
        assert_pages_add_up(engine._loop.session._cache)
    assert [handle.output.token_ids for handle in handles] == plain()
    assert engine._loop.session._cache.free_pages == engine._loop.session._cache.num_pages


def test_acceptance_does_not_decay():
    """faults.md E1, B18: the target as its own drafter is right in every one of 20 rounds, greedy or sampled."""
    for params in (
        SamplingParams(temperature=0, max_new_tokens=100),
        SamplingParams(seed=3, max_new_tokens=100),
        SamplingParams(max_new_tokens=100),
        SamplingParams(temperature=0.7, top_p=0.9, top_k=30, max_new_tokens=100),
    ):
        (out,) = decoder(DraftModel(target())).generate([[2, 9]], params)
        assert out.stats.acceptance_rate == 1.0
        assert out.stats.target_passes == 1 + -(-99 // 5)


def test_drafts_do_not_depend_on_the_batch():
    """faults.md E14: rows that draft less, or not at all, change nothing for their neighbours."""
    for params in (greedy, lambda **x: SamplingParams(seed=4, max_new_tokens=NEW, **x)):
        each = [params(num_draft_tokens=k) for k in (8, 2, 5)]
        together = decoder(DraftModel(small()), 1).generate(PROMPTS, each)
        for prompt, one, out in zip(PROMPTS, each, together, strict=True):
            (alone,) = decoder(DraftModel(small()), 1).generate([prompt], one)
            assert alone.stats.accepted_at == out.stats.accepted_at
            assert alone.stats.drafted_at == out.stats.drafted_at


def test_greedy_requests_among_rejection_requests():
    """Two groups that draft different numbers of tokens, judged in one pass."""
    params = [greedy(num_draft_tokens=1), SamplingParams(max_new_tokens=NEW, num_draft_tokens=5), greedy(seed=1)]
    out = decoder(DraftModel(small()), 3).generate(PROMPTS, params)
    assert [out[0].token_ids, out[2].token_ids] == [plain()[0], plain()[2]]


# Vocabularies, contexts, bad models.


@pytest.mark.parametrize("vocab", [64, TOY_VOCAB + 23])
def test_padded_vocabularies(vocab):
    """faults.md I1: a draft model with fewer or more columns; the text is the target's, its ids within the target's."""
    draft = DraftModel(toy_model(seed=1, vocab_size=vocab))
    low = [[x % 60 for x in prompt] for prompt in PROMPTS]
    want = [plain_greedy(target(), prompt, NEW) for prompt in low]
    assert [out.token_ids for out in decoder(draft).generate(low, greedy())] == want
    seeded = [SamplingParams(seed=seed, max_new_tokens=NEW) for seed in range(3)]
    want = [out.token_ids for out in decoder(NoDraft()).generate(low, seeded)]
    assert [out.token_ids for out in decoder(draft).generate(low, seeded)] == want
    for out in decoder(draft).generate(low * 3, SamplingParams(temperature=1.5, max_new_tokens=NEW)):
        assert out.finish_reason == "length"
        assert max(out.token_ids) < TOY_VOCAB


def test_prompt_ids_that_the_draft_model_lacks():
    """faults.md I1: the text holds ids beyond the draft model's vocabulary."""
    draft = DraftModel(toy_model(seed=1, vocab_size=64))
    prompts = [[90, 3, 96], [5, 70]]
    want = [plain_greedy(target(), prompt, NEW) for prompt in prompts]
    assert any(max(text) >= 64 for text in want)
    assert [out.token_ids for out in decoder(draft).generate(prompts, greedy())] == want


def test_another_vocabulary_is_refused():
    with pytest.raises(ValueError, match="another vocabulary: 2000 ids, the target has 97"):
        decoder(DraftModel(toy_model(vocab_size=2000)))


def test_draft_context_limit():
    """faults.md J1: rows go on without drafts, the text is right, one warning for the decoder."""
    draft = toy_model(seed=1, max_position_embeddings=20)
    prompts = [*PROMPTS, list(range(20, 50))]  # the last is too long from the start
    want = [plain_greedy(target(), prompt, NEW) for prompt in prompts]
    engine = decoder(DraftModel(draft))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outputs = engine.generate(prompts, greedy())
        again = engine.generate(prompts, greedy())
    assert [out.token_ids for out in outputs] == [out.token_ids for out in again] == want
    assert sum("outgrown the draft model's context of 20 tokens" in str(w.message) for w in caught) == 1
    assert [out.stats.drafted > 0 for out in outputs] == [True, True, True, False]


def test_draft_logits_that_are_not_finite():
    """faults.md K1: a named warning, and those rows fall to K = 0; the others draft on."""
    draft = toy_model(seed=1)
    with torch.no_grad():
        draft.model.embed_tokens.weight[96] = NAN
    prompts = [[5, 96, 4], *PROMPTS]
    want = [plain_greedy(target(), prompt, NEW) for prompt in prompts]
    for params in (greedy(), SamplingParams(max_new_tokens=NEW)):
        with pytest.warns(UserWarning, match="drafter's logits hold NaN or infinity"):
            outputs = decoder(DraftModel(draft)).generate(prompts, params)
        assert params.greedy is False or [out.token_ids for out in outputs] == want
        assert [out.stats.drafted > 0 for out in outputs] == [False, True, True, True]
        assert [out.finish_reason for out in outputs] == ["length"] * 4


def test_draft_model_that_is_broken_from_the_start():
    """faults.md I16: refused when bound, not a drafter that is never right."""
    draft = toy_model(seed=1)
    with torch.no_grad():
        draft.model.norm.weight[3] = NAN
    with pytest.raises(UnsupportedModelError, match="differ from its own forward pass"):
        decoder(DraftModel(draft))


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_the_flag_and_the_file_disagree_about_the_head(tied, stored, tmp_path):
    """faults.md I7: a draft model whose head is tied to its embedding or not, and lies in the file or not. It drafts what it says in
    transformers, so that drafts for itself are all accepted; without a head it is refused."""
    toy_model(tie_word_embeddings=tied, seed=1).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in tensors) != tied
    if stored:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        if not tied:
            tensors["lm_head.weight"] += torch.randn_like(tensors["lm_head.weight"])
    else:
        tensors.pop("lm_head.weight", None)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    if not tied and not stored:
        with pytest.raises(UnsupportedModelError, match=r"lacks 1 of its tensors, 'lm_head\.weight'"):
            load_model(str(tmp_path))
        return
    draft = load_model(str(tmp_path))
    own = toy_model(tie_word_embeddings=tied, seed=1)
    if not tied:
        own.lm_head.weight.data.copy_(tensors["lm_head.weight"])
    engine = SpeculativeDecoder(draft, DraftModel(own), num_draft_tokens=3, exact=False, adaptive=False)
    outputs = engine.generate(PROMPTS, greedy())
    assert [out.token_ids for out in outputs] == [plain_greedy(own, prompt, NEW) for prompt in PROMPTS]
    assert engine.stats.acceptance_rate == 1.0


def test_draft_model_in_another_dtype():
    """faults.md I17: bf16 drafts for an fp32 target."""
    draft = toy_model(seed=1, dtype=torch.bfloat16)
    assert texts(decoder(DraftModel(draft)), greedy()) == plain()
    assert all(
        out.finish_reason == "length"
        for out in decoder(DraftModel(draft)).generate(PROMPTS, SamplingParams(max_new_tokens=NEW))
    )


def test_draft_model_of_another_type_with_a_window():
    """faults.md E3, E4: the drafter's own cache slides too."""
    draft = toy_model("mistral", seed=1, sliding_window=4)
    engine = decoder(DraftModel(draft))
    handles = [engine.submit(prompt, greedy()) for prompt in PROMPTS]
    while engine.step():
        assert_caches_hold_the_texts(engine, drafting=True)
    assert [handle.output.token_ids for handle in handles] == plain()


def test_one_draft_model_serves_two_decoders():
    """A drafter is a recipe: what it remembers belongs to the decoder."""
    draft = DraftModel(small())
    engines = [decoder(draft), decoder(draft, 2)]
    handles = [engine.submit(prompt, greedy()) for prompt in PROMPTS for engine in engines]
    while sum(engine.step() for engine in engines):
        pass
    assert [handle.output.token_ids for handle in handles] == [text for text in plain() for _ in engines]


# Prompt lookup.


@pytest.mark.parametrize("sizes", [(0, 0), (2, 3), (3, 0), ("3", 1), (1.5, 1)])
def test_prompt_lookup_refuses(sizes):
    with pytest.raises(ValueError, match="needs 1 <= min_ngram <= max_ngram"):
        PromptLookup(*sizes)


@pytest.mark.parametrize(
    "drafter", [PromptLookup(1), PromptLookup(4, 2), PromptLookup(10, 10), NoDraft()], ids=["1", "2-4", "10", "none"]
)
def test_lookup_of_other_sizes(drafter):
    assert texts(decoder(drafter, 6), greedy()) == plain()


def test_lookup_copies_a_repeating_text():
    """A text of period 20: from its second round on the drafts are right, and K grows to the limit."""
    cycle = torch.randperm(TOY_VOCAB)[:20]

    def follow(history, logits):
        return logits.index_fill(1, cycle[history.shape[1] % 20], 1e4)

    params = greedy(max_new_tokens=120, logits_processors=[follow])
    (want,) = decoder(NoDraft()).generate([[5]], params)
    (out,) = decoder(PromptLookup(), 8).generate([[5]], params)
    assert out.token_ids == want.token_ids == [int(cycle[i % 20]) for i in range(1, 121)]
    assert out.stats.acceptance_rate == 1.0
    assert out.stats.accepted_at[7] > 0
    assert out.stats.target_passes < 40


def test_drafts_that_are_never_right_are_noticed():
    """faults.md L5: below 2% of 200 drafts, one warning; the text stays right."""
    long = [plain_greedy(target(), prompt, 60) for prompt in PROMPTS]
    engine = decoder(always_wrong([p + t for p, t in zip(PROMPTS, long, strict=True)]))
    params = greedy(max_new_tokens=60)
    with pytest.warns(UserWarning, match=r"only 0 of the last 2\d\d drafts were accepted"):
        assert texts(engine, params) == long
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert texts(engine, params) == long  # warned once
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fine = decoder(random_drafts([p + t for p, t in zip(PROMPTS, long, strict=True)], right=0.2))
        assert texts(fine, greedy(max_new_tokens=60)) == long


def test_prompt_lookup_copies_on_through_a_period():
    """A text that repeats itself every 3 tokens: K tokens are drafted, though only 3 follow the last occurrence."""
    session = PromptLookup().bind(checked(), SessionOptions(slots=1))
    text = torch.tensor([[9, 5, 6, 7, 5, 6, 7]])
    lens, limits = torch.tensor([7], dtype=torch.int32), torch.tensor([8], dtype=torch.int32)
    params = SamplingBatch.from_params([greedy()], [7], "cpu")
    drafts = session.propose(Round(8, text, lens, limits, params, draw=None, needs_logits=False, reads=True))
    assert drafts.lens.tolist() == [8]
    assert drafts.tokens.tolist() == [[5, 6, 7, 5, 6, 7, 5, 6]]
