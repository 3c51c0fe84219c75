"""Measured costs, kept in the cache folder: a file for each combination of models and machine."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specdec_triton import __version__, ops
from specdec_triton._versions import version
from specdec_triton.engine.costs import CostModel
from specdec_triton.models import cache_dir

if TYPE_CHECKING:
    from specdec_triton.adapter import ModelAdapter

FOLDER = "costs"
_FORMAT = 3  # raise it when what is timed changes


def fingerprint(
    target: ModelAdapter, drafter: Any = None, *, exact: bool, backend: str | None = None
) -> dict[str, Any]:
    """What the costs depend on; the key under which they are kept.

    Args:
        drafter: the draft model's adapter, or a name; None: drafts are free.
        exact: whether passes are padded (see ``exactness.py``). backend: of the ops.
    """
    device = target.device
    versions = {"specdec_triton": __version__} | {name: version(name) for name in ("torch", "transformers", "triton")}
    return {
        "format": _FORMAT,
        "target": _sizes(target),
        "drafter": _sizes(drafter) if hasattr(drafter, "model") else drafter,
        "exact": exact,
        "backend": ops.resolve_backend(backend, "verify_attention", torch.empty(0, device=device)),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "versions": versions,
    }


def _sizes(adapter: ModelAdapter) -> dict[str, Any]:
    config = adapter.config.to_dict()
    return {
        "type": config.get("model_type"),
        "sizes": {name: value for name, value in sorted(config.items()) if type(value) is int},
        "dtype": str(adapter.dtype),
        "bytes": sum(x.nbytes for x in (*adapter.model.parameters(), *adapter.model.buffers())),
        "optimized": getattr(adapter.model, "_specdec_optimized", False),
    }


def device_name(device: torch.device) -> str:
    """Of a GPU what its driver says; of a CPU its name, where the system tells, and what PyTorch uses of it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            name = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def load(key: Mapping[str, Any], *, device: torch.device | str = "cpu") -> CostModel | None:
    """What was kept under the key; None if nothing was, or if it cannot be read."""
    try:
        kept = json.loads(_path(key).read_text(encoding="utf-8"))
        target = {(n, d): seconds for n, d, seconds in kept["target"]}
        draft = dict(kept["draft"])
        whole = all(type(n) is int and n > 0 for n in (*(n for n, _ in target), *draft))
        whole = whole and all(type(d) is int and d >= 0 for _, d in target)
        timed = all(type(x) is float and 0 < x < math.inf for x in (*target.values(), *draft.values()))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return CostModel(target, draft, device=device) if whole and timed else None


def save(costs: CostModel, key: Mapping[str, Any]) -> None:
    """Keep measured costs under the key. Where the cache folder cannot be written, later runs measure again."""
    path = _path(key)
    content = {
        "key": key,
        "target": [[n, d, seconds] for (n, d), seconds in costs.target.items()],
        "draft": [[n, seconds] for n, seconds in (costs.draft or {}).items()],
    }
    text = json.dumps(content, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError:
        pass


def _path(key: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_dir() / FOLDER / f"{digest[:16]}.json"
