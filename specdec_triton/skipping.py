"""A model's passes without some of its decoder layers."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from specdec_triton.taps import decoder_layers


class _Bypass(nn.Module):
    """In a layer's place: gives back what it is given. Whoever asks for something else of the layer gets the layer's own."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._layer = [layer]  # not a child of this one

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattribute__("_layer")[0], name)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states


@contextmanager
def skipping(model: Any, layers: Collection[int]) -> Iterator[None]:
    """Inside, the model passes by these of its decoder layers. Whoever holds the model's lock may use it."""
    if not layers:
        yield
        return
    modules = decoder_layers(model)._modules
    own = {str(i): modules[str(i)] for i in layers}
    try:
        for name, layer in own.items():
            assert layer is not None
            modules[name] = _Bypass(layer)
        yield
    finally:
        modules.update(own)
