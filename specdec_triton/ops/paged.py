"""The ops on the paged KV cache: append, attend, compact."""

from __future__ import annotations

import torch

from specdec_triton._checks import (
    check_caches,
    check_floating,
    check_integer,
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
    " Tensor? query_lens, Tensor? k_scale, Tensor? v_scale, Tensor? cos, Tensor? sin, bool interleaved, str backend)"
    " -> ()",
    fake=lambda *args: None,
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
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    interleaved: bool = False,
    backend: str | None = None,
) -> None:
    """Write new keys and values into the pages: position ``context_lens[b] + t`` of request b, in place.

    With ``cos`` and ``sin`` the keys' first R lanes are rotated on the way (rotary position embedding): lane i becomes
    ``k[i] cos[i] - k[j] sin[i]`` where i is the first lane of its pair and j the second, ``k[i] cos[i] + k[j] sin[i]`` where i
    is the second and j the first. That is computed in fp32 and rounded once, to the cache's dtype.

    Args:
        k, v: ``[B,T,Hkv,D]``.
        k_cache, v_cache: ``[P,S,Hkv,D]``; may be float8_e4m3fn, then stored value x scale = key.
        block_table: int32 ``[B,max_pages]``; entries past a request's length are not read.
        context_lens: int32 ``[B]``, tokens already in the cache.
        query_lens: int32 ``[B]``, new tokens of each request (None: T). Nothing is written past it.
        k_scale, v_scale: float32 ``[Hkv]``, required with an fp8 cache.
        cos, sin: ``[B,T,R]`` or ``[1,T,R]`` of any floating dtype, R even and at most D; both or neither. A factor for each
            lane, as transformers' rotary modules give them (GLM's, Helium's and Ernie's only once their models'
            ``apply_rotary_pos_emb`` has repeated the first half: ``cos[..., :R // 2].repeat_interleave(2, -1)``).
        interleaved: pairs are the lanes (2i, 2i + 1) (Cohere, GLM), not (i, i + R / 2) (Llama, GPT-NeoX).

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; on the CPU also a length or a page id out of range.

    Source: Kwon et al. 2023 (paged KV cache); Su et al. 2021 (rotary embedding).

    Example:
        >>> k = torch.ones(1, 2, 1, 4)
        >>> cache = torch.zeros(3, 2, 1, 4), torch.zeros(3, 2, 1, 4)
        >>> append_kv(k, k, *cache, torch.tensor([[2, 0]]), torch.tensor([1]))  # positions 1 and 2: pages 2 and 0
        >>> cache[0][:, :, 0, 0].tolist()
        [[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]
    """
    check_tensor("k", k, (None, None, None, None))
    batch, count, kv_heads, dim = k.shape
    check_tensor("v", v, tuple(k.shape), k)
    check_floating("k", k)
    check_floating("v", v)
    require(v.dtype == k.dtype, "v", f"of k's dtype {k.dtype}", v.dtype)
    check_tensor("k_cache", k_cache, (None, None, kv_heads, dim), k)
    if k_cache.dtype != torch.float8_e4m3fn:
        require(k_cache.dtype == k.dtype, "k_cache", f"of k's dtype {k.dtype} or float8_e4m3fn", k_cache.dtype)
    table, context, lens = check_pages(
        k_cache, v_cache, block_table, context_lens, query_lens, k_scale, v_scale, batch, count
    )
    check_rotary(cos, sin, interleaved, k)
    chosen = resolve_backend(backend, "append_kv", k)
    _append_kv(
        k, v, k_cache, v_cache, table, context, lens, k_scale, v_scale, cos, sin, interleaved, chosen
    )  # fmt: skip


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
