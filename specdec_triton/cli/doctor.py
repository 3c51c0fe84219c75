"""``specdec-triton doctor``: what is installed, which device and backend would be used, and why."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from pathlib import Path
from typing import Any

from specdec_triton import __version__
from specdec_triton._versions import version as version_of
from specdec_triton.cli.common import write
from specdec_triton.models import cache_dir, smollm2_status

NAME = "doctor"
HELP = "show versions, devices, and what would run where"
DESCRIPTION = "Show versions, devices, which backend each op would use and why, and the models at hand."

# Lowest version that works. Triton is needed on a GPU alone.
REQUIRED: dict[str, str | None] = {"torch": "2.9", "transformers": "5.17", "numpy": None, "safetensors": None}
OPTIONAL: dict[str, str | None] = {"triton": "3.6"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    found = examine()
    write(json.dumps(found, indent=2) + "\n" if args.json else as_text(found))
    return 1 if found["problems"] else 0


def examine() -> dict[str, Any]:
    """Everything that the command shows. Packages that are missing or too old are ``problems``, not exceptions."""
    versions = {name: version_of(name) for name in (*REQUIRED, *OPTIONAL)}
    problems = []
    for name, lowest in (REQUIRED | OPTIONAL).items():
        version = versions[name]
        if version is None and name in REQUIRED:
            problems.append(f"{name} is not installed")
        elif version is not None and lowest is not None and _numbers(version) < _numbers(lowest):
            problems.append(f"{name} {version} is too old: {lowest} or later is needed")
    versions = {"specdec_triton": __version__, "python": platform.python_version(), **versions}
    ready, state = smollm2_status()
    found: dict[str, Any] = {
        "versions": versions,
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": None,
        "gpus": [],
        "device": "cpu",
        "ops": {},
        "environment": {name: os.environ.get(name) for name in ("SPECDEC_BACKEND", "TRITON_INTERPRET")},
        "cache": {"folder": str(cache_dir()), "writable": _writable(cache_dir())},
        "smollm2": {"ready": ready, "state": state},
        "problems": problems,
    }
    if versions["torch"] is not None:
        found["cpu"] = _cpu()
        found["gpus"] = _gpus()
        found["device"] = "cuda" if found["gpus"] else "cpu"
        found["ops"] = _ops(found["device"])
        problems += [f"{op}: {chosen['why']}" for op, chosen in found["ops"].items() if chosen["backend"] is None]
    return found


def _numbers(version: str) -> tuple[int, ...]:
    """``2.13.0+cpu`` -> (2, 13)."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _writable(folder: Path) -> bool:
    """Whether files can be made in it, or it in the nearest folder above that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK)


def _cpu() -> dict[str, Any]:
    import torch

    return {"capability": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()}


def _gpus() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        architecture = getattr(properties, "gcnArchName", None) if torch.version.hip else None
        gpus.append(
            {
                "name": properties.name,
                "architecture": architecture or f"sm_{properties.major}{properties.minor}",
                "memory_gib": round(properties.total_memory / 2**30, 1),
                "runtime": runtime,
            }
        )
    return gpus


def _ops(device: str) -> dict[str, dict[str, str | None]]:
    """Each op's backend on the device, and why."""
    import torch

    from specdec_triton import ops
    from specdec_triton._library import resolve_backend, why_not_triton

    tensor = torch.empty(0, device=device)
    asked = os.environ.get("SPECDEC_BACKEND")
    chosen: dict[str, dict[str, str | None]] = {}
    for op in (name for name in ops.__all__ if name.islower()):
        try:
            backend: str | None = resolve_backend(None, op, tensor)
        except (ValueError, RuntimeError) as error:
            backend, why = None, str(error)
        else:
            if asked:
                why = f"SPECDEC_BACKEND={asked}"
            elif backend == "triton":
                why = "there is a GPU and a kernel"
            else:
                why = "tensors on the CPU" if device == "cpu" else why_not_triton(op, device) or ""
        chosen[op] = {"backend": backend, "why": why}
    return chosen


def as_text(found: dict[str, Any]) -> str:
    """The same for people."""
    missing = "not installed"
    lines = ["versions"]
    lines += [f"  {name:<18}{version or missing}" for name, version in found["versions"].items()]
    if found["versions"]["triton"] is None:
        lines[-1] += " (only GPUs need it)"
    lines += ["devices", f"  {'platform':<18}{found['platform']}"]
    if found["cpu"]:
        lines.append(f"  {'cpu':<18}{found['cpu']['capability']}, {found['cpu']['threads']} threads")
    for index, gpu in enumerate(found["gpus"]):
        lines.append(
            f"  {f'cuda:{index}':<18}{gpu['name']}, {gpu['architecture']}, {gpu['memory_gib']} GiB, {gpu['runtime']}"
        )
    lines += [f"  {'--device auto':<18}{found['device']}", f"backend of each op on {found['device']}"]
    lines += [f"  {op:<18}{chosen['backend'] or 'none':<8}{chosen['why']}" for op, chosen in found["ops"].items()]
    lines.append("models")
    folder = found["cache"]
    lines.append(f"  {'cache folder':<18}{folder['folder']}{'' if folder['writable'] else ' (not writable)'}")
    lines.append(f"  {'smollm2':<18}{found['smollm2']['state']}")
    lines.append("problems" if found["problems"] else "no problems found")
    lines += [f"  {problem}" for problem in found["problems"]]
    return "\n".join(lines) + "\n"
