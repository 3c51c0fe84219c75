"""What the micro-benchmarks share: the command, the correctness gate, interleaved timings, the floor, rows.

The same command does on each machine what that machine can tell:

* GPU: times by CUDA events, the L2 cache flushed before each call, all providers in turn within a round. A provider runs from a
  CUDA graph where it can be captured, as an engine would run it; launches of single kernels would time Python. GB/s are bytes
  of the floor over the time, so providers compare; the floor's own time comes from a device-to-device copy measured first.
* CPU: wall-clock times of the PyTorch backend at small shapes, and for the GPU's shapes the audit's prediction for each chip.
* ``TRITON_INTERPRET=1``: launches and bytes, counted access by access on reduced shapes. No times.

A provider that fails is a line and no more. Ours is timed only after its results passed the gate.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from bench.common import RESULTS, provenance, quantile, write_rows
from specdec_triton._library import why_not_triton
from specdec_triton.audit.traffic import Traffic
from specdec_triton.kernels._config import CHIPS, INTERPRETER, Chip, chip_of

OURS = "specdec"
_FLUSHED = 256 << 20  # bytes written between calls; no chip's last cache is larger
_MIB = 1 << 20
_LONG = 5e-3  # seconds; a call that takes longer gains nothing from a graph, which would hold its memory a second time


class Skip(Exception):
    """Why a provider does not run; shown once."""


@dataclass
class Provider:
    """One way of doing the op.

    Attributes:
        make: imports and prepares, and returns the call to time; raises :class:`Skip` or anything else.
        graph: False: it reads results on the host, so it cannot be captured.
        same_work: False: another problem, timed beside ours for a ratio; no GB/s of the floor is shown.
    """

    make: Callable[[], Callable[[], object]]
    graph: bool = True
    same_work: bool = True


@dataclass
class Problem:
    """A spec with its tensors. ``gate`` returns what is wrong with ours, or None."""

    providers: dict[str, Provider]
    gate: Callable[[], str | None]


class Spec(Protocol):
    """A problem's sizes: a dataclass whose fields go into the rows. ``shape`` names the model."""

    shape: str


@dataclass(frozen=True)
class Bench:
    """What one file states.

    Attributes:
        specs: for a machine (``gpu``, ``cpu`` or ``interpreter``) and --quick, the most telling first.
        build: the problem on a device.
        bytes_moved: what ours moves on a chip, and the floor. flops: of the op. memory: device bytes that the problem needs.
        vs: name of a provider -> name of a ratio of medians (ours over it) shown beside the times.
    """

    op: str
    doc: str
    specs: Callable[[str, bool], Sequence[Any]]
    build: Callable[[Any, torch.device], Problem]
    bytes_moved: Callable[[Any, Chip], Traffic]
    flops: Callable[[Any], int]
    memory: Callable[[Any], int]
    vs: dict[str, str] = field(default_factory=dict)


# Timing.


class Clock(Protocol):
    def start(self, call: Callable[[], object], captured: bool) -> Callable[[], float]:
        """Run the call; its milliseconds can be asked for after :meth:`wait`."""
        ...

    def wait(self) -> None: ...


class WallClock:
    def start(self, call: Callable[[], object], captured: bool) -> Callable[[], float]:
        begin = time.perf_counter()
        call()
        took = (time.perf_counter() - begin) * 1e3
        return lambda: took

    def wait(self) -> None:
        pass


class CudaClock:
    """CUDA events. The flush also gives the host time to enqueue; a call that is not a graph gets a longer head start."""

    HEAD_START = 2_000_000  # cycles, about a millisecond

    def __init__(self, device: torch.device) -> None:
        self.flushed = torch.empty(_FLUSHED, dtype=torch.int8, device=device)

    def start(self, call: Callable[[], object], captured: bool) -> Callable[[], float]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flushed.zero_()
        if not captured:
            torch.cuda._sleep(self.HEAD_START)
        begin.record()
        call()
        end.record()
        return lambda: begin.elapsed_time(end)

    def wait(self) -> None:
        torch.cuda.synchronize()


