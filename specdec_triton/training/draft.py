"""Train a draft model: the target with a few of its layers, on the target's own distributions."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specdec_triton.errors import UnsupportedModelError
from specdec_triton.taps import decoder_layers
from specdec_triton.training.features import Example
from specdec_triton.training.student import Predictions, Student


class DraftStudent(Student):
    """Layers are trained; embedding and head stay the target's.

    Args:
        tokenizer: is saved beside the model. layers: how many it keeps, spread over the target's, the last among them.

    Raises:
        UnsupportedModelError: the target does not run with fewer layers.
    """

    def __init__(self, model: Any, ids: torch.Tensor, tokenizer: Any, layers: int) -> None:
        super().__init__(model, ids)
        self._tokenizer = tokenizer
        self.module = student = shortened(model, layers)
        for x in (student.get_input_embeddings(), student.get_output_embeddings()):
            x.requires_grad_(False)
        try:
            with torch.no_grad():
                self._states(torch.zeros(1, 2, dtype=torch.int64, device=self.device))
        except Exception as error:
            name = type(model).__name__
            raise UnsupportedModelError(f"{name} cannot run with {layers} of its layers: {error}") from error

    def _states(self, tokens: torch.Tensor) -> torch.Tensor:
        out = self.module.get_decoder()(input_ids=tokens, use_cache=False)  # type: ignore[operator]
        return out.last_hidden_state  # type: ignore[no-any-return]

    def predict(self, example: Example, steps: int) -> Iterator[Predictions]:
        hidden = self._states(example.tokens.long()[None])[0]
        yield torch.arange(len(hidden), device=self.device), lambda chosen: hidden[chosen] @ self.taught_by.T

    def save(self, folder: Path) -> None:
        """As transformers does."""
        copy.deepcopy(self.module).to("cpu", torch.bfloat16).save_pretrained(folder)  # type: ignore[operator]
        self._tokenizer.save_pretrained(folder)


def shortened(model: Any, count: int) -> Any:
    """A copy of a model that keeps ``count`` of its N layers, spread evenly up to the last."""
    found = decoder_layers(model)
    total = len(found)
    if not 1 <= count <= total:
        raise UnsupportedModelError(f"a draft model keeps 1 to {total} of the target's layers, got {count}")
    kept = sorted({round((i + 1) * total / count) - 1 for i in range(count)})
    place = next(module for module in model.modules() if found in module.children())
    (name,) = (name for name, child in place.named_children() if child is found)
    setattr(place, name, nn.ModuleList([found[i] for i in kept]))
    try:
        short = copy.deepcopy(model).float()
    finally:
        setattr(place, name, found)
    config = short.config.get_text_config()
    config.num_hidden_layers = len(kept)
    for field in ("layer_types", "mlp_layer_types"):
        if isinstance(listed := getattr(config, field, None), list):
            setattr(config, field, [listed[i] for i in kept])
    for index, layer in enumerate(getattr(next(m for m in short.modules() if hasattr(m, name)), name)):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = index
    return short
