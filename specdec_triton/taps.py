"""Hidden states of a model that a drafter is shown: taken from its passes as they are made, never by a pass of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from specdec_triton.errors import UnsupportedModelError
from specdec_triton.passes import Pass


class Taps:
    """Takes hidden states from a model's passes.

    Args:
        layers: after how many of its N decoder layers, 0 to N - 1; N: what its head is given.

    Attributes:
        states: ``[B,T,F]`` of the last pass, those after each of the layers side by side; rows at or past query_lens are unspecified.

    Raises:
        ValueError: the model has no such layer.
        UnsupportedModelError: its layers are not one list.
    """

    states: torch.Tensor

    def __init__(self, model: Any, layers: Sequence[int]) -> None:
        self._layers = decoder_layers(model)
        self._decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
        self._wanted = tuple(layers)
        for layer in layers:
            if not 0 <= layer <= len(self._layers):
                raise ValueError(f"taps must be from 0 to {len(self._layers)} layers, got {layer}")
        if len(self._layers) in layers and not isinstance(self._decoder, nn.Module):
            raise UnsupportedModelError(
                f"{type(model).__name__} does not say what its head is given (it has no get_decoder)"
            )
        self._seen: dict[int, torch.Tensor] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the model's passes leave their hidden states here."""
        hooks = []
        try:
            for layer in set(self._wanted):
                if layer < len(self._layers):
                    module, given = self._layers[layer], self._given(layer)
                    hooks.append(module.register_forward_pre_hook(given, with_kwargs=True))
                else:
                    assert self._decoder is not None
                    hooks.append(self._decoder.register_forward_hook(self._made))
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def take(self, p: Pass | None = None) -> None:
        """The pass is over; None: it was the module's own, of one text."""
        seen = [self._seen[layer] for layer in self._wanted]
        self._seen.clear()
        states = torch.cat(seen, -1) if len(seen) > 1 else seen[0]
        self.states = states if p is None else p.unpack(states[0])

    def _given(self, layer: int) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._seen[layer] = args[0] if args else kwargs["hidden_states"]

        return note

    def _made(self, module: nn.Module, args: Any, out: Any) -> None:
        self._seen[len(self._layers)] = out.last_hidden_state


def decoder_layers(model: Any) -> nn.ModuleList:
    """The model's decoder layers.

    Raises:
        UnsupportedModelError: they are not one list.
    """
    count = model.config.get_text_config().num_hidden_layers
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == count]
    if not lists:
        raise UnsupportedModelError(f"{type(model).__name__} does not keep its {count} decoder layers in one list")
    return lists[0]
