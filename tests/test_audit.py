"""The compile audit: its parsers on a few lines of listing, what makes it fail, and one real run where Triton is installed."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from specdec_triton._library import why_not_triton
from specdec_triton.audit import traffic
from specdec_triton.audit.disassembly import Code, parse_amdgcn, parse_sass
from specdec_triton.audit.traffic import (
    AttentionShape,
    HeadTiles,
    LinearTiles,
    RopeShape,
    accept_reject,
    append_kv,
    apply_logit_rules,
    attention,
    head_from_memory,
    linear_flops,
    rope_append,
    row_mean,
    sample,
    skinny_linear,
    verify_head,
)
from specdec_triton.cli import audit as command
from specdec_triton.cli import main

NO_TRITON = why_not_triton("sample", "meta")
needs_triton = pytest.mark.skipif(NO_TRITON is not None, reason=str(NO_TRITON))
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

USAGE = """Resource usage:
 Common:
  GLOBAL:11 CONSTANT[4]:8
 Function _some_kernel:
  REG:160 STACK:24 SHARED:1024 LOCAL:0 CONSTANT[0]:664 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
SASS = """
        .type           _some_kernel,@function
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E R2, desc[UR8][R4.64] ;
        /*0020*/              @!P1 LDG.E.128 R4, desc[UR8][R2.64] ;
        /*0030*/                   LDGSTS.E.BYPASS.128 [R9], desc[UR8][R2.64], P1 ;
        /*0040*/              @!UPT LDGSTS.E.64 [R9], desc[UR8][R2.64], P1 ;
        /*0050*/                   LDG.E.ENL2.256 R8, R4, desc[UR8][R2.64] ;
        /*0060*/                   UTMALDG.2D [UR8], [UR4] ;
        /*0070*/                   STL [R1], R7 ;
        /*0080*/                   STL.64 [R1+0x8], R8 ;
        /*0090*/               @P0 STL.U8 [R1+0x10], R8 ;
        /*00a0*/                   LDL R7, [R1] ;
        /*00b0*/                   HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        /*00c0*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], !UPT ;
        /*10d0*/                   UTCHMMA gdesc[UR8], gdesc[UR10], tmem[UR4], tmem[UR12] ;
        /*10e0*/                   HFMA2.MMA R1, -RZ, RZ, 0, 0 ;
        /*10f0*/                   FFMA R1, R2, R3, R4 ;
"""
GCN = """
	buffer_load_dwordx4 v[2:5], v1, s[4:7], 0 offen
	buffer_load_ushort v7, v1, s[4:7], 0 offen
	global_load_dword v8, v[2:3], off
	global_load_lds_dwordx4 v[2:3], off
	buffer_store_dwordx4 v[2:5], v1, s[4:7], 0 offen
	v_mfma_f32_32x32x8_bf16 v[0:15], v[16:17], v[18:19], v[0:15]
	v_mul_f32_e32 v1, v2, v3
	s_endpgm
    .private_segment_fixed_size: 40
    .sgpr_spill_count: 46
    .vgpr_count:     234
    .vgpr_spill_count: 3
"""


def test_sass():
    assert parse_sass(USAGE, SASS) == Code(
        registers=160, spilled_bytes=13, stack_bytes=24, tensor_core=3, loads=6, wide_loads=4
    )


def test_sass_of_nothing_is_an_error():
    """A tool that prints something else must not read as a kernel without spills."""
    with pytest.raises(ValueError, match="no instructions"):
        parse_sass(USAGE, "")
    with pytest.raises(ValueError, match="no registers"):
        parse_sass("cuobjdump fatal: unknown architecture", SASS)


def test_amdgcn():
    assert parse_amdgcn(GCN) == Code(
        registers=234, spilled_bytes=12, stack_bytes=40, tensor_core=1, loads=4, wide_loads=2
    )
    with pytest.raises(ValueError, match=r"\.vgpr_count"):
        parse_amdgcn("s_endpgm")


