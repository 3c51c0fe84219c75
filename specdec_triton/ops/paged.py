"""The ops on the paged KV cache: append, attend, compact."""

from __future__ import annotations

import torch

from specdec_triton._checks import (
    check_caches,
    check_floating,
    check_integer,
    check_norms,
    check_pages,
    check_path,
    check_positive,
    check_rotary,
    check_tensor,
    integers,
    require,
)
from specdec_triton._library import register, resolve_backend
from specdec_triton.sampling import MAX_DRAFT_TOKENS

_append_kv = register(
    "append_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor block_table, Tensor context_lens,"
    " Tensor? query_lens, Tensor? k_scale, Tensor? v_scale, str backend) -> ()",
    fake=lambda *args: None,
)
_rope_append = register(
    "rope_append(Tensor q, Tensor k, Tensor v, Tensor? cos, Tensor? sin, Tensor(a!) k_cache, Tensor(b!) v_cache,"
    " Tensor block_table, Tensor context_lens, Tensor? query_lens, bool interleaved, Tensor? q_norm, Tensor? k_norm,"
    " float eps, bool add_one, Tensor? k_scale, Tensor? v_scale, str backend) -> Tensor",
    fake=lambda q, *rest: q.new_empty(q.shape),
)
_compact_kv = register(
    "compact_kv(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor block_table, Tensor context_lens, Tensor path,"
    " Tensor? path_lens, str backend) -> ()",
    fake=lambda *args: None,
)
_verify_attention = register(
    "verify_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor context_lens,"
    " Tensor? query_lens, float? scale, Tensor? tree_mask, int? sliding_window, float? softcap, Tensor? sinks,"
    " Tensor? k_scale, Tensor? v_scale, str backend) -> Tensor",
    fake=lambda q, *rest: q.new_empty(q.shape),
)


