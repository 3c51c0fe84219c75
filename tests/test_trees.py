"""Trees of drafts: their shapes, passes over them, and texts that do not depend on them."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from head_cases import likeliest_nodes, path_to, paths_of

from specdec_triton import (
    Cascade,
    DynamicTree,
    NoDraft,
    PromptLookup,
    SamplingParams,
    SpeculativeDecoder,
    StaticTree,
    optimize,
)
from specdec_triton.adapter import ModelAdapter
from specdec_triton.drafters import Drafts
from specdec_triton.drafters.base import Children
from specdec_triton.drafters.heads.growing import fed_nodes, grow, level_of
from specdec_triton.errors import UnsupportedModelError
from specdec_triton.exactness import ExactnessError
from specdec_triton.testing import (
    ScriptedTrees,
    own_logits,
    plain_greedy,
    random_drafts,
    random_trees,
    toy_adapter,
    toy_model,
)
from specdec_triton.trees import check_target, lineage

PROMPTS = [[5, 17, 3, 44, 8, 21, 9], [11], [60, 61, 62, 63], [7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7]]


def random_parents(rng, k):
    return [rng.randint(0, i) for i in range(k)]


# Shapes.


@pytest.mark.parametrize("k", [0, 1, 2, 5, 31, 32, 63])
def test_lineage(k):
    rng = random.Random(k)
    rows = [random_parents(rng, k), list(range(k)), [0] * k]
    mask, depth = lineage(torch.tensor(rows, dtype=torch.int64).view(3, k))
    assert (mask.dtype, depth.dtype, mask.shape) == (torch.int64, torch.int32, (3, k + 1))
    for row, bits, depths in zip(rows, mask.tolist(), depth.tolist(), strict=True):
        for node in range(k + 1):
            seen = {0, *(draft + 1 for draft in path_to(row, node))}
            assert {j for j in range(64) if bits[node] >> j & 1} == seen
            assert depths[node] == len(seen) - 1


def test_static_trees():
    tree = StaticTree([0, 0, 1, 1, 3, 0])
    assert tree.ranks == (0, 1, 0, 1, 0, 2)
    assert tree.levels == ((1, 2, 6), (3, 4), (5,))
    assert (tree.depth, fed_nodes(tree), level_of(tree, 5), level_of(tree, 1)) == (3, 2, 1, 1)
    choices = [[0], [0, 0], [1], [0, 1], [2], [1, 0], [0, 0, 0]]
    assert StaticTree.of_choices(choices).parents == (0, 0, 0, 1, 1, 2, 4)
    assert StaticTree.of_choices(choices[::-1]) == StaticTree.of_choices(choices)
    for wrong in ([], [1], [0, 3], [0, -1], [0] * 64, [True], ["0"], 3):
        with pytest.raises(ValueError, match="tree"):
            StaticTree(wrong)
    for wrong in ([], [[0, 0]], [[0], [0]], [[1]], [[]], [[0], [0, 1]]):
        with pytest.raises(ValueError, match="tree"):
            StaticTree.of_choices(wrong)
    for depth, branch in ((0, 1), (64, 1), (3, 0), (5, 17), (2, 65), (2.0, 3)):
        with pytest.raises(ValueError, match=r"depth|branch"):
            DynamicTree(depth, branch)
    assert fed_nodes(DynamicTree(5, 16)) == 64


# Growing, of a head whose logits are a function of the path.


class Head:
    """Logits of paths by a table; states are the paths' numbers."""

    def __init__(self, vocab, seed, ids=None):
        self.vocab, self.ids = vocab, ids
        self.columns = list(range(vocab)) if ids is None else ids.tolist()
        self._generator = torch.Generator().manual_seed(seed)
        self._of, self.paths = {}, [()]
        self.fed = []  # the paths that were fed
        self.depths = []

    def logits(self, path):
        if path not in self._of:
            self._of[path] = 2 * torch.randn(self.vocab, generator=self._generator)
        return self._of[path]

    def score(self, states, depth):
        assert all(len(self.paths[int(s)]) == depth for s in states.flatten())
        self.depths.append(depth)
        return torch.stack([torch.stack([self.logits(self.paths[int(s)]) for s in row[:, 0]]) for row in states])

    def feed(self, tokens, states, sees):
        rows = []
        for own, before, bits in zip(tokens.tolist(), states[..., 0].tolist(), sees.tolist(), strict=True):
            row, first = [], len(self.fed)
            for j, (token, parent, seen) in enumerate(zip(own, before, bits, strict=True)):
                path = (*self.paths[int(parent)], token)
                self.fed.append(path)
                visible = [self.fed[i] for i in range(64) if seen >> i & 1 and i <= first + j]
                assert visible == [path[: n + 1] for n in range(len(path))]
                self.paths.append(path)
                row.append(len(self.paths) - 1)
            rows.append(row)
        return torch.tensor(rows, dtype=torch.float32)[..., None]

    def branch(self, logits, j, count, ids=None):
        best, possible = logits.topk(count, -1), logits.amax(-1, keepdim=True) != float("-inf")
        scores = logits.log_softmax(-1).gather(-1, best.indices).masked_fill(~possible, float("-inf"))
        return Children(best.indices if ids is None else ids[best.indices], scores)

    def log_probs(self, path):
        return dict(zip(self.columns, self.logits(path).log_softmax(-1).tolist(), strict=True))

    def children(self, path, count):
        best = self.logits(path).topk(count).indices
        return [(*path, self.columns[i]) for i in best.tolist()]

    def grow(self, tree, k):
        self.fed = []
        return grow(tree, k, torch.zeros(1, 1), self.feed, self.score, self.branch, self.ids)


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize(("depth", "branch", "k"), [(1, 3, 2), (3, 4, 10), (4, 2, 63), (5, 8, 30), (2, 6, 5)])
def test_dynamic_trees_hold_the_likeliest_nodes(depth, branch, k, reduced):
    ids = torch.tensor([3, 4, 8, 11, 20, 21, 35, 36, 50]) if reduced else None
    head = Head(9, seed=depth * 10 + branch, ids=ids)
    want = likeliest_nodes(head.log_probs, depth, branch, k)
    drafts = head.grow(DynamicTree(depth, branch), k)
    assert paths_of(drafts) == want
    assert drafts.lens.tolist() == [len(want)]
    assert head.depths == list(range(depth))
    assert not bool(drafts.failed.any())


