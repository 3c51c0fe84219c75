"""The audit itself: record, compile, judge; and its tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specdec_triton._versions import version
from specdec_triton.audit.cases.base import Case
from specdec_triton.audit.compile import Compiled, compile_all
from specdec_triton.audit.occupancy import occupancy
from specdec_triton.audit.record import Binary, record
from specdec_triton.audit.traffic import Traffic

if TYPE_CHECKING:
    from specdec_triton.kernels._config import Chip


_PRODUCTS = ("_verify_attention_kernel", "_skinny_linear_kernel", "_gated_linear_kernel")  # of matrices


@dataclass
class Row:
    """A kernel in one configuration on one chip; ``problems`` is empty where it passed. Traffic is that of the whole call."""

    arch: str
    op: str
    case: str
    kernel: str
    registers: int | None = None
    spilled_bytes: int | None = None
    stack_bytes: int | None = None
    shared_bytes: int | None = None
    shared_limit: int | None = None
    num_warps: int | None = None
    occupancy: float | None = None
    tensor_core: int | None = None
    loads: int | None = None
    wide_loads: int | None = None
    binaries: int = 1
    call_bytes: int = 0
    call_floor_bytes: int = 0
    predicted_us: float = 0.0
    problems: tuple[str, ...] = ()


@dataclass
class Recorded:
    """What a case launches on a chip: for each kernel its distinct binaries over all run-time sizes, or why it cannot launch."""

    chip: Chip
    case: Case
    kernels: dict[str, list[Binary]]
    error: str | None = None


def audit(
    chips: Sequence[Chip],
    cases: Sequence[Case],
    processes: int,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> list[Row]:
    """One row for each kernel, case and chip."""
    recorded = [record_case(chip, case) for chip in chips for case in cases]
    binaries = {b.digest: b for one in recorded for found in one.kernels.values() for b in found}
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        progress(done, len(binaries))

    compiled = compile_all(binaries.values(), processes, step)
    return [row for one in recorded for row in rows_of(one, compiled)]


def record_case(chip: Chip, case: Case) -> Recorded:
    kernels: dict[str, dict[str, Binary]] = {}
    try:
        for size in case.sizes:
            launches: dict[str, int] = {}
            for binary in record(chip, lambda size=size: case.call(size)):  # type: ignore[misc]
                # A kernel that one call launches twice may have a binary for each of the two.
                launches[binary.kernel] = nth = launches.get(binary.kernel, 0) + 1
                name = binary.kernel if nth == 1 else f"{binary.kernel} #{nth}"
                kernels.setdefault(name, {})[binary.digest] = binary
    except Exception as error:  # the launcher's, whatever it is
        return Recorded(chip, case, {}, f"{type(error).__name__}: {error}")
    return Recorded(chip, case, {name: list(found.values()) for name, found in kernels.items()})


def rows_of(one: Recorded, compiled: dict[str, Compiled]) -> list[Row]:
    chip, case = one.chip, one.case
    if one.error is not None or not one.kernels:
        problem = f"cannot launch: {one.error}" if one.error else "launches nothing"
        return [Row(chip.arch, case.op, case.name, "-", problems=(problem,))]
    moved = case.traffic(chip)
    return [
        _row(chip, case, name, [compiled[binary.digest] for binary in binaries], moved)
        for name, binaries in one.kernels.items()
    ]


def _row(chip: Chip, case: Case, kernel: str, compiled: Sequence[Compiled], moved: Traffic) -> Row:
    row = Row(chip.arch, case.op, case.name, kernel, binaries=len(compiled))
    row.call_bytes, row.call_floor_bytes = moved
    row.predicted_us = moved.moved / (chip.bandwidth * 1e3)
    row.shared_limit = chip.shared_memory
    first = compiled[0]
    if first.code is not None:
        code = first.code
        row.registers, row.spilled_bytes, row.stack_bytes = code.registers, code.spilled_bytes, code.stack_bytes
        row.tensor_core, row.loads, row.wide_loads = code.tensor_core, code.loads, code.wide_loads
        row.shared_bytes, row.num_warps = first.shared, first.num_warps
        row.occupancy = occupancy(chip, code.registers, first.shared, first.num_warps)
    row.problems = problems_of(row, compiled, needs_tensor_cores=kernel in _PRODUCTS and case.tensor_cores)
    return row


def problems_of(row: Row, compiled: Sequence[Compiled], *, needs_tensor_cores: bool) -> tuple[str, ...]:
    """Why the audit fails: empty if it does not."""
    found = [f"does not compile: {one.error}" for one in compiled if one.code is None]
    if len(compiled) > 1:
        found.append(f"{len(compiled)} binaries for one configuration: it recompiles as lengths, T, B or V change")
    for one in compiled:
        if one.code is None:
            continue
        if one.code.spilled_bytes:
            found.append(f"spills {one.code.spilled_bytes} bytes a thread")
        if row.shared_limit is not None and one.shared > row.shared_limit:
            found.append(f"needs {one.shared} bytes of shared memory, the chip has {row.shared_limit}")
        if needs_tensor_cores and not one.code.tensor_core:
            found.append("has no tensor-core instructions")
    return tuple(dict.fromkeys(found))


HEADINGS = (
    "kernel", "configuration", "regs", "spill", "stack", "shared", "occupancy", "mma", "128-bit", "MB/call", "x floor",
    "predicted us",
)  # fmt: skip


def cells(row: Row, first_of_call: bool) -> tuple[str, ...]:
    """A row as text. Bytes and predicted time are the whole call's, and stand beside its first kernel."""
    kernel = row.kernel.strip("_").removesuffix("_kernel").replace("_kernel ", " ")
    if row.registers is None:
        return (kernel, f"{row.op} {row.case}" if row.kernel == "-" else row.case, *["-"] * 10)
    assert row.shared_bytes is not None
    assert row.shared_limit is not None
    assert row.occupancy is not None
    wide = f"{row.wide_loads / row.loads:.0%}" if row.loads and row.wide_loads is not None else "-"
    call = ("", "", "")
    if first_of_call:
        floor = row.call_bytes / row.call_floor_bytes if row.call_floor_bytes else 1.0
        call = (f"{row.call_bytes / 1e6:.2f}", f"{floor:.2f}", f"{row.predicted_us:.1f}")
    return (
        kernel,
        row.case,
        str(row.registers),
        str(row.spilled_bytes),
        str(row.stack_bytes),
        f"{row.shared_bytes / 1024:.1f}/{row.shared_limit // 1024} KiB",
        f"{row.occupancy:.0%}",
        str(row.tensor_core),
        wide,
        *call,
    )


