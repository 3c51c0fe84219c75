"""Trees that EAGLE and Medusa heads draft: against the heads written down without a cache, and the texts that come of them."""

from __future__ import annotations

import itertools

import pytest
from head_cases import CONFIG, WIDTH, eagle_ids, eagle_logits, eagle_tensors, likeliest_nodes, paths_of, save
from test_own_layers import HEADS, medusa_logits, medusa_tensors

from specdec_triton import (
    Cascade,
    DynamicTree,
    EagleDrafter,
    LayerSkip,
    MedusaDrafter,
    NoDraft,
    SamplingParams,
    SpeculativeDecoder,
    StaticTree,
    SuffixDrafter,
    optimize,
)
from specdec_triton.adapter import ModelAdapter
from specdec_triton.errors import UnsupportedModelError
from specdec_triton.testing import plain_greedy, toy_model

TAPS = (2, 3, 3)
TEXT = [(37 * i) % 90 + 3 for i in range(1, 24)]
PROMPTS = [TEXT, TEXT[:1], TEXT[3:9], [5, 5, 5, 5]]
STATIC = StaticTree([0, 0, 1, 1, 2, 3, 3, 6, 0])
EAGLES = {"eagle": {"three": False}, "eagle3-reduced": {"draft_size": 40}}


def target():
    return toy_model(hidden_size=WIDTH, num_hidden_layers=6)


def adapter_of(model, mode):
    adapter = ModelAdapter(model)
    adapter.fixed_shapes = mode == "device"
    return adapter


def watched(decoder):
    """What the session is asked behind and what it drafts, round by round."""
    session, seen = decoder._loop.session, []
    propose = session.propose

    def watching(round_):
        drafts = propose(round_)
        for row, n in enumerate(round_.lens.tolist()):
            count = int(drafts.lens[row])
            if count:
                paths = paths_of(drafts, row)
                seen.append((round_.texts[row, :n].tolist(), paths[:count], int(round_.limits[row])))
        return drafts

    session.propose = watching
    return seen


@pytest.mark.parametrize("mode", ["reads", "device"])
@pytest.mark.parametrize("tree", [DynamicTree(4, 3), STATIC], ids=["dynamic", "static"])
@pytest.mark.parametrize("version", EAGLES.values(), ids=EAGLES)
def test_eagle_trees_are_those_of_the_head(version, tree, mode, tmp_path):
    """In every round: what was accepted along a path, and what was not, is as if it had been a chain."""
    model = target()
    tensors = eagle_tensors(model, **version)
    drafter = EagleDrafter(save(tmp_path / "head", tensors, CONFIG), tree=tree)
    decoder = SpeculativeDecoder(adapter_of(model, mode), drafter, num_draft_tokens=9, adaptive=False)
    seen = watched(decoder)
    outs = decoder.generate(PROMPTS, SamplingParams(temperature=0, max_new_tokens=30))
    assert [out.token_ids for out in outs] == [plain_greedy(model, prompt, 30) for prompt in PROMPTS]
    assert decoder.stats.accepted > 0
    assert len(seen) > 40
    columns = eagle_ids(tensors, model.config.vocab_size).tolist()
    for text, paths, limit in seen[::7]:
        logits = {}

        def log_probs(path, text=text, logits=logits):
            if path not in logits:
                logits[path] = eagle_logits(model, tensors, text, list(path), taps=TAPS).log_softmax(-1)
            return dict(zip(columns, logits[path].tolist(), strict=True))

        if isinstance(tree, DynamicTree):
            want = likeliest_nodes(log_probs, tree.depth, tree.branch, min(9, limit))
            assert set(paths) == set(want)
        else:
            assert len(paths) == min(9, limit)
            for path, rank in zip(paths, STATIC.ranks, strict=False):
                after = log_probs(path[:-1])
                assert path[-1] == sorted(after, key=after.get, reverse=True)[rank]


CHOICES = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize("mode", ["reads", "device"])
@pytest.mark.parametrize("tree", [DynamicTree(3, 4), CHOICES], ids=["dynamic", "choices"])
def test_medusa_trees_are_those_of_the_heads(tree, mode, tmp_path):
    model = target()
    tensors = medusa_tensors(model)
    drafter = MedusaDrafter(save(tmp_path / "heads", tensors, {}), tree=tree)
    decoder = SpeculativeDecoder(adapter_of(model, mode), drafter, num_draft_tokens=8, adaptive=False)
    seen = watched(decoder)
    outs = decoder.generate(PROMPTS, SamplingParams(temperature=0, max_new_tokens=30))
    assert [out.token_ids for out in outs] == [plain_greedy(model, prompt, 30) for prompt in PROMPTS]
    assert len(seen) > 40
    for text, paths, limit in seen[::5]:
        after = [dict(enumerate(x.log_softmax(-1).tolist())) for x in medusa_logits(model, tensors, text)]
        if isinstance(tree, DynamicTree):
            assert set(paths) == set(likeliest_nodes(lambda path, after=after: after[len(path)], 3, 4, min(8, limit)))
        else:
            ranked = [sorted(x, key=x.get, reverse=True) for x in after]
            want = [tuple(ranked[d][rank] for d, rank in enumerate(choice)) for choice in CHOICES]
            assert paths == want[: len(paths)]


