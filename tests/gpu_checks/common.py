"""What the checks share: the device, its copies of arguments, and calls that may not read on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest import SkipTest

import torch

from specdec_triton.logit_rules import LogitRules
from specdec_triton.ops import SamplingBatch
from specdec_triton.testing import poisoned_outputs

device = torch.device("cuda")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
CHECKS: dict[str, Callable[[], object]] = {}


def add(name: str, check: Callable[..., object], *args: object, **options: object) -> None:
    """A check of that name, to be called with these arguments."""
    assert name not in CHECKS, name
    CHECKS[name] = partial(check, *args, **options)


def needs_gpu() -> None:
    if device.type != "cuda":
        raise SkipTest("needs a GPU")


def on_gpu(x: object) -> object:
    """Tensors, and those in tuples, dicts, parameters and rules, on the device."""
    if isinstance(x, torch.Tensor):
        return x.to(device)
    if isinstance(x, dict):
        return {name: on_gpu(value) for name, value in x.items()}
    if isinstance(x, SamplingBatch | LogitRules):
        return replace(x, **{name: on_gpu(value) for name, value in vars(x).items()})
    return tuple(map(on_gpu, x)) if isinstance(x, tuple | list) else x


@contextmanager
def no_host_reads() -> Iterator[None]:
    """A wait for the device raises inside (compiling a kernel does not wait)."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def call(op: Callable, *args: object, **options: object) -> object:
    """The op's kernel on the device's copies of the arguments; what it allocates holds NaN."""
    args, options = on_gpu(args), on_gpu(options)
    with no_host_reads(), poisoned_outputs():
        return op(*args, **options, backend="triton")
