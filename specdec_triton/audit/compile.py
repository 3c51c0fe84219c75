"""Compile recorded binaries, each in a process of its own, and keep what was read off them in the user's cache folder."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from specdec_triton.audit.disassembly import Code, parse_amdgcn, read_cubin
from specdec_triton.audit.record import Binary, target_of
from specdec_triton.errors import BackendUnavailableError
from specdec_triton.models import cache_dir

_FORMAT = 1  # part of the cache folder's name: raise it when what is read off a binary changes


class Compiled(NamedTuple):
    """A binary's ``code`` (None: it could not be compiled, ``error`` says why), shared memory in bytes and number of warps."""

    code: Code | None
    shared: int = 0
    num_warps: int = 0
    error: str | None = None


def compile_all(
    binaries: Iterable[Binary], processes: int, progress: Callable[[], object] = lambda: None
) -> dict[str, Compiled]:
    """What became of each binary, by its digest. A crash of the compiler is that binary's error.

    Raises:
        BackendUnavailableError: Triton has no compiler for one of the chips, or lacks the programs that read binaries.
    """
    waiting = {binary.digest: binary for binary in binaries}
    results: dict[str, Compiled] = {}
    for digest in list(waiting):
        if (found := _read(digest)) is not None:
            results[digest] = found
            del waiting[digest]
            progress()
    for chip in {binary.chip for binary in waiting.values()}:
        _check_target(chip)
    queue = list(waiting.values())
    context = multiprocessing.get_context("fork")  # Triton's functions cannot be pickled
    running: dict[Connection, tuple[Binary, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            while queue or running:
                while queue and len(running) < processes:
                    binary = queue.pop(0)
                    ours, theirs = context.Pipe(duplex=False)
                    process = context.Process(target=_work, args=(binary, theirs, scratch), daemon=True)
                    process.start()
                    theirs.close()
                    running[ours] = (binary, process)
                for ready in wait(list(running)):
                    assert isinstance(ready, Connection)
                    binary, process = running.pop(ready)
                    results[binary.digest] = _receive(ready, process)
                    if results[binary.digest].code is not None:
                        _write(binary.digest, results[binary.digest])
                    progress()
        finally:
            for _, process in running.values():
                process.terminate()
    return results


def compile_binary(binary: Binary) -> Compiled:
    """Compile in this process and read the result."""
    import triton
    from triton.compiler import ASTSource

    source = ASTSource(binary.function, binary.signature, binary.constants, binary.attributes)
    compiled = triton.compile(source, target=target_of(binary.chip), options=binary.options)
    code = read_cubin(compiled.asm["cubin"]) if binary.chip.backend == "cuda" else parse_amdgcn(compiled.asm["amdgcn"])
    return Compiled(code, compiled.metadata.shared, compiled.metadata.num_warps)


def _work(binary: Binary, result: Connection, scratch: str) -> None:
    """In a process of its own: Triton prints whole programs where a compilation fails, and LLVM aborts."""
    os.environ["TRITON_CACHE_DIR"] = scratch
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    try:
        compiled = compile_binary(binary)
    except BackendUnavailableError as error:
        result.send(error)
    except Exception as error:
        result.send(Compiled(None, error=_reason(error)))
    else:
        result.send(compiled)
    result.close()


def _reason(error: BaseException) -> str:
    """The innermost cause: Triton's own message begins with the kernel's source and ends with what is wrong."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message if len(message) < 300 else '... ' + message[-300:]}"


def _receive(ready: Connection, process: Any) -> Compiled:
    try:
        outcome = ready.recv()
    except EOFError:
        outcome = None
    process.join()
    ready.close()
    if isinstance(outcome, BackendUnavailableError):
        raise outcome
    return outcome or Compiled(None, error=f"the compiler crashed (exit status {process.exitcode})")


def _check_target(chip: Any) -> None:
    """Also loads what every child then inherits."""
    from triton.compiler.compiler import make_backend

    try:
        make_backend(target_of(chip)).hash()
    except Exception as error:
        raise BackendUnavailableError(f"this build of triton has no compiler for {chip.arch}: {error}") from error


def _path(digest: str) -> Path:
    return cache_dir() / f"audit-{_FORMAT}" / f"{digest}.json"


def _read(digest: str) -> Compiled | None:
    try:
        kept = json.loads(_path(digest).read_text())
        return Compiled(Code(**kept.pop("code")), **kept)
    except (OSError, ValueError, TypeError, KeyError):  # none, or damaged
        return None


def _write(digest: str, compiled: Compiled) -> None:
    """A cache that cannot be written costs time alone."""
    assert compiled.code is not None
    kept = {"code": compiled.code._asdict(), "shared": compiled.shared, "num_warps": compiled.num_warps}
    path = _path(digest)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(kept))
        part.replace(path)
