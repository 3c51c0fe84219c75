"""The benchmarks: each runs and writes rows whose figures fit together, and the GPU's path is walked with a clock that is not one.

Nothing here asserts a time.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import asdict, replace

import pytest
import torch

from bench import micro
from specdec_triton._library import why_not_triton
from specdec_triton.audit.traffic import Traffic
from specdec_triton.kernels._config import CHIPS
from specdec_triton.testing import unexplained

OPS = (
    "verify_attention", "append_kv", "compact_kv", "accept_reject", "sample", "ngram_propose", "skinny_linear", "row_mean",
    "apply_logit_rules", "rope_append", "rms_norm", "gated_mlp_activation", "gated_linear", "verify_head",
    "accept_tree",
)  # fmt: skip
ORIGIN = {
    "device",
    "threads",
    "torch",
    "transformers",
    "triton",
    "python",
    "commit",
    "bench",
    "machine",
    "shape",
    "provider",
}


def bench_of(op):
    return importlib.import_module(f"bench.bench_{op}")


@pytest.mark.parametrize("op", OPS)
def test_quick(op, tmp_path, capsys, monkeypatch):
    """On a CPU: baselines first, ours last and correct; one prediction for each chip; no row without its origin."""
    monkeypatch.setattr(micro, "machine_kind", lambda: "cpu")
    out = tmp_path / "rows.jsonl"
    assert bench_of(op).main(["--quick", "--seconds", "0.001", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    predicted = [row for row in rows if row.get("predicted")]
    timed = [row for row in rows if not row.get("predicted")]
    assert all(row.keys() >= ORIGIN and row["bench"] == op for row in rows)
    assert {row["chip"] for row in predicted} == set(CHIPS)
    assert timed[0]["provider"] != "specdec" == timed[-1]["provider"]
    for row in timed:
        assert 0 < row["p20_ms"] <= row["p50_ms"] <= row["p80_ms"]
        assert row["provider"] == "specdec-T1" or row["times_floor"] > 0
    ours = [row for row in timed if row["provider"] == "specdec"]
    assert len(ours) == len(bench_of(op).specs("cpu", True))
    assert all(row["correct"] and any(name.startswith("over_") for name in row) for row in ours)
    text = capsys.readouterr().out
    assert "not measured" in text
    assert f"{len(rows)} rows, 0 failures" in text


@pytest.mark.skipif(why_not_triton("sample", "cpu") is not None, reason="counts in the interpreter")
@pytest.mark.parametrize("op", OPS)
def test_counted(op, tmp_path):
    """What the interpreter counts is what the audit's formulas say, within a tenth (parameters, lengths, statistics)."""
    out = tmp_path / "rows.jsonl"
    assert bench_of(op).main(["--quick", "--out", str(out)]) == 0
    for row in map(json.loads, out.read_text().splitlines()):
        assert row["correct"]
        assert row["launches"] >= 1
        assert row["floor_bytes"] <= row["moved_bytes"]
        moved = row["loaded_bytes"] + row["stored_bytes"]
        assert 0.9 * row["floor_bytes"] <= moved
        assert row["distinct_loaded_bytes"] + row["stored_bytes"] <= 1.1 * row["moved_bytes"]


class FakeClock:
    """Answers what it is told, in order."""

    def __init__(self, *milliseconds):
        self.answers, self.waited = list(milliseconds), 0

    def start(self, call, captured):
        call()
        answer = self.answers.pop(0)
        return lambda: answer

    def wait(self):
        self.waited += 1


def test_interleave():
    """Each round runs all providers in turn; the first round is not counted."""
    order = []
    calls = {name: (lambda name=name: order.append(name), True) for name in "ab"}
    clock = FakeClock(9, 9, 1, 10, 2, 20, 3, 30)
    found = micro.interleave(calls, clock, seconds=0, least=3, most=3)
    assert found == {"a": [1, 2, 3], "b": [10, 20, 30]}
    assert "".join(order) == "abababab"
    assert clock.waited == 4


def test_interleave_ends():
    """Enough rounds and enough time; slow problems after three rounds; never more than the most."""

    def rounds(second, **limits):
        ticks = iter(range(10**6))
        one = {"a": (lambda: None, True)}
        clock = FakeClock(*[1.0] * 1000)
        return len(micro.interleave(one, clock, 2.0, now=lambda: next(ticks) * second, **limits)["a"])

    assert rounds(0.01, least=5, most=50) == 50
    assert 5 < rounds(0.1, least=5, most=50) < 50
    assert rounds(0.5, least=5, most=50) == 5
    assert rounds(100.0, least=5, most=50) == 3


def test_row_by_hand():
    """A floor of 4 MB at 2 GB/s takes 2 ms."""
    row = micro.timed_row([3.0, 1.0, 4.0, 2.0, 5.0], Traffic(moved=5_000_000, floor=4_000_000), 6_000_000_000, 2.0)
    assert (row["p20_ms"], row["p50_ms"], row["p80_ms"], row["rounds"]) == (2.0, 3.0, 5.0, 5)
    assert (row["floor_ms"], row["times_floor"]) == (2.0, 1.5)
    assert row["gb_per_s"] == pytest.approx(4 / 3)
    assert row["tflop_per_s"] == 2.0


