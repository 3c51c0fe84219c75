"""Which of a model's layers it can draft without: a short search on sample prompts.

How often the model without some layers chooses the token that the whole model chose is read off one pass over the whole model's own texts.
Together with what the layers left cost, that gives the expected speed of a chain of drafts; the search leaves out one layer at a time, the
one whose loss is least, as long as that grows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from specdec_triton.models import cache_dir
from specdec_triton.skipping import skipping
from specdec_triton.taps import decoder_layers

if TYPE_CHECKING:
    from specdec_triton.adapter import ModelAdapter

_PATIENCE = 4  # layers more that are left out although it has not grown, before the search ends


@dataclass(frozen=True)
class Skip:
    """A choice of layers to leave out.

    Attributes:
        agreement: how often the same token is chosen. speed: expected tokens over those of plain decoding, in the same time, with the
            best of up to ``k`` drafts a round.
    """

    layers: frozenset[int]
    agreement: float
    speed: float
    k: int


def search(
    model: Any,
    texts: Sequence[tuple[Sequence[int], int]],
    *,
    max_k: int = 8,
    step: Callable[[Skip], None] = lambda found: None,
) -> Skip:
    """The best choice.

    Args:
        texts: token ids of prompts and the model's own answers to them, and where those begin.
        max_k: the most drafts a round.
        step: is told of each choice on the way.
    """
    count = len(decoder_layers(model))
    layer, rest = _costs(model)

    def judge(skip: frozenset[int]) -> Skip:
        agreement = _agreement(model, texts, skip)
        cost = (layer * (count - len(skip)) + rest) / (layer * count + rest)
        speeds = {k: sum(agreement**i for i in range(k + 1)) / (1 + k * cost) for k in range(max_k + 1)}
        best = max(speeds, key=lambda k: speeds[k])
        return Skip(skip, agreement, speeds[best], best)

    best = here = Skip(frozenset(), 1.0, 1.0, 0)
    while len(here.layers) < count - 1 and len(here.layers) - len(best.layers) < _PATIENCE:
        others = (judge(here.layers | {i}) for i in range(count) if i not in here.layers)
        here = max(others, key=lambda found: found.agreement)
        step(here)
        if here.speed > best.speed:
            best = here
    return best


@torch.inference_mode()
def _agreement(model: Any, texts: Iterable[tuple[Sequence[int], int]], skip: frozenset[int]) -> float:
    same = total = 0
    with skipping(model, skip):
        for text, start in texts:
            ids = torch.tensor([list(text)], device=model.device)
            chosen = model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1].argmax(-1)
            same += int((chosen == ids[0, start:]).sum())
            total += len(text) - start
    return same / max(total, 1)


def _costs(model: Any) -> tuple[float, float]:
    """Bytes of a decoder layer's weights, and of those of the head: a pass over few tokens takes as long as reading them."""

    def size(module: torch.nn.Module) -> int:
        packed = sum(getattr(x, "packed_bytes", 0) for x in module.modules())
        return packed + sum(p.numel() * p.element_size() for p in module.parameters())

    layers = decoder_layers(model)
    return sum(map(size, layers)) / len(layers), float(size(model.get_output_embeddings()))


def remember(target: ModelAdapter, found: Skip) -> None:
    """Keep a choice for later decoders of this target."""
    path = _path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {"skip": sorted(found.layers), "agreement": found.agreement, "speed": found.speed, "k": found.k}
    path.write_text(json.dumps(kept) + "\n")


def recall(target: ModelAdapter) -> frozenset[int] | None:
    """The layers of a choice that was kept."""
    try:
        layers = json.loads(_path(target).read_text())["skip"]
        return frozenset(int(layer) for layer in layers)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _path(target: ModelAdapter) -> Any:
    """By name and shape of the model."""
    config = target.config
    facts = (
        type(target.model).__name__,
        getattr(target.model, "name_or_path", ""),
        config.num_hidden_layers,
        config.hidden_size,
    )
    return cache_dir() / "skip" / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.json"
