"""``accept_reject``, where the result is determined: equal integers. What is drawn: test_accept_reject_draws.py; the
kernels' bytes: test_accept_reject_kernels.py."""

from __future__ import annotations

import pytest
import torch

from specdec_triton import SamplingParams, ops
from specdec_triton.ops import METHODS, SamplingBatch
from specdec_triton.ops.sampling import unpacked
from specdec_triton.testing import INF, NAN, assert_follows, batch_of, exact_probs

OP = "accept_reject"
VOCAB = 10


def target_rows(*rows, vocab=VOCAB):
    """Logits ``[B,K+1,V]`` whose argmaxes are the given ids."""
    return torch.nn.functional.one_hot(torch.tensor(rows), vocab).float() * 5.0


def emitted(result):
    """What each request emits, as lists."""
    return [row[: n + 1] for row, n in zip(result.tokens.tolist(), result.num_accepted.tolist(), strict=True)]


def greedy(drafts, logits, backend="torch", **options):
    params = batch_of(len(drafts), temperature=0)
    drafts = torch.tensor(drafts, dtype=torch.int64).view(len(drafts), logits.shape[1] - 1)
    return ops.accept_reject(drafts, logits, params=params, method="greedy", backend=backend, **options)


# Greedy. anchors.md F: drafts, the target's argmaxes, what comes out.

GREEDY = {
    "all-accepted": ([[1, 2, 3]], [[1, 2, 3, 4]], [[1, 2, 3, 4]]),
    "second-rejected": ([[1, 2, 3]], [[1, 5, 3, 4]], [[1, 5, -1, -1]]),
    "ragged": ([[1, 2], [3, -1]], [[1, 2, 5], [3, 4, 9]], [[1, 2, 5], [3, 4, -1]]),
    "ragged-with-0": ([[1], [1], [-1]], [[1, 2], [2, 3], [5, 9]], [[1, 2], [2, -1], [5, -1]]),
    "third-and-second": (
        [[1, 2, 3], [4, 5, 6]],
        [[1, 2, 7, 6], [4, 8, 6, 9]],
        [[1, 2, 7, -1], [4, 8, -1, -1]],
    ),
    "rejected-and-all": ([[1, 2], [3, 4]], [[1, 5, 6], [3, 4, 7]], [[1, 5, -1], [3, 4, 7]]),
    "minus-1-in-the-middle": ([[1, -1, 3]], [[1, 2, 3, 4]], [[1, 2, -1, -1]]),
    "minus-1-first": ([[-1, 2, 3]], [[1, 2, 3, 4]], [[1, -1, -1, -1]]),
    "id-V": ([[1, VOCAB, 3]], [[1, 2, 3, 4]], [[1, 2, -1, -1]]),  # faults.md B8
    "id-far-out": ([[1 << 40, 2, 3]], [[1, 2, 3, 4]], [[1, -1, -1, -1]]),
    "K-0": ([[], []], [[7], [3]], [[7], [3]]),
    "first-draft-is-checked": ([[1]], [[2, 2]], [[2, -1]]),  # faults.md A3
}


@pytest.mark.parametrize(("drafts", "targets", "want"), GREEDY.values(), ids=GREEDY)
def test_greedy_table(drafts, targets, want, backend):
    result = greedy(drafts, target_rows(*targets), backend)
    assert result.tokens.tolist() == want
    assert result.num_accepted.tolist() == [sum(token != -1 for token in row) - 1 for row in want]
    assert result.status.tolist() == [0] * len(want)
    assert [x.dtype for x in result] == [torch.int64, torch.int32, torch.int32]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("drafts", "targets", "want"), GREEDY.values(), ids=GREEDY)
def test_temperature_0_is_greedy_whatever_the_method(drafts, targets, want, method, backend):
    """faults.md A8: at temperature 0 both distributions are one-hot; draft logits of another argmax change nothing."""
    logits = target_rows(*targets)
    draft_logits = torch.randn(*logits[:, 1:].shape)
    params = batch_of(len(drafts), temperature=0, top_p=0.5, top_k=2)
    drafts = torch.tensor(drafts, dtype=torch.int64).view(len(targets), logits.shape[1] - 1)
    for q in (None, draft_logits):
        result = ops.accept_reject(drafts, logits, q, params=params, method=method, backend=backend)
        assert result.tokens.tolist() == want


