"""``sample`` and the filters: kept sets equal those of transformers' warpers, tokens follow the exact distribution."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from specdec_triton import SamplingParams, ops
from specdec_triton.ops import SamplingBatch
from specdec_triton.ops.sampling import unpacked
from specdec_triton.reference import logits as reference_logits
from specdec_triton.reference.logits import best_of, scaled_logits
from specdec_triton.reference.noise import Stream, gumbel, race
from specdec_triton.testing import INF, NAN, assert_follows, batch_of, exact_probs

OP = "sample"


def warped(logits, temperature, top_k, top_p, min_p, typical_p=1.0):
    """transformers' scores: -inf where removed."""
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k > 0 else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p > 0 else []
    warpers += [TypicalLogitsWarper(typical_p)] if typical_p < 1 else []
    scores = logits.clone()
    for warper in warpers:
        scores = warper(None, scores)
    return scores


FILTERS = list(itertools.product((0.3, 1.0, 2.0), (0, 1, 5, 1000), (1.0, 0.9, 0.5, 0.1, 0.0), (0.0, 0.05, 0.3, 1.0)))


@pytest.mark.parametrize("vocab", [7, 50, 3000])
def test_filters_keep_what_transformers_keeps(vocab):
    """Order and meaning of temperature, top-k, top-p and min-p (faults.md B3, B15), on random rows without ties."""
    logits = torch.randn(6, vocab) * 3
    for temperature, top_k, top_p, min_p in FILTERS:
        params = batch_of(6, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        want = warped(logits, temperature, top_k, top_p, min_p)
        fields = (params.temperature, params.top_k, params.top_p, params.min_p)
        scaled = scaled_logits(logits, *fields, None, params.has_filters)
        lse = ops.sample(logits, params=params, return_lse=True)[1]
        got = scaled - lse[:, None]
        assert torch.equal(got > -INF, want > -INF), (temperature, top_k, top_p, min_p)
        assert torch.allclose(got.exp(), want.softmax(-1), atol=1e-5)
        assert torch.allclose(lse, want.logsumexp(-1), atol=1e-4)
        unknown = scaled_logits(logits, *fields)  # has_filters only saves time
        assert torch.equal(unknown, scaled)


TYPICAL = list(itertools.product((0.3, 1.0, 2.0), (0, 5), (1.0, 0.7), (0.0, 0.05), (0.95, 0.5, 0.2, 0.01)))


@pytest.mark.parametrize("vocab", [7, 50, 3000])
def test_typical_p_keeps_what_transformers_keeps(vocab, backend):
    """After the other filters; on Triton its kernel's two bounds."""
    logits = torch.randn(6, vocab) * 3
    cases = TYPICAL if backend == "torch" else TYPICAL[::11]
    for temperature, top_k, top_p, min_p, typical_p in cases:
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "typical_p": typical_p}
        want = warped(logits, **options)
        params = batch_of(6, **options)
        _, lse = ops.sample(logits, params=params, return_lse=True, backend=backend)
        assert torch.allclose(lse, want.logsumexp(-1), atol=1e-4), options
        fields = (params.temperature, params.top_k, params.top_p, params.min_p, params.typical_p)
        assert torch.equal(scaled_logits(logits, *fields) > -INF, want > -INF), options


def test_typical_p_of_one_request_leaves_the_others_alone(backend):
    """Also a greedy one's, and a row that is all but decided."""
    logits = torch.randn(4, 40)
    logits[3, 7] = 60.0
    each = [{"typical_p": 0.3}, {}, {"typical_p": 0.3, "temperature": 0}, {"typical_p": 0.3}]
    params = SamplingBatch.from_params([SamplingParams(seed=b, **one) for b, one in enumerate(each)], [5] * 4)
    tokens, lse = ops.sample(logits, params=params, return_lse=True, backend=backend)
    alone = ops.sample(logits[1:2], params=batch_of(1, seed=1, position=5), return_lse=True, backend=backend)
    assert tokens[1] == alone[0][0]
    torch.testing.assert_close(lse[1], alone[1][0])
    assert tokens[2] == logits[2].argmax()
    assert tokens[3] == 7
    assert lse[0] < logits[0].logsumexp(-1)


