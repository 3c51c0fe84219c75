"""What a decoder will hold in memory, before it does: both models, the pages, the logits of its largest round."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from specdec_triton.fusion.packed_linear import PackedLinear

if TYPE_CHECKING:
    from specdec_triton.adapter import ModelAdapter


class MemoryEstimate(NamedTuple):
    """Bytes on the device.

    Attributes:
        target_weights, draft_weights: of both models.
        pages: keys and values of both models, for all requests at their longest (of the pages that a fixed pool has, if
            there are fewer); None where the longest text is not known: give ``max_seq_len`` or ``num_pages``.
        page_bytes: of one page, of both models.
        logits: of a round of all requests with all their drafts: as the model gives them, and once in fp32; of the draft
            model those that judging by probability needs.
    """

    target_weights: int
    draft_weights: int
    pages: int | None
    page_bytes: int
    logits: int

    @property
    def total(self) -> int | None:
        """All of it; None where the number of pages is not known. Activations and captured graphs come on top."""
        if self.pages is None:
            return None
        return self.target_weights + self.draft_weights + self.pages + self.logits


def estimate(
    target: ModelAdapter,
    draft: ModelAdapter | None,
    *,
    slots: int,
    k: int,
    page_size: int,
    num_pages: int | None,
    max_tokens: int | None,
) -> MemoryEstimate:
    """For ``slots`` requests of up to ``max_tokens`` tokens (None: not known) that draft up to k tokens each."""
    models = [target] if draft is None else [target, draft]
    page_bytes = page_size * sum(
        2 * shape.kv_heads * shape.head_dim * model.dtype.itemsize
        for model in models
        for shape in model.observation.layers
    )
    counts = [n for n in (num_pages, max_tokens and slots * -(-max_tokens // page_size)) if n is not None]
    rows = slots * (k + 1)
    logits = rows * target.vocab_size * (target.dtype.itemsize + 4)
    if draft is not None:
        logits += slots * k * target.vocab_size * draft.dtype.itemsize
    return MemoryEstimate(
        target_weights=_weights(target),
        draft_weights=0 if draft is None else _weights(draft),
        pages=min(counts) * page_bytes if counts else None,
        page_bytes=page_bytes,
        logits=logits,
    )


def _weights(adapter: ModelAdapter) -> int:
    tensors = [*adapter.model.parameters(), *adapter.model.buffers()]
    layers = [layer for layer in adapter.model.modules() if isinstance(layer, PackedLinear)]
    packed = {id(layer._packed): layer.packed_bytes for layer in layers}
    plain = sum({x.data_ptr() or id(x): x.nbytes for x in tensors}.values())  # tied ones once
    return plain + sum(packed.values())
