"""Shared settings of the suite.

One thread: the models are tiny, and threads that wait for a busy core make the suite ten times slower. A test that asks
for ``backend`` runs on PyTorch, and on Triton where the op that its module names as ``OP`` has a kernel that can run.
"""

from __future__ import annotations

import os

import pytest
import torch

from specdec_triton._library import why_not_triton

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        runs = why_not_triton(getattr(metafunc.module, "OP", "none"), "cpu") is None
        runs = runs and metafunc.definition.get_closest_marker("torch_only") is None
        metafunc.parametrize("backend", ["torch", "triton"] if runs else ["torch"])


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_backend_override(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SPECDEC_BACKEND", raising=False)