@pytest.mark.parametrize("split", [1024, 4096])
def test_a_race_compares_exact_sums(split, backend, monkeypatch):
    """Logits so large that noise added to them is rounded away, and ties: the winner is that of fp64, whatever the splits."""
    if backend == "triton":
        rows = pytest.importorskip("specdec_triton.kernels._rows")
        monkeypatch.setattr(rows, "SPLIT_V", split)
    logits = torch.randn(6, 4200).round()
    logits[1] += 1e6
    logits[2] *= 1e4
    logits[3] = 1e9
    logits[4, 40:] = -INF
    logits[5] = -INF
    logits[5, 4199] = -1e30
    params = batch_of(6, position=3)
    noise = gumbel(params.seed, params.position, torch.zeros_like(params.seed), Stream.COUPLED, 4200)
    want = (logits.double() + noise.double()).argmax(-1)
    assert not torch.equal((logits + noise).argmax(-1), want)
    assert torch.equal(ops.sample(logits, params=params, backend=backend), want)


@pytest.mark.parametrize("rows", ["random", "flat", "tied", "masked"])
def test_a_prefix_of_the_sorted_row_decides_the_same(rows, monkeypatch):
    """The CPU's short cuts change nothing: the largest 1024 values where they suffice, noise for the kept tokens alone."""
    vocab = 5000
    logits = torch.randn(6, vocab) * 3
    if rows == "flat":
        logits *= 0.01
    if rows == "tied":
        logits = logits.round()
    if rows == "masked":
        logits[:, 700:] = -INF
    whole = torch.full((6,), 5, dtype=torch.int64), torch.arange(6), torch.zeros(6, dtype=torch.int64)
    for temperature, top_k, top_p, min_p in itertools.product((0.3, 1.0), (0, 40, 1500), (1.0, 0.9, 0.0), (0.0, 0.2)):
        params = batch_of(6, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        fields = (params.temperature, params.top_k, params.top_p, params.min_p)
        short = scaled_logits(logits, *fields)
        lse = ops.sample(logits, params=params, return_lse=True)[1]
        with monkeypatch.context() as patch:
            patch.setattr(reference_logits, "_PREFIX", vocab)
            full = scaled_logits(logits, *fields)
            full_lse = ops.sample(logits, params=params, return_lse=True)[1]
        assert torch.equal(short, full)
        assert torch.equal(lse, full_lse)
        noise = gumbel(*whole, Stream.COUPLED, vocab)
        assert torch.equal(race(full, *whole, Stream.COUPLED), (full + noise).argmax(-1))


TIES = {
    "top-k": ([3.0, 1.0, 1.0, 0.0], {"top_k": 2}, {0, 1, 2}),
    "top-p": ([2.0, 2.0, 2.0, 0.0], {"top_p": 0.2}, {0, 1, 2}),
    "top-p-reached-exactly": ([0.6931472, 0.0, 0.0], {"top_p": 0.5}, {0}),
    "min-p": ([0.0, -1.0, 0.0, -5.0], {"min_p": 1.0}, {0, 2}),
    "top-p-0": ([2.0, 1.0, 2.0, 0.0], {"top_p": 0.0}, {0, 2}),
    "top-k-1": ([2.0, 1.0, 2.0, 0.0], {"top_k": 1}, {0, 2}),
    "top-k-with-masked": ([2.0, -INF, 1.0, -INF], {"top_k": 3}, {0, 2}),
    "typical-tied": ([1.0, 1.0, 1.0, 1.0], {"typical_p": 0.1}, {0, 1, 2, 3}),
    "typical-drops-the-likeliest": ([3.0, 2.0, 2.0, 2.0, 2.0, -9.0], {"typical_p": 0.3}, {1, 2, 3, 4}),
    "all-three": ([2.0, 2.0, 1.0, 1.0, -9.0], {"top_k": 3, "top_p": 0.9, "min_p": 0.3}, {0, 1, 2, 3}),
}


@pytest.mark.torch_only
@pytest.mark.parametrize(("logits", "params", "kept"), TIES.values(), ids=TIES)
def test_ties_at_a_boundary_are_all_kept(logits, params, kept, backend):
    rows = 4000 if backend == "torch" else 100
    tokens = ops.sample(
        torch.tensor(logits).expand(rows, -1).contiguous(), params=batch_of(rows, **params), backend=backend
    )
    assert set(tokens.tolist()) == kept
    if backend == "torch":
        assert_follows(tokens, exact_probs(torch.tensor(logits), **params))


GRID = list(itertools.product((0.5, 1.0, 2.0), (0, 3), (1.0, 0.8), (0.0, 0.2)))


@pytest.mark.parametrize("node", [None, 0, 5])
@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), GRID)
def test_distribution(temperature, top_k, top_p, min_p, node):
    """Goodness of fit over the parameter grid, for the shared noise and for a drafter's own (faults.md B1, B3)."""
    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    logits = torch.tensor([0.3, -1.0, 2.0, 1.5, -0.5, 0.0, 1.0, -3.0])
    rows = 20000
    tokens = ops.sample(logits.expand(rows, -1).contiguous(), params=batch_of(rows, **params), node=node)
    assert_follows(tokens, exact_probs(logits, **params))


