"""Read a compiled kernel: registers, spills, stack, and which instructions it is made of.

NVIDIA: ``cuobjdump`` and ``nvdisasm``, which come with Triton. AMD: the assembly that Triton keeps. The parsers take text, so
that they can be tested on a few lines of it. Instructions are counted as they stand in the program, not as often as they run.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from specdec_triton.errors import BackendUnavailableError


class Code(NamedTuple):
    """What a kernel is made of.

    Attributes:
        registers: vector registers of a thread (AMD: accumulation registers included).
        spilled_bytes: of a thread, to local memory or scratch (AMD's scalars in lanes of vector registers are not spilled).
            NVIDIA names no size where the compiler cannot tell spills from arrays, so there it is the bytes that the stores to
            local memory write.
        stack_bytes: of a thread.
        tensor_core: matrix instructions. loads: from global memory, copies into shared memory included. wide_loads: of these,
            the ones of 128 bits or more.
    """

    registers: int
    spilled_bytes: int
    stack_bytes: int
    tensor_core: int
    loads: int
    wide_loads: int


_SASS = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
# HMMA, IMMA (sm_80), HGMMA (sm_90), UTCHMMA (sm_100) and their like for other types.
_SASS_MATRIX = re.compile(r"(?:UTC)?[A-Z]*MMA\b")
_SASS_LOAD = re.compile(r"(?:LDG|LDGSTS|UBLKCP|UTMALDG)\b")
_SASS_WIDE = re.compile(r"(?:UBLKCP|UTMALDG)\b|\w+.*\.(?:128|256)\b")
_RESOURCE = re.compile(r"\b(REG|STACK):(\d+)")

_GCN = re.compile(r"^\s+((?:v|global|buffer|flat|scratch)_\w+)", re.MULTILINE)
_GCN_LOAD = re.compile(r"(?:global|buffer|flat)_load_")
_GCN_WIDE = re.compile(r"\w+_(?:dwordx4|b128)\b|\w+_lds_(?:dwordx4|b128)")
_GCN_FIELD = r"^\s*\.{name}:\s+(\d+)"


def read_cubin(cubin: bytes) -> Code:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return parse_sass(_tool("cuobjdump", "--dump-resource-usage", file.name), _tool("nvdisasm", "-c", file.name))


def parse_sass(resource_usage: str, listing: str) -> Code:
    """From what ``cuobjdump --dump-resource-usage`` and ``nvdisasm`` print."""
    usage = {name: int(value) for name, value in _RESOURCE.findall(resource_usage)}
    if not usage:
        raise ValueError(f"cuobjdump names no registers: {resource_usage.strip()[:200]!r}")
    opcodes = _SASS.findall(listing)
    if not opcodes:
        raise ValueError("nvdisasm lists no instructions")
    loads = [opcode for opcode in opcodes if _SASS_LOAD.match(opcode)]
    return Code(
        registers=usage["REG"],
        spilled_bytes=sum(_sass_bytes(opcode) for opcode in opcodes if re.match(r"STL\b", opcode)),
        stack_bytes=usage.get("STACK", 0),
        tensor_core=sum(bool(_SASS_MATRIX.match(opcode)) for opcode in opcodes),
        loads=len(loads),
        wide_loads=sum(bool(_SASS_WIDE.match(opcode)) for opcode in loads),
    )


def parse_amdgcn(assembly: str) -> Code:
    """From the assembly of a kernel, whose metadata closes it."""
    opcodes = _GCN.findall(assembly)
    loads = [opcode for opcode in opcodes if _GCN_LOAD.match(opcode)]
    return Code(
        registers=_gcn_field(assembly, "vgpr_count"),
        spilled_bytes=4 * _gcn_field(assembly, "vgpr_spill_count"),
        stack_bytes=_gcn_field(assembly, "private_segment_fixed_size"),
        tensor_core=sum(opcode.startswith(("v_mfma", "v_smfma")) for opcode in opcodes),
        loads=len(loads),
        wide_loads=sum(bool(_GCN_WIDE.match(opcode)) for opcode in loads),
    )


def _sass_bytes(opcode: str) -> int:
    """Bytes of a local-memory store: STL is 4, STL.64 8, STL.U8 1."""
    for width, size in ((".128", 16), (".64", 8), ("16", 2), ("8", 1)):
        if opcode.endswith(width):
            return size
    return 4


def _gcn_field(assembly: str, name: str) -> int:
    found = re.search(_GCN_FIELD.format(name=name), assembly, re.MULTILINE)
    if found is None:
        raise ValueError(f"the assembly has no .{name}")
    return int(found[1])


def _tool(name: str, *arguments: str) -> str:
    """The output of one of the programs in Triton's NVIDIA backend."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not path.is_file():
        raise BackendUnavailableError(f"this build of triton lacks {name}, which reads NVIDIA binaries: {path}")
    return subprocess.run([str(path), *arguments], check=True, capture_output=True, text=True).stdout
