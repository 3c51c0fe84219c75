"""The ops: pure functions on tensors, each with a PyTorch reference and a Triton kernel of the same meaning.

Symbols: B requests, T new positions each, K drafts, Hq query heads, Hkv KV heads, D head size, V vocabulary, P pages of
S tokens. Token ids, seeds and positions are int64, other integers int32, probabilities and temperatures float32. Every
op takes ``backend``: ``"triton"``, ``"torch"`` or None (Triton on a GPU, PyTorch elsewhere; ``SPECDEC_BACKEND``
overrides). They are for inference: none has a gradient.
"""

from __future__ import annotations

from specdec_triton._library import resolve_backend as resolve_backend
from specdec_triton.logit_rules import LogitRules
from specdec_triton.ops.drafting import ngram_propose
from specdec_triton.ops.head import HeadStats, accept_stats, head_stats, sample_head, verify_head
from specdec_triton.ops.linear import gated_linear, row_mean, skinny_linear
from specdec_triton.ops.paged import append_kv, compact_kv, rope_append, verify_attention
from specdec_triton.ops.rowwise import gated_mlp_activation, rms_norm
from specdec_triton.ops.rules import apply_logit_rules
from specdec_triton.ops.sampling import BY_PROBABILITY, METHODS, PATHLESS, AcceptResult, accept_reject, sample
from specdec_triton.ops.trees import MAX_NODES, TREE_METHODS, TreeAcceptResult, accept_tree
from specdec_triton.reference.accept_reject import PAD
from specdec_triton.sampling import SamplingBatch

__all__ = [
    "BY_PROBABILITY",
    "MAX_NODES",
    "METHODS",
    "PAD",
    "PATHLESS",
    "TREE_METHODS",
    "AcceptResult",
    "HeadStats",
    "LogitRules",
    "SamplingBatch",
    "TreeAcceptResult",
    "accept_reject",
    "accept_stats",
    "accept_tree",
    "append_kv",
    "apply_logit_rules",
    "compact_kv",
    "gated_linear",
    "gated_mlp_activation",
    "head_stats",
    "ngram_propose",
    "rms_norm",
    "rope_append",
    "row_mean",
    "sample",
    "sample_head",
    "skinny_linear",
    "verify_attention",
    "verify_head",
]