def test_traffic_by_hand():
    """One request, one head, D = 4, bf16: 10 + 2 keys in chunks of 8, so two splits."""
    shape = AttentionShape(
        batch=1, steps=2, context=10, heads=1, kv_heads=1, dim=4, itemsize=2, kv_itemsize=2, window=0, block_m=16,
        split_size=8, num_splits=4,
    )  # fmt: skip
    keys, query, partial = 2 * 12 * 4 * 2, 2 * 4 * 2, 2 * 2 * (4 + 2) * 4
    assert attention(shape) == (keys + 2 * query + 2 * partial + query, keys + 2 * query)
    windowed = attention(shape._replace(window=3))  # keys 8..11: one chunk
    assert windowed.floor == 2 * 4 * 4 * 2 + 2 * query
    assert attention(shape._replace(block_m=1)).moved > attention(shape).moved
    assert sample(2, 10, 2, filters=False) == (40, 40)
    assert sample(2, 33, 2, filters=True) == (132 + 2 * 2 * 2 * 4, 132)  # two groups
    searched = 8 * (33 * 2 + 2 * 4)  # 33 has 6 bits
    assert sample(2, 33, 2, filters=True, typical=True) == (132 + 2 * (2 * 2 * 4 + searched), 132)


def test_traffic_of_rules_by_hand():
    """2 requests, 3 rows each, V = 33 (two words of a mask), bf16; texts of 5."""
    logits, out, table = 2 * 3 * 33 * 2, 2 * 3 * 33 * 4, 2 * 33 * 4
    off = {"penalties": False, "bias": False, "mask": False}
    assert apply_logit_rules(2, 3, 33, 2, **off) == (logits + out, logits + out)
    for rule in ("penalties", "bias"):
        given = apply_logit_rules(2, 3, 33, 2, **{**off, rule: True})
        assert given == (logits + out + 3 * table, logits + out + table)
    masks = 2 * 3 * 2 * 4
    assert apply_logit_rules(2, 3, 33, 2, **{**off, "mask": True}) == (logits + out + masks, logits + out + masks)
    texts = 2 * 5 * 8
    assert apply_logit_rules(2, 3, 33, 2, **off, text=5) == (logits + out + 3 * texts, logits + out + texts)


def test_traffic_of_products_by_hand():
    """3 rows of K = 10 in row tiles of 2, N = 5 in column tiles of 4, bf16."""
    x, weight, out, bias = 3 * 10 * 2, 5 * 10 * 2, 3 * 5 * 2, 5 * 2
    tiles = LinearTiles(block_m=2, block_n=4, splits=1)
    floor = x + weight + out
    assert skinny_linear(3, 5, 10, 2, tiles, bias=False) == (2 * x + 2 * weight + out, floor)
    assert skinny_linear(3, 5, 10, 2, tiles, bias=True) == (2 * x + 2 * weight + out + 2 * bias, floor + bias)
    split = skinny_linear(3, 5, 10, 2, tiles._replace(splits=3), bias=True)
    assert split.moved == 2 * x + 2 * weight + out + 3 * bias + 2 * 3 * (3 * 5 * 4)
    assert linear_flops(3, 5, 10) == 300
    added = skinny_linear(3, 5, 10, 2, tiles, bias=False, residual=True)
    assert added == (2 * x + 2 * weight + 2 * out, floor + out)
    assert row_mean(3, 10, 2) == (66, 66)


def test_traffic_of_layers_by_hand():
    """3 rows of K = 10 in row tiles of 2; I = 5 outputs from column tiles of 4, which are 2 gates and 2 ups; bf16."""
    x, weight, out, bias = 3 * 10 * 2, 2 * 5 * 10 * 2, 3 * 5 * 2, 2 * 5 * 2
    tiles = LinearTiles(block_m=2, block_n=4, splits=7)
    floor = x + weight + out
    assert traffic.gated_linear(3, 5, 10, 2, tiles, bias=False) == (3 * x + 2 * weight + out, floor)
    assert traffic.gated_linear(3, 5, 10, 2, tiles, bias=True) == (3 * x + 2 * weight + out + 2 * bias, floor + bias)
    assert traffic.gated_mlp_activation(3, 5, 2) == (3 * out, 3 * out)
    row, weight = 3 * 10 * 2, 10 * 4
    for sums, whole, long in (({}, 2, 3), ({"residual": True}, 4, 6), ({"residual": True, "after": True}, 3, 4)):
        assert traffic.rms_norm(3, 10, 2, 4, block=16, **sums) == (whole * row + 3 * weight, whole * row + weight)
        assert traffic.rms_norm(3, 10, 2, 4, block=8, **sums) == (long * row + 3 * weight, whole * row + weight)