def test_ties_go_to_the_lowest_id(backend):
    """faults.md A2: also for a tie across distant columns."""
    logits = torch.zeros(1, 2, 9001)
    logits[0, :, [1, 2]] = 5.0
    logits[0, 1, 9000] = 5.0
    assert greedy([[2]], logits, backend).tokens.tolist() == [[1, -1]]
    assert greedy([[1]], logits, backend).tokens.tolist() == [[1, 1]]
    logits[0, 1, [1, 2]] = 0.0
    logits[0, 1, 4000] = 5.0
    assert greedy([[1]], logits, backend).tokens.tolist() == [[1, 4000]]


def test_greedy_compares_raw_logits(backend):
    """Neighbouring numbers that become equal over the temperature, and logits that overflow over it, are told apart."""
    low, high = 1.0, 1.0 + 2.0**-23
    logits = torch.tensor([[[low, high], [1e30, 1.1e30]]])
    for temperature in (0.0, 0.7, 3.0, 1e-5):
        params = batch_of(1, temperature=temperature)
        result = ops.accept_reject(torch.tensor([[1]]), logits, params=params, method="greedy", backend=backend)
        assert result.tokens.tolist() == [[1, 1]]
        assert result.status.tolist() == [0]


def test_overflow_over_a_tiny_temperature_is_a_bad_row(backend):
    """Sampled from fp32 logits of 1e35 at 1e-5: status 1, not some token."""
    logits = torch.tensor([[[0.0, 1e35]], [[0.0, 1.0]]])
    nothing = torch.empty(2, 0, dtype=torch.int64)
    for method in METHODS[1:]:
        params = batch_of(2, temperature=1e-5)
        result = ops.accept_reject(nothing, logits, params=params, method=method, backend=backend)
        assert result.status.tolist() == [1, 0]
        assert result.tokens.tolist() == [[0], [1]]


def test_draft_lens_end_the_draft(backend):
    """Drafts past draft_lens are not accepted even if right, and their rows not read."""
    logits = target_rows([1, 2, 3], [1, 2, 3], [1, 2, 3])
    logits[0, 1:] = NAN
    logits[1, 2] = NAN
    result = greedy([[1, 2], [1, 2], [1, 2]], logits, backend, draft_lens=torch.tensor([0, 1, 2]))
    assert result.tokens.tolist() == [[1, -1, -1], [1, 2, -1], [1, 2, 3]]
    assert result.status.tolist() == [0, 0, 0]