def append_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_lens: torch.Tensor | None = None,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Write new keys and values into the pages: position ``context_lens[b] + t`` of request b, in place.

    Keys are stored as they are given; ``rope_append`` rotates them on the way.

    Args:
        k, v: ``[B,T,Hkv,D]``.
        k_cache, v_cache: ``[P,S,Hkv,D]``; may be float8_e4m3fn, then stored value x scale = key.
        block_table: int32 ``[B,max_pages]``; entries past a request's length are not read.
        context_lens: int32 ``[B]``, tokens already in the cache.
        query_lens: int32 ``[B]``, new tokens of each request (None: T). Nothing is written past it.
        k_scale, v_scale: float32 ``[Hkv]``, required with an fp8 cache.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; on the CPU also a length or a page id out of range.

    Source: Kwon et al. 2023 (paged KV cache).

    Example:
        >>> k = torch.ones(1, 2, 1, 4)
        >>> cache = torch.zeros(3, 2, 1, 4), torch.zeros(3, 2, 1, 4)
        >>> append_kv(k, k, *cache, torch.tensor([[2, 0]]), torch.tensor([1]))  # positions 1 and 2: pages 2 and 0
        >>> cache[0][:, :, 0, 0].tolist()
        [[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]
    """
    table, context, lens = _check_append(
        k, v, k_cache, v_cache, block_table, context_lens, query_lens, k_scale, v_scale
    )
    chosen = resolve_backend(backend, "append_kv", k)
    _append_kv(k, v, k_cache, v_cache, table, context, lens, k_scale, v_scale, chosen)


def rope_append(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_lens: torch.Tensor | None = None,
    *,
    interleaved: bool = False,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    add_one: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """All that lies between a layer's QKV product and its attention, in one launch: norm, rotate, append.

    Each head of q and of k is normed if its weight is given: ``x rsqrt(mean(x^2) + eps) w``, in fp32, rounded to the tensor's
    dtype. Then its first R lanes are rotated (rotary position embedding): lane i becomes ``x[i] cos[i] - x[j] sin[i]`` where i
    is the first lane of its pair and j the second, ``x[i] cos[i] + x[j] sin[i]`` where i is the second and j the first. That
    is computed in fp32 and rounded once, q to its dtype, k to the cache's. k and v go to position ``context_lens[b] + t`` of
    request b, in place.

    Args:
        q: ``[B,T,Hq,D]``. k, v: ``[B,T,Hkv,D]``. Of any strides but in the last dimension: views of one product's output
            ``[B*T,(Hq+2*Hkv)*D]``, for example.
        cos, sin: ``[B,T,R]`` or ``[1,T,R]`` of any floating dtype, R even and at most D; None, both: nothing is rotated. A
            factor for each lane, as transformers' rotary modules give them, whatever the scaling (GLM's, Helium's and Ernie's
            only once their models' ``apply_rotary_pos_emb`` has repeated the first half:
            ``cos[..., :R // 2].repeat_interleave(2, -1)``).
        k_cache, v_cache: ``[P,S,Hkv,D]``; may be float8_e4m3fn, then stored value x scale = key.
        block_table: int32 ``[B,max_pages]``; entries past a request's length are not read.
        context_lens: int32 ``[B]``, tokens already in the cache.
        query_lens: int32 ``[B]``, new tokens of each request (None: T). Nothing is written past it.
        interleaved: pairs are the lanes (2i, 2i + 1) (Cohere, GLM), not (i, i + R / 2) (Llama, GPT-NeoX).
        q_norm, k_norm: ``[D]`` of any floating dtype but float64, the weights of RMS norms over each head (Qwen3, Gemma-3);
            None, each: no norm. A norm over all heads of a row at once (OLMo-2: a weight ``[Hq*D]``) is not done here.
        eps: of both norms. add_one: weights are stored as w - 1 (Gemma).
        k_scale, v_scale: float32 ``[Hkv]``, required with an fp8 cache.

    Returns:
        The queries for ``verify_attention``: ``[B,T,Hq,D]`` in q's dtype, contiguous; 0 where t >= query_lens.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; on the CPU also a length or a page id out of range.

    Source: Su et al. 2021 (rotary embedding); Zhang and Sennrich 2019 (RMS norm); Kwon et al. 2023 (paged KV cache).

    Example:
        >>> q = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
        >>> cache = torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4)
        >>> cos, sin = torch.zeros(1, 1, 2), torch.ones(1, 1, 2)  # a quarter turn of the first two lanes
        >>> rope_append(q, -q, q, cos, sin, *cache, torch.tensor([[0]]), torch.tensor([1])).flatten().tolist()
        [-2.0, 1.0, 3.0, 4.0]
        >>> cache[0].flatten().tolist()
        [0.0, 0.0, 0.0, 0.0, 2.0, -1.0, -3.0, -4.0]
    """
    table, context, lens = _check_append(
        k, v, k_cache, v_cache, block_table, context_lens, query_lens, k_scale, v_scale
    )
    batch, count, kv_heads, dim = k.shape
    check_tensor("q", q, (batch, count, None, dim), k)
    check_floating("q", q)
    require(q.dtype == k.dtype, "q", f"of k's dtype {k.dtype}", q.dtype)
    divides = kv_heads > 0 and q.shape[2] > 0 and q.shape[2] % kv_heads == 0
    require(divides, "q", f"of a head count that is a positive multiple of k's {kv_heads} heads", q.shape[2])
    check_rotary(cos, sin, interleaved, k)
    check_norms(q_norm, k_norm, eps, add_one, k)
    chosen = resolve_backend(backend, "rope_append", q)
    return _rope_append(
        q, k, v, cos, sin, k_cache, v_cache, table, context, lens, interleaved, q_norm, k_norm, float(eps), add_one,
        k_scale, v_scale, chosen,
    )  # fmt: skip


def _check_append(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_lens: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """What is appended, and where; returns table and lengths as int32."""
    check_tensor("k", k, (None, None, None, None))
    batch, count, kv_heads, dim = k.shape
    check_tensor("v", v, tuple(k.shape), k)
    check_floating("k", k)
    check_floating("v", v)
    require(v.dtype == k.dtype, "v", f"of k's dtype {k.dtype}", v.dtype)
    check_tensor("k_cache", k_cache, (None, None, kv_heads, dim), k)
    if k_cache.dtype != torch.float8_e4m3fn:
        require(k_cache.dtype == k.dtype, "k_cache", f"of k's dtype {k.dtype} or float8_e4m3fn", k_cache.dtype)
    return check_pages(k_cache, v_cache, block_table, context_lens, query_lens, k_scale, v_scale, batch, count)


def compact_kv(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    path: torch.Tensor,
    path_lens: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> None:
    """Move an accepted path's keys and values to where a chain's would lie, in place.

    Node j of request b's tree lies at position ``context_lens[b] + j``. Afterwards position ``context_lens[b] + i`` holds
    what position ``context_lens[b] + path[b, i]`` held, for each i below the path's length; nothing else changes.

    There is no race: a path increases from parent to child, so ``path[i] >= i``, and moving in the order of i never reads
    what has been written; in the kernel one program owns a lane of all of a request's rows.

    Args:
        k_cache, v_cache: ``[P,S,Hkv,D]`` of any dtype the ops know; fp8 needs no scales, bytes are moved.
        block_table: int32 ``[B,max_pages]``; entries of pages without a position of the path are not read.
        context_lens: int32 ``[B]``, tokens in the cache before the tree.
        path: int32 ``[B,N]``, node indices from the root on as ``accept_tree`` gives them: increasing, padded with -1.
        path_lens: int32 ``[B]``, entries of each path in use (None: those before the first negative one). 0: nothing moves.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; on the CPU also a path that does not increase, or a node, a
            length or a page id out of range.

    Source: Miao et al. 2023 (SpecInfer's token tree).

    Example:
        >>> cache = torch.tensor([5.0, 0.0, 1.0, 2.0]).view(2, 2, 1, 1)  # one token of context, then nodes 0, 1, 2
        >>> compact_kv(cache, cache.clone(), torch.tensor([[0, 1]]), torch.tensor([1]), torch.tensor([[0, 2, -1]]))
        >>> cache.flatten().tolist()
        [5.0, 0.0, 2.0, 2.0]
    """
    check_caches(k_cache, v_cache)
    checked = check_path(k_cache, block_table, context_lens, path, path_lens)
    _compact_kv(k_cache, v_cache, *checked, resolve_backend(backend, "compact_kv", k_cache))


def verify_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_lens: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    tree_mask: torch.Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Attention of T new positions per request over its paged context and one another (their keys already appended).

    New position t sees all context and the new positions j <= t, or with ``tree_mask`` those whose bit is set.

    Args:
        q: ``[B,T,Hq,D]``, Hq a multiple of Hkv.
        k_cache, v_cache: ``[P,S,Hkv,D]``. Slots past a request's length may hold NaN.
        block_table: int32 ``[B,max_pages]``; entries past a request's length are not read.
        context_lens: int32 ``[B]``, tokens in the cache before the new ones.
        query_lens: int32 ``[B]``, new positions of each request (None: T).
        scale: factor on q.k; None: D ** -0.5.
        tree_mask: int64 ``[T]`` or ``[B,T]``, T <= 64; bit j set: sees new position j. Node 0 is the root.
        sliding_window: W: key j is visible to position i iff i - W < j <= i, where i = context + depth and depth is t,
            or popcount(mask) - 1 in a tree. In a tree j is the key's slot.
        softcap: c: scores become c tanh(score / c).
        sinks: ``[Hq]``, the logit of one extra key without a value.
        k_scale, v_scale: float32 ``[Hkv]``, required with an fp8 cache.

    Returns:
        ``[B,T,Hq,D]`` in q's dtype; 0 where t >= query_lens.

    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit; on the CPU also lengths or page ids out of range.

    Source: Kwon et al. 2023 (paged KV cache), Dao 2022 (online softmax), Miao et al. 2023 (tree mask).
    """
    check_tensor("q", q, (None, None, None, None))
    batch, count, q_heads, dim = q.shape
    check_floating("q", q)
    check_tensor("k_cache", k_cache, (None, None, None, dim), q)
    kv_heads = k_cache.shape[2]
    divides = kv_heads > 0 and q_heads % kv_heads == 0
    require(divides, "q", f"of a head count that is a multiple of the cache's {kv_heads} KV heads", q_heads)
    if k_cache.dtype != torch.float8_e4m3fn:
        require(k_cache.dtype == q.dtype, "k_cache", f"of q's dtype {q.dtype} or float8_e4m3fn", k_cache.dtype)
    table, context, lens = check_pages(
        k_cache, v_cache, block_table, context_lens, query_lens, k_scale, v_scale, batch, count
    )
    check_positive("scale", scale)
    check_positive("softcap", softcap)
    if sliding_window is not None:
        check_integer("sliding_window", sliding_window, 1)
        sliding_window = min(sliding_window, 2**31 - 1)
    if tree_mask is not None:
        require(count <= MAX_DRAFT_TOKENS + 1, "tree_mask", "used with T <= 64", f"T = {count}")
        rows = (count,) if isinstance(tree_mask, torch.Tensor) and tree_mask.dim() == 1 else (batch, count)
        tree_mask = integers("tree_mask", tree_mask, rows, q, torch.int64)
    if sinks is not None:
        check_tensor("sinks", sinks, (q_heads,), q)
        check_floating("sinks", sinks)
    chosen = resolve_backend(backend, "verify_attention", q)
    return _verify_attention(
        q, k_cache, v_cache, table, context, lens, scale, tree_mask, sliding_window, softcap, sinks,
        k_scale, v_scale, chosen,
    )  # fmt: skip
