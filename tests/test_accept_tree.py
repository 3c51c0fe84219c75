"""``accept_tree``: by hand, against ``accept_reject`` and ``sample``, and its distribution against enumeration."""

from __future__ import annotations

import itertools

import pytest
import torch

from specdec_triton import ops
from specdec_triton._library import why_not_triton
from specdec_triton.sampling import SamplingBatch
from specdec_triton.testing import INF, NAN, assert_follows, batch_of, exact_probs

OP = "accept_tree"
VOCAB = 8
#    0 ── 1 ── 3 ── 5
#    │    └─── 4
#    └─── 2 ── 6
PARENTS = torch.tensor([-1, 0, 0, 1, 1, 3, 2])
TOKENS = torch.tensor([[7, 1, 2, 3, 4, 5, 6]])


def rows(*winners: int, vocab: int = VOCAB) -> torch.Tensor:
    """Logits ``[1,N,V]`` whose argmax after each node is given."""
    return torch.nn.functional.one_hot(torch.tensor([winners]), vocab).float()


def greedy(tokens, logits, parents=PARENTS, backend="torch", method="greedy", **options):
    params = batch_of(len(tokens), temperature=0)
    result = ops.accept_tree(tokens, logits, parents, params=params, method=method, backend=backend, **options)
    return [x.tolist() for x in result]


TABLE = {
    "nothing": ([0, 0, 0, 0, 0, 0, 0], [0], [0]),
    "first child": ([1, 0, 0, 0, 0, 0, 0], [0, 1], [1, 0]),
    "second child": ([2, 0, 7, 0, 0, 0, 0], [0, 2], [2, 7]),
    "to a leaf": ([1, 3, 0, 5, 0, 4, 0], [0, 1, 3, 5], [1, 3, 5, 4]),
    "second branch": ([2, 0, 6, 0, 0, 0, 1], [0, 2, 6], [2, 6, 1]),
    "a token of another branch": ([2, 0, 3, 0, 0, 0, 0], [0, 2], [2, 3]),
    "last of a depth": ([1, 4, 0, 0, 6, 0, 0], [0, 1, 4], [1, 4, 6]),
}


def padded(values: list[int], n: int = 7) -> list[int]:
    return values + [-1] * (n - len(values))


@pytest.mark.parametrize("method", ops.TREE_METHODS)
@pytest.mark.parametrize(("winners", "path", "tokens"), TABLE.values(), ids=TABLE)
def test_greedy_table(winners, path, tokens, method, backend):
    """Rows with temperature 0, whatever the method."""
    got = greedy(TOKENS, rows(*winners), backend=backend, method=method)
    assert got == [[padded(path)], [padded(tokens)], [len(path) - 1], [0]]


def test_a_tree_of_its_own_for_each_request(backend):
    """A chain, a star, and a root alone; parents of nodes past a length may be anything."""
    parents = torch.tensor([[-1, 0, 1, 2], [-1, 0, 0, 0], [-1, -7, 99, 3], [-1, 0, 1, 2]])
    tokens = torch.tensor([[7, 1, 2, 3], [7, 1, 2, 3], [7, 1, 2, 3], [7, 1, 2, 3]])
    logits = rows(1, 2, 3, 4).repeat(4, 1, 1)
    logits[1] = rows(3, 0, 0, 6)
    logits[3, 2:] = NAN  # not of this request
    path, out, accepted, status = greedy(
        tokens, logits, parents, backend, node_lens=torch.tensor([4, 4, 1, 2], dtype=torch.int32)
    )
    assert path == [[0, 1, 2, 3], [0, 3, -1, -1], [0, -1, -1, -1], [0, 1, -1, -1]]
    assert out == [[1, 2, 3, 4], [3, 6, -1, -1], [1, -1, -1, -1], [1, 2, -1, -1]]
    assert (accepted, status) == ([3, 1, 0, 1], [0, 0, 0, 0])


def test_a_request_without_nodes_is_skipped(backend):
    logits = rows(1, 2, 3, 4).repeat(2, 1, 1)
    logits[0] = NAN
    tokens, parents = torch.tensor([[7, 1, 2, 3]] * 2), torch.tensor([-1, 0, 1, 2])
    got = greedy(tokens, logits, parents, backend, node_lens=torch.tensor([0, 4], dtype=torch.int32))
    assert got == [[[-1] * 4, [0, 1, 2, 3]], [[-1] * 4, [1, 2, 3, 4]], [0, 3], [0, 0]]