def test_traffic_of_appending_by_hand():
    """2 requests of 3 tokens, 4 query and 2 KV heads of 8 lanes of which 6 are rotated; bf16, the cache fp8."""
    tokens = 2 * 3
    copied = 2 * tokens * 2 * 8 * (2 + 1)
    assert append_kv(2, 3, 2, 8, 2, 1) == (copied, copied)
    shape = RopeShape(batch=2, steps=3, heads=4, kv_heads=2, dim=8, rotary=6, itemsize=2, kv_itemsize=1)
    queries, turns, weight = 2 * tokens * 4 * 8 * 2, 2 * tokens * 6 * 2, 8 * 2
    assert rope_append(shape) == (queries + copied + 6 * turns, queries + copied + turns)
    normed = rope_append(shape._replace(norms=True))
    assert normed == (queries + copied + 6 * (turns + tokens * weight), queries + copied + turns + 2 * weight)
    assert rope_append(shape._replace(rotary=0)) == (queries + copied,) * 2


def test_traffic_of_the_head_by_hand():
    """3 rows of H = 10 in row tiles of 2, V = 5 in column tiles of 2 and parts of 4, bf16; 24 bytes a row and part."""
    x, weight, bias, stats = 3 * 10 * 2, 5 * 10 * 2, 5 * 2, 3 * 2 * 24
    tiles = HeadTiles(block_m=2, block_n=2, part=4)
    assert verify_head(3, 5, 10, 2, tiles, bias=False) == (3 * x + 2 * weight + 2 * stats, x + weight)
    assert verify_head(3, 5, 10, 2, tiles, bias=True) == (3 * x + 2 * (weight + bias) + 2 * stats, x + weight + bias)
    assert head_from_memory(3, 5, 10, 2, 4, bias=True) == x + weight + bias + 2 * stats


@pytest.mark.parametrize(
    ("method", "options", "moved", "floor"),
    [
        ("coupled", {}, 4, 4),
        ("typical", {}, 4 + 1, 4),
        ("rejection", {}, 4 + 1, 4),
        ("rejection", {"has_draft": True, "has_lse": True}, 4 + 2, 4 + 1),
        ("rejection", {"has_draft": True}, 7 + 2, 4 + 3),
        ("block", {"has_draft": True, "has_lse": True}, 4 + 7, 4 + 3),
        ("block", {}, 4 + 1, 4),
    ],
)
def test_rows_moved(method, options, moved, floor):
    """K = 3, counted in rows."""
    options = {"has_draft": False, "has_lse": False, **options}
    row = 10 * 2
    assert accept_reject(1, 3, 10, 2, method=method, filters=False, **options) == (moved * row, floor * row)
    filtered, typical = (
        accept_reject(1, 3, 10, 2, method=method, filters=True, typical=typical, **options).moved
        for typical in (False, True)
    )
    summed = 7 if options["has_draft"] else 4  # filters need the drafter's rows
    assert typical - filtered == summed * (4 + 2) * (row + 4)  # 10 has 4 bits and makes one group


@needs_triton
def test_groups_are_the_kernels():
    from specdec_triton.kernels._filters import GROUP

    assert traffic.GROUP == GROUP