class Event:
    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Event.now

    def elapsed_time(self, other):
        return other.at - self.at


def test_cuda_clock(monkeypatch):
    """Flush and head start lie before the first event; a captured call needs no head start."""
    happened = []

    class Flushed:
        def zero_(self):
            happened.append("flush")
            Event.now += 100

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: happened.append("sleep"), raising=False)
    clock = micro.CudaClock.__new__(micro.CudaClock)
    clock.flushed = Flushed()

    def call():
        happened.append("call")
        Event.now += 7

    assert clock.start(call, captured=False)() == 7
    assert clock.start(call, captured=True)() == 7
    assert happened == ["flush", "sleep", "call", "flush", "call"]


@pytest.fixture
def pretended_gpu(monkeypatch):
    """The benchmarks' path for a GPU, on the CPU: the PyTorch backend, wall-clock times, a capture that changes nothing."""
    captures = []
    monkeypatch.setattr(micro, "machine_kind", lambda: "gpu")
    monkeypatch.setattr(micro, "device_of", lambda kind: torch.device("cpu"))
    monkeypatch.setattr(micro, "CudaClock", lambda device: micro.WallClock())
    monkeypatch.setattr(micro, "chip_of", lambda device: CHIPS["sm_90"])
    monkeypatch.setattr(micro, "capture", lambda call: captures.append(call) or call)
    monkeypatch.setattr(micro, "_LONG", 1e9)  # a busy machine would leave calls uncaptured
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 40, 1 << 40))
    for op in OPS:
        monkeypatch.setattr(bench_of(op), "backend", lambda: "torch")
    return captures


def small(bench, count=1):
    return replace(bench, specs=lambda machine, quick, specs=bench.specs: specs("cpu", True)[:count])