def test_static_trees_hold_the_ranks_that_they_name():
    head = Head(9, seed=3)
    tree = StaticTree([0, 0, 1, 1, 3, 0, 5, 4])
    drafts = head.grow(tree, 63)
    for path, draft in zip(paths_of(drafts), range(8), strict=True):
        before = path[:-1]
        assert path == head.children(before, 9)[tree.ranks[draft]]
    assert paths_of(Head(9, seed=3).grow(tree, 4)) == paths_of(drafts)[:4]


def test_numbers_that_are_not_finite_end_a_tree():
    head = Head(9, seed=3)
    best = head.children((), 1)[0]
    for poison, failed in ((float("nan"), True), (float("-inf"), False)):
        head._of[best] = torch.full((9,), poison)
        drafts = head.grow(DynamicTree(3, 2), 20)
        assert drafts.failed.tolist() == [failed]
        kept = paths_of(drafts)[: int(drafts.lens[0])]
        assert kept
        assert not any(path[:1] == best and len(path) > 1 for path in kept)
    head._of[()] = torch.full((9,), float("nan"))
    assert head.grow(DynamicTree(3, 2), 20).lens.tolist() == [0]


# Passes.


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("mode", ["packed", "padded", "device", "optimized"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_a_pass_over_trees_scores_each_path(kind, mode, page_size):
    """Each node as the module scores its path alone; then the kept path's keys serve the next pass."""
    rng = random.Random(page_size)
    model = toy_model(kind, **({"sliding_window": 64} if kind == "gemma3_text" else {}))
    texts = [[rng.randrange(97) for _ in range(n)] for n in (9, 1, 14)]
    counts = [7, 1, 12]  # nodes
    parents = [random_parents(rng, 11) for _ in texts]
    tokens = torch.tensor([[text[-1], *(rng.randrange(97) for _ in range(11))] for text in texts])
    want = []
    for text, above, row, count in zip(texts, parents, tokens.tolist(), counts, strict=True):
        for node in range(count):
            path = [row[draft + 1] for draft in path_to(above, node)]
            want.append(own_logits(model, text + path)[-1])
    if mode == "optimized":
        optimize(model)
    adapter = ModelAdapter(model)
    adapter.fixed_shapes = mode == "device"
    cache = adapter.new_cache(slots=3, page_size=page_size, num_pages=100)
    for slot, text in enumerate(texts):
        cache.reserve(slot, len(text) + 12)
        if len(text) > 1:
            table = cache.block_table[slot : slot + 1]
            adapter.forward(torch.tensor([text[:-1]]), cache, table, torch.zeros(1, dtype=torch.int32))
    context, lens = (torch.tensor(x, dtype=torch.int32) for x in ([len(text) - 1 for text in texts], counts))
    tree = lineage(torch.tensor(parents))
    rows = 32 if mode == "padded" else None
    got = adapter.forward(tokens, cache, cache.block_table, context, lens, tree=tree, rows=rows)
    got = torch.cat([row[:count] for row, count in zip(got, counts, strict=True)])
    torch.testing.assert_close(got, torch.stack(want), rtol=1e-4, atol=2e-4)

    from specdec_triton import ops

    nodes = [4, 0, 10]
    paths = [[0, *(draft + 1 for draft in path_to(above, node))] for above, node in zip(parents, nodes, strict=True)]
    path = torch.tensor([p + [-1] * (12 - len(p)) for p in paths])
    for layer in range(len(adapter.observation.layers)):
        ops.compact_kv(*cache.layer(layer), cache.block_table, context, path)
    kept = torch.tensor([len(p) for p in paths], dtype=torch.int32)
    got = adapter.forward(torch.tensor([[33]] * 3), cache, cache.block_table, context + kept)
    for row, text, tokens_of, p in zip(got, texts, tokens.tolist(), paths, strict=True):
        whole = text + [tokens_of[node] for node in p[1:]] + [33]
        torch.testing.assert_close(row[0], own_logits(model, whole)[-1], rtol=1e-4, atol=2e-4)


# Texts.


def truth(model, prompts, new):
    return [prompt + plain_greedy(model, prompt, new) for prompt in prompts]


@pytest.mark.parametrize("mode", ["reads", "device"])
@pytest.mark.parametrize("options", [{}, {"max_batch_size": 2}, {"num_pages": 40, "page_size": 3}], ids=str)
@pytest.mark.parametrize("k", [1, 6, 24, 63])
def test_greedy_texts_are_the_targets(k, options, mode):
    model = toy_model()
    whole = truth(model, PROMPTS, 40)
    adapter = toy_adapter(mode)
    if options.get("num_pages") and k == 63:
        options = {**options, "num_pages": 90}
    decoder = SpeculativeDecoder(adapter, random_trees(whole), num_draft_tokens=k, adaptive=False, **options)
    outs = decoder.generate(PROMPTS, SamplingParams(temperature=0, max_new_tokens=40))
    assert [p + out.token_ids for p, out in zip(PROMPTS, outs, strict=True)] == whole
    stats = decoder.stats
    assert stats.accepted > (10 if k == 1 else 40)
    assert stats.accepted <= stats.drafted
    assert stats.new_tokens == 160
    assert stats.pages_in_use == 0


def test_more_is_accepted_than_of_chains():
    model = toy_model()
    whole = truth(model, PROMPTS, 40)
    rates = []
    for drafter in (random_trees(whole, right=1.0), random_drafts(whole, right=0.5)):
        decoder = SpeculativeDecoder(toy_adapter(), drafter, num_draft_tokens=20, adaptive=False)
        decoder.generate(PROMPTS, SamplingParams(temperature=0, max_new_tokens=40))
        rates.append(decoder.stats.tokens_per_target_pass)
    assert rates[0] > 1.5 * rates[1]


@pytest.mark.parametrize("mode", ["reads", "device"])
@pytest.mark.parametrize("method", ["coupled", "rejection", "block"])
def test_sampled_texts_do_not_depend_on_trees(method, mode):
    params = [SamplingParams(seed=i, max_new_tokens=25 + 5 * i, temperature=0.9, top_k=40) for i in range(4)]
    plain = SpeculativeDecoder(toy_adapter(mode), NoDraft(), method="coupled").generate(PROMPTS, params)
    want = [out.token_ids for out in plain]
    whole = [prompt + ids for prompt, ids in zip(PROMPTS, want, strict=True)]
    for options in ({"num_draft_tokens": 17}, {"num_draft_tokens": 9, "max_batch_size": 3, "page_size": 2}):
        decoder = SpeculativeDecoder(toy_adapter(mode), random_trees(whole), method=method, adaptive=False, **options)
        outs = decoder.generate(PROMPTS, params)
        assert decoder.stats.accepted > (30 if method == "coupled" else 0)
        assert [len(out.token_ids) for out in outs] == [len(ids) for ids in want]
        if method == "coupled":
            assert [out.token_ids for out in outs] == want


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("level", [1, 4])
def test_trees_and_chains_and_nothing_side_by_side(level, adaptive):
    model = toy_model()
    whole = truth(model, PROMPTS, 30)
    trees = random_trees(whole, level=level)
    drafter = Cascade([PromptLookup(max_ngram=2, min_ngram=2), trees])
    decoder = SpeculativeDecoder(toy_adapter(), drafter, num_draft_tokens=12, adaptive=adaptive)
    params = [SamplingParams(temperature=0, max_new_tokens=30, num_draft_tokens=n) for n in (12, 0, 5, 12)]
    outs = decoder.generate(PROMPTS, params)
    assert [p + out.token_ids for p, out in zip(PROMPTS, outs, strict=True)] == whole
    assert outs[1].stats.drafted == 0
    assert decoder.stats.accepted > 0 or (adaptive and level > 1)  # four rows a level do not pay in a batch of four


def test_stop_tokens_and_ends_inside_a_path():
    model = toy_model()
    whole = truth(model, PROMPTS, 30)
    stops = [text[len(prompt) + 11] for prompt, text in zip(PROMPTS, whole, strict=True)]
    params = [SamplingParams(temperature=0, max_new_tokens=30, stop_token_ids=[stop]) for stop in stops]
    decoder = SpeculativeDecoder(toy_adapter(), random_trees(whole, right=1.0), num_draft_tokens=30, adaptive=False)
    outs = decoder.generate(PROMPTS, params)
    for prompt, text, out, stop in zip(PROMPTS, whole, outs, stops, strict=True):
        new = text[len(prompt) :]
        assert out.token_ids == new[: new.index(stop) + 1]
        assert out.finish_reason == "stop"
    for length in (1, 2, 7):
        outs = decoder.generate(PROMPTS, SamplingParams(temperature=0, max_new_tokens=length))
        got = [p + out.token_ids for p, out in zip(PROMPTS, outs, strict=True)]
        assert got == [text[: len(p) + length] for p, text in zip(PROMPTS, whole, strict=True)]


@pytest.mark.parametrize("mode", ["reads", "device"])
def test_log_probabilities_are_those_of_the_path(mode):
    model = toy_model()
    whole = truth(model, PROMPTS, 20)
    decoder = SpeculativeDecoder(toy_adapter(mode), random_trees(whole), num_draft_tokens=20, adaptive=False)
    outs = decoder.generate(PROMPTS, SamplingParams(temperature=0, max_new_tokens=20, logprobs=3))
    for prompt, text, out in zip(PROMPTS, whole, outs, strict=True):
        want = own_logits(model, text).log_softmax(-1)
        for j, known in enumerate(out.logprobs):
            row = want[len(prompt) + j - 1]
            assert known.token_id == text[len(prompt) + j]
            assert abs(known.logprob - float(row[known.token_id])) < 1e-3
            assert set(known.top) == set(row.topk(3).indices.tolist())


def test_requests_with_rules_get_chains():
    """Rules follow the text: a node's row would have to know its path."""
    model = toy_model()
    whole = truth(model, PROMPTS[:2], 20)
    seen = []

    def script(text, limit):
        nodes = random_trees(whole).script(text, limit)
        seen.append(nodes)
        return nodes

    params = [
        SamplingParams(temperature=0, max_new_tokens=20, repetition_penalty=1.3),
        SamplingParams(temperature=0, max_new_tokens=20),
    ]
    want = SpeculativeDecoder(toy_adapter(), NoDraft()).generate(PROMPTS[:2], params)
    outs = SpeculativeDecoder(toy_adapter(), ScriptedTrees(script), num_draft_tokens=9, adaptive=False).generate(
        PROMPTS[:2], params
    )
    assert [out.token_ids for out in outs] == [out.token_ids for out in want]
    assert seen


def test_rejection_follows_the_target():
    """The first two tokens behind a prompt, of 4,000 seeds, against the module's own distribution."""
    from specdec_triton.testing import assert_follows

    model = toy_model(vocab_size=12)
    prompt = [3, 5, 7]
    rng = random.Random(1)
    trees = ScriptedTrees(lambda text, limit: [(rng.randrange(12), rng.randint(0, i)) for i in range(limit)])
    decoder = SpeculativeDecoder(
        ModelAdapter(model), trees, num_draft_tokens=6, adaptive=False, method="rejection", max_batch_size=64
    )
    params = [SamplingParams(seed=i, temperature=1.0, max_new_tokens=3) for i in range(4000)]
    outs = decoder.generate([prompt] * len(params), params)
    assert decoder.stats.accepted > 500
    first = own_logits(model, prompt)[-1].softmax(-1)
    assert_follows(torch.tensor([out.token_ids[0] for out in outs]), first)
    pairs = torch.stack([first[a] * own_logits(model, [*prompt, a])[-1].softmax(-1) for a in range(12)])
    assert_follows(torch.tensor([out.token_ids[0] * 12 + out.token_ids[1] for out in outs]), pairs.flatten())


# Refusals.


def test_what_trees_cannot_have():
    with pytest.raises(ExactnessError, match="exact=True cannot hold with trees"):
        SpeculativeDecoder(toy_adapter(), random_trees(), exact=True)
    adapter = ModelAdapter(toy_model("gemma3_text", sliding_window=16))
    with pytest.raises(UnsupportedModelError, match="sliding window of 16 tokens"):
        check_target(adapter)
    check_target(ModelAdapter(toy_model("gemma3_text", sliding_window=64)))


@pytest.mark.parametrize("wrong", ["late", "negative", "shape", "dtype"])
def test_parents_that_are_none(wrong):
    """The session is left out, with a warning that says why; the text is the target's."""
    model = toy_model()
    drafter = ScriptedTrees(lambda text, limit: [(5, 0)] * limit)
    bind = drafter.bind

    def bound(target, options):
        session = bind(target, options)
        propose = session.propose

        def broken(round_):
            drafts: Drafts = propose(round_)
            parents = drafts.parents
            if wrong == "late":
                parents[:, 1] = 2
            elif wrong == "negative":
                parents[:, 0] = -1
            elif wrong == "shape":
                drafts.parents = parents[:, 1:]
            else:
                drafts.parents = parents.int()
            return drafts

        session.propose = broken
        return session

    drafter.bind = bound
    decoder = SpeculativeDecoder(toy_adapter(), drafter, num_draft_tokens=4, adaptive=False)
    with pytest.warns(UserWarning, match="parents"):
        (out,) = decoder.generate(PROMPTS[:1], SamplingParams(temperature=0, max_new_tokens=10))
    assert out.token_ids == plain_greedy(model, PROMPTS[0], 10)


def test_every_small_tree_and_every_limit():
    """All trees of up to four drafts, the right path laid through each node: greedy texts, and as many accepted as the path is long."""
    model = toy_model()
    prompt = PROMPTS[0]
    (text,) = truth(model, [prompt], 8)
    for k in (1, 2, 3, 4):
        for parents in itertools.product(*(range(i + 1) for i in range(k))):
            for goal in range(k + 1):
                path = path_to(parents, goal)

                def script(known, limit, parents=parents, path=path):
                    depth = {draft: n for n, draft in enumerate(path)}
                    right = text[len(known) :]
                    return [
                        (right[depth[i]] if i in depth and depth[i] < len(right) else [*right, 0][0] + 1, parent)
                        for i, parent in enumerate(parents)
                    ][:limit]

                decoder = SpeculativeDecoder(
                    toy_adapter(), ScriptedTrees(script), num_draft_tokens=k, adaptive=False, exact=False
                )
                (out,) = decoder.generate([prompt], SamplingParams(temperature=0, max_new_tokens=6))
                assert prompt + out.token_ids == text[: len(prompt) + 6]


OP = "accept_tree"


def test_on_the_kernels(backend):
    """Mask, path and compaction of both backends: the target's text."""
    model = toy_model()
    (text,) = truth(model, [PROMPTS[0]], 12)
    new = 12 if backend == "torch" else 6
    drafter = random_trees([text], right=1.0)
    decoder = SpeculativeDecoder(
        model, drafter, num_draft_tokens=7, adaptive=False, backend=backend, page_size=4, exact=False, max_batch_size=1
    )
    (out,) = decoder.generate([PROMPTS[0]], SamplingParams(temperature=0, max_new_tokens=new))
    assert PROMPTS[0] + out.token_ids == text[: len(PROMPTS[0]) + new]
    assert out.stats.accepted > 0