@needs_triton
def test_occupancy():
    from specdec_triton.audit.occupancy import occupancy
    from specdec_triton.kernels._config import CHIPS

    hopper, ampere, cdna = CHIPS["sm_90"], CHIPS["sm_86"], CHIPS["gfx942"]
    assert occupancy(hopper, 32, 0, 4) == 1.0
    assert occupancy(hopper, 160, 0, 4) == 12 / 64  # 12 warps of 5120 registers
    assert occupancy(hopper, 32, 100 * 1024, 4) == 8 / 64  # two blocks
    assert occupancy(hopper, 255, 0, 16) == 0.0  # a block of 16 warps has not so many registers
    assert occupancy(ampere, 32, 99 * 1024, 4) == 4 / 48
    assert occupancy(ampere, 32, 99 * 1024 + 1, 4) == 0.0
    assert occupancy(cdna, 234, 16384, 4) == 8 / 32


GOOD = Code(registers=64, spilled_bytes=0, stack_bytes=0, tensor_core=8, loads=4, wide_loads=2)


@needs_triton
@pytest.mark.parametrize(
    ("code", "shared", "copies", "message"),
    [
        (GOOD, 1024, 1, None),
        (GOOD._replace(spilled_bytes=12), 1024, 1, "spills 12 bytes"),
        (GOOD._replace(tensor_core=0), 1024, 1, "no tensor-core"),
        (GOOD, 294912, 1, "294912 bytes of shared memory"),
        (None, 0, 1, "does not compile: boom"),
        (GOOD, 1024, 2, "2 binaries for one configuration"),
    ],
    ids=["passes", "spill", "no-tensor-cores", "shared-memory", "does-not-compile", "recompiles"],
)
def test_what_fails(code, shared, copies, message, monkeypatch, capsys):
    """Each fault fails its row, is named in the text, and makes the command's status 1."""
    from specdec_triton.audit import report
    from specdec_triton.audit.cases import cases
    from specdec_triton.audit.compile import Compiled
    from specdec_triton.audit.record import Binary
    from specdec_triton.kernels._config import CHIPS

    case = next(case for case in cases() if case.op == "verify_attention")
    chip = CHIPS["sm_90"]
    binaries = [Binary("_verify_attention_kernel", chip, None, {}, {}, {}, {}, str(i)) for i in range(copies)]
    recorded = report.Recorded(chip, case, {"_verify_attention_kernel": binaries})
    compiled = {str(i): Compiled(code, shared, 4, None if code else "boom") for i in range(copies)}
    rows = report.rows_of(recorded, compiled)
    assert len(rows) == 1
    if message is None:
        assert rows[0].problems == ()
        assert rows[0].occupancy == 0.5
    else:
        assert len(rows[0].problems) == 1
        assert message in rows[0].problems[0]
        assert message in report.as_text(rows, [chip])
    assert report.as_json(rows)["ok"] is (message is None)
    if not INTERPRETED:
        monkeypatch.setattr(report, "audit", lambda *args: rows)
        assert main(["audit", "--arch", "sm_90"]) == (0 if message is None else 1)
        assert "1 kernels, 1 chips, 1 rows" in capsys.readouterr().out