def as_text(rows: Sequence[Row], chips: Sequence[Chip]) -> str:
    """A table for each chip, then the problems, then one line that counts."""
    lines = []
    for chip in chips:
        table = [HEADINGS, *(_cells_of(rows, chip.arch))]
        widths = [max(len(row[i]) for row in table) for i in range(len(HEADINGS))]
        lines.append(f"{chip.arch}: predicted for {chip.product}, {chip.num_sms} SMs, {chip.bandwidth} GB/s")
        lines += ["  " + "  ".join(_align(row, widths)).rstrip() for row in table]
    failed = [row for row in rows if row.problems]
    if failed:
        lines.append("problems")
        lines += [f"  {r.arch} {r.op} {r.case} {r.kernel}: {problem}" for r in failed for problem in r.problems]
    lines.append(summary(rows))
    return "\n".join(lines) + "\n"


def summary(rows: Sequence[Row]) -> str:
    names = {row.kernel.split(" ")[0] for row in rows if row.kernel != "-"}
    failed = sum(bool(row.problems) for row in rows)
    return (
        f"{len(names)} kernels, {len({row.arch for row in rows})} chips, {len(rows)} rows, "
        f"{sum(row.binaries for row in rows)} binaries, {failed} failed"
    )


def as_markdown(rows: Sequence[Row], chip: Chip) -> str:
    """The page kernels/AUDIT.md, of one chip."""
    lines = [
        f"# What the kernels compile to on {chip.arch}",
        "",
        f"`specdec-triton audit --arch {chip.arch} --markdown` made this page, with triton {version('triton')}. Times are predictions"
        f" from bytes and {chip.product}'s {chip.bandwidth} GB/s, not measurements; each is of the case's first size.",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "| --- | --- |" + " ---: |" * (len(HEADINGS) - 2),
    ]
    lines += ["| " + " | ".join(row) + " |" for row in _cells_of(rows, chip.arch)]
    return "\n".join(lines) + "\n"


def _cells_of(rows: Sequence[Row], arch: str) -> list[tuple[str, ...]]:
    table, before = [], None
    for row in rows:
        if row.arch == arch:
            table.append(cells(row, (row.op, row.case) != before))
            before = (row.op, row.case)
    return table


def _align(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [
        cell.ljust(width) if i < 2 else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    return {"ok": not any(row.problems for row in rows), "summary": summary(rows), "rows": [vars(row) for row in rows]}