@pytest.mark.parametrize("op", OPS)
def test_the_path_for_a_gpu(op, pretended_gpu, tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    bench = small(bench_of(op).BENCH)
    assert micro.run(bench, ["--seconds", "0.001", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows[-1]["provider"] == "specdec"
    assert rows[-1]["moved_bytes"] >= rows[-1]["floor_bytes"]
    assert all(row["machine"] == "gpu" and row["copy_gb_per_s"] > 0 for row in rows)
    assert len(pretended_gpu) == sum(row["graph"] for row in rows) > 0
    assert "FAILED" not in capsys.readouterr().out


def broken(bench, **providers):
    """The bench with other providers, or another gate."""

    def build(spec, device):
        problem = bench.build(spec, device)
        gate = providers.pop("gate", problem.gate)
        ours = problem.providers.pop("specdec")
        return micro.Problem({**problem.providers, **providers, "specdec": providers.get("specdec", ours)}, gate)

    return replace(bench, build=build)


def raising():
    raise RuntimeError("no kernel\nfor this chip")


def test_a_failing_provider_is_a_line(pretended_gpu, monkeypatch, capsys):
    bench = broken(small(bench_of("sample").BENCH), theirs=micro.Provider(raising))
    assert micro.run(bench, ["--seconds", "0.001"]) == 0
    assert "sample: theirs skipped: RuntimeError: no kernel for this chip" in capsys.readouterr().out


def test_a_failing_capture_is_a_line(pretended_gpu, monkeypatch, capsys):
    monkeypatch.setattr(micro, "capture", lambda call: raising())
    assert micro.run(small(bench_of("sample").BENCH), ["--seconds", "0.001"]) == 0
    assert "timed without: RuntimeError: no kernel" in capsys.readouterr().out


@pytest.mark.parametrize("gate", [lambda: "other tokens", raising], ids=["wrong", "raises"])
def test_a_red_gate_is_not_timed(gate, pretended_gpu, tmp_path, capsys):
    """And makes the command's status 1."""
    out = tmp_path / "rows.jsonl"
    bench = broken(small(bench_of("sample").BENCH), gate=gate)
    assert micro.run(bench, ["--seconds", "0.001", "--out", str(out)]) == 1
    [row] = map(json.loads, out.read_text().splitlines())
    assert (row["provider"], row["correct"], "p50_ms" in row) == ("specdec", False, False)
    assert "FAILED" in capsys.readouterr().out


def test_running_out_of_memory_is_a_line(pretended_gpu, capsys):
    def gate():
        raise torch.OutOfMemoryError("wanted 9 GiB")

    bench = broken(small(bench_of("sample").BENCH), gate=gate)
    assert micro.run(bench, ["--seconds", "0.001"]) == 0
    assert "skipped: it does not fit the device's memory" in capsys.readouterr().out


def test_ours_failing_is_a_failure(pretended_gpu, capsys):
    bench = broken(small(bench_of("sample").BENCH), specdec=micro.Provider(raising))
    assert micro.run(bench, ["--seconds", "0.001"]) == 1


def test_too_little_memory_and_budget(pretended_gpu, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000, 1000))
    bench = small(bench_of("sample").BENCH, 2)
    assert micro.run(bench, ["--seconds", "0.001"]) == 0
    assert "MiB of device memory" in capsys.readouterr().out
    assert micro.run(bench, ["--seconds", "0.001", "--budget", "1e-9"]) == 0
    assert "2 of 2 problems skipped: the budget of 1e-09 s is spent" in capsys.readouterr().out


@pytest.mark.parametrize("op", OPS)
def test_specs_of_a_gpu(op):
    """Every problem is listed once, and its bytes, flops and memory can be told."""
    module = bench_of(op)
    specs = module.specs("gpu", False)
    assert len(set(specs)) == len(specs) > 5
    assert set(module.specs("gpu", True)) <= set(specs)
    for spec in specs:
        assert spec.shape in module.SHAPES
        for chip in CHIPS.values():
            traffic = module.bytes_moved(spec, chip)
            assert traffic.moved >= traffic.floor > 0
        assert module.flops(spec) >= 0
        assert module.memory(spec) > 0
        assert json.loads(json.dumps(asdict(spec))) == asdict(spec)


def test_only_near_ties_are_excused():
    """The rule by which kernels are judged on a chip: 1e-6 apart is a near tie, 1e-3 is not, and equal needs no excuse."""
    logits = torch.zeros(3, 4)
    logits[:, 2] = torch.tensor([1e-6, 1e-3, 1e-6])
    logits[:, 1] = torch.tensor([0.0, 0.0, -1.0])
    logits[:, [0, 3]] = -9.0

    def judge(change):
        return [change(logits).argmax(-1)]

    assert unexplained([torch.tensor([2, 2, 2])], judge) == []
    assert unexplained([torch.tensor([1, 2, 2])], judge) == []
    assert unexplained([torch.tensor([1, 1, 1])], judge) == [1, 2]


def test_tables_of_text(tmp_path):
    """Of rows made by hand: ratios are paired by prompt, shares are counted over drafts, and a table goes between its markers."""
    from bench import bench_drafters, bench_generate

    origin = {
        "dtype": "bfloat16", "max_new_tokens": 10, "device": "a CPU", "threads": 2, "torch": "2", "transformers": "5", "lookup": 5, "k": 8,
    }  # fmt: skip
    phases = {"draft": 1.0, "verify": 3.0, "accept": 0.0}
    plain = {"drafted_at": [], "accepted_at": [], "phase_seconds": {}, "target_passes": 10, "drafted": 0, "accepted": 0}
    head = {
        "drafted_at": [4, 4],
        "accepted_at": [3, 1],
        "phase_seconds": phases,
        "target_passes": 5,
        "drafted": 8,
        "accepted": 4,
    }
    rows = []
    for i, task in enumerate(("chat", "rag")):
        made = {"plain": (plain, 4.0 + i), "eagle": (head, 2.0)}
        for name, (facts, seconds) in made.items():
            row = {"provider": name, "id": f"{task}-0", "task": task, "seconds": seconds, "new_tokens": 10}
            rows.append(origin | row | facts | {"identical": True})
    lines = bench_drafters.table(rows).splitlines()
    assert lines[-1] == "| eagle | 2.00 | 2.00 | 2.00 × | 2.25 × | 2.00 × | 75% | 25% | 25% | 2 of 2 |"
    lines = bench_drafters.by_task(rows).splitlines()
    assert lines[2:] == [f"| {task} | 75% | 25% | – | – | 2.00 |" for task in ("chat", "rag", "all")]
    card = tmp_path / "card.md"
    card.write_text("above\n<!-- acceptance table -->\nold\n<!-- end of acceptance table -->\nbelow\n")
    bench_drafters.write_card(card, rows)
    assert card.read_text().startswith("above\n<!-- acceptance table -->\n| task | 1st draft kept")
    assert card.read_text().endswith("were.\n<!-- end of acceptance table -->\nbelow\n")
    assert "old" not in card.read_text()

    named = {"plain": "specdec-plain", "eagle": "specdec-cascade"}
    theirs = [
        row | {"provider": name}
        for row in rows[::2]
        for name in ("transformers", "transformers-lookup", "specdec-ngram")
    ]
    ours = [row | {"provider": named[row["provider"]]} for row in rows]
    lines = bench_generate.table(theirs + ours).splitlines()
    assert lines[0].startswith(
        "| task | transformers | its prompt lookup | ours plain | ours n-gram | ours cascade | n-gram / transformers |"
    )
    assert (
        lines[2] == "| chat | 2.5 | 2.5 | 2.5 | 2.5 | 5.0 | 1.00 × | 2.00 × | 1.00 | 2.00 | 1 of 1 | 1 of 1 | 1 of 1 |"
    )
    assert lines[-1].startswith("| all | 2.2 | 2.2 | 2.2 | 2.2 | 5.0 | 1.00 × | 2.25 × |")
    assert (
        len(bench_generate.table(theirs + [row for row in ours if row["provider"] == "specdec-plain"]).splitlines())
        == 5
    )