@needs_triton
def test_tensor_cores_are_not_asked_of_fp32_or_of_merging():
    from specdec_triton.audit import report
    from specdec_triton.audit.cases import cases
    from specdec_triton.audit.compile import Compiled
    from specdec_triton.audit.record import Binary
    from specdec_triton.kernels._config import CHIPS

    case = next(case for case in cases() if case.op == "verify_attention")
    chip, bare = CHIPS["sm_80"], {"a": Compiled(GOOD._replace(tensor_core=0), 0, 4)}
    for kernel, of, passes in (
        ("_verify_attention_kernel", case, False),
        ("_verify_attention_kernel", replace(case, tensor_cores=False), True),
        ("_skinny_linear_kernel", case, False),
        ("_merge_splits_kernel", case, True),
    ):
        recorded = report.Recorded(chip, of, {kernel: [Binary(kernel, chip, None, {}, {}, {}, {}, "a")]})
        assert (report.rows_of(recorded, bare)[0].problems == ()) is passes


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1: triton.jit does not compile in this process")
class TestRecording:
    def test_one_binary(self):
        """At all sizes of a case the same binaries, in every chip's table."""
        from specdec_triton.audit.cases import cases
        from specdec_triton.audit.report import record_case
        from specdec_triton.kernels._config import CHIPS

        for chip in (CHIPS["sm_80"], CHIPS["gfx950"]):
            for case in cases():
                if case.op == "verify_attention" and case.quick:
                    recorded = record_case(chip, case)
                    assert recorded.error is None
                    assert {kernel: len(found) for kernel, found in recorded.kernels.items()} == {
                        "_verify_attention_kernel": 1,
                        "_merge_splits_kernel": 1,
                    }

    def test_one_binary_for_all_rows(self):
        """One row or thousands, whole products and split ones: what makes a row's bits its own."""
        from specdec_triton.audit.cases import cases
        from specdec_triton.audit.report import record_case
        from specdec_triton.kernels._config import CHIPS

        names = (
            "llama3-8b kv bf16",
            "llama3-8b kv fp32",
            "gpt2 qkv bf16 bias transposed",
            "gpt2 head bf16",
            "D = 576 bf16",
            "llama3-8b down bf16 residual",
            "gemma3-4b gelu_tanh bf16",
            "H = 4096 bf16, sum before",
            "heads, D = 128 bf16",
            "I = 1536 silu bf16",
        )
        chosen = [case for case in cases() if case.name in names]
        assert len(chosen) == len(names)
        chosen += [
            case for case in cases() if case.op in ("verify_head", "sample_head") and "llama3-8b bf16" in case.name
        ]
        assert len(chosen) == len(names) + 4
        for chip, case in itertools.product((CHIPS["sm_90"], CHIPS["gfx942"]), chosen):
            recorded = record_case(chip, case)
            assert recorded.error is None
            assert all(len(found) == 1 for found in recorded.kernels.values())
            assert ("_add_splits_kernel" in recorded.kernels) is (case.name == "llama3-8b kv fp32")

    @pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
    def test_one_binary_for_all_rows_of_logits(self, arch):
        """Rules and filters: whatever B, T, V, the drafts before a row, the text's length and how many ids end it."""
        from specdec_triton.audit.cases import cases
        from specdec_triton.audit.report import record_case
        from specdec_triton.kernels._config import CHIPS

        names = (
            "bf16 all", "fp32 all, one row", "bf16 all, odd V", "bf16 race, typical-p",
            "rejection bf16 K <= 7, draft, typical-p",
        )  # fmt: skip
        chosen = [case for case in cases() if case.name in names]
        assert len(chosen) == len(names)
        for case in chosen:
            recorded = record_case(CHIPS[arch], case)
            assert recorded.error is None
            assert {kernel: len(found) for kernel, found in recorded.kernels.items() if len(found) != 1} == {}
            wanted = "_repeated_kernel" if case.op == "apply_logit_rules" else "_cut_kernel"
            assert wanted in recorded.kernels

    @pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (80, 20), (17, 6)])
    def test_one_binary_for_all_layouts_of_queries_and_keys(self, dim, rotary):
        """Views of one product, contiguous, [B,H,T,D] in memory, padded rows, factors for all requests; any B and T."""
        import torch

        from specdec_triton import ops
        from specdec_triton.audit.record import record
        from specdec_triton.kernels._config import CHIPS

        def meta(*shape, dtype=torch.bfloat16):
            return torch.empty(shape, dtype=dtype, device="meta")

        def call(layout, batch, count):
            heads = (6, 2, 2)
            if layout == "product":
                given = meta(batch, count, sum(heads), dim).split(heads, 2)
            elif layout == "transposed":
                given = [meta(batch, n, count, dim).transpose(1, 2) for n in heads]
            else:
                given = [meta(batch, count, n, dim + 3 * (layout == "padded"))[..., :dim] for n in heads]
            turns = [meta(1 if layout == "padded" else batch, count, rotary) for _ in range(2)]
            caches, weight = [meta(50, 16, 2, dim) for _ in range(2)], meta(dim)
            lens = [meta(batch, dtype=torch.int32) for _ in range(2)]
            ops.rope_append(
                *given, *turns, *caches, meta(batch, 9, dtype=torch.int32), *lens, q_norm=weight, k_norm=weight,
                backend="triton",
            )  # fmt: skip

        for chip in (CHIPS["sm_90"], CHIPS["gfx942"]):
            binaries = set()
            for layout in ("product", "contiguous", "transposed", "padded"):
                for batch, count in ((1, 1), (1, 16), (3, 5), (16, 7), (64, 16)):
                    [binary] = record(chip, lambda a=(layout, batch, count): call(*a))
                    binaries.add(binary.digest)
            assert len(binaries) == 1

    def test_one_binary_can_fail(self):
        """A head size is part of the model: launches with two of them are two binaries, and the audit says so."""
        from specdec_triton.audit.cases import cases
        from specdec_triton.audit.report import record_case
        from specdec_triton.kernels._config import CHIPS

        two = [case for case in cases() if case.name in ("smollm2-135m bf16", "phi2 bf16")]
        two = [case for case in two if case.op == "verify_attention"]
        calls = {size: case.call for case, size in zip(two, two[0].sizes, strict=False)}
        mixed = replace(two[0], sizes=tuple(calls), call=lambda size: calls[size](size))
        recorded = record_case(CHIPS["sm_90"], mixed)
        assert len(recorded.kernels["_verify_attention_kernel"]) == 2

    def test_a_launcher_that_raises_is_a_row(self):
        from specdec_triton.audit.cases import cases
        from specdec_triton.audit.report import audit
        from specdec_triton.kernels._config import CHIPS

        def call(size):
            raise ValueError("no such tile")

        [row] = audit([CHIPS["sm_90"]], [replace(cases()[0], call=call)], 1)
        assert row.problems == ("cannot launch: ValueError: no such tile",)


