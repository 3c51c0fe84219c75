"""Record what the launchers launch, for a pretended chip: real launchers on meta tensors, Triton's own specialisation rules.

The ops run on the meta device under :class:`_ToLaunchers`, which hands them to their Triton launchers. A launch goes through
Triton's binder with a driver that claims the pretended chip, and ends in ``jit_cache_hook``, which every release calls before
it compiles: it keeps signature, constants, attributes and options, and says that there is nothing to compile.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import TorchDispatchMode

from specdec_triton._library import implementation

if TYPE_CHECKING:
    from specdec_triton.kernels._config import Chip


@dataclass(frozen=True)
class Binary:
    """One specialisation of a kernel for a chip: what ``triton.compile`` is given.

    Attributes:
        kernel: its name. function: the ``JITFunction``.
        digest: of the kernel's source and all below, Triton's version included: equal digests, equal binaries.
    """

    kernel: str
    chip: Chip
    function: Any
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]
    digest: str


class _Driver:
    """A driver of a chip that is not here; its device numbers are the chips' names, since Triton keeps a binder for each."""

    def __init__(self, chip: Chip) -> None:
        self.chip = chip

    def get_current_target(self) -> Any:
        return target_of(self.chip)

    def get_current_device(self) -> str:
        return self.chip.arch

    def get_current_stream(self, device: str) -> int:
        return 0


class _ToLaunchers(TorchDispatchMode):
    """Runs the launchers of our ops, where the meta device would run the fake implementations."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "specdec":
            return implementation(name, "triton")(*args[:-1])
        return func(*args, **(kwargs or {}))


def target_of(chip: Chip) -> Any:
    """The ``GPUTarget``."""
    from triton.backends.compiler import GPUTarget

    arch = int(chip.arch.removeprefix("sm_")) if chip.backend == "cuda" else chip.arch
    return GPUTarget(chip.backend, arch, chip.warp_size)


def record(chip: Chip, call: Callable[[], object]) -> list[Binary]:
    """The binaries that ``call``, which runs ops with ``backend="triton"`` on meta tensors, would launch on the chip, in order."""
    from specdec_triton.kernels._config import pretend

    launched: list[Binary] = []

    def hook(*, fn: Any, compile: dict[str, Any], **ignored: Any) -> bool:
        launched.append(_binary(chip, fn.jit_function, compile))
        return True

    with pretend(chip), _driver(chip), _hook(hook), _ToLaunchers():
        call()
    return launched


@contextmanager
def _driver(chip: Chip) -> Iterator[None]:
    from triton.runtime.driver import driver

    before = getattr(driver, "_active", None)  # None: not asked for yet, and where there is no GPU asking fails
    driver.set_active(_Driver(chip))
    try:
        yield
    finally:
        driver.set_active(before)


@contextmanager
def _hook(hook: Callable[..., bool]) -> Iterator[None]:
    from triton import knobs

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, hook
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = before


def _binary(chip: Chip, function: Any, compiled: dict[str, Any]) -> Binary:
    import triton

    # The options travel as JSON; Triton's own preload() makes tuples of the lists again.
    options = json.loads(compiled["specialization_data"])["options"]
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    attributes = compiled["configs"][0]
    parts = (
        triton.__version__,
        chip.arch,
        function.cache_key,
        compiled["signature"],
        sorted(compiled["constants"].items()),
        sorted(attributes.items()),
        sorted((name, str(value)) for name, value in options.items() if name != "extern_libs"),  # those hold paths
    )
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()
    return Binary(
        function.__name__, chip, function, compiled["signature"], compiled["constants"], attributes, options, digest
    )
