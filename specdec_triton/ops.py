"""The ops: pure functions on tensors, each with a PyTorch reference and a Triton kernel of the same meaning.

Symbols: B requests, T new positions each, K drafts, Hq query heads, Hkv KV heads, D head size, V vocabulary, P pages of
S tokens. Token ids, seeds and positions are int64, other integers int32, probabilities and temperatures float32. Every
op takes ``backend``: ``"triton"``, ``"torch"`` or None (Triton on a GPU, PyTorch elsewhere; ``SPECDEC_BACKEND``
overrides).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from specdec_triton._checks import (
    check_bool,
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
from specdec_triton.reference.accept_reject import METHODS, PAD
from specdec_triton.sampling import MAX_DRAFT_TOKENS, SamplingBatch

__all__ = [
    "PAD",
    "AcceptResult",
    "SamplingBatch",
    "accept_reject",
    "append_kv",
    "compact_kv",
    "ngram_propose",
    "sample",
    "verify_attention",
]


class AcceptResult(NamedTuple):
    """What a round emits: request b emits ``tokens[b, : num_accepted[b] + 1]``.

    Attributes:
        tokens: int64 ``[B,K+1]``, padded with -1.
        num_accepted: int32 ``[B]``.
        status: int32 ``[B]``; 1: the request's logits held NaN, +inf or a row of nothing but -inf. Its tokens are
            [0, -1, ...] and must not be emitted.
    """

    tokens: torch.Tensor
    num_accepted: torch.Tensor
    status: torch.Tensor


BY_PROBABILITY = ("rejection", "block")  # methods that judge a draft by the probability it was drawn with
PATHLESS = (*BY_PROBABILITY, "typical")  # of which a text depends on how its rounds fell

_PARAMS = (
    "Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seed, Tensor position, bool? has_filters"
)

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
_accept_reject = register(
    "accept_reject(Tensor draft_tokens, Tensor target_logits, Tensor? draft_logits, Tensor? draft_lse,"
    f" Tensor? draft_lens, {_PARAMS}, str method, float epsilon, float delta, str backend) -> (Tensor, Tensor, Tensor)",
    fake=lambda drafts, *rest: (
        drafts.new_empty((drafts.shape[0], drafts.shape[1] + 1)),
        drafts.new_empty((drafts.shape[0],), dtype=torch.int32),
        drafts.new_empty((drafts.shape[0],), dtype=torch.int32),
    ),
)
_sample = register(
    f"sample(Tensor logits, {_PARAMS}, int? node, str backend) -> (Tensor, Tensor)",
    fake=lambda logits, *rest: (
        logits.new_empty((logits.shape[0],), dtype=torch.int64),
        logits.new_empty((logits.shape[0],), dtype=torch.float32),
    ),
)
_ngram_propose = register(
    "ngram_propose(Tensor tokens, Tensor lens, int k, int min_ngram, int max_ngram, str backend) -> (Tensor, Tensor)",
    fake=lambda tokens, lens, k, *rest: (
        tokens.new_empty((tokens.shape[0], k)),
        tokens.new_empty((tokens.shape[0],), dtype=torch.int32),
    ),
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


def accept_reject(
    draft_tokens: torch.Tensor,
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor | None = None,
    *,
    draft_lse: torch.Tensor | None = None,
    draft_lens: torch.Tensor | None = None,
    params: SamplingBatch,
    method: str,
    typical_epsilon: float = 0.3,
    typical_delta: float = 0.09,
    backend: str | None = None,
) -> AcceptResult:
    """Keep the right prefix of each drafted chain and add one token.

    Args:
        draft_tokens: int64 ``[B,K]``, K >= 0. An id below 0 or >= V ends the row's draft.
        target_logits: ``[B,K+1,V]``; row j scores the token after drafts 0..j-1. -inf masks a token.
        draft_logits: ``[B,K,V]``, the raw logits that the drafts were drawn from under ``params``; None: the drafts
            were certain (q is one-hot), as from an n-gram table.
        draft_lse: float32 ``[B,K]``, what ``sample(..., return_lse=True)`` gave for those rows.
        draft_lens: int32 ``[B]``, drafts of each row (None: K).
        params: the requests' parameters; ``params.position`` is that of the first drafted token.
        method: ``greedy``: accept while the draft is the argmax (ties: the lowest id). ``rejection``: the output
            follows the target's distribution exactly. ``block``: so it does, and on average never fewer drafts are
            accepted. ``coupled``: position i's token is a pure function of (seed, i, logits); a draft is accepted while
            it is that token. ``typical``: accept while the draft's probability exceeds min(epsilon, delta
            exp(-entropy)), then draw from the target; lossy. Rows with temperature 0 are greedy whatever the method.
        typical_epsilon, typical_delta: of ``typical``, from 0 to 1.

    Returns:
        :class:`AcceptResult`. Rows with status 1 have num_accepted 0 and must not be emitted.

    Raises:
        ValueError: shapes, dtypes, devices or a method that do not fit; on the CPU also draft_lens out of range.

    Source: Leviathan et al. 2023; Chen et al. 2023; Sun et al. 2024 (block); Cai et al. 2024 (typical). Proofs of
    exactness: kernels/README.md.

    Example:
        >>> from specdec_triton import SamplingParams
        >>> logits = torch.nn.functional.one_hot(torch.tensor([[1, 5, 3, 4]]), 8).float()
        >>> greedy = SamplingBatch.from_params([SamplingParams(temperature=0)], [0])
        >>> accept_reject(torch.tensor([[1, 2, 3]]), logits, params=greedy, method="greedy").tokens.tolist()
        [[1, 5, -1, -1]]
    """
    require(method in METHODS, "method", f"one of {', '.join(METHODS)}", repr(method))
    check_tensor("target_logits", target_logits, (None, None, None))
    batch, rows, vocab = target_logits.shape
    require(rows >= 1 and vocab >= 1, "target_logits", "of shape [B,K+1,V] with V >= 1", list(target_logits.shape))
    check_floating("target_logits", target_logits)
    draft_tokens = integers("draft_tokens", draft_tokens, (batch, rows - 1), target_logits, torch.int64)
    if draft_logits is not None:
        check_tensor("draft_logits", draft_logits, (batch, rows - 1, vocab), target_logits)
        check_floating("draft_logits", draft_logits)
    if draft_lse is not None:
        require(draft_logits is not None, "draft_lse", "given together with draft_logits", "it alone")
        check_tensor("draft_lse", draft_lse, (batch, rows - 1), target_logits)
        require(draft_lse.dtype == torch.float32, "draft_lse", "float32", draft_lse.dtype)
    if draft_lens is not None:
        draft_lens = integers("draft_lens", draft_lens, (batch,), target_logits, torch.int32)
        if draft_lens.device.type == "cpu" and batch:
            low, high = int(draft_lens.min()), int(draft_lens.max())
            require(low >= 0 and high < rows, "draft_lens", f"from 0 to K = {rows - 1}", (low, high))
    for name, value in (("typical_epsilon", typical_epsilon), ("typical_delta", typical_delta)):
        ok = isinstance(value, (int, float)) and 0 <= value <= 1
        require(ok, name, "a number from 0 to 1", repr(value))
    unpacked = _unpack(params, batch, target_logits)
    chosen = resolve_backend(backend, "accept_reject", target_logits)
    return AcceptResult(
        *_accept_reject(
            draft_tokens, target_logits, draft_logits, draft_lse, draft_lens, *unpacked, method,
            float(typical_epsilon), float(typical_delta), chosen,
        )
    )  # fmt: skip


def sample(
    logits: torch.Tensor,
    *,
    params: SamplingBatch,
    return_lse: bool = False,
    node: int | None = None,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row under the request's parameters; the argmax (lowest id of ties) at temperature 0.

    Args:
        logits: ``[B,V]``; -inf masks a token.
        params: ``params.position`` is the absolute position of the token being drawn.
        return_lse: also return the log-sum-exp of logits / temperature over the tokens that the filters keep.
        node: None: the noise is keyed by (seed, position), the ``coupled`` noise that any drafter and the target
            share. An integer j: draft j of a round of ``rejection`` that begins at ``params.position``; its stream
            is separate from every stream that decides on the draft.

    Returns:
        tokens int64 ``[B]``, or (tokens, lse float32 ``[B]``).

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    check_tensor("logits", logits, (None, None))
    batch, vocab = logits.shape
    require(vocab >= 1, "logits", "of shape [B,V] with V >= 1", list(logits.shape))
    check_floating("logits", logits)
    if node is not None:
        check_integer("node", node, 0, MAX_DRAFT_TOKENS)
    tokens, lse = _sample(logits, *_unpack(params, batch, logits), node, resolve_backend(backend, "sample", logits))
    return (tokens, lse) if return_lse else tokens


def ngram_propose(
    tokens: torch.Tensor,
    lens: torch.Tensor,
    k: int,
    min_ngram: int = 1,
    max_ngram: int = 3,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Propose what followed the last earlier occurrence of the text's tail (prompt lookup).

    The longest tail of min_ngram..max_ngram tokens that occurs earlier wins; of its occurrences the most recent; the
    tail never matches itself.

    Args:
        tokens: int64 ``[B,L]``, the texts so far. lens: int32 ``[B]``, their lengths.
        k: the most tokens to propose.

    Returns:
        draft_tokens int64 ``[B,k]`` padded with -1, and draft_lens int32 ``[B]`` (0: no match).

    Raises:
        ValueError: shapes, dtypes, devices or sizes that do not fit.

    Source: Saxena 2023, "Prompt lookup decoding".

    Example:
        >>> ngram_propose(torch.tensor([[5, 6, 7, 5, 6, 8, 5, 6]]), torch.tensor([8]), 3)[0].tolist()
        [[8, 5, 6]]
    """
    check_tensor("tokens", tokens, (None, None))
    tokens = integers("tokens", tokens, tuple(tokens.shape), tokens, torch.int64)
    lens = integers("lens", lens, (tokens.shape[0],), tokens, torch.int32)
    check_integer("k", k, 0, MAX_DRAFT_TOKENS)
    check_integer("min_ngram", min_ngram, 1)
    check_integer("max_ngram", max_ngram, min_ngram)
    if tokens.device.type == "cpu" and lens.numel():
        low, high = int(lens.min()), int(lens.max())
        require(low >= 0 and high <= tokens.shape[1], "lens", f"from 0 to L = {tokens.shape[1]}", (low, high))
    return _ngram_propose(tokens, lens, k, min_ngram, max_ngram, resolve_backend(backend, "ngram_propose", tokens))


