"""The op that judges drafted trees."""

from __future__ import annotations

from typing import NamedTuple

import torch

from specdec_triton._checks import check_floating, check_tensor, integers, require
from specdec_triton._library import register, resolve_backend
from specdec_triton.ops.sampling import PARAMS_SCHEMA, check_typical, unpacked
from specdec_triton.sampling import SamplingBatch

MAX_NODES = 64  # bits of a tree mask
TREE_METHODS = ("greedy", "rejection", "coupled", "typical")


class TreeAcceptResult(NamedTuple):
    """What a round with trees emits: request b emits ``tokens[b, : num_accepted[b] + 1]``.

    Attributes:
        path: int64 ``[B,N]``, the accepted nodes from the root (node 0) on, padded with -1: what ``compact_kv`` takes.
        tokens: int64 ``[B,N]``, padded with -1.
        num_accepted: int32 ``[B]``, the root not counted.
        status: int32 ``[B]``; 1: the request's logits held NaN, +inf or a row of nothing but -inf. Its path is [0, -1, ...] and its tokens
            are [0, -1, ...], which must not be emitted.
    """

    path: torch.Tensor
    tokens: torch.Tensor
    num_accepted: torch.Tensor
    status: torch.Tensor


_accept_tree = register(
    "accept_tree(Tensor node_tokens, Tensor node_logits, Tensor parents, Tensor? node_draft_logits, Tensor? node_lens,"
    f" {PARAMS_SCHEMA}, str method, float epsilon, float delta, str backend) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=lambda tokens, *rest: (
        torch.empty_like(tokens, memory_format=torch.contiguous_format),
        torch.empty_like(tokens, memory_format=torch.contiguous_format),
        tokens.new_empty((tokens.shape[0],), dtype=torch.int32),
        tokens.new_empty((tokens.shape[0],), dtype=torch.int32),
    ),
)


def accept_tree(
    node_tokens: torch.Tensor,
    node_logits: torch.Tensor,
    parents: torch.Tensor,
    node_draft_logits: torch.Tensor | None = None,
    *,
    node_lens: torch.Tensor | None = None,
    params: SamplingBatch,
    method: str,
    typical_epsilon: float = 0.3,
    typical_delta: float = 0.09,
    backend: str | None = None,
) -> TreeAcceptResult:
    """Keep the right path of each drafted tree and add one token.

    Args:
        node_tokens: int64 ``[B,N]``, 1 <= N <= 64. Node 0 is the root, the text's last token. An id below 0 or >= V is never
            accepted, nor is anything below it.
        node_logits: ``[B,N,V]``; a node's row scores the token after it. -inf masks a token.
        parents: integers ``[N]`` or ``[B,N]``: each node's parent, which comes before it; -1 for the root.
        node_draft_logits: ``[B,N,V]``: the raw logits that a node's children were drawn from under ``params``, one after the other, in the
            order of their numbers and **without replacement** (as the largest of logits + Gumbel noise are); rows of nodes
            without children do not matter. How many children a node has must not depend on what was drawn. None: the
            children were certain, as the drafter's most likely tokens are.
        node_lens: int32 ``[B]``, nodes of each row, the root included (None: N); 0: the row is skipped.
        params: the requests' parameters; ``params.position`` is that of the root's children.
        method: ``greedy``: walk to the child that is the argmax (ties: the lowest id; of equal children, the first). ``coupled``: to
            the child that is the position's token, a pure function of (seed, position, logits). ``rejection``: the
            output follows the target's distribution exactly, by recursive rejection; of certain children it is ``coupled``.
            ``typical``: the deepest path of children whose probability exceeds min(epsilon, delta exp(-entropy)); lossy.
            Rows with temperature 0 are greedy whatever the method.
        typical_epsilon, typical_delta: of ``typical``, from 0 to 1.

    Returns:
        :class:`TreeAcceptResult`. Of a row that is skipped, path and tokens are all -1, the rest is 0.

    Raises:
        ValueError: shapes, dtypes, devices or a method that do not fit (``block`` is defined for chains alone); on the CPU also
            node_lens or parents out of range.

    Source: Miao et al. 2024 ("SpecInfer"); Jeon et al. 2024 ("Recursive speculative decoding"); Chen et al. 2024 ("Sequoia"); Cai et
    al. 2024 ("Medusa"; typical). Proofs of exactness: kernels/README.md.

    Example:
        >>> from specdec_triton import SamplingParams
        >>> logits = torch.nn.functional.one_hot(torch.tensor([[5, 7, 3, 4]]), 8).float()
        >>> greedy = SamplingBatch.from_params([SamplingParams(temperature=0)], [0])
        >>> parents = torch.tensor([-1, 0, 0, 2])  # two ideas of what follows, one of them with a sequel
        >>> accept_tree(torch.tensor([[9, 1, 5, 3]]), logits, parents, params=greedy, method="greedy").tokens.tolist()
        [[5, 3, 4, -1]]
    """
    require(method in TREE_METHODS, "method", f"one of {', '.join(TREE_METHODS)}", repr(method))
    check_tensor("node_logits", node_logits, (None, None, None))
    batch, n, vocab = node_logits.shape
    allowed = f"of shape [B,N,V] with 1 <= N <= {MAX_NODES} and V >= 1"
    require(1 <= n <= MAX_NODES and vocab >= 1, "node_logits", allowed, list(node_logits.shape))
    check_floating("node_logits", node_logits)
    node_tokens = integers("node_tokens", node_tokens, (batch, n), node_logits, torch.int64)
    require(isinstance(parents, torch.Tensor), "parents", "a tensor", type(parents).__name__)
    shape = (n,) if parents.dim() == 1 else (batch, n)
    parents = integers("parents", parents, shape, node_logits, torch.int64).expand(batch, n)
    if node_draft_logits is not None:
        check_tensor("node_draft_logits", node_draft_logits, (batch, n, vocab), node_logits)
        check_floating("node_draft_logits", node_draft_logits)
    if node_lens is not None:
        node_lens = integers("node_lens", node_lens, (batch,), node_logits, torch.int32)
    if node_logits.device.type == "cpu" and batch:
        _check_values(parents, node_lens)
    epsilon, delta = check_typical(typical_epsilon, typical_delta)
    fields = unpacked(params, batch, node_logits)
    chosen = resolve_backend(backend, "accept_tree", node_logits)
    return TreeAcceptResult(
        *_accept_tree(
            node_tokens, node_logits, parents, node_draft_logits, node_lens, *fields, method, epsilon, delta, chosen
        )
    )


def _check_values(parents: torch.Tensor, node_lens: torch.Tensor | None) -> None:
    """Lengths from 0 to N; the parents of the nodes that exist come before them."""
    n = parents.shape[1]
    step = torch.arange(n)
    exists = step < (n if node_lens is None else node_lens[:, None])
    if node_lens is not None:
        low, high = int(node_lens.min()), int(node_lens.max())
        require(low >= 0 and high <= n, "node_lens", f"from 0 to N = {n}", (low, high))
    wrong = exists & torch.where(step == 0, parents != -1, (parents < 0) | (parents >= step))
    if bool(wrong.any()):
        b, i = (int(x) for x in wrong.nonzero()[0])
        allowed = "-1 (the root)" if i == 0 else f"a node from 0 to {i - 1} (a parent comes before its children)"
        require(False, f"parents[{b},{i}]", allowed, int(parents[b, i]))