def run(*arguments, cache, **environment):
    environment = {**os.environ, "SPECDEC_CACHE": str(cache), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [sys.executable, "-m", "specdec_triton", "audit", *arguments],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


@needs_triton
def test_command(tmp_path):
    """Also from a process whose interpreter is on; a second run takes the results from the cache."""
    arguments = ("--arch", "sm_90", "--op", "ngram_propose", "--json", "--jobs", "1")
    first = run(*arguments, cache=tmp_path, TRITON_INTERPRET="1")
    found = json.loads(first.stdout)
    assert first.returncode == 0, first.stderr
    assert found["ok"] is True
    [row] = found["rows"]
    assert row["kernel"] == "_ngram_propose_kernel"
    assert row["registers"] > 0
    assert row["predicted_us"] > 0
    [kept] = (tmp_path / "audit-1").iterdir()
    kept.write_text(kept.read_text().replace(f'"registers": {row["registers"]}', '"registers": 7'))
    assert json.loads(run(*arguments, cache=tmp_path).stdout)["rows"][0]["registers"] == 7
    kept.write_text("damaged")
    table = run(*arguments[:4], "--markdown", cache=tmp_path).stdout
    shown = re.search(r"\n\n\| kernel \|.*\n\| --- .*\n\| ngram_propose \| k = 4 \| (\d+) ", table)
    assert shown is not None
    assert int(shown[1]) == row["registers"]
    assert table.startswith("# What the kernels compile to on ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "sm_75"], "sm_80, sm_86"),
        (["--arch", "sm_80", "sm_90", "--markdown"], "one --arch"),
        (["--json", "--markdown"], "not allowed"),
        (["--jobs", "0"], "from 1 to 64"),
    ],
)
def test_mistakes(arguments, message, capsys):
    assert main(["audit", *arguments]) == 2
    assert message in capsys.readouterr().err


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1: the command starts another process")
def test_unknown_op(capsys):
    assert main(["audit", "--op", "softmax"]) == 2
    assert "verify_attention" in capsys.readouterr().err


def test_without_triton(monkeypatch, capsys):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert main(["audit"]) == 2
    assert "triton, which is not installed" in capsys.readouterr().err


@needs_triton
def test_names_chips_as_the_table_does():
    from specdec_triton.kernels._config import CHIPS

    assert tuple(CHIPS) == command.ARCHS