BAD_ROWS = {
    "nan": lambda row: row.index_fill_(-1, torch.tensor([3]), NAN),
    "inf": lambda row: row.index_fill_(-1, torch.tensor([3]), INF),
    "all-masked": lambda row: row.fill_(-INF),
    "all-nan": lambda row: row.fill_(NAN),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("spoil", BAD_ROWS.values(), ids=BAD_ROWS)
def test_bad_logits_end_only_their_request(spoil, method, backend):
    """faults.md B9, B11: status 1 for the row itself, at any place up to draft_lens; the others as without it."""
    logits = torch.randn(5, 4, VOCAB)
    drafts, lens = torch.randint(0, VOCAB, (5, 3)), torch.tensor([3, 3, 3, 1, 3])
    params = SamplingBatch.from_params([SamplingParams(temperature=t, seed=5) for t in (1, 0, 1, 0.7, 0)], range(5))
    args = {"draft_lens": lens, "params": params, "method": method, "backend": backend}
    clean = ops.accept_reject(drafts, logits, **args)
    for request, place in ((0, 0), (1, 3), (2, 2)):
        spoil(logits[request, place])
    spoil(logits[3, 2])  # past draft_lens: not read
    result = ops.accept_reject(drafts, logits, **args)
    assert result.status.tolist() == [1, 1, 1, 0, 0]
    assert result.num_accepted[:3].tolist() == [0, 0, 0]
    assert result.tokens[:3].tolist() == [[0, -1, -1, -1]] * 3
    assert torch.equal(result.tokens[3:], clean.tokens[3:])


@pytest.mark.parametrize("method", METHODS)
def test_masked_ids_never_win(method, backend):
    """faults.md B10, I2: padded columns hold -inf; a greedy row with -inf is greedy in a mixed batch (A9)."""
    rows = 60 if backend == "torch" else 20
    logits = torch.full((rows, 2, VOCAB), -INF)
    logits[:, :, [0, 1]] = torch.tensor([-50.0, -50.0])
    logits[:, :, 2] = -51.0
    drafts = torch.full((rows, 1), 7)
    params = batch_of(rows)
    params.temperature[::2] = 0.0
    result = ops.accept_reject(drafts, logits, params=params, method=method, backend=backend)
    assert result.num_accepted.tolist() == [0] * rows
    assert set(result.tokens[::2, 0].tolist()) == {0}
    if method != "greedy":
        assert set(result.tokens[1::2, 0].tolist()) == {0, 1, 2}


# Rejection: what is determined.


def sampled(method="rejection", *, drafts, logits, draft_logits=None, lse=None, backend="torch", **params):
    """The same drafts judged with many seeds (fewer in Triton's interpreter, where a filter's search takes 50 ms a row)."""
    filters = params.keys() & {"top_k", "top_p", "min_p"}
    rows = 2000 if backend == "torch" else 6 if filters else 48
    return ops.accept_reject(
        torch.tensor(drafts, dtype=torch.int64).expand(rows, len(drafts)).contiguous(),
        logits.expand(rows, *logits.shape).contiguous(),
        None if draft_logits is None else draft_logits.expand(rows, *draft_logits.shape).contiguous(),
        draft_lse=None if lse is None else lse.expand(rows, *lse.shape).contiguous(),
        params=batch_of(rows, position=11, **params),
        method=method,
        backend=backend,
    )


def test_equal_distributions_accept_everything(backend):
    """faults.md B18: p = q has acceptance 1, with and without draft_lse, filters included."""
    logits = torch.randn(4, VOCAB)
    drafts = torch.stack([logits[j].topk(3).indices for j in range(3)])[:, 0]
    for params in ({}, {"top_k": 3, "top_p": 0.8, "temperature": 0.6}):
        result = sampled(drafts=drafts.tolist(), logits=logits, draft_logits=logits[:3], backend=backend, **params)
        assert set(result.num_accepted.tolist()) == {3}


@pytest.mark.torch_only
def test_zero_residual(backend):
    """faults.md B9: p = q leaves no residual, neither as one point nor when a draft_lse that is too small lets q
    exceed p everywhere, so that drafts are rejected: then p itself is drawn from."""
    one_hot = torch.full((2, VOCAB), -INF)
    one_hot[:, 4] = 0.0
    result = sampled(drafts=[4], logits=one_hot, draft_logits=one_hot[:1], backend=backend)
    assert set(map(tuple, result.tokens.tolist())) == {(4, 4)}
    logits = torch.randn(2, VOCAB)
    lse = logits[:1].logsumexp(-1) - 0.5
    result = sampled(drafts=[4], logits=logits, draft_logits=logits[:1], lse=lse, backend=backend)
    assert not result.status.any()
    rejected = result.tokens[result.num_accepted == 0, 0]
    assert len(rejected) > 0
    if backend == "torch":
        assert_follows(rejected, exact_probs(logits[0]))


def test_a_draft_that_the_draft_model_cannot_draw_is_rejected(backend):
    """faults.md B9: q(draft) = 0, as -inf, as filtered, or in a row of NaN."""
    logits = torch.zeros(2, VOCAB)
    q = torch.zeros(1, VOCAB)
    q[0, 4] = -INF
    assert not sampled(drafts=[4], logits=logits, draft_logits=q, backend=backend).num_accepted.any()
    q[0, 4] = -3.0
    assert not sampled(drafts=[4], logits=logits, draft_logits=q, backend=backend, top_k=1).num_accepted.any()
    q[0, 7] = NAN
    result = sampled(drafts=[4], logits=logits, draft_logits=q, backend=backend)
    assert not result.num_accepted.any()
    assert set(result.tokens[:, 0].tolist()) == set(range(VOCAB))


def test_a_draft_that_the_target_excludes_is_never_accepted(backend):
    """faults.md B5: p(draft) = 0, as -inf or as filtered, with a drafter that is certain or not."""
    logits = torch.zeros(2, VOCAB)
    logits[0, 4] = -INF
    for q in (None, torch.zeros(1, VOCAB)):
        result = sampled(drafts=[4], logits=logits, draft_logits=q, backend=backend)
        assert not result.num_accepted.any()
        assert 4 not in result.tokens[:, 0]
    logits[0] = torch.arange(VOCAB)
    assert not sampled(drafts=[4], logits=logits, backend=backend, top_k=3).num_accepted.any()


def test_disjoint_supports(backend):
    """anchors.md F: reject at once, and a residual of one point fixes the token."""
    p, q = torch.full((2, VOCAB), -INF), torch.full((1, VOCAB), -INF)
    p[:, 2], q[:, [3, 4]] = 0.0, 0.0
    result = sampled(drafts=[3], logits=p, draft_logits=q, backend=backend)
    assert set(map(tuple, result.tokens.tolist())) == {(2, -1)}


def test_tiny_temperature_is_finite_and_nearly_greedy(backend):
    """faults.md B15: T = 1e-6 in every dtype."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        logits = (torch.randn(3, VOCAB) * 50).to(dtype)
        want = logits.argmax(-1).tolist()
        for method in ("rejection", "coupled"):
            result = sampled(method, drafts=want[:2], logits=logits, backend=backend, temperature=1e-6)
            assert set(map(tuple, result.tokens.tolist())) == {tuple(want)}


def test_draft_lse_changes_nothing(backend):
    """It only saves reading the draft rows."""
    rows, k = 64 if backend == "torch" else 6, 3
    target, draft = torch.randn(rows, k + 1, VOCAB), torch.randn(rows, k, VOCAB)
    params = batch_of(rows, temperature=0.8, top_p=0.9)
    drawn = [ops.sample(draft[:, j], params=params, node=j, return_lse=True, backend=backend) for j in range(k)]
    drafts, lse = (torch.stack(x, 1) for x in zip(*drawn, strict=True))
    args = {"params": params, "method": "rejection", "backend": backend}
    with_lse = ops.accept_reject(drafts, target, draft, draft_lse=lse, **args)
    without = ops.accept_reject(drafts, target, draft, **args)
    for a, b in zip(with_lse, without, strict=True):
        assert torch.equal(a, b)


# Typical.

TYPICAL = {  # target's probabilities, draft, options, whether it is kept. Threshold: min(epsilon, delta exp(-entropy))
    "likely-enough": ([0.9, 0.1], 1, {}, True),  # 0.1 > 0.09 exp(-0.325) = 0.065
    "too-unlikely": ([0.95, 0.05], 1, {}, False),  # 0.05 < 0.074
    "epsilon-is-the-cap": ([0.95, 0.05], 1, {"typical_epsilon": 0.02}, True),
    "a-larger-delta": ([0.9, 0.1], 1, {"typical_delta": 0.2}, False),
    "flat-rows-forgive": ([0.125] * 8, 3, {}, True),  # exp(-entropy) = 1/8
    "impossible": ([0.5, 0.5, 0.0], 2, {"typical_epsilon": 0.0}, False),
}


@pytest.mark.parametrize(("probs", "draft", "options", "kept"), TYPICAL.values(), ids=TYPICAL)
def test_typical(probs, draft, options, kept, backend):
    """Medusa's rule, whose acceptance draws nothing; draft logits are not asked."""
    rows = 4
    logits = torch.tensor(probs).log().expand(rows, 2, len(probs)).contiguous()
    drafts = torch.full((rows, 1), draft)
    for q in (None, torch.zeros(rows, 1, len(probs))):
        params = batch_of(rows)
        result = ops.accept_reject(drafts, logits, q, params=params, method="typical", backend=backend, **options)
        assert result.num_accepted.tolist() == [int(kept)] * rows


def test_typical_entropy_is_that_of_the_kept_tokens(backend):
    """With top-k 1 it is zero: only the most likely token passes, and that for sure."""
    logits = torch.tensor([0.4, 0.35, 0.25]).log().expand(2, 3)
    for draft, accepted in ((0, 1), (1, 0)):
        result = sampled("typical", drafts=[draft], logits=logits, backend=backend, top_k=1)
        assert set(result.num_accepted.tolist()) == {accepted}
        assert set(result.tokens[:, accepted].tolist()) == {0}


# Coupled.


def test_coupled_token_is_the_sampled_token(backend):
    """Position i's token is ``sample``'s at position i, whatever was drafted: one path (faults.md B17, C1)."""
    rows, k = 24 if backend == "torch" else 4, 4
    logits = torch.randn(rows, k + 1, 50)
    params = [SamplingParams(temperature=0.9, top_p=0.95, seed=7 * b) for b in range(rows)]
    path = torch.stack(
        [
            ops.sample(
                logits[:, j].contiguous(), params=SamplingBatch.from_params(params, [9 + j] * rows), backend=backend
            )
            for j in range(k + 1)
        ],
        1,
    )
    batch = SamplingBatch.from_params(params, [9] * rows)

    def judge(drafts):
        return ops.accept_reject(drafts, logits, params=batch, method="coupled", backend=backend)

    assert torch.equal(judge(path[:, :k].clone()).tokens, path)
    wrong = path[:, :k].clone()
    wrong[:, 2] = (wrong[:, 2] + 1) % 50
    result = judge(wrong)
    assert result.num_accepted.tolist() == [2] * rows
    assert torch.equal(result.tokens[:, :3], path[:, :3])
    assert (result.tokens[:, 3:] == -1).all()


@pytest.mark.parametrize("method", METHODS)
def test_rows_do_not_know_each_other(method, backend):
    """faults.md A4, C1, C2: permuting rows permutes results; alone, in pairs and twice in a batch give the same."""
    rows, k = 12, 3
    drafts, logits, q = torch.randint(0, 6, (rows, k)), torch.randn(rows, k + 1, 6), torch.randn(rows, k, 6)
    one = [SamplingParams(temperature=(1.0, 0.0, 0.5)[b % 3], seed=b // 2, top_k=(0, 2)[b % 2]) for b in range(rows)]
    lens = torch.tensor([b % (k + 1) for b in range(rows)])

    def judge(order):
        batch = SamplingBatch.from_params([one[b] for b in order], [b + 3 for b in order])
        x = torch.tensor(order)
        result = ops.accept_reject(
            drafts[x], logits[x], q[x], draft_lens=lens[x], params=batch, method=method, backend=backend
        )
        return emitted(result)

    together = judge(list(range(rows)))
    order = torch.randperm(rows).tolist()
    assert judge(order) == [together[b] for b in order]
    assert judge([3, 3]) == [together[3], together[3]]
    for b in range(rows):
        assert judge([b]) == [together[b]]


@pytest.mark.parametrize("method", METHODS)
def test_padding_with_more_drafts_changes_nothing(method, backend):
    """faults.md G4: a row's result does not depend on how far its neighbours drafted."""
    rows, k = 40, 2
    drafts, logits, q = torch.randint(0, 6, (rows, k)), torch.randn(rows, k + 1, 6), torch.randn(rows, k, 6)
    params, lens = batch_of(rows, position=5), torch.full((rows,), k)
    args = {"params": params, "method": method, "backend": backend}
    want = emitted(ops.accept_reject(drafts, logits, q, **args))
    wide = (
        torch.cat([drafts, torch.full((rows, 3), 999)], 1),
        torch.cat([logits, torch.full((rows, 3, 6), NAN)], 1),
        torch.cat([q, torch.full((rows, 3, 6), NAN)], 1),
    )
    assert emitted(ops.accept_reject(*wide, draft_lens=lens, **args)) == want


def test_odd_top_k_and_top_p(backend):
    """faults.md B15: top_k beyond V keeps all, 0 and -1 are off, top_p 0 keeps the most likely token."""
    logits = torch.randn(1, VOCAB)
    assert set(sampled(drafts=[], logits=logits, top_p=0.0, backend=backend).tokens[:, 0].tolist()) == {
        int(logits.argmax())
    }
    want = sampled(drafts=[], logits=logits, backend=backend).tokens
    for top_k in (0, -1, 10**7, VOCAB):
        got = sampled(drafts=[], logits=logits, top_k=top_k, backend=backend).tokens
        assert torch.equal(got, want[: len(got)])


# Awkward inputs.


def test_expanded_and_strided_small_inputs(backend):
    """Parameters expanded from one number or taken as columns, lengths and log-sum-exps likewise."""
    rows, k = 3, 2
    target, draft = torch.randn(rows, k + 1, 12), torch.randn(rows, k, 12)
    drafts = torch.randint(0, 12, (rows, k))
    lse = draft.logsumexp(-1)
    one = batch_of(1, seed=3, position=8, temperature=0.7, top_k=5)
    fields = {name: getattr(one, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed", "position")}
    lens = torch.tensor([1])
    for method in METHODS:
        results = []
        for place in (lambda x: x.repeat(rows), lambda x: x.expand(rows), lambda x: x.repeat(rows, 2)[:, 0]):
            params = SamplingBatch(**{name: place(x.view(1, -1)[0]) for name, x in fields.items()})
            results.append(
                ops.accept_reject(
                    drafts.t().contiguous().t(), target, draft, draft_lse=lse.t().contiguous().t(),
                    draft_lens=place(lens), params=params, method=method, backend=backend,
                )
            )  # fmt: skip
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
        tokens = [
            ops.sample(target[:, 0], params=SamplingBatch(**{n: p(x) for n, x in fields.items()}), backend=backend)
            for p in (lambda x: x.repeat(rows), lambda x: x.expand(rows))
        ]
        assert torch.equal(*tokens)


def test_both_zeros_are_one_number(backend):
    """-0.0 and 0.0 tie, at every filter's boundary too."""
    logits = torch.tensor([[-0.0, 0.0, -1.0, -0.0], [0.0, -1.0, -0.0, -0.0], [-0.0, -1.0, -0.0, -2.0]])
    for filters in ({"min_p": 1.0}, {"top_k": 1}, {"top_p": 0.1}, {"top_k": 2, "top_p": 0.5, "min_p": 0.9}):
        params = batch_of(3, temperature=1.7, **filters)
        tokens, lse = ops.sample(logits, params=params, return_lse=True, backend=backend)
        assert (logits.gather(1, tokens[:, None]) == 0).all()
        assert torch.allclose(lse, torch.tensor([3.0, 3.0, 2.0]).log())


@pytest.mark.parametrize("vocab", [3, 5000])
def test_noise_keeps_its_digits_beside_large_logits(vocab, backend):
    """Two tied tokens at T = 1e-5, where a logit of 100 becomes 1e7: either comes up half the time, in one part of the
    vocabulary or in two (within 4.5 standard deviations)."""
    rows = 24 if backend == "triton" else 4000 if vocab == 3 else 300
    logits = torch.zeros(vocab)
    logits[[0, vocab - 2]] = 100.0
    params = batch_of(rows, temperature=1e-5, position=5)
    tokens = ops.sample(logits.expand(rows, vocab), params=params, backend=backend)
    assert set(tokens.tolist()) == {0, vocab - 2}
    assert abs((tokens == 0).double().mean() - 0.5) < 4.5 * 0.5 / rows**0.5
    nothing = torch.empty(rows, 0, dtype=torch.int64)
    for method in ("coupled", "rejection"):
        result = ops.accept_reject(
            nothing, logits.expand(rows, 1, vocab), params=params, method=method, backend=backend
        )
        assert abs((result.tokens == 0).double().mean() - 0.5) < 4.5 * 0.5 / rows**0.5


def test_probabilities_do_not_lose_digits_at_low_temperature(backend):
    """Logits near 20 at 1e-4: the log-sum-exp is near 2e5, whose last digit is 1.6% of a probability."""
    logits = torch.tensor([[20.0, 20.0 + d * 2.0**-19] for d in range(1, 25)])
    params = batch_of(24, temperature=1e-4, top_p=0.5)
    scaled = logits * params.temperature.reciprocal()[:, None]
    top = torch.softmax(scaled.double(), -1).amax(-1)
    for slack, expected in (
        (-1e-3, True),
        (1e-3, False),
    ):  # a top-p just within and just beyond the likelier token's share
        params.top_p[:] = (top * (1 + slack)).clamp(max=1.0).float()
        lse = ops.sample(logits, params=params, return_lse=True, backend=backend)[1]
        alone = lse == scaled.amax(-1)
        decided = (top * (1 + abs(slack)) < 1.0) & (top < 0.99)
        assert decided.sum() > 5
        assert (alone[decided] == expected).all()


# Arguments.


def good():
    return {
        "draft_tokens": torch.zeros(2, 3, dtype=torch.int64),
        "target_logits": torch.zeros(2, 4, 5),
        "draft_logits": torch.zeros(2, 3, 5),
        "draft_lse": torch.zeros(2, 3),
        "draft_lens": torch.tensor([3, 1]),
        "params": batch_of(2),
        "method": "rejection",
    }


def spoiled(name, value):
    params = batch_of(2)
    setattr(params, name, value)
    return {"params": params}


BAD = {
    "method-unknown": ("method", {"method": "best"}),
    "method-none": ("method", {"method": None}),
    "logits-rank": ("target_logits", {"target_logits": torch.zeros(2, 5)}),
    "logits-no-row": ("target_logits", {"target_logits": torch.zeros(2, 0, 5)}),
    "logits-no-vocabulary": ("target_logits", {"target_logits": torch.zeros(2, 4, 0)}),
    "logits-integer": ("target_logits", {"target_logits": torch.zeros(2, 4, 5, dtype=torch.int64)}),
    "logits-inner-stride": ("target_logits", {"target_logits": torch.zeros(2, 5, 4).transpose(1, 2)}),
    "drafts-shape": ("draft_tokens", {"draft_tokens": torch.zeros(2, 4, dtype=torch.int64)}),
    "drafts-float": ("draft_tokens", {"draft_tokens": torch.zeros(2, 3)}),
    "drafts-device": ("draft_tokens", {"draft_tokens": torch.zeros(2, 3, dtype=torch.int64, device="meta")}),
    "draft-logits-vocabulary": ("draft_logits", {"draft_logits": torch.zeros(2, 3, 6)}),
    "draft-logits-K": ("draft_logits", {"draft_logits": torch.zeros(2, 4, 5)}),
    "lse-alone": ("draft_lse", {"draft_logits": None}),
    "lse-shape": ("draft_lse", {"draft_lse": torch.zeros(2, 4)}),
    "lens-shape": ("draft_lens", {"draft_lens": torch.tensor([1])}),
    "lens-negative": ("draft_lens", {"draft_lens": torch.tensor([1, -1])}),
    "lens-above-K": ("draft_lens", {"draft_lens": torch.tensor([4, 1])}),
    "params-type": ("params", {"params": SamplingParams()}),
    "params-batch": (r"params\.temperature", {"params": batch_of(3)}),
    "temperature-dtype": (r"params\.temperature", spoiled("temperature", torch.ones(2).double())),
    "top-p-shape": (r"params\.top_p", spoiled("top_p", torch.ones(3))),
    "top-k-float": (r"params\.top_k", spoiled("top_k", torch.ones(2))),
    "seed-float": (r"params\.seed", spoiled("seed", torch.ones(2))),
    "epsilon-above-1": ("typical_epsilon", {"typical_epsilon": 1.5}),
    "delta-negative": ("typical_delta", {"typical_delta": -0.1}),
    "epsilon-none": ("typical_epsilon", {"typical_epsilon": None}),
    "top-k-below-minus-1": (r"params\.top_k", spoiled("top_k", torch.tensor([0, -2]))),
    "position-negative": (r"params\.position", spoiled("position", torch.tensor([0, -1]))),
    "backend": ("backend", {"backend": "cuda"}),
}


@pytest.mark.parametrize(("named", "changes"), BAD.values(), ids=BAD)
def test_refuses(named, changes):
    with pytest.raises(ValueError, match=f"^{named} must be"):
        ops.accept_reject(**{**good(), **changes})


def test_good_arguments_are_good():
    ops.accept_reject(**good())


def test_strided_logits(backend):
    """Rows cut out of wider tensors: only the last stride must be 1."""
    logits, q = torch.randn(4, 8, 12), torch.randn(4, 6, 12)
    drafts, params = torch.randint(0, 6, (4, 3)), batch_of(4)
    views = logits[:, ::2, 3:9], q[:, ::2, :6]
    args = {"params": params, "method": "rejection", "backend": backend}
    got = ops.accept_reject(drafts, *views, **args)
    want = ops.accept_reject(drafts, *(x.contiguous() for x in views), **args)
    assert torch.equal(got.tokens, want.tokens)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("k", [0, 3])
def test_opcheck(method, k):
    params = unpacked(batch_of(2, top_p=0.9), 2, torch.zeros(1))
    for q in (None, torch.randn(2, k, 5)):
        lse = None if q is None else q.logsumexp(-1)
        args = (
            torch.randint(0, 5, (2, k)),
            torch.randn(2, k + 1, 5),
            q,
            lse,
            None,
            *params,
            method,
            0.3,
            0.09,
            "torch",
        )
        torch.library.opcheck(torch.ops.specdec.accept_reject.default, args)


def test_shapes_on_meta():
    params = batch_of(2)
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
    on_meta = SamplingBatch(*(getattr(params, name).to("meta") for name in names))
    args = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in good().items()}
    result = ops.accept_reject(**{**args, "params": on_meta})
    assert [tuple(x.shape) for x in result] == [(2, 4), (2,), (2,)]
