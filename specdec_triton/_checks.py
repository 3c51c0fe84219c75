"""Argument checks shared by the ops. Each error names the argument, what was given and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch


def require(holds: bool, name: str, allowed: str, given: object) -> None:
    if not holds:
        raise ValueError(f"{name} must be {allowed}, got {given}")


def check_tensor(name: str, x: Any, shape: tuple[int | None, ...], like: torch.Tensor | None = None) -> None:
    """A tensor of the given shape (None: any size) on ``like``'s device."""
    require(isinstance(x, torch.Tensor), name, "a tensor", type(x).__name__)
    fits = x.dim() == len(shape) and all(
        want is None or have == want for have, want in zip(x.shape, shape, strict=True)
    )
    require(fits, name, "of shape " + str([("any" if s is None else s) for s in shape]), list(x.shape))
    if like is not None:
        require(x.device == like.device, name, f"on {like.device} like the other tensors", x.device)


def check_floating(name: str, x: torch.Tensor) -> None:
    require(x.dtype in (torch.float32, torch.float16, torch.bfloat16), name, "float32, float16 or bfloat16", x.dtype)
    require(x.shape[-1] <= 1 or x.stride(-1) == 1, name, "of stride 1 in its last dimension", list(x.stride()))


def integers(name: str, x: Any, shape: tuple[int | None, ...], like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An integer tensor, converted to ``dtype`` if it has another integer type."""
    check_tensor(name, x, shape, like)
    allowed = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
    require(x.dtype in allowed, name, f"an integer tensor ({dtype})", x.dtype)
    if x.dtype == dtype:
        return x
    if x.device.type == "cpu" and x.dtype.itemsize > dtype.itemsize and x.numel():
        limits = torch.iinfo(dtype)
        low, high = int(x.min()), int(x.max())
        require(limits.min <= low and high <= limits.max, name, f"within {dtype}", (low, high))
    return x.to(dtype)


def check_bool(name: str, value: Any, *, optional: bool = False) -> None:
    allowed = "a bool or None" if optional else "a bool"
    require(isinstance(value, bool) or (optional and value is None), name, allowed, repr(value))


def check_integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    integer = isinstance(value, Integral) and not isinstance(value, bool)
    holds = integer and value >= low and (high is None or value <= high)
    require(holds, name, f"an integer >= {low}" if high is None else f"an integer from {low} to {high}", repr(value))


def check_positive(name: str, value: Any) -> None:
    """None, or a finite number above 0 (0 would mean 'off' to one reader and 'nothing' to another)."""
    if value is not None:
        ok = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
        require(ok, name, "None (off) or a finite number above 0", repr(value))


ACTIVATIONS = ("silu", "gelu_tanh", "gelu")


def check_activation(activation: Any) -> None:
    known = isinstance(activation, str) and activation in ACTIVATIONS
    require(known, "activation", f"one of {', '.join(ACTIVATIONS)}", repr(activation))


def check_rows(name: str, x: Any) -> None:
    """``[...,H]``: rows, however many dimensions they are spread over."""
    require(isinstance(x, torch.Tensor), name, "a tensor", type(x).__name__)
    require(x.dim() >= 1 and x.shape[-1] >= 1, name, "of shape [...,H] with H >= 1", list(x.shape))
    check_floating(name, x)


def check_caches(k_cache: Any, v_cache: Any) -> None:
    check_tensor("k_cache", k_cache, (None, None, None, None))
    check_tensor("v_cache", v_cache, tuple(k_cache.shape), k_cache)
    require(v_cache.dtype == k_cache.dtype, "v_cache", f"of k_cache's dtype {k_cache.dtype}", v_cache.dtype)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dtype != torch.float8_e4m3fn:
            check_floating(name, cache)
        unit = cache.shape[-1] <= 1 or cache.stride(-1) == 1
        require(unit, name, "of stride 1 in its last dimension", list(cache.stride()))
        require(cache.shape[3] >= 1, name, "of head size at least 1", list(cache.shape))
        require(cache.shape[1] >= 1, name, "of page size at least 1", list(cache.shape))


def check_pages(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: Any,
    context_lens: Any,
    query_lens: Any,
    k_scale: Any,
    v_scale: Any,
    batch: int,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The arguments that all paged ops share; returns table and lengths as int32.

    On the CPU, where values are at hand, lengths and the page ids that will be used are checked too.
    """
    check_caches(k_cache, v_cache)
    table = integers("block_table", block_table, (batch, None), k_cache, torch.int32)
    context = integers("context_lens", context_lens, (batch,), k_cache, torch.int32)
    lens = None
    if query_lens is not None:
        lens = integers("query_lens", query_lens, (batch,), k_cache, torch.int32)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            check_tensor(name, scale, (k_cache.shape[2],), k_cache)
            require(scale.dtype == torch.float32, name, "float32", scale.dtype)
        else:  # a missing scale read as 1.0 halves acceptance without an error (faults.md E13)
            needs = k_cache.dtype == torch.float8_e4m3fn
            require(not needs, name, "given with an fp8 cache (torch.ones(Hkv) for none)", None)
    if k_cache.device.type == "cpu":
        _check_page_values(k_cache, table, context, lens, count)
    require((k_scale is None) == (v_scale is None), "v_scale", "given together with k_scale", "one of them")
    return table, context, lens


def _check_page_values(
    cache: torch.Tensor, table: torch.Tensor, context: torch.Tensor, lens: torch.Tensor | None, count: int
) -> None:
    page_size = cache.shape[1]
    counts = [count] * len(context) if lens is None else lens.tolist()
    for b, (start, n) in enumerate(zip(context.tolist(), counts, strict=True)):
        require(start >= 0, f"context_lens[{b}]", "at least 0", start)
        require(0 <= n <= count, f"query_lens[{b}]", f"from 0 to T = {count}", n)
        _check_table(cache, table, b, range(-(-(start + n) // page_size) if n else 0))


def _check_table(cache: torch.Tensor, table: torch.Tensor, b: int, used: Sequence[int]) -> None:
    """The entries that request b uses, in increasing order."""
    needed = used[-1] + 1 if used else 0
    require(needed <= table.shape[1], "block_table", f"at least {needed} wide for request {b}", table.shape[1])
    row, pages = table[b].tolist(), cache.shape[0]
    for index in used:
        if not 0 <= row[index] < pages:  # a text has many pages: nothing is formatted for those that fit
            require(False, f"block_table[{b},{index}]", f"a page from 0 to {pages - 1}", row[index])


def check_path(
    k_cache: torch.Tensor, block_table: Any, context_lens: Any, path: Any, path_lens: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """What ``compact_kv`` takes besides the caches, as int32; on the CPU the values that will be used are checked too."""
    check_tensor("path", path, (None, None))
    batch, nodes = path.shape
    path = integers("path", path, (batch, nodes), k_cache, torch.int32)
    table = integers("block_table", block_table, (batch, None), k_cache, torch.int32)
    context = integers("context_lens", context_lens, (batch,), k_cache, torch.int32)
    lens = None if path_lens is None else integers("path_lens", path_lens, (batch,), k_cache, torch.int32)
    if k_cache.device.type != "cpu":
        return table, context, path, lens
    counts = ((path >= 0).int().cumprod(1).sum(1) if lens is None else lens).tolist()
    for b, (start, n, row) in enumerate(zip(context.tolist(), counts, path.tolist(), strict=True)):
        require(start >= 0, f"context_lens[{b}]", "at least 0", start)
        require(0 <= n <= nodes, f"path_lens[{b}]", f"from 0 to N = {nodes}", n)
        for i, node in enumerate(row[:n]):
            low = row[i - 1] + 1 if i else 0
            allowed = f"a node from {low} to {nodes - 1} (a path increases)"
            require(low <= node < nodes, f"path[{b},{i}]", allowed, node)
        positions = (start + x for x in {*range(n), *row[:n]})
        _check_table(k_cache, table, b, sorted({position // k_cache.shape[1] for position in positions}))
    return table, context, path, lens


def check_rotary(cos: Any, sin: Any, interleaved: Any, k: torch.Tensor) -> None:
    """Both or neither; ``[B,T,R]`` or ``[1,T,R]`` with R even and at most D."""
    check_bool("interleaved", interleaved)
    if cos is None and sin is None:
        return
    require(cos is not None, "cos", "given together with sin", None)
    require(sin is not None, "sin", "given together with cos", None)
    batch, count, _, dim = k.shape
    for name, x in (("cos", cos), ("sin", sin)):
        check_tensor(name, x, (None, count, None), k)
        require(x.shape[0] in (1, batch), name, f"of batch size 1 or {batch}", x.shape[0])
        rotary = x.shape[2]
        require(2 <= rotary <= dim and rotary % 2 == 0, name, f"of an even size from 2 to D = {dim}", rotary)
        allowed = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
        require(x.dtype in allowed, name, "float64, float32, float16 or bfloat16", x.dtype)
        require(x.stride(2) == 1, name, "of stride 1 in its last dimension", list(x.stride()))
    require(sin.shape[2] == cos.shape[2], "sin", f"of cos's size {cos.shape[2]}", sin.shape[2])


def check_norms(q_norm: Any, k_norm: Any, eps: Any, add_one: Any, k: torch.Tensor) -> None:
    """Weights ``[D]`` of norms over each head, either or none, and what they share."""
    check_bool("add_one", add_one)
    finite = isinstance(eps, (int, float)) and not isinstance(eps, bool) and 0 < eps < math.inf
    require(finite, "eps", "a finite number above 0", repr(eps))
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            check_tensor(name, weight, (k.shape[3],), k)
            check_floating(name, weight)
