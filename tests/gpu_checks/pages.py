"""What writes pages: ``append_kv``, ``rope_append`` and ``compact_kv``."""

from __future__ import annotations

import torch

from gpu_checks import common
from gpu_checks.common import DTYPES, add, call, on_gpu
from specdec_triton import ops
from specdec_triton.testing import FP8


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().view(torch.uint8)


def paged_problem(dtype: torch.dtype, page_size: int, kv_heads: int, dim: int, count: int) -> tuple:
    """k, v, caches, table, context_lens, query_lens, scales."""
    contexts, lens = [0, 5, page_size - 1, 300], [count, 0, 1, count]
    new = torch.float32 if dtype == FP8 else dtype
    k, v = (4 * torch.randn(4, count, kv_heads, dim).to(new) for _ in range(2))
    columns = -(-(300 + count) // page_size) + 1
    caches = [torch.randn(4 * columns + 3, page_size, kv_heads, dim).to(dtype) for _ in range(2)]
    table = torch.randperm(4 * columns + 3)[: 4 * columns].view(4, columns).int()
    scales = {}
    if dtype == FP8:
        scales = {"k_scale": torch.linspace(0.05, 2.0, kv_heads), "v_scale": torch.linspace(1.5, 0.01, kv_heads)}
    return k, v, caches, table, torch.tensor(contexts).int(), torch.tensor(lens).int(), scales


def check_append(dtype: torch.dtype, page_size: int, kv_heads: int, dim: int) -> None:
    """Every byte of the caches, those that must not change included."""
    k, v, caches, table, context, lens, scales = paged_problem(dtype, page_size, kv_heads, dim, 5)
    theirs, mine = [x.clone() for x in caches], [x.to(common.device) for x in caches]
    ops.append_kv(k, v, *theirs, table, context, lens, **scales, backend="torch")
    call(ops.append_kv, k, v, *mine, table, context, lens, **scales)
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(raw(a), raw(b))


# Hq, Hkv, D, R, norms: query heads in one tile and in several, halves that are no power of two, lanes that are not rotated.
ROPE = {
    "llama": (32, 8, 128, 128, False),
    "qwen3": (16, 8, 128, 128, True),
    "gemma3": (8, 4, 256, 256, True),
    "smollm2": (9, 3, 64, 64, False),
    "partial": (12, 4, 80, 20, True),
    "phi3": (4, 4, 96, 96, False),
    "no-rotation": (6, 2, 64, 0, True),
}


def rope(x: torch.Tensor, weight: torch.Tensor | None, turns: tuple, pairs: bool, dtype: torch.dtype) -> torch.Tensor:
    """Normed and rotated with every intermediate in ``dtype``."""
    x = x.to(dtype)
    if weight is not None:
        wide = x.double() if dtype == torch.float64 else x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        x = weight.to(dtype) * wide.to(dtype)
    if turns[0] is None:
        return x
    c, s = (t[:, :, None].to(dtype) for t in turns)
    part, rest = x[..., : c.shape[-1]], x[..., c.shape[-1] :]
    if pairs:
        turned = torch.stack([-part[..., 1::2], part[..., ::2]], -1).flatten(-2)
    else:
        turned = torch.cat([-part[..., c.shape[-1] // 2 :], part[..., : c.shape[-1] // 2]], -1)
    return torch.cat([part * c + turned * s, rest], -1)


def check_rope(shape: tuple[int, int, int, int, bool], dtype: torch.dtype, pairs: bool) -> None:
    """q and keys at most twice as far from fp64 as PyTorch, values byte for byte, all else untouched; a row's bits are its own."""
    q_heads, kv_heads, dim, rotary, norms = shape
    k, v, caches, table, context, lens, scales = paged_problem(dtype, 16, kv_heads, dim, 5)
    q = torch.randn(4, 5, q_heads, dim).to(k.dtype)
    angle = torch.rand(4, 5, rotary) * 6
    turns = (angle.cos().to(k.dtype), angle.sin().to(k.dtype)) if rotary else (None, None)
    weights = {f"{x}_norm": (torch.rand(dim) + 0.5).to(k.dtype) for x in "qk"} if norms else {}
    heads = (q_heads, kv_heads, kv_heads)
    given = on_gpu(torch.cat((q, k, v), 2)).split(heads, 2)  # views of one tensor
    options = {**scales, **weights, "interleaved": pairs}
    mine, theirs = [x.to(common.device) for x in caches], [x.clone() for x in caches]
    out = call(ops.rope_append, *given, *turns, *mine, table, context, lens, **options)
    ops.append_kv(k, v, *theirs, table, context, lens, **scales, backend="torch")
    assert torch.equal(raw(mine[1]), raw(theirs[1]))
    got, touched = mine[0].cpu(), torch.zeros(caches[0].shape[:2], dtype=torch.bool)
    keys = torch.zeros(k.shape, dtype=torch.float64)
    for b, n in enumerate(lens.tolist()):
        for t in range(n):
            position = int(context[b]) + t
            at = int(table[b, position // 16]), position % 16
            touched[at] = True
            keys[b, t] = got[at].double()
    assert torch.equal(raw(got)[~touched], raw(caches[0])[~touched])
    unused = torch.arange(5) >= lens[:, None]
    for x, name, found in ((q, "q_norm", out.cpu()), (k, "k_norm", keys)):
        truth, plain = (rope(x, weights.get(name), turns, pairs, of).double() for of in (torch.float64, x.dtype))
        if dtype == FP8 and name == "k_norm":
            scale = scales["k_scale"][:, None]
            plain = (plain.float() / scale).clamp(-448, 448).to(FP8).double() * scale.double()
            found = found * scale.double()
        truth[unused], plain[unused] = 0, 0
        least = 2.0**-22 * float(truth.abs().max()) if x.dtype == torch.float32 else 0.0
        allowed = max(2 * float((plain - truth).abs().max()), least)
        error = float((found.double() - truth).abs().max())
        assert error <= allowed, f"{name[0]} is {error:.2e} from fp64, allowed {allowed:.2e}"

    contiguous = on_gpu((q, k, v))
    for first, last in ((0, 1), (3, 4), (0, 4)):
        part = [None if x is None else x[first:last] for x in (*contiguous, *turns, table, context, lens)]
        again = [x.to(common.device) for x in caches]
        alone = call(ops.rope_append, *part[:5], *again, *part[5:], **options)
        assert torch.equal(alone, out[first:last]), (first, last)
    assert all(torch.equal(raw(a), raw(b)) for a, b in zip(again, mine, strict=True))


def check_compact(dtype: torch.dtype, page_size: int, kv_heads: int, dim: int, given: bool) -> None:
    _, _, caches, table, context, _, _ = paged_problem(dtype, page_size, kv_heads, dim, 9)
    path = torch.tensor([[0, 2, 5, 8], [0, 1, 2, 3], [1, 4, -1, -1], [-1, -1, -1, -1]]).int()
    path = torch.nn.functional.pad(path, (0, 5), value=-1)
    lens = (path >= 0).sum(1).int() if given else None
    theirs, mine = [x.clone() for x in caches], [x.to(common.device) for x in caches]
    ops.compact_kv(*theirs, table, context, path, lens, backend="torch")
    call(ops.compact_kv, *mine, table, context, path, lens)
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(raw(a), raw(b))


for _dtype, _type in {**DTYPES, "fp8": FP8}.items():
    for _size, _heads, _dim in ((1, 2, 64), (16, 8, 128), (7, 3, 80), (16, 1, 256)):
        _name = f"{_dtype}-page-{_size}-{_heads}x{_dim}"
        add(f"append-{_name}", check_append, _type, _size, _heads, _dim)
        add(f"compact-{_name}", check_compact, _type, _size, _heads, _dim, _size == 16)
    for _name, _shape in ROPE.items():
        for _pairs in (False, True) if _shape[3] else (False,):
            add(f"rope-{_dtype}-{_name}{'-interleaved' if _pairs else ''}", check_rope, _shape, _type, _pairs)