def interleave(
    calls: dict[str, tuple[Callable[[], object], bool]],
    clock: Clock,
    seconds: float,
    *,
    least: int = 10,
    most: int = 200,
    now: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Milliseconds of every call in every round; a round runs them all in turn, so that they meet the same conditions.

    The first round is not counted. Slow problems end after 3 x ``seconds``, with 3 rounds at least.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    begin, done = now(), -1
    while True:
        readers = [(name, clock.start(call, captured)) for name, (call, captured) in calls.items()]
        clock.wait()
        if done >= 0:
            for name, read in readers:
                samples[name].append(read())
        done += 1
        spent = now() - begin
        if done >= most or (done >= least and spent >= seconds) or (done >= 3 and spent >= 3 * seconds):
            return samples


def capture(call: Callable[[], object]) -> Callable[[], object]:
    """The call as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


def copy_bandwidth(device: torch.device, clock: Clock, rounds: int = 20) -> float:
    """GB/s, read and written, of a copy that no cache holds."""
    size = 512 * _MIB if device.type == "cuda" else 64 * _MIB
    source, target = (
        torch.zeros(size, dtype=torch.int8, device=device),
        torch.empty(size, dtype=torch.int8, device=device),
    )
    times = interleave({"copy": (lambda: target.copy_(source), False)}, clock, 0.5, least=rounds, most=rounds)["copy"]
    return 2 * size / quantile(times, 0.5) / 1e6


# Rows.


def timed_row(
    times: Sequence[float], traffic: Traffic, flops: int, copy: float, *, same_work: bool = True
) -> dict[str, Any]:
    """Quantiles in milliseconds, and what they mean against the floor."""
    p50 = quantile(times, 0.5)
    row: dict[str, Any] = {
        "p20_ms": quantile(times, 0.2),
        "p50_ms": p50,
        "p80_ms": quantile(times, 0.8),
        "rounds": len(times),
    }
    if same_work:
        floor_ms = traffic.floor / copy / 1e6
        row |= {
            "floor_bytes": traffic.floor,
            "floor_ms": floor_ms,
            "times_floor": p50 / floor_ms if floor_ms else None,
            "gb_per_s": traffic.floor / p50 / 1e6,
            "tflop_per_s": flops / p50 / 1e9 if flops else None,
        }
    return row


class Report:
    """Rows, written to --out as they come, and lines for the reader."""

    def __init__(self, bench: Bench, machine: str, out: Path | None) -> None:
        self.op, self.out = bench.op, out
        if out:
            write_rows(out, [])
        self.origin = provenance() | {"bench": bench.op, "machine": machine}
        self.rows: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self._said: set[tuple[str, str]] = set()

    def add(self, spec: Any, **values: Any) -> None:
        self.rows.append(self.origin | asdict(spec) | values)
        if self.out:  # at once: what was measured survives a crash
            with self.out.open("a") as file:
                file.write(json.dumps(self.rows[-1]) + "\n")

    def skipped(self, provider: str, reason: str) -> None:
        """Each reason once."""
        if (provider, reason) not in self._said:
            self._said.add((provider, reason))
            self.say(f"{self.op}: {provider} skipped: {reason}")

    def failed(self, what: str) -> None:
        self.failures.append(what)
        self.say(f"{self.op}: FAILED: {what}")

    def say(self, line: str) -> None:
        print(line, flush=True)


def label(spec: Any) -> str:
    """``llama3-8b batch=8 steps=5``, without what is off."""
    values = {name: value for name, value in asdict(spec).items() if value is not False and value is not None}
    shape = values.pop("shape")
    return " ".join([shape, *(name if value is True else f"{name}={value}" for name, value in values.items())])


def reason(error: BaseException) -> str:
    """One line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:240]}" if not isinstance(error, Skip) else text


# The three machines.


def machine_kind() -> str:
    if os.environ.get("TRITON_INTERPRET") == "1" and why_not_triton("sample", "cpu") is None:
        return "interpreter"
    return "gpu" if torch.cuda.is_available() else "cpu"


def device_of(kind: str) -> torch.device:
    return torch.device("cuda" if kind == "gpu" else "cpu")


def gate(problem: Problem) -> str | None:
    """What is wrong with ours, an exception included; too little memory judges nothing."""
    try:
        return problem.gate()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return reason(error)