def test_ties_and_twins(backend):
    """The lowest id of equal logits; the first of equal children, and what is below the second is out of reach."""
    parents = torch.tensor([-1, 0, 0, 1, 2])
    logits = rows(0, 4, 5, 0, 0)
    logits[0, 0, [2, 5]] = 1.0
    logits[0, 0, 0] = 0.0
    got = greedy(torch.tensor([[7, 2, 2, 5, 5]]), logits, parents, backend)
    assert got[:2] == [[[0, 1, -1, -1, -1]], [[2, 4, -1, -1, -1]]]


@pytest.mark.parametrize("foreign", [-1, VOCAB, 2**40])
def test_foreign_ids_end_their_branch(foreign, backend):
    tokens = TOKENS.clone()
    tokens[0, 1] = foreign
    logits = rows(1, 3, 6, 5, 0, 0, 0)
    assert greedy(tokens, logits, backend=backend)[1] == [padded([1])]
    logits = rows(2, 3, 6, 5, 0, 0, 0)
    assert greedy(tokens, logits, backend=backend)[1] == [padded([2, 6, 0])]


@pytest.mark.parametrize("method", ops.TREE_METHODS)
@pytest.mark.parametrize("spoil", [NAN, INF, -INF])
def test_bad_logits_end_only_their_request(spoil, method, backend):
    logits = torch.randn(3, 7, VOCAB)
    logits[1, 6] = spoil if spoil == -INF else logits[1, 6]
    logits[1, 6, 2] = spoil
    tokens, drafts = TOKENS.repeat(3, 1), torch.randn(3, 7, VOCAB)
    params = batch_of(3, position=5)
    got = ops.accept_tree(tokens, logits, PARENTS, drafts, params=params, method=method, backend=backend)
    assert got.status.tolist() == [0, 1, 0]
    assert got.num_accepted[1] == 0
    assert got.path[1].tolist() == got.tokens[1].tolist() == padded([0])


# Sampled.