def test_distribution_of_200_000_draws():
    """A vocabulary that is no multiple of the generator's four lanes."""
    logits = torch.tensor([1.0, 0.0, -1.0, 0.5, 2.0])
    tokens = ops.sample(logits.expand(200_000, -1).contiguous(), params=batch_of(200_000, seed=-5))
    assert_follows(tokens, exact_probs(logits))


def test_distribution_over_positions():
    """One seed, many positions: what a text is written with."""
    logits = torch.tensor([1.0, 0.0, -1.0, 0.5, 2.0])
    rows = 20000
    params = SamplingBatch.from_params([SamplingParams(seed=3)] * rows, range(rows))
    tokens = ops.sample(logits.expand(rows, -1).contiguous(), params=params)
    assert_follows(tokens, exact_probs(logits))
    pairs = tokens[:-1] * 5 + tokens[1:]
    assert_follows(pairs, (exact_probs(logits)[:, None] * exact_probs(logits)).flatten())


def test_top_p_of_a_large_flat_row():
    """faults.md B13: of 131,072 nearly equal tokens top-p 0.99 keeps 99 of 100; sums in half precision would stop growing early."""
    logits = (1e-3 * torch.randn(1, 131072)).bfloat16()
    scaled = scaled_logits(logits, *(torch.tensor([x]) for x in (1.0, 0, 0.99, 0.0)))
    kept = scaled[0] > -INF
    mass = logits[0].double().softmax(-1)
    assert 0.99 <= mass[kept].sum() < 0.9901