def measure(
    bench: Bench, spec: Any, report: Report, device: torch.device, clock: Clock, copy: float, args: Any
) -> None:
    """Gate, then all providers in turn; a row for each."""
    on_gpu = machine_kind() == "gpu"
    problem = bench.build(spec, device)
    wrong = gate(problem)
    if wrong is not None:
        report.add(spec, provider=OURS, correct=False, problem=wrong)
        report.failed(f"{label(spec)}: {wrong}; not timed")
        return
    calls: dict[str, tuple[Callable[[], object], bool]] = {}
    for name, provider in problem.providers.items():
        if args.providers and name not in args.providers and name != OURS:
            continue
        try:
            call = provider.make()
            for _ in range(2):  # the first may compile
                begin = time.perf_counter()
                call()
                clock.wait()
            seconds = time.perf_counter() - begin
        except Exception as error:
            if name == OURS:
                report.failed(f"{label(spec)}: {reason(error)}")
                return
            report.skipped(name, reason(error))
            continue
        captured = False
        if on_gpu and provider.graph and not args.no_graph and seconds < _LONG:
            try:
                call, captured = capture(call), True
            except Exception as error:
                report.skipped(name, f"its CUDA graph, so it is timed without: {reason(error)}")
                clock.wait()
        calls[name] = (call, captured)
    times = interleave(calls, clock, args.seconds, least=10 if on_gpu else 4)
    traffic = bench.bytes_moved(spec, chip_of(device))
    cells = []
    for name, (_, captured) in calls.items():
        provider = problem.providers[name]
        row = timed_row(times[name], traffic, bench.flops(spec), copy, same_work=provider.same_work)
        if name == OURS:
            row |= {"correct": True}
            if on_gpu:
                row |= {"moved_bytes": traffic.moved}
            for other, ratio in bench.vs.items():
                if other in times:
                    row[ratio] = row["p50_ms"] / quantile(times[other], 0.5)
        report.add(spec, provider=name, graph=captured, copy_gb_per_s=copy, **row)
        text = f"{name} {row['p50_ms'] * 1e3:.1f} us"
        if provider.same_work:
            text += f" ({row['gb_per_s']:.3g} GB/s, {row['times_floor']:.2f} x floor)"
        if name == OURS:
            text += "".join(f", {ratio} {row[ratio]:.2f}" for ratio in bench.vs.values() if ratio in row)
        cells.append(text)
    report.say(f"{label(spec)}: " + "; ".join(cells))


def count(bench: Bench, spec: Any, report: Report) -> None:
    """Launches and bytes of one call under the interpreter."""
    from specdec_triton.interpreter import counted

    problem = bench.build(spec, torch.device("cpu"))
    wrong = gate(problem)
    if wrong is not None:
        report.add(spec, provider=OURS, correct=False, problem=wrong)
        report.failed(f"{label(spec)}: {wrong}")
        return
    call = problem.providers[OURS].make()
    with counted() as found:
        call()
    plan = bench.bytes_moved(spec, INTERPRETER)
    loaded = sum(sum(x.loaded.values()) for x in found.values())
    stored = sum(sum(x.stored.values()) for x in found.values())
    distinct = sum(x.distinct(name) for x in found.values() for name in x.loaded)
    launches = sum(x.launches for x in found.values())
    kernels = {
        name.strip("_"): {
            "launches": x.launches,
            "grid": list(x.grid),
            "loaded": dict(x.loaded),
            "stored": dict(x.stored),
        }
        for name, x in found.items()
    }
    report.add(
        spec, provider=OURS, correct=True, launches=launches, loaded_bytes=loaded, stored_bytes=stored,
        distinct_loaded_bytes=distinct, moved_bytes=plan.moved, floor_bytes=plan.floor, kernels=kernels,
    )  # fmt: skip
    report.say(
        f"{label(spec)}: {launches} launches; {loaded + stored} bytes counted ({distinct + stored} with each element read "
        f"once), {plan.moved} by the plan, {plan.floor} at the floor"
    )


