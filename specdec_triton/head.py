"""The head of a model: the last product and what follows it, found by watching a short pass.

Where only tokens are wanted of the logits (which drafts are accepted, what is drawn), they need not be written: ``ops.verify_head`` and
``ops.sample_head`` take what the head would be given. That holds where the head is a plain linear layer, then perhaps a factor
and a softcap, as a pass of the whole model must show.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from specdec_triton import ops
from specdec_triton.observe import is_steered, model_lock, shapes_alone
from specdec_triton.reference.head_stats import finished

_PROBE_TOKENS = 5


@dataclass(frozen=True)
class Head:
    """logits = softcap(scale (hidden @ weight.T + bias)).

    Attributes:
        decoder: the part of the model before it. linear: the layer itself. around: the modules that are passed by.
        size: ids that count, the first of the layer's outputs.
    """

    decoder: Any
    linear: nn.Linear
    around: tuple[nn.Module, ...]
    scale: float | None
    softcap: float | None
    size: int

    @property
    def usable(self) -> bool:
        """Whether nobody watches or steers what would be passed by."""
        return not any(map(is_steered, self.around))

    def first(self, size: int) -> Head:
        """Of the first ids alone."""
        return replace(self, size=min(size, self.size))

    def verify(
        self, hidden: torch.Tensor, draft_tokens: torch.Tensor, draft_lens: torch.Tensor | None, **options: Any
    ) -> ops.AcceptResult:
        """``ops.verify_head`` of hidden ``[n,K+1,H]``."""
        return ops.verify_head(hidden, self._weight, draft_tokens, draft_lens=draft_lens, **self._after, **options)

    def sample(self, hidden: torch.Tensor, **options: Any) -> Any:
        """``ops.sample_head`` of hidden ``[n,H]``."""
        return ops.sample_head(hidden, self._weight, **self._after, **options)

    @property
    def _weight(self) -> torch.Tensor:
        return self.linear.weight.detach()[: self.size]

    @property
    def _after(self) -> dict[str, Any]:
        bias = self.linear.bias
        return {
            "bias": None if bias is None else bias.detach()[: self.size],
            "scale": self.scale,
            "softcap": self.softcap,
        }


@dataclass(frozen=True)
class HeadPlan:
    """Where in a model its head is, by names: it does not keep the model alive."""

    decoder: str
    linear: weakref.ref[nn.Linear]
    around: tuple[str, ...]
    scale: float | None
    softcap: float | None
    size: int

    def of(self, model: Any) -> Head | None:
        """The model's head; None if the layer has been replaced."""
        linear = self.linear()
        if linear is None or model.get_output_embeddings() is not linear:
            return None
        around = tuple(map(model.get_submodule, self.around))
        return Head(model.get_submodule(self.decoder), linear, around, self.scale, self.softcap, self.size)


def find_head(model: Any) -> HeadPlan | None:
    """The head, or None if the logits come about in another way.

    On the meta device, where numbers cannot be compared, its factor and softcap are what the configuration says.
    """
    linear, decoder = model.get_output_embeddings(), getattr(model, "get_decoder", lambda: None)()
    if type(linear) is not nn.Linear or not isinstance(decoder, nn.Module) or decoder is model:
        return None
    if (
        linear.weight.dtype not in (torch.float32, torch.float16, torch.bfloat16)
        or type(linear.weight) is not nn.Parameter
    ):
        return None
    config = model.config.get_text_config()
    device = linear.weight.device
    tokens = (torch.arange(1, _PROBE_TOKENS + 1, device=device)[None] * 7919) % config.vocab_size
    seen: dict[str, Any] = {}

    def of_decoder(module: nn.Module, args: Any, out: Any) -> None:
        seen["hidden"] = getattr(out, "last_hidden_state", None)

    def of_linear(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        seen["given"], seen["product"] = args[0], out.clone()  # the model may change it in place

    with model_lock(model), shapes_alone(model), torch.inference_mode():
        hooks = [decoder.register_forward_hook(of_decoder), linear.register_forward_hook(of_linear)]
        try:
            logits = model(input_ids=tokens, use_cache=False).logits
        finally:
            for hook in hooks:
                hook.remove()
    hidden, given, product = (seen.get(name) for name in ("hidden", "given", "product"))
    if hidden is None or given is None or product is None:
        return None
    if not hidden.dtype == given.dtype == linear.weight.dtype == logits.dtype:
        return None
    on_meta = logits.is_meta
    if given.shape != hidden.shape or product.shape != logits.shape or not (on_meta or torch.equal(given, hidden)):
        return None
    inside = set(decoder.modules())
    names = {module: name for name, module in model.named_modules()}
    around = [x for x in names if x is linear or (x not in inside and decoder in x.modules())]
    if decoder not in names or linear not in names:
        return None
    for scale, softcap in candidates(config):
        if on_meta or torch.equal(finished(product, scale, softcap), logits):
            if not all(x is None or 0 < x < math.inf for x in (scale, softcap)):
                return None  # the ops refuse it
            passed_by = tuple(names[x] for x in around)
            return HeadPlan(names[decoder], weakref.ref(linear), passed_by, scale, softcap, logits.shape[-1])
    return None


def candidates(config: Any) -> list[tuple[float | None, float | None]]:
    """Factors and softcaps that the configuration names, the likeliest first."""
    factor = getattr(config, "logit_scale", None)
    if divisor := getattr(config, "logits_scaling", None):
        factor = 1 / divisor
    softcap = getattr(config, "final_logit_softcapping", None)
    named = (None if factor in (None, 1, 1.0) else float(factor), None if softcap is None else float(softcap))
    return list(dict.fromkeys([named, (named[0], None), (None, named[1]), (None, None)]))