def test_greedy(backend):
    """The argmax, ties to the lowest id (faults.md A2), seed without effect (C4), filters without effect (A9)."""
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0], [-INF, -3.0, -2.0, -2.0], [1.0, 1.0, 0.0, 0.0]])
    for seed in (0, 9):
        params = batch_of(3, seed=seed, temperature=0, top_k=1, top_p=0.1, min_p=0.5)
        assert ops.sample(logits, params=params, backend=backend).tolist() == [1, 2, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_best_of_rows(dtype):
    """As PyTorch's argmax says, in every dtype and layout; NaN wins, of equal ones the first."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-3, 4, (5, 4, 30), generator=generator).to(dtype)
    logits[0, 0], logits[0, 1, 7], logits[0, 2, 9] = -INF, NAN, INF
    logits[0, 3] = 0.0
    logits[0, 3, 11] = torch.finfo(dtype).tiny
    for rows in (logits, logits[..., ::2], logits.transpose(0, 2), logits[:0], logits.clone().requires_grad_()):
        largest, ids = best_of(rows)
        assert torch.equal(ids, rows.argmax(-1))
        torch.testing.assert_close(largest, rows.amax(-1), equal_nan=True, rtol=0, atol=0)


def test_greedy_row_in_a_sampled_batch(backend):
    """faults.md A9: logits [1, 1, 0], temperatures [0, 1]: the greedy row is 0 in every draw."""
    rows = 10_000 if backend == "torch" else 100
    params = batch_of(rows)
    params.temperature[::2] = 0.0
    tokens = ops.sample(torch.tensor([1.0, 1.0, 0.0]).expand(rows, -1).contiguous(), params=params, backend=backend)
    assert set(tokens[::2].tolist()) == {0}
    assert set(tokens[1::2].tolist()) == {0, 1, 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_tiny_temperature(dtype, backend):
    """faults.md B15: finite, and the argmax."""
    logits = (torch.randn(20, 30) * 100).to(dtype)
    for temperature in (1e-3, 1e-6, 1e-30):
        params = batch_of(20, temperature=temperature, top_p=0.9)
        tokens, lse = ops.sample(logits, params=params, return_lse=True, backend=backend)
        assert tokens.tolist() == logits.argmax(-1).tolist()
        assert lse.isfinite().all()


def test_masked_ids_never_win(backend):
    """faults.md B10, I2: -inf columns, all real logits far below 0."""
    logits = torch.full((100, 37), -INF)
    logits[:, [3, 36]] = -1e4
    for node in (None, 2):
        tokens = ops.sample(logits, params=batch_of(100), node=node, backend=backend)
        assert set(tokens.tolist()) == {3, 36}


def test_ids_stay_in_the_vocabulary_whatever_the_logits(backend):
    """faults.md B10: NaN, infinities and rows of -inf give some id, and an lse that is not finite."""
    logits = torch.zeros(4, 9)
    logits[0, 3], logits[1, 3], logits[2] = NAN, INF, -INF
    tokens, lse = ops.sample(logits, params=batch_of(4), return_lse=True, backend=backend)
    assert ((tokens >= 0) & (tokens < 9)).all()
    assert lse.isfinite().tolist() == [False, False, False, True]


def test_lse_gives_the_probability(backend):
    """log q(x) = logits[x] / temperature - lse, over the tokens that the filters keep."""
    logits = torch.randn(8, 12)
    params = {"temperature": 0.7, "top_k": 6, "top_p": 0.9}
    tokens, lse = ops.sample(logits, params=batch_of(8, **params), return_lse=True, backend=backend)
    for row, token, total in zip(logits, tokens, lse, strict=True):
        assert float(row[token] / 0.7 - total) == pytest.approx(
            float(exact_probs(row, **params)[token].log()), abs=1e-5
        )


def test_rows_do_not_know_each_other(backend):
    """faults.md C1, C2: the same seed and position give the same token in any batch, at any place."""
    logits = torch.randn(10, 40)
    one = [SamplingParams(temperature=(1.0, 0.0)[b % 2], seed=b, top_p=(1.0, 0.9)[b % 3 == 0]) for b in range(10)]

    def draw(order):
        params = SamplingBatch.from_params([one[b] for b in order], [100 + b for b in order])
        return ops.sample(logits[torch.tensor(order)], params=params, backend=backend).tolist()

    together = draw(list(range(10)))
    order = torch.randperm(10).tolist()
    assert draw(order) == [together[b] for b in order]
    assert [draw([b])[0] for b in range(10)] == together
    assert draw([4, 4, 4]) == [together[4]] * 3


def test_unseeded_rows_draw_distinct_seeds_from_the_global_generator():
    """faults.md C2, B14: None is a fresh seed, governed by torch.manual_seed; 0 is a seed."""
    torch.manual_seed(1)
    first = SamplingBatch.from_params([SamplingParams(top_k=50)] * 4 + [SamplingParams(seed=0)], [0] * 5)
    torch.manual_seed(1)
    second = SamplingBatch.from_params([SamplingParams(top_k=50)] * 4 + [SamplingParams(seed=0)], [0] * 5)
    assert torch.equal(first.seed, second.seed)
    assert len(set(first.seed.tolist())) == 5
    assert first.seed[4] == 0
    assert first.temperature.tolist() == [1.0] * 5


def test_noise_of_a_draft_differs_by_node_and_from_the_shared_one():
    """faults.md B6: another stream for each purpose."""
    logits, params = torch.zeros(500, 1000), batch_of(500)
    draws = [ops.sample(logits, params=params, node=node) for node in (None, 0, 1, 2)]
    for a, b in itertools.combinations(draws, 2):
        assert (a == b).double().mean() < 0.02


# Parameters.

BAD_PARAMS = {
    "temperature": [-1, NAN, INF, "1", True],
    "top_k": [-2, 1.5, True, None],
    "top_p": [-0.1, 1.1, NAN, None],
    "min_p": [-0.1, 1.1, NAN],
    "seed": [1.0, 2**63, -(2**63) - 1],
    "max_new_tokens": [0, -1, 2.0],
    "stop_token_ids": [[-1], [1.5]],
    "num_draft_tokens": [-1, 64, 1.0],
    "typical_p": [-0.1, 1.1, NAN],
    "min_new_tokens": [-1, 129, 1.5],
    "stop_strings": [[""], [3], "", 7],
    "repetition_penalty": [0.0, -1.0, INF, NAN, "1", 1e-50],  # faults.md H5
    "presence_penalty": [INF, NAN, None],
    "frequency_penalty": [-INF, NAN, True],
    "logit_bias": [{-1: 0.0}, {1: INF}, {1: NAN}, {1: "a"}, [1, 2], {1.5: 0.0}],
    "allowed_token_ids": [[], [-1], [0.5], 3, [[1]]],
    "banned_token_ids": [[-1], ["a"], 3],
    "no_repeat_ngram_size": [-1, 2.0],
    "grammar": [3, "json"],
    "logprobs": [-1, 21, True],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in BAD_PARAMS.items() for v in vs], ids=lambda x: str(x))
def test_sampling_params_refuse(name, value):
    with pytest.raises(ValueError, match=rf"^SamplingParams\.{name} must be"):
        SamplingParams(**{name: value})


def test_sampling_params_defaults():
    """faults.md B14, B15: unset temperature is 1; top_k 0 and -1 are off."""
    params = SamplingParams(temperature=None, top_k=-1)
    assert (params.temperature, params.top_k, params.greedy, params.has_filters) == (1.0, 0, False, False)
    assert SamplingParams(temperature=0, top_p=0.5).has_filters is False
    assert SamplingParams(seed=0).seed == 0


def test_positions_must_match():
    with pytest.raises(ValueError, match="one entry per request"):
        SamplingBatch.from_params([SamplingParams()], [1, 2])


# Arguments.

BAD = {
    "logits-rank": ("logits", {"logits": torch.zeros(2, 1, 5)}),
    "logits-no-vocabulary": ("logits", {"logits": torch.zeros(2, 0)}),
    "logits-integer": ("logits", {"logits": torch.zeros(2, 5, dtype=torch.int32)}),
    "logits-inner-stride": ("logits", {"logits": torch.zeros(5, 2).t()}),
    "params-type": ("params", {"params": None}),
    "params-batch": (r"params\.temperature", {"params": batch_of(3)}),
    "params-device": (r"params\.temperature", {"logits": torch.zeros(2, 5, device="meta")}),
    "node-negative": ("node", {"node": -1}),
    "node-64": ("node", {"node": 64}),
    "backend": ("backend", {"backend": "cuda"}),
}


@pytest.mark.parametrize(("named", "changes"), BAD.values(), ids=BAD)
def test_refuses(named, changes):
    with pytest.raises(ValueError, match=f"^{named} must be"):
        ops.sample(**{"logits": torch.zeros(2, 5), "params": batch_of(2), **changes})


@pytest.mark.parametrize("node", [None, 3])
def test_opcheck(node):
    params = unpacked(batch_of(2, top_p=0.9), 2, torch.zeros(1))
    torch.library.opcheck(torch.ops.specdec.sample.default, (torch.randn(2, 7), *params, node, "torch"))


def test_shapes_on_meta():
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
    params = SamplingBatch(*(getattr(batch_of(2), name).to("meta") for name in names))
    tokens, lse = ops.sample(torch.zeros(2, 7, device="meta"), params=params, return_lse=True)
    assert (tokens.shape, tokens.dtype, lse.shape, lse.dtype) == ((2,), torch.int64, (2,), torch.float32)


@pytest.mark.parametrize(
    ("name", "value"),
    [("min_p", 2.0), ("top_p", -0.5), ("temperature", NAN), ("temperature", INF), ("has_filters", "no")],
)
def test_batches_with_impossible_values(name, value):
    batch = batch_of(2)
    setattr(batch, name, value if isinstance(value, str) else torch.tensor([0.5, value]))
    with pytest.raises(ValueError, match=rf"params\.{name} must be"):
        ops.sample(torch.zeros(2, 5), params=batch)
    with pytest.raises(ValueError, match="node must be an integer"):
        ops.sample(torch.zeros(2, 5), params=batch_of(2), node=1.5)
