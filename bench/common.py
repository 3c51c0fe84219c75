"""What every benchmark shares: rows with their provenance, quantiles, prompts."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import specdec_triton
from specdec_triton._versions import version
from specdec_triton.engine.cost_files import device_name

HERE = Path(__file__).parent
RESULTS = HERE / "results"


def provenance() -> dict[str, Any]:
    """Device, versions and commit, for every row."""
    return {
        "device": device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "triton": version("triton"),
        "specdec_triton": specdec_triton.__version__,
        "python": platform.python_version(),
        "commit": _commit(),
    }


def _commit() -> str:
    """The commit, with a plus if files have changed since; ``$SPECDEC_COMMIT`` where a copy has no history."""
    try:
        commit = subprocess.check_output(["git", "rev-parse", "--short=12", "HEAD"], cwd=HERE, text=True).strip()
        changed = subprocess.check_output(["git", "status", "--porcelain", "-uno"], cwd=HERE, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("SPECDEC_COMMIT") or "unknown"
    return commit + ("+" if changed else "")


def quantile(values: Iterable[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(q * len(ordered)), len(ordered) - 1)]


def median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """One JSON object a line; an existing file is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def fill_in(readme: Path, name: str, text: str) -> None:
    """Put ``text`` between the README's markers ``<!-- name -->`` and ``<!-- end of name -->``."""
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    head, rest = readme.read_text().split(start)
    readme.write_text(f"{head}{start}{text}\n{end}{rest.split(end)[1]}")


def prompts(tasks: Sequence[str] | None = None, per_task: int | None = None) -> list[dict[str, str]]:
    """The benchmark's prompts: seven tasks, six each."""
    chosen: list[dict[str, str]] = []
    for row in read_rows(HERE / "prompts.jsonl"):
        same = sum(other["task"] == row["task"] for other in chosen)
        if (not tasks or row["task"] in tasks) and (per_task is None or same < per_task):
            chosen.append(row)
    return chosen