def drawn(parents: torch.Tensor, logits_of, count: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Trees whose children were drawn without replacement: tokens ``[count,N]`` and the logits ``[count,N,V]`` after each node.

    Args:
        logits_of: from the tokens after the root, int64 ``[count,depth]``, to logits ``[count,V]``.
    """
    n = len(parents)
    tokens, logits = torch.zeros(count, n, dtype=torch.int64), torch.zeros(count, n, vocab)
    text = {0: torch.zeros(count, 0, dtype=torch.int64)}
    for node in range(n):
        logits[:, node] = logits_of(text[node])
        children = (parents == node).nonzero()[:, 0]
        noise = -torch.log(-torch.log(torch.rand(count, vocab)))
        order = (logits[:, node] + noise).topk(len(children)).indices
        for i, child in enumerate(children.tolist()):
            tokens[:, child] = order[:, i]
            text[child] = torch.cat([text[node], order[:, i : i + 1]], 1)
    return tokens, logits


def table(depth: int, vocab: int, scale: float = 1.5):
    """A random model of texts: the logits after at most ``depth`` tokens."""
    weights = [torch.randn(vocab**d, vocab) * scale for d in range(depth + 1)]

    def logits_of(text: torch.Tensor) -> torch.Tensor:
        code = torch.zeros(len(text), dtype=torch.int64)
        for column in text.T:
            code = code * vocab + column
        return weights[text.shape[1]][code]

    return logits_of


def after_nodes(parents: torch.Tensor, tokens: torch.Tensor, logits_of) -> torch.Tensor:
    """Logits ``[count,N,V]`` of a model after each node."""
    text, out = {0: tokens[:, :0]}, []
    for node, parent in enumerate(parents.tolist()):
        if node:
            text[node] = torch.cat([text[parent], tokens[:, node : node + 1]], 1)
        out.append(logits_of(text[node]))
    return torch.stack(out, 1)


TREES = {
    "star": [-1, 0, 0, 0],
    "two levels": [-1, 0, 0, 1, 1, 2],
    "chain": [-1, 0, 1],
    "all but one": [-1, 0, 0, 0, 0],  # of five tokens
    "as many as there are": [-1, 0, 0, 0, 0, 0],
}
COUNT = 100_000


@pytest.mark.torch_only
@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "certain"])
@pytest.mark.parametrize("method", ["rejection", "coupled"])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_distribution(tree, method, certain):
    """The first two tokens follow the target, whatever the tree brought."""
    vocab, parents = 5, torch.tensor(tree)
    target, drafter = table(3, vocab), table(3, vocab)
    tokens, drafts = drawn(parents, drafter, COUNT, vocab)
    logits = after_nodes(parents, tokens, target)
    params = batch_of(COUNT, position=3)
    got = ops.accept_tree(tokens, logits, parents, None if certain else drafts, params=params, method=method)
    first = target(torch.zeros(1, 0, dtype=torch.int64))[0]
    assert_follows(got.tokens[:, 0], exact_probs(first))
    for token in range(vocab):
        second = got.tokens[(got.num_accepted > 0) & (got.tokens[:, 0] == token), 1]
        if len(second):
            assert_follows(second, exact_probs(target(torch.tensor([[token]]))[0]))
    assert int((got.num_accepted > 0).sum()) > COUNT // 10


@pytest.mark.torch_only
@pytest.mark.parametrize("options", [{"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.3}], ids=str)
def test_distribution_under_parameters(options):
    """Filters may leave the drafter fewer tokens than the tree has children: those were not drawn."""
    vocab, parents = 6, torch.tensor([-1, 0, 0, 0, 0])
    target, drafter = torch.randn(vocab) * 2, torch.randn(vocab) * 2
    probs = exact_probs(drafter, **options)
    tokens, _ = drawn(parents, lambda text: probs.log().float().expand(len(text), -1), COUNT, vocab)
    logits = target.expand(COUNT, 5, vocab)
    got = ops.accept_tree(
        tokens,
        logits,
        parents,
        drafter.expand(COUNT, 5, vocab),
        params=batch_of(COUNT, position=3, **options),
        method="rejection",
    )
    assert_follows(got.tokens[:, 0], exact_probs(target, **options))


def accepted_by_enumeration(p: torch.Tensor, q: torch.Tensor, children: int) -> float:
    """The probability that one of the children is accepted: over all sequences of draws, by the definition."""
    total = 0.0
    for sequence in itertools.permutations(range(len(p)), children):
        weight, rejected, here, rest = 1.0, 1.0, p.double(), q.double()
        accepted = 0.0
        for token in sequence:
            weight *= float(rest[token])
            keep = min(1.0, float(here[token] / rest[token])) if rest[token] > 0 else 0.0
            accepted += rejected * keep
            rejected *= 1 - keep
            left = (here - rest).clamp(min=0)
            here = left / left.sum() if left.sum() > 0 else here
            rest = rest.clone()
            rest[token] = 0
            rest = rest / rest.sum() if rest.sum() > 0 else rest
        total += weight * accepted
    return total


@pytest.mark.torch_only
@pytest.mark.parametrize("children", [1, 2, 3, 4])
def test_acceptance_is_that_of_recursive_rejection(children):
    vocab = 5
    target, drafter = torch.randn(vocab) * 1.5, torch.randn(vocab) * 1.5
    parents = torch.tensor([-1] + [0] * children)
    tokens, drafts = drawn(parents, lambda text: drafter.expand(len(text), -1), COUNT, vocab)
    logits = target.expand(COUNT, children + 1, vocab)
    got = ops.accept_tree(tokens, logits, parents, drafts, params=batch_of(COUNT), method="rejection")
    want = accepted_by_enumeration(target.softmax(-1), drafter.softmax(-1), children)
    error = (want * (1 - want) / COUNT) ** 0.5
    assert abs(got.num_accepted.double().mean() - want) < 4.5 * error


def test_a_chain_is_judged_as_by_accept_reject(backend):
    """The same noise decides: what is accepted, and what replaces the first rejected draft."""
    count, k, vocab = (2000 if backend == "torch" else 12), 3, 11
    drafts, target = torch.randn(count, k, vocab), torch.randn(count, k + 1, vocab)
    tokens = torch.stack([drafts[:, j].softmax(-1).multinomial(1)[:, 0] for j in range(k)], 1)
    params = batch_of(count, position=9)
    nodes = torch.cat([torch.zeros(count, 1, dtype=torch.int64), tokens], 1)
    after = torch.cat([drafts, torch.full((count, 1, vocab), NAN)], 1)  # the leaf's row is nobody's
    parents = torch.arange(-1, k)
    for method in ("rejection", "coupled", "greedy"):
        chain = ops.accept_reject(tokens, target, drafts, params=params, method=method, backend=backend)
        tree = ops.accept_tree(nodes, target, parents, after, params=params, method=method, backend=backend)
        assert tree.num_accepted.tolist() == chain.num_accepted.tolist()
        recovered = chain.num_accepted < k if method == "rejection" else chain.num_accepted >= 0
        assert int(recovered.sum()) > count // 4
        assert tree.tokens[recovered].tolist() == chain.tokens[recovered].tolist()


@pytest.mark.parametrize("method", ["coupled", "rejection"])
def test_certain_children_are_followed_along_the_sampled_text(method, backend):
    """Each position's token is the one that ``sample`` gives for its row: whatever the tree, the same text."""
    count, vocab, position = (300 if backend == "torch" else 6), 9, 21
    parents = torch.tensor([-1, 0, 0, 0, 1, 1, 2, 4])
    logits = torch.randn(count, 8, vocab)
    tokens = torch.randint(0, vocab, (count, 8))
    params = batch_of(count, position=position, temperature=0.8, top_k=4)
    got = ops.accept_tree(tokens, logits, parents, params=params, method=method, backend=backend)
    assert int(got.num_accepted.sum()) > count // 8
    for depth in range(4):
        at = got.path[:, depth]
        there = at >= 0
        own = ops.sample(logits[torch.arange(count), at.clamp(min=0)], params=params.after(depth), backend=backend)
        assert got.tokens[there, depth].tolist() == own[there].tolist()


@pytest.mark.parametrize("method", ops.TREE_METHODS)
def test_rows_do_not_know_each_other(method, backend):
    count, n, vocab = (40 if backend == "torch" else 4), 7, 13
    logits, drafts = torch.randn(count, n, vocab), torch.randn(count, n, vocab)
    tokens = torch.randint(0, vocab, (count, n))
    params = batch_of(count, position=2)

    def judge(order):
        got = ops.accept_tree(
            tokens[order],
            logits[order],
            PARENTS,
            drafts[order],
            params=params.of(order),
            method=method,
            backend=backend,
        )
        return [x.tolist() for x in got]

    whole = judge(torch.arange(count))
    order = torch.randperm(count)[: count // 2]
    assert judge(order) == [[x[i] for i in order.tolist()] for x in whole]


def test_typical(backend):
    """The deepest path of likely children, the first of equally deep ones; not the first child that is likely."""
    parents = torch.tensor([-1, 0, 0, 2, 2, 3])
    tokens = torch.tensor([[7, 1, 2, 3, 4, 5]])
    logits = torch.full((1, 6, VOCAB), -4.0)
    logits[0, 0, [1, 2]] = 3.0
    logits[0, 2, [3, 4]] = 3.0  # both are likely
    logits[0, 3, 6] = 9.0  # and its child is not
    got = ops.accept_tree(tokens, logits, parents, params=batch_of(1, position=4), method="typical", backend=backend)
    assert got.path.tolist() == [[0, 2, 3, -1, -1, -1]]
    assert got.tokens.tolist() == [[2, 3, 6, -1, -1, -1]]
    logits[0, 3, 5] = 9.0
    deeper = ops.accept_tree(tokens, logits, parents, params=batch_of(1, position=4), method="typical", backend=backend)
    assert deeper.path.tolist() == [[0, 2, 3, 5, -1, -1]]


# The kernels against the reference.

SIZES = {"small": (4, 6, 9), "one node": (2, 1, 5), "wide": (1, 5, 4101), "many nodes": (1, 20, 33)}
OPTIONS = {"plain": {}, "filtered": {"temperature": 0.7, "top_k": 6, "top_p": 0.9}}


@pytest.mark.skipif(why_not_triton(OP, "cpu") is not None, reason=str(why_not_triton(OP, "cpu")))
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("count", "n", "vocab"), SIZES.values(), ids=SIZES)
def test_kernels_equal_the_reference(count, n, vocab, options):
    """Trees of all shapes, ragged, with twins, ids that were not drawn and requests of temperature 0."""
    parents = torch.full((count, n), -1)
    for i in range(1, n):
        parents[:, i] = torch.randint(max(0, i - 4), i, (count,))
    logits = torch.randn(count, n, vocab) * 1.5
    drafts = logits + torch.randn(count, n, vocab) * 0.5
    tokens = torch.randint(0, vocab, (count, n))
    for b, i in itertools.product(range(count), range(1, n)):
        rank = int((parents[b, :i] == parents[b, i]).sum())
        if torch.rand(()) < 0.9:
            tokens[b, i] = drafts[b, parents[b, i]].topk(min(rank + 1, vocab)).indices[-1]
    params = batch_of(count, position=17, **options)
    params.temperature[0] = 0.0
    lens = torch.randint(1, n + 1, (count,), dtype=torch.int32)
    lens[-1] = n
    for method, after in itertools.product(ops.TREE_METHODS, (None, drafts)):
        want, got = (
            ops.accept_tree(
                tokens, logits, parents, after, node_lens=lens, params=params, method=method, backend=backend
            )
            for backend in ("torch", "triton")
        )
        assert [x.tolist() for x in got] == [x.tolist() for x in want], method


# Arguments.


def good():
    return {
        "node_tokens": TOKENS.repeat(2, 1),
        "node_logits": torch.randn(2, 7, VOCAB),
        "parents": PARENTS,
        "node_draft_logits": torch.randn(2, 7, VOCAB),
        "node_lens": torch.tensor([7, 3], dtype=torch.int32),
        "params": batch_of(2),
        "method": "rejection",
    }


BAD = {
    "method must be one of": {"method": "block"},
    "node_logits must be of shape": {"node_logits": torch.randn(2, VOCAB)},
    "1 <= N <= 64": {"node_logits": torch.randn(2, 65, VOCAB)},
    "node_logits must be float32": {"node_logits": torch.randn(2, 7, VOCAB).double()},
    "node_tokens must be of shape": {"node_tokens": TOKENS},
    "node_tokens must be an integer": {"node_tokens": TOKENS.repeat(2, 1).float()},
    "parents must be a tensor": {"parents": PARENTS.tolist()},
    "parents must be of shape": {"parents": PARENTS[:-1]},
    r"parents\[0,3\] must be a node from 0 to 2": {"parents": torch.tensor([-1, 0, 0, 5, 1, 3, 2])},
    r"parents\[0,0\] must be -1": {"parents": torch.tensor([0, 0, 0, 1, 1, 3, 2])},
    "node_draft_logits must be of shape": {"node_draft_logits": torch.randn(2, 6, VOCAB)},
    "node_lens must be from 0 to N = 7": {"node_lens": torch.tensor([8, 1], dtype=torch.int32)},
    "params must be a SamplingBatch": {"params": None},
    "typical_epsilon must be a number": {"typical_epsilon": 2},
}


@pytest.mark.parametrize(("message", "changes"), BAD.items(), ids=BAD)
def test_refuses(message, changes):
    with pytest.raises(ValueError, match=message):
        ops.accept_tree(**{**good(), **changes})


def test_good_arguments_are_good():
    assert ops.accept_tree(**good()).status.tolist() == [0, 0]


def test_strided(backend):
    wide = torch.randn(2, 14, 3 * VOCAB)
    logits, drafts = wide[:, ::2, :VOCAB], wide[:, 1::2, VOCAB : 2 * VOCAB]
    tokens = TOKENS.expand(2, -1)
    given = {"params": batch_of(2), "method": "rejection", "backend": backend}
    want = ops.accept_tree(tokens.contiguous(), logits.contiguous(), PARENTS, drafts.contiguous(), **given)
    got = ops.accept_tree(tokens, logits, PARENTS[None].expand(2, -1), drafts, **given)
    assert [x.tolist() for x in got] == [x.tolist() for x in want]


@pytest.mark.parametrize("method", ops.TREE_METHODS)
def test_opcheck(method):
    p = batch_of(2)
    args = (
        TOKENS.repeat(2, 1), torch.randn(2, 7, VOCAB), PARENTS.repeat(2, 1), torch.randn(2, 7, VOCAB), None,
        p.temperature, p.top_k, p.top_p, p.min_p, None, p.seed, p.position, False, method, 0.3, 0.09, "torch",
    )  # fmt: skip
    torch.library.opcheck(torch.ops.specdec.accept_tree.default, args)


def test_shapes_on_meta():
    params = batch_of(2)
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
    on_meta = SamplingBatch(*(getattr(params, name).to("meta") for name in names))
    args = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in good().items()}
    result = ops.accept_tree(**{**args, "params": on_meta})
    assert [tuple(x.shape) for x in result] == [(2, 7), (2, 7), (2,), (2,)]
