"""Registration of the ops with PyTorch (``specdec::name``) and the choice of their backend.

Each op takes plain tensors and scalars and a backend name; the dataclasses live in ``ops``. The fake implementations
give shapes alone, so the ops run on the meta device, under ``torch.compile`` and in CUDA graph capture.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from functools import cache

import torch

from specdec_triton.errors import BackendUnavailableError

BACKENDS = ("triton", "torch")
_library = torch.library.Library("specdec", "DEF")


def resolve_backend(backend: str | None, op: str, tensor: torch.Tensor) -> str:
    """``backend``, else ``$SPECDEC_BACKEND``, else Triton for tensors on a GPU where the op has a kernel, else PyTorch.

    Raises:
        ValueError: an unknown name.
        BackendUnavailableError: Triton was asked for by name and cannot run here; it never falls back silently.
    """
    source = "backend" if backend is not None else "SPECDEC_BACKEND"
    requested = backend if backend is not None else os.environ.get("SPECDEC_BACKEND") or None
    if requested is None:
        on_gpu = tensor.device.type == "cuda"
        return "triton" if on_gpu and why_not_triton(op, tensor.device.type) is None else "torch"
    if requested not in BACKENDS:
        raise ValueError(f"{source} must be one of {', '.join(BACKENDS)}, got {requested!r}")
    if requested == "triton" and (reason := why_not_triton(op, tensor.device.type)) is not None:
        raise BackendUnavailableError(f"{source}='triton' cannot run {op} on {tensor.device}: {reason}")
    return requested


@cache
def why_not_triton(op: str, device_type: str) -> str | None:
    """Why the op cannot run in Triton on such a device, or None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if importlib.util.find_spec(f"specdec_triton.kernels.{op}") is None:
        return "this op has no Triton kernel yet"
    if device_type != "cpu":
        return None
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "tensors on the CPU need the interpreter: set TRITON_INTERPRET=1 before the first import"
    if _release("triton") < (3, 9) and _release("numpy") >= (2, 4):
        return "the interpreter of triton before 3.9 fails with numpy 2.4 and later: install triton>=3.9 or numpy<2.4"
    return None


def _release(package: str) -> tuple[int, int]:
    """``3.9.0+git`` -> (3, 9)."""
    major, minor = importlib.metadata.version(package).split(".")[:2]
    return int(major), int(minor)


@cache
def implementation(op: str, backend: str) -> Callable:
    package = "kernels" if backend == "triton" else "reference"
    return getattr(importlib.import_module(f"specdec_triton.{package}.{op}"), op)


def register(schema: str, fake: Callable) -> Callable:
    """Define ``specdec::name`` from a schema whose last argument is ``str backend``; returns the callable op.

    ``fake`` takes the same arguments without the backend and returns empty tensors of the result's shapes.
    """
    name = schema.split("(", 1)[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))

    def run(*args: object) -> object:
        return implementation(name, str(args[-1]))(*args[:-1])

    for key in ("CPU", "CUDA", "XPU"):
        _library.impl(name, run, key)
    torch.library.register_fake(f"specdec::{name}", lambda *args: fake(*args[:-1]), lib=_library)
    return getattr(torch.ops.specdec, name).default
