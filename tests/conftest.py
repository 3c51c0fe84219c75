"""Shared settings of the suite.

One thread: the models are tiny, and threads that wait for a busy core make the suite ten times slower. A test that asks
for ``backend`` runs on PyTorch, and on Triton where the op that its module names as ``OP`` has a kernel that can run:
without a GPU in Triton's interpreter, if triton is installed. On a GPU the kernels are tested by test_gpu.py.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from specdec_triton._library import why_not_triton

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are imported


if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    # The same examples in every run: a suite that fails now and then is one that nobody believes.
    settings.register_profile("suite", deadline=None, derandomize=True, database=None, max_examples=25)
    settings.load_profile("suite")


def _in_a_large_frame(call: Callable[[], object]) -> object:
    return call()


# CPython keeps frames in chunks of 16 KB, and gives the next chunk back to the system whenever a call at the edge of one
# returns. A loop that happens to run there spends four fifths of its time on that (3.8 million mmaps in one test). A frame
# that needs half a megabyte comes with a chunk that has room for all that follow.
_in_a_large_frame.__code__ = _in_a_large_frame.__code__.replace(co_stacksize=1 << 16)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    _in_a_large_frame(lambda: pyfuncitem.obj(**arguments))
    return True


def _patch_the_language_once_a_launch() -> None:
    """The interpreter looks through all of ``triton.language`` whenever a kernel calls a helper; once for each module that
    helpers come from is enough for a launch, at whose end the patches go. That is two fifths of the kernels' tests."""
    from triton.runtime import interpreter

    patched: set[int] = set()
    launch = interpreter.GridExecutor.__call__

    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(self, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id(self.fn.__globals__) not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(id(self.fn.__globals__))
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.GridExecutor.__call__ = start
    interpreter.InterpretedFunction.__call__ = call


def _remember_types() -> None:
    """The interpreter makes a block's type anew for each value, looks its numpy type up in a table that it builds each time, and
    copies both sides of an operation to the shape that they have. None of it is in what it computes, but half of its time."""
    from triton.language import core, semantic
    from triton.runtime import interpreter

    core.block_type.__hash__ = core.pointer_type.__hash__ = core.dtype.__hash__  # by name, which says all
    interpreter._get_np_dtype = functools.cache(interpreter._get_np_dtype)
    core.block_type.with_element_ty = functools.cache(core.block_type.with_element_ty)
    broadcast, start = semantic.TritonSemantic.broadcast_impl_value, core.tensor.__init__
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def broadcast_where_needed(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        return (lhs, rhs) if lhs.shape.values == rhs.shape.values else broadcast(self, lhs, rhs)

    def start_with_known_shape(self: Any, handle: Any, type: Any) -> None:
        shape = (*type.shape.values,) if type.is_block() else ()
        if shape in shapes:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.numel, self.shape = shapes[shape]
        else:
            start(self, handle, type)
            shapes[shape] = self.numel, self.shape

    semantic.TritonSemantic.broadcast_impl_value = broadcast_where_needed
    core.tensor.__init__ = start_with_known_shape


if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    _patch_the_language_once_a_launch()
    _remember_types()


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


@pytest.fixture
def few_row_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """For commands that load a model of toy size each: of thousands of rows, the tests at the start take seconds."""
    monkeypatch.setattr("specdec_triton.exactness._OUTPUTS", 2**12)


@pytest.fixture
def few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """``verify_attention`` with 2 splits and chunks of 64 keys: programs walk over several chunks, and there are few programs."""
    if why_not_triton("verify_attention", "cpu") is None:
        kernels = importlib.import_module("specdec_triton.kernels.verify_attention")
        usual = kernels.attention_config
        monkeypatch.setattr(
            kernels, "attention_config", lambda *args: usual(*args)._replace(split_size=64, num_splits=2)
        )
