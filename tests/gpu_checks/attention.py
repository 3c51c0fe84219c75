"""``verify_attention``: errors, and bits that depend neither on the batch nor on how many positions are scored."""

from __future__ import annotations

import torch

from gpu_checks import common
from gpu_checks.common import DTYPES, add, call, no_host_reads, on_gpu
from specdec_triton import ops
from specdec_triton.testing import attention_oracle, paged_case, tree


def on(context: list[int], new: int, **shape: object) -> dict[str, object]:
    return {"context_lens": context, "new": new, **shape}


ATTENTION = {
    "page-1": (on([0, 1, 5, 33], 3, page_size=1), {}),
    "page-48": (on([47, 1, 96], 3, page_size=48), {}),
    "group-1": (on([9, 300], 3, q_heads=3, kv_heads=3), {}),
    "group-3": (on([9, 300], 3, q_heads=9, kv_heads=3, dim=64), {}),
    "group-7": (on([9, 300], 3, q_heads=28, kv_heads=4), {}),
    "group-71": (on([9, 2], 3, q_heads=71, kv_heads=1), {}),
    **{f"head-{d}": (on([11, 300], 5, dim=d), {}) for d in (80, 96, 128, 192, 256)},
    **{f"T-{t}": (on([11, 300], t), {}) for t in (1, 2, 5, 8, 17, 64)},
    "ragged": (on([12, 0, 7, 300], 5, query_lens=[5, 1, 0, 3]), {}),
    "prefill": (on([0, 0], 40, query_lens=[40, 17], page_size=7), {}),
    "window-4": (on([12, 3, 0, 300], 5), {"sliding_window": 4}),
    "window-ragged": (on([300, 3], 5, query_lens=[2, 5], page_size=7), {"sliding_window": 260}),
    "softcap": (on([12, 300], 3, amplitude=40.0), {"softcap": 50.0}),
    "sinks": (on([12, 0, 300], 3), {"sinks": True}),
    "tree": (on([12, 300], 5), {"tree_mask": tree(-1, 0, 0, 1, 2)}),
    "tree-64": (on([5], 64), {"tree_mask": tree(-1, *range(63))}),
    "tree-window": (on([12, 300], 5), {"tree_mask": tree(-1, 0, 0, 1, 2), "sliding_window": 4}),
    "tree-empty-rows": (on([0, 0], 3), {"tree_mask": torch.tensor([1, 0, 5])}),
    "fp8": (on([12, 300], 3, fp8=True), {}),
    "fp8-128": (on([12, 300], 3, fp8=True, dim=128), {}),
    "everything": (
        on([60, 0, 9], 5, query_lens=[5, 2, 4], q_heads=6, dim=80, page_size=7, fp8=True, amplitude=5.0),
        {"tree_mask": tree(-1, 0, 0, 1, 2), "sliding_window": 6, "softcap": 3.0, "sinks": True, "scale": 0.3},
    ),
}
# Hq, Hkv, D of real models, at contexts of many chunks.
REAL = {
    "llama3-8b": (32, 8, 128),
    "qwen2-0.5b": (14, 2, 64),
    "gemma3-4b": (8, 4, 256),
    "gpt-oss-20b": (64, 8, 64),
    "phi2": (32, 32, 80),
    "smollm2": (9, 3, 64),
}


def check_attention(arguments: dict, options: dict, dtype: torch.dtype) -> None:
    case = paged_case(**{"page_size": 16, **arguments}, dtype=dtype)
    if options.get("sinks") is True:
        options = {**options, "sinks": torch.linspace(-1.0, 2.0, case.q.shape[2]).to(dtype)}
    out = call(ops.verify_attention, *case.args, **case.scales, **options).cpu()
    truth = attention_oracle(case, **options)
    plain = attention_oracle(case, **options, dtype=dtype)
    allowed = max(2 * float((plain.double() - truth).abs().max()), 1e-5 if dtype == torch.float32 else 0.0)
    error = float((out.double() - truth).abs().max())
    assert error <= allowed, f"{error:.2e} from fp64, allowed {allowed:.2e}"
    for b, n in enumerate(case.query_lens.tolist()):
        assert not out[b, n:].any(), "rows past query_lens are not 0"


for _dtype in DTYPES:
    for _name, (_arguments, _options) in ATTENTION.items():
        add(f"attention-{_dtype}-{_name}", check_attention, _arguments, _options, DTYPES[_dtype])
for _name, (_hq, _hkv, _dim) in REAL.items():
    for _fp8 in (False, True):
        _arguments = on([0, 900, 4097], 5, q_heads=_hq, kv_heads=_hkv, dim=_dim, fp8=_fp8)
        add(f"attention-{_name}{'-fp8' if _fp8 else ''}", check_attention, _arguments, {}, torch.bfloat16)


def check_bits(shape: tuple[int, int, int], dtype: torch.dtype, fp8: bool, **options: object) -> None:
    """A text's rows have the same bits for T in {1, 2, 5, 8, 17} and in batches of 1, 3 and 64, with query_lens or without."""
    q_heads, kv_heads, dim = shape
    lengths = [600, *(30 + 37 * i % 900 for i in range(63))]
    case = paged_case([n - 17 for n in lengths], 17, q_heads=q_heads, kv_heads=kv_heads, dim=dim, dtype=dtype, fp8=fp8)
    q, k_cache, v_cache, table, context = (x.to(common.device) for x in case.args[:5])
    scales = on_gpu({name: x for name, x in case.scales.items() if x is not None})

    def score(rows: int, first: int, count: int, lens: torch.Tensor | None = None) -> torch.Tensor:
        """Text 0 in a batch of ``rows``, positions first .. first + count - 1 of the 17."""
        order = torch.arange(rows - 1, -1, -1, device=common.device)
        part = q[order, first : first + count]
        pages = table[order, : -(-lengths[0] // 16) if rows == 1 else None]  # nor do bits depend on the table's width
        with no_host_reads():
            out = ops.verify_attention(
                part, k_cache, v_cache, pages, context[order] + first, lens, **scales, **options,
                backend="triton",
            )  # fmt: skip
        return out[-1]

    whole = score(1, 0, 17)
    for count in (1, 2, 5, 8):
        for first in (0, 17 - count):
            assert torch.equal(score(1, first, count), whole[first : first + count]), f"T = {count} at {first}"
    for rows in (3, 64):
        for count in (1, 5, 17):
            want = whole[17 - count :]
            assert torch.equal(score(rows, 17 - count, count), want), f"T = {count} in a batch of {rows}"
            lens = torch.full((rows,), count, dtype=torch.int32, device=common.device)
            assert torch.equal(score(rows, 17 - count, count, lens), want), f"T = {count}, {rows} rows, query_lens"


for _name, _shape in {"4x128": (8, 2, 128), "3x64": (9, 3, 64), "1x80": (4, 4, 80), "2x256": (4, 2, 256)}.items():
    for _dtype in ("fp32", "bf16"):
        add(f"bits-{_name}-{_dtype}", check_bits, _shape, DTYPES[_dtype], False)
add("bits-fp8", check_bits, (8, 2, 128), torch.bfloat16, True)
add("bits-window", check_bits, (8, 2, 128), torch.bfloat16, False, sliding_window=100)
add("bits-softcap", check_bits, (8, 2, 128), torch.bfloat16, False, softcap=5.0)