def _unpack(params: SamplingBatch, batch: int, like: torch.Tensor) -> tuple:
    """The parameter tensors in the order in which the ops take them."""
    require(isinstance(params, SamplingBatch), "params", "a SamplingBatch", type(params).__name__)
    for name in ("temperature", "top_p", "min_p"):
        x = getattr(params, name)
        check_tensor(f"params.{name}", x, (batch,), like)
        require(x.dtype == torch.float32, f"params.{name}", "float32", x.dtype)
        if batch and x.device.type == "cpu":
            low, high = (float(end) for end in x.aminmax())
            most = 1.0 if name != "temperature" else torch.finfo(torch.float32).max
            require(low >= 0 and high <= most, f"params.{name}", f"from 0 to {most:g}", (low, high))
    flag = params.has_filters
    check_bool("params.has_filters", flag, optional=True)
    whole = ((name, torch.int32 if name == "top_k" else torch.int64) for name in ("top_k", "seed", "position"))
    top_k, seed, position = (
        integers(f"params.{name}", getattr(params, name), (batch,), like, dtype) for name, dtype in whole
    )
    if batch and like.device.type == "cpu":
        require(int(top_k.min()) >= -1, "params.top_k", "at least 0 (0 and -1: off)", int(top_k.min()))
        require(int(position.min()) >= 0, "params.position", "at least 0", int(position.min()))
    return params.temperature, top_k, params.top_p, params.min_p, seed, position, params.has_filters