def drafters_in(folder, model):
    eagle = save(folder / "eagle", eagle_tensors(model, draft_size=40), CONFIG)
    medusa = save(folder / "medusa", medusa_tensors(model), {})
    return {
        "eagle-dynamic": EagleDrafter(eagle, tree=DynamicTree(3, 4)),
        "eagle-static": EagleDrafter(eagle, tree=[0, 0, 1, 2]),
        "medusa": MedusaDrafter(medusa, tree=CHOICES),
        "cascade": Cascade([SuffixDrafter(min_match=2), EagleDrafter(eagle, tree=DynamicTree(4, 2))]),
    }


@pytest.mark.parametrize("rewritten", [False, True], ids=["plain", "optimized"])
def test_greedy_texts_are_the_targets(rewritten, tmp_path):
    model = target()
    want = [plain_greedy(model, prompt, 40) for prompt in PROMPTS]
    drafters = drafters_in(tmp_path, model)
    if rewritten:
        optimize(model)
    for drafter in drafters.values():
        for options in (
            {"adaptive": False},
            {},
            {"adaptive": False, "max_batch_size": 2, "num_pages": 40, "page_size": 4},
        ):
            decoder = SpeculativeDecoder(model, drafter, num_draft_tokens=12, **options)
            outs = decoder.generate(PROMPTS, SamplingParams(temperature=0, max_new_tokens=40))
            assert [out.token_ids for out in outs] == want
            assert decoder.stats.drafted > 0 or not options  # a random head may not pay


@pytest.mark.parametrize("mode", ["reads", "device"])
def test_seeded_texts_do_not_depend_on_trees(mode, tmp_path):
    model = target()
    params = [SamplingParams(seed=i, max_new_tokens=20 + 9 * i, temperature=0.9) for i in range(len(PROMPTS))]
    want = [out.token_ids for out in SpeculativeDecoder(adapter_of(model, mode), NoDraft()).generate(PROMPTS, params)]
    for drafter in drafters_in(tmp_path, model).values():
        for options in ({}, {"max_batch_size": 2}, {"num_pages": 60, "page_size": 4}):
            decoder = SpeculativeDecoder(adapter_of(model, mode), drafter, num_draft_tokens=12, **options)
            assert [out.token_ids for out in decoder.generate(PROMPTS, params)] == want


def test_sampled_texts_follow_the_target(tmp_path):
    from specdec_triton.verification import check_distribution

    model = target()
    for drafter in drafters_in(tmp_path, model).values():
        report = check_distribution(ModelAdapter(model), drafter, TEXT, samples=200)
        assert report.passed, report


def test_rules_make_chains(tmp_path):
    model = target()
    params = SamplingParams(temperature=0, max_new_tokens=20, repetition_penalty=1.2)
    want = [out.token_ids for out in SpeculativeDecoder(model, NoDraft()).generate(PROMPTS, params)]
    for name, drafter in drafters_in(tmp_path, model).items():
        decoder = SpeculativeDecoder(model, drafter, num_draft_tokens=12, adaptive=False)
        assert [out.token_ids for out in decoder.generate(PROMPTS, params)] == want
        longest = {"eagle-dynamic": 3, "eagle-static": 2, "medusa": HEADS}.get(name)
        assert longest is None or len(decoder.stats.drafted_at) == longest


def test_refusals(tmp_path):
    model = target()
    medusa = save(tmp_path / "medusa", medusa_tensors(model), {})
    with pytest.raises(UnsupportedModelError, match="tree is 4 deep, but there are 3 Medusa heads"):
        SpeculativeDecoder(model, MedusaDrafter(medusa, tree=DynamicTree(4, 2)))
    for wrong in ([[1]], [], [[0], [0]]):
        with pytest.raises(ValueError, match="tree"):
            MedusaDrafter(medusa, tree=wrong)
    eagle = save(tmp_path / "eagle", eagle_tensors(model), CONFIG)
    with pytest.raises(ValueError, match="tree"):
        EagleDrafter(eagle, tree=[0, 2])
    windowed = toy_model("gemma3_text", hidden_size=WIDTH, num_hidden_layers=6, sliding_window=16)
    with pytest.raises(UnsupportedModelError, match="sliding window of 16 tokens"):
        SpeculativeDecoder(windowed, EagleDrafter(eagle, tree=[0, 1]))


def test_costs_are_kept_by_drafter(tmp_path):
    """A head's passes are not those of a free drafter, nor of another head: costs that were measured for one are no other's."""
    model = target()
    drafters = drafters_in(tmp_path, model)
    wide = save(tmp_path / "wide", eagle_tensors(model), CONFIG)
    drafters |= {"free": SuffixDrafter(), "wide": EagleDrafter(wide), "skip": LayerSkip(3), "more": LayerSkip(4)}
    keys = {name: str(SpeculativeDecoder(model, drafter)._warmup._key()) for name, drafter in drafters.items()}
    assert len(set(keys.values())) == len(keys), keys


def test_numbers_that_are_not_finite(tmp_path):
    """A head that breaks in the middle of its work: fewer drafts, a warning, the target's text."""
    model = target()
    drafter = EagleDrafter(save(tmp_path / "head", eagle_tensors(model), CONFIG), tree=DynamicTree(3, 3))
    decoder = SpeculativeDecoder(model, drafter, num_draft_tokens=9, adaptive=False)
    head = decoder._loop.session._head
    finish, calls = head.finish, itertools.count()
    head.finish = lambda hidden: finish(hidden) * (float("nan") if next(calls) % 4 == 2 else 1.0)
    with pytest.warns(UserWarning, match="NaN or infinity"):
        outs = decoder.generate(PROMPTS, SamplingParams(temperature=0, max_new_tokens=20))
    assert [out.token_ids for out in outs] == [plain_greedy(model, prompt, 20) for prompt in PROMPTS]
