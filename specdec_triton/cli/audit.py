"""``specdec-triton audit``: compile every Triton kernel for chips that need not be here, and report what came out."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

from specdec_triton.cli.common import UsageError, integer, write
from specdec_triton.errors import BackendUnavailableError

NAME = "audit"
HELP = "compile every kernel for every chip, and show registers, spills, tensor cores"
DESCRIPTION = """Compile every Triton kernel in the configurations of real models, for chips that need not be here.

Shown for each kernel: registers, spilled bytes and stack of a thread; shared memory of a block and the chip's limit;
occupancy; tensor-core instructions; the share of global loads that are 128 bits wide. For each call: bytes moved, how
many times the floor (inputs and outputs once) that is, and the time predicted from the chip's bandwidth alone.

Exit status 1: a kernel that does not compile, spills, needs more shared memory than the chip has, recompiles as lengths,
T, B or V change, or a matrix product (attention, linear layers) without tensor-core instructions."""

# As in kernels/_config.py, which needs torch.
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")
QUICK_ARCHS = ("sm_80", "sm_90")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", nargs="+", metavar="ARCH", help=f"chips: {', '.join(ARCHS)} (default: all)")
    parser.add_argument("--op", nargs="+", metavar="NAME", help="ops, such as verify_attention (default: all)")
    parser.add_argument("--quick", action="store_true", help=f"few configurations, {' and '.join(QUICK_ARCHS)}: for CI")
    parser.add_argument(
        "--jobs", type=integer(1, 64), default=2, metavar="N", help="compilations at a time (default: 2)"
    )
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="print one JSON object")
    shape.add_argument("--markdown", action="store_true", help="print kernels/AUDIT.md, the page of one chip")


def run(args: argparse.Namespace) -> int:
    archs = list(dict.fromkeys(args.arch or (QUICK_ARCHS if args.quick else ARCHS)))
    for arch in archs:
        if arch not in ARCHS:
            raise UsageError(f"--arch must be among {', '.join(ARCHS)}, got {arch!r}")
    if args.markdown and len(archs) != 1:
        raise UsageError("--markdown needs one --arch")
    if importlib.util.find_spec("triton") is None:
        raise BackendUnavailableError("the audit compiles with triton, which is not installed: pip install triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return _without_interpreter(args)

    from specdec_triton.audit.cases import cases
    from specdec_triton.audit.report import as_json, as_markdown, as_text, audit
    from specdec_triton.kernels._config import CHIPS

    chosen = [case for case in cases() if case.quick or not args.quick]
    known = sorted({case.op for case in chosen})
    for op in args.op or ():
        if op not in known:
            raise UsageError(f"--op must be among {', '.join(known)}, got {op!r}")
    chosen = [case for case in chosen if not args.op or case.op in args.op]
    chips = [CHIPS[arch] for arch in archs]
    rows = audit(chips, chosen, args.jobs, _Progress())
    if args.json:
        write(json.dumps(as_json(rows)) + "\n")
    elif args.markdown:
        write(as_markdown(rows, chips[0]))
    else:
        write(as_text(rows, chips))
    return 1 if any(row.problems for row in rows) else 0


def _without_interpreter(args: argparse.Namespace) -> int:
    """``triton.jit`` decides at import whether it compiles: start again in a process where it does."""
    command = [sys.executable, "-m", "specdec_triton", NAME, "--jobs", str(args.jobs)]
    for name in ("arch", "op"):
        if getattr(args, name):
            command += [f"--{name}", *getattr(args, name)]
    command += [f"--{name}" for name in ("quick", "json", "markdown") if getattr(args, name)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    write(done.stdout)
    return done.returncode


class _Progress:
    """A bar on stderr, where that is a terminal."""

    def __init__(self) -> None:
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        from tqdm import tqdm

        if self._bar is None:
            self._bar = tqdm(total=total, unit="binary", disable=None, leave=False)
        self._bar.update(done - self._bar.n)
        if done == total:
            self._bar.close()