def predict(bench: Bench, specs: Sequence[Any], report: Report) -> None:
    """The audit's prediction for chips that are not here: moved bytes over the chip's bandwidth."""
    for spec in specs:
        cells = []
        for chip in CHIPS.values():
            traffic = bench.bytes_moved(spec, chip)
            microseconds = traffic.moved / chip.bandwidth / 1e3
            report.add(
                spec, provider=OURS, predicted=True, chip=chip.arch, product=chip.product, predicted_us=microseconds,
                moved_bytes=traffic.moved, floor_bytes=traffic.floor,
            )  # fmt: skip
            cells.append(f"{chip.arch} {microseconds:.1f}")
        report.say(f"{label(spec)}: predicted, not measured, us: " + ", ".join(cells))


def run(bench: Bench, argv: Sequence[str] | None = None) -> int:
    """The command; 1: ours was wrong or failed somewhere."""
    args = parse(bench, argv)
    begin = time.perf_counter()
    kind = machine_kind()
    report = Report(bench, kind, args.out)
    device = device_of(kind)
    specs, left_out = list(bench.specs(kind, args.quick)), 0
    if kind != "interpreter":
        clock: Clock = CudaClock(device) if kind == "gpu" else WallClock()
        copy = copy_bandwidth(device, clock, 20 if kind == "gpu" else 5)
        report.say(f"{bench.op}: {report.origin['device']}; a copy moves {copy:.0f} GB/s")
    with torch.inference_mode():
        for spec in specs:
            if args.budget and time.perf_counter() - begin > args.budget:
                left_out += 1
                continue
            if kind == "gpu" and bench.memory(spec) > torch.cuda.mem_get_info()[0]:
                report.skipped(label(spec), f"needs {bench.memory(spec) >> 20} MiB of device memory")
                continue
            try:
                if kind == "interpreter":
                    count(bench, spec, report)
                else:
                    measure(bench, spec, report, device, clock, copy, args)
            except torch.OutOfMemoryError:
                report.skipped(label(spec), "it does not fit the device's memory")
            except Exception as error:
                report.failed(f"{label(spec)}: {reason(error)}")
            if kind == "gpu":
                _free()
    if left_out:
        report.skipped(f"{left_out} of {len(specs)} problems", f"the budget of {args.budget:g} s is spent")
    if kind == "cpu":
        predict(bench, bench.specs("gpu", True)[:1] if args.quick else bench.specs("gpu", False), report)
    report.say(f"{bench.op}: {len(report.rows)} rows, {len(report.failures)} failures")
    return 1 if report.failures else 0


def _free() -> None:
    """Tensors of the last problem; a device that failed answers with an error here too."""
    gc.collect()
    try:
        torch.cuda.empty_cache()
    except Exception as error:
        print(f"cannot free memory: {reason(error)}", file=sys.stderr)


def parse(bench: Bench, argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=bench.doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few problems and short timings")
    parser.add_argument("--providers", nargs="+", metavar="NAME", help=f"these and {OURS} (default: all)")
    parser.add_argument("--seconds", type=float, help="of timing for each problem (default: 0.6; --quick: 0.1)")
    parser.add_argument("--budget", type=float, metavar="S", help="start no problem after so many seconds (CPU: 25)")
    parser.add_argument("--no-graph", action="store_true", help="launch kernel by kernel on a GPU too")
    parser.add_argument("--out", type=Path, help=f"rows as JSON lines, such as bench/{RESULTS.name}/{bench.op}.jsonl")
    args = parser.parse_args(argv)
    if args.seconds is None:
        args.seconds = 0.1 if args.quick else 0.6
    if args.budget is None and machine_kind() == "cpu":
        args.budget = 25.0
    return args


# For the files.


def installed(package: str) -> Any:
    """The imported package.

    Raises:
        Skip: it is not there.
    """
    import importlib

    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise Skip(f"{package.split('.')[0]} is not installed ({error})") from error


def backend() -> str:
    """Which backend of ours a machine runs."""
    return "torch" if machine_kind() == "cpu" else "triton"


def generator(device: torch.device, seed: int = 0) -> torch.Generator:
    """Inputs come from a generator of their own: a failed graph capture leaves torch's default one unusable."""
    return torch.Generator(device).manual_seed(seed)


def normal(
    *shape: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0
) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, scale, generator=generator(device, seed))
