"""The formulas of the acceptance benchmark against counted draws, and the draft model that is made of the target."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from bench import bench_lossless
from bench.bench_acceptance import block_length, coupled_acceptance, table, token_length
from bench.bench_lossless import without_layers
from specdec_triton import DraftModel, SamplingParams, SpeculativeDecoder, ops
from specdec_triton.testing import batch_of, own_logits, toy_model

ROWS = 40_000


def distributions(k, vocab=6):
    p, q = 1.3 * torch.randn(2, k + 1, vocab)
    return p.softmax(-1), (p + q).softmax(-1)


@pytest.mark.parametrize("seed", range(3))
def test_coupled_acceptance(seed):
    """Two races with common noise have one winner as often as the formula says; 1 for equal, 0 for disjoint ones."""
    torch.manual_seed(seed)
    p, q = (x[0] for x in distributions(0))
    params = batch_of(ROWS, position=3)
    one, other = (ops.sample(x.log().expand(ROWS, -1).contiguous(), params=params) for x in (p, q))
    expected = coupled_acceptance(p, q)
    assert abs((one == other).double().mean() - expected) < 5 * (expected * (1 - expected) / ROWS) ** 0.5
    assert coupled_acceptance(p, p) == pytest.approx(1)
    assert coupled_acceptance(torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.0, 0.0, 1.0])) == 0
    assert coupled_acceptance(torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5])) == pytest.approx(0.5)


@pytest.mark.parametrize(("method", "length"), [("rejection", token_length), ("block", block_length)])
def test_expected_lengths(method, length):
    """For given drafts, over the noise that judges them."""
    for seed in range(4):
        torch.manual_seed(seed)
        p, q = distributions(3)
        drafts = torch.multinomial(q[:3], 1)[:, 0]
        accepted = ops.accept_reject(
            drafts.expand(ROWS, -1),
            p.log().expand(ROWS, -1, -1).contiguous(),
            q[:3].log().expand(ROWS, -1, -1).contiguous(),
            params=batch_of(ROWS, position=9),
            method=method,
        ).num_accepted.double()
        assert abs(accepted.mean() - length(p, q, drafts.tolist())) < 5 * accepted.std() / ROWS**0.5 + 1e-9


def test_without_layers():
    """What is left behaves like a model that was built so, shares the weights, and drafts; the target notices nothing."""
    model = toy_model(num_hidden_layers=4)
    before = own_logits(model, [3, 5, 7])
    shorter = without_layers(model, [1, 2])
    removed = copy.deepcopy(model)
    removed.model.layers = torch.nn.ModuleList([removed.model.layers[0], removed.model.layers[3]])
    assert torch.equal(own_logits(shorter, [3, 5, 7]), own_logits(removed, [3, 5, 7]))
    assert shorter.lm_head.weight is model.lm_head.weight
    params = SamplingParams(temperature=0, max_new_tokens=12)
    plain, drafted = (
        SpeculativeDecoder(model, drafter, num_draft_tokens=3, adaptive=False).generate([[3, 5, 7]], params)[0]
        for drafter in (None, DraftModel(shorter))
    )
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.drafted > 0
    assert torch.equal(own_logits(model, [3, 5, 7]), before)
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1, 2, 3]


def test_identical_goes_on_where_it_was_stopped(tmp_path, monkeypatch, capsys):
    """A configuration that is in the file is not decoded again; a text that differs is counted and named."""

    class Toys:
        def __init__(self, name, dtype):
            self.model = toy_model()

        def __getitem__(self, which):
            return self.model

    monkeypatch.setattr(bench_lossless, "Models", Toys)
    monkeypatch.setattr(bench_lossless, "load_tokenizer", lambda name: None)
    monkeypatch.setattr(bench_lossless, "encode", lambda tokenizer, text: [3, len(text) % 90 + 1, 7])
    out = tmp_path / "rows.jsonl"
    options = [
        "--identical",
        "--no-peers",
        "--per-task",
        "1",
        "--max-new-tokens",
        "6",
        "--dtypes",
        "float32",
        "--out",
        str(out),
    ]
    bench_lossless.main([*options, "--ks", "1", "2", "--methods", "coupled"])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 8
    assert all(row["identical"] == row["prompts"] == 7 and row["differing"] == [] for row in rows)
    assert "| ours, n-gram drafts, sampled with a seed | 1 – 2 | 1, 8 | 28 of 28 |" in capsys.readouterr().out
    generate = bench_lossless.SpeculativeDecoder.generate

    def wrong(self, prompts, params):
        outputs = generate(self, prompts, params)
        if self.num_draft_tokens == 3:
            outputs[2].token_ids[-1] += 1
        return outputs

    monkeypatch.setattr(bench_lossless.SpeculativeDecoder, "generate", wrong)
    bench_lossless.main([*options, "--ks", "2", "3", "--methods", "coupled", "--batches", "8"])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["k"] for row in rows[8:]] == [3, 3]
    assert all((row["identical"], row["differing"]) == (6, [2]) for row in rows[8:])


def test_table_of_acceptance():
    numbers = {"first_draft": 0.5, "accepted_per_round": 1.0, "rounds": 10}
    row = {"layers": "24 of 30", "temperature": 1.0, "coupled": numbers, "rejection": numbers, "block": numbers}
    row |= {
        "expected_first": {"rejection": 0.6, "coupled": 0.55},
        "expected_per_round": {"rejection": 1.2, "block": 1.25},
    }
    line = table([row | {"block_gain": 0.05, "block_gain_error": 0.002}]).splitlines()[-1]
    assert line == "| 24 of 30 layers | 1.0 | 60.0% | 50.0% | 55.0% | 50.0% | 1.20 | 1.25 | +0.050 (0.002) |"
