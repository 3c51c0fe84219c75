"""``specdec-triton tune``: tables and JSON of given costs."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from specdec_triton.cli import tune
from specdec_triton.cli.common import Parser, UsageError
from specdec_triton.engine.controller import MARGIN
from specdec_triton.engine.costs import CostModel


def arguments(*argv):
    parser = Parser()
    tune.add_arguments(parser)
    return parser.parse_args(argv)


@pytest.fixture
def no_models(monkeypatch):
    """The command without models: the costs are given."""
    costs = CostModel({(n, n * k): 0.04 + 0.002 * n * (k + 1) for n in (1, 2) for k in (0, 1, 4)}, {1: 0.004, 2: 0.005})

    class Decoder:
        def __init__(self, target, drafter, *, num_draft_tokens, max_batch_size):
            assert (target, drafter) == ("target", "drafter")
            if max_batch_size > 8:
                raise ValueError("the drafter does not fit")
            self.target = SimpleNamespace(fixed_shapes=False, device="cpu")

        def tune(self):
            print("library noise")
            return costs

    for name in ("check_models", "quiet_transformers"):
        monkeypatch.setattr(tune, name, lambda *args: None)
    monkeypatch.setattr(tune, "load_target", lambda args, device: "target")
    monkeypatch.setattr(tune, "load_drafter", lambda args, device, target, tokenizers: "drafter")
    monkeypatch.setattr("specdec_triton.engine.SpeculativeDecoder", Decoder)
    return costs


def test_tune_prints_tables(no_models, capsys):
    assert tune.run(arguments("--device", "cpu")) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:4] == [
        ["batch", "0", "drafts", "1", "draft", "2", "drafts", "4", "drafts", "8", "drafts", "drafting"],
        ["1", "42.0", "44.0", "-", "50.0", "-", "4.0"],
        ["2", "44.0", "-", "48.0", "-", "60.0", "5.0"],
    ]
    assert lines[6] == ["batch", "30%", "50%", "70%", "90%"]
    assert [line[0] for line in lines[7:]] == ["1", "2"]
    drafts = [int(cell.split("-")[-1]) for cell in lines[7][1:]]
    assert drafts == sorted(drafts)
    assert drafts[-1] == 4


def test_tune_prints_json(no_models, capsys):
    assert tune.run(arguments("--json", "--device", "cpu", "-k", "6")) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["passes"][1] == {"batch_size": 1, "drafts": 1, "seconds": 0.044}
    assert result["drafting_passes"] == [{"batch_size": 1, "seconds": 0.004}, {"batch_size": 2, "seconds": 0.005}]
    assert (result["target"], result["k"], result["max_batch_size"]) == ("smollm2", 6, 8)
    for choice in result["choices"]:
        n, rate = choice["batch_size"], choice["acceptance"]
        curve = no_models.curve(n)
        value = [
            (n * sum(rate**j for j in range(k + 1))) / (float(curve.target[n * k]) + k * float(curve.draft))
            for k in range(7)
        ]
        value[0] *= 1 + MARGIN
        assert choice["k"] == [value.index(max(value))] * n
    assert [(choice["batch_size"], choice["acceptance"]) for choice in result["choices"]] == [
        (n, rate) for n in (1, 2) for rate in (0.3, 0.5, 0.7, 0.9)
    ]


def test_tune_shows_a_spread_and_what_was_not_timed():
    text = tune.as_text(
        CostModel({(1, 0): 0.01, (1, 1): 0.02, (2, 0): 0.03}, {}),
        [{"batch_size": n, "acceptance": 0.5, "k": k} for n, k in ((1, [2]), (2, [1, 2])) for _ in tune.ACCEPTANCE],
    )
    lines = [line.split() for line in text.splitlines()]
    assert lines[1:4] == [["batch", "0", "drafts", "1", "draft"], ["1", "10.0", "20.0"], ["2", "30.0", "-"]]
    assert lines[7:] == [["1", *["2"] * 4], ["2", *["1-2"] * 4]]


def test_tune_passes_on_that_the_drafter_does_not_fit(no_models):
    with pytest.raises(UsageError, match="does not fit"):
        tune.run(arguments("--max-batch-size", "9", "--device", "cpu"))


@pytest.mark.parametrize("argv", [["--draft", "none"], ["-k", "0"], ["--max-batch-size", "0"]], ids=" ".join)
def test_tune_refuses(argv):
    with pytest.raises(UsageError):
        tune.run(arguments(*argv))
