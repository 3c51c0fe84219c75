"""Every op's Triton kernel on a GPU against the reference on the CPU, and what only a chip can show: bits, host reads, graphs.

    python -m pytest -q tests/test_gpu.py
    python tests/test_gpu.py --shard 0/4          # the same checks without pytest, a quarter of them
    TRITON_INTERPRET=1 python tests/test_gpu.py --device cpu --only ragged     # the checks themselves, without a GPU

What counts as equal: attention is at most twice as far from fp64 as PyTorch in the same dtype (1e-5 in fp32); bytes and bits are
equal; so are integers, but for near ties by the rule of ``specdec_triton.testing.unexplained``. No op may read on the host.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from unittest import SkipTest

import gpu_checks  # noqa: F401
import torch
from gpu_checks import common
from gpu_checks.common import CHECKS

from specdec_triton._library import why_not_triton


def pytest_generate_tests(metafunc):
    metafunc.parametrize("check", CHECKS.values(), ids=CHECKS)


def test_on_a_gpu(check):
    if not torch.cuda.is_available():
        raise SkipTest("needs a GPU")
    if (why := why_not_triton("verify_attention", "cuda")) is not None:
        raise SkipTest(f"needs Triton: {why}")
    check()


def main(argv: list[str] | None = None) -> int:
    """One line for each check that did not pass, and one that counts; 1: a failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="every N-th check, from the I-th on")
    parser.add_argument("--only", default="", metavar="TEXT", help="checks whose name holds it")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no check after so long")
    args = parser.parse_args(argv)
    common.device = torch.device(args.device)
    if common.device.type == "cuda" and not torch.cuda.is_available():
        print("no GPU: nothing to check")
        return 0
    index, of = map(int, args.shard.split("/"))
    torch.set_num_threads(max((os.cpu_count() or 1) // of, 1))
    begin, passed, failed, skipped, left = time.perf_counter(), 0, [], [], 0
    for name in [name for name in CHECKS if args.only in name][index::of]:
        if time.perf_counter() - begin > args.seconds:
            left += 1
            continue
        torch.manual_seed(0)
        try:
            CHECKS[name]()
            passed += 1
        except SkipTest as reason:
            skipped.append(name)
            print(f"SKIPPED {name}: {reason}", flush=True)
        except Exception as error:
            failed.append(name)
            print(f"FAILED {name}: {type(error).__name__}: {str(error)[:500]}", flush=True)
            if len(failed) <= 3:
                print(traceback.format_exc()[-3000:], flush=True)
    seconds = time.perf_counter() - begin
    print(
        f"shard {args.shard}: {passed} passed, {len(failed)} failed, {len(skipped)} skipped, {left} not run, {seconds:.0f} s"
    )
    return 1 if failed or left else 0


if __name__ == "__main__":
    sys.exit(main())
