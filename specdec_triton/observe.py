"""Find out, by watching short passes, whether and how a model can be decoded over the paged cache.

Nothing here knows a model by name. A recording attention function sees which layers call it, with what shapes and
options; a recording mask function sees which keys each layer's mask would have let through. Then the adapter scores a
few tokens in one pass and in several, and must agree with the module's own forward. Recurrent state, convolutions over
time, position biases and dropped arguments all fail one of these, and the error says which.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from specdec_triton.errors import UnsupportedModelError
from specdec_triton.kv_cache import LayerShape

if TYPE_CHECKING:
    from specdec_triton.adapter import ModelAdapter

RECORDING = "specdec_recording"
RECORDING_ON_META = "specdec_recording_on_meta"  # without masks: transformers reads values to build them
_MASK_HORIZON = 1 << 17  # masks are examined up to this many positions
_PROBE_TOKENS = 6
_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "attention", "dense", "sparse", "moe"}
_PROBE_SPLIT = (3, 1, 2)  # the same tokens in three passes

_lock = threading.RLock()
_locks: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


@dataclass
class Call:
    """One attention layer's call of the interface; sinks: whether it has any."""

    layer: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    sliding_window: int | None
    softcap: float | None
    sinks: bool
    causal: bool
    kwargs_arrive: bool
    mask: torch.Tensor | None


@dataclass
class _Recording:
    calls: list[Call]
    masks: list[tuple[torch.Tensor, Any]]


_active: list[_Recording] = []  # not an argument: whether arguments arrive is one of the things being watched


def _recording_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    specdec_pass: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    causal = kwargs.get("is_causal")
    _active[-1].calls.append(
        Call(
            layer=getattr(module, "layer_idx", -1),
            kv_heads=key.shape[1],
            key_dim=key.shape[-1],
            value_dim=value.shape[-1],
            dtype=key.dtype,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=s_aux is not None,
            causal=bool(getattr(module, "is_causal", True) if causal is None else causal),
            kwargs_arrive=specdec_pass is not None,
            mask=attention_mask,
        )
    )
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


def _recording_mask(*, q_length: int, kv_length: int, mask_function: Any, device: Any = "cpu", **kwargs: Any) -> Any:
    mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool, device=device)
    _active[-1].masks.append((mask, mask_function))
    return mask


AttentionInterface.register(RECORDING, _recording_attention)
AttentionInterface.register(RECORDING_ON_META, _recording_attention)
AttentionMaskInterface.register(RECORDING, _recording_mask)


@dataclass
class Observation:
    """What was found.

    Attributes:
        layers: KV shape by layer index. calls: what each layer asked of the attention interface.
        dtype: of the keys and values in the cache: the narrower of the layers' and the parameters'.
        vocab_size: columns of the logits.
        max_len: the longest text that is decoded as the model means it; None: no limit found.
        keeps_logits: the forward pass can skip the head for rows nobody reads (``logits_to_keep``).
        mixture: the model routes tokens to experts, whose matrix products have as many rows as tokens fell to them.
    """

    layers: tuple[LayerShape, ...]
    calls: tuple[Call, ...]
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    max_len: int | None
    keeps_logits: bool
    mixture: bool

    def check_cached_passes(self, adapter: ModelAdapter) -> None:
        """The adapter's logits, from one pass and from several, against the module's own.

        Raises:
            UnsupportedModelError: they differ.
        """
        if self.device.type == "meta":
            return
        tokens = _probe_tokens(self.vocab_size, self.device)
        with model_lock(adapter.model), torch.inference_mode():
            own = adapter.model(input_ids=tokens, use_cache=False).logits[0]
        cache = adapter.new_cache(slots=1, page_size=2, num_pages=_PROBE_TOKENS)
        cache.reserve(0, _PROBE_TOKENS)

        def run(split: tuple[int, ...]) -> torch.Tensor:
            parts, start = [], 0
            for n in split:
                context = torch.tensor([start], dtype=torch.int32, device=self.device)
                new = tokens[:, start : start + n]
                parts.append(adapter.forward(new, cache, cache.block_table, context)[0])
                start += n
            return torch.cat(parts)

        for split, first, reason in (
            ((_PROBE_TOKENS,), 0, "its logits over the paged cache differ from its own forward pass"),
            # Rows of the first pass agree whatever the model keeps: only later ones tell.
            (
                _PROBE_SPLIT,
                _PROBE_SPLIT[0],
                "it keeps state between passes besides keys and values (a recurrent layer?)",
            ),
        ):
            try:
                ours = run(split)
            except Exception as error:
                raise _refuse(adapter.model, f"a pass over the paged cache failed: {error}") from error
            distance = row_distance(ours.float(), own.float())[first:]
            allowed = 1e-4 if self.dtype == torch.float32 else 0.1
            if not float(distance.median()) < allowed:  # a NaN fails too; the median forgives one flipped expert
                raise _refuse(adapter.model, f"{reason} (relative difference {float(distance.median()):.2g})")


def row_distance(ours: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """How far rows of logits lie apart, by the largest of the row's numbers; columns that both mask with -inf count as equal."""
    masked = (own == float("-inf")) & (ours == float("-inf"))
    ours, own = (x.masked_fill(masked, 0.0) for x in (ours, own))
    return (ours - own).abs().amax(-1) / own.abs().amax(-1).clamp(min=1e-30)


def attention_configs(model: Any) -> list[Any]:
    """Every config object in the model that names an attention implementation."""
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    return list({id(c): c for c in configs if hasattr(c, "_attn_implementation_internal")}.values())


def observe(model: Any) -> Observation:
    """Watch one short pass of ``model``.

    Raises:
        UnsupportedModelError: with the reason.
    """
    check_kind(model)
    devices = sorted({str(p.device) for p in model.parameters()})
    if len(devices) != 1:
        raise _refuse(model, f"its parameters are spread over several devices ({', '.join(devices)}); load it on one")
    if any(hasattr(p, "device_mesh") for p in model.parameters()):  # ranks could accept different drafts at a near-tie
        raise _refuse(model, "its parameters are shared out over several processes; load it without a tp_plan")
    if model.dtype == torch.float64:
        raise _refuse(model, "its parameters are float64; load it in float32, bfloat16 or float16")
    device = torch.device(devices[0])
    config = model.config.get_text_config()
    recording, vocab_size = _record(model, device, config)
    calls = recording.calls
    _check_calls(model, calls, config)
    # Some layers compress or index old keys once there are a hundred: a short pass does not show it.
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    if unknown:
        raise _refuse(model, f"a layer of the type {unknown[0]} keeps state besides keys and values")
    limits = [_mask_limit(model, call, recording.masks, config) for call in calls]
    limits += [*_rope_limits(model), getattr(config, "max_position_embeddings", None)]
    shapes = sorted((call.layer, LayerShape(call.kv_heads, call.key_dim)) for call in calls)
    return Observation(
        layers=tuple(shape for _, shape in shapes),
        calls=tuple(calls),
        device=device,
        dtype=min(calls[0].dtype, model.dtype, key=lambda dtype: dtype.itemsize),
        vocab_size=vocab_size,
        max_len=min((n for n in limits if n is not None), default=None),
        keeps_logits="logits_to_keep" in inspect.signature(model.forward).parameters,
        mixture=any("expert" in name.rsplit(".", 1)[-1] for name, _ in model.named_modules()),
    )


def check_kind(model: Any) -> None:
    """Raises UnsupportedModelError for what is no decoder-only language model of transformers in evaluation mode."""
    if not hasattr(model, "config") or not hasattr(model, "get_output_embeddings"):
        raise UnsupportedModelError(f"the model must be a transformers model, got {type(model).__name__}")
    if getattr(model.config, "is_encoder_decoder", False):
        raise _refuse(model, "it is an encoder-decoder; only decoder-only language models are supported")
    if model.get_output_embeddings() is None:
        raise _refuse(model, "it has no language-model head")
    if model.training and has_dropout(model):
        raise _refuse(model, "it is in training mode, with dropout; call model.eval()")


def model_lock(model: Any) -> Any:
    """Held while the model's attention is switched, so that several decoders of one model can run in several threads."""
    with _lock:
        return _locks.setdefault(model, threading.RLock())


def is_steered(module: torch.nn.Module) -> bool:
    """Whether somebody watches or changes what the module does: a hook, or a ``forward`` of its own, as accelerate gives it."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def has_dropout(model: Any) -> bool:
    """Whether the model's passes are random in training mode."""
    rates = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    rates += [getattr(config, "attention_dropout", 0.0) or 0.0 for config in attention_configs(model)]
    return any(rate > 0 for rate in rates)


def _refuse(model: Any, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{type(model).__name__} cannot be decoded here: {reason}")


def _probe_tokens(vocab_size: int, device: torch.device) -> torch.Tensor:
    return (torch.arange(1, _PROBE_TOKENS + 1, device=device)[None] * 7919) % vocab_size


def _record(model: Any, device: torch.device, config: Any) -> tuple[_Recording, int]:
    tokens = _probe_tokens(config.vocab_size, device)
    positions = torch.arange(_PROBE_TOKENS, device=device)[None]
    with _recording(model, RECORDING_ON_META if device.type == "meta" else RECORDING) as recording:
        try:
            with torch.inference_mode():
                out = model(input_ids=tokens, position_ids=positions, use_cache=False, specdec_pass=recording)
        except Exception as error:
            raise _refuse(
                model, f"it does not accept position_ids and keyword arguments for its attention: {error}"
            ) from error
    return recording, out.logits.shape[-1]


def shapes_alone(model: Any) -> AbstractContextManager[object]:
    """Inside, on the meta device, the model's passes look at no value, which masks would."""
    on_meta = next(model.parameters()).device.type == "meta"
    return _recording(model, RECORDING_ON_META) if on_meta else nullcontext()


@contextmanager
def _recording(model: Any, implementation: str) -> Iterator[_Recording]:
    """The model's attention switched to one that records."""
    with model_lock(model), _lock:
        recording = _Recording([], [])
        configs = attention_configs(model)
        before = [c._attn_implementation_internal for c in configs]
        _active.append(recording)
        try:
            for c in configs:
                c._attn_implementation_internal = implementation
            yield recording
        finally:
            _active.pop()
            for c, own in zip(configs, before, strict=True):
                c._attn_implementation_internal = own


def _check_calls(model: Any, calls: list[Call], config: Any) -> None:
    if not calls:
        raise _refuse(model, "its attention does not go through transformers' attention interface")
    seen = sorted(call.layer for call in calls)
    expected = list(range(config.num_hidden_layers))
    if missing := sorted(set(expected) - set(seen)):
        kinds = getattr(config, "layer_types", None)
        named = f" ({kinds[missing[0]]})" if kinds and missing[0] < len(kinds) else ""
        raise _refuse(
            model,
            f"layers {missing}{named} never call the attention interface: recurrent and convolutional layers keep"
            " state that cannot be rolled back",
        )
    if seen != expected:
        raise _refuse(model, f"its attention layers ran as {seen}, not each of {expected} once")
    for call in calls:
        if not call.kwargs_arrive:
            raise _refuse(model, f"layer {call.layer} drops the keyword arguments given to the model")
        if call.key_dim != call.value_dim:
            raise _refuse(
                model, f"layer {call.layer} has keys of size {call.key_dim} but values of size {call.value_dim}"
            )
        if not call.causal:
            raise _refuse(model, f"layer {call.layer} is not causal")


def _mask_limit(model: Any, call: Call, masks: list[tuple[torch.Tensor, Any]], config: Any) -> int | None:
    """Up to which length the layer's own mask is 'causal, within the window that it states'."""
    if call.mask is None:
        return None
    function = next((f for mask, f in masks if mask is call.mask), None)
    if function is None:
        raise _refuse(model, f"layer {call.layer} adds a bias or a mask of its own to the attention scores")
    horizon = min(getattr(config, "max_position_embeddings", None) or _MASK_HORIZON, _MASK_HORIZON)
    key = torch.arange(horizon)
    zero = torch.zeros((), dtype=torch.long)
    limit = horizon
    for query in sorted({0, 1, 2, *(horizon // d - 1 for d in (1, 2, 3, 5, 8, 16, 64, 256) if horizon // d > 0)}):
        theirs = function(zero, zero, torch.tensor(query), key)
        ours = key <= query
        if call.sliding_window is not None:
            ours = ours & (key > query - call.sliding_window)
        if not bool((torch.as_tensor(theirs).expand_as(key) == ours).all()):
            limit = min(limit, _first_difference(function, call.sliding_window, query))
    if limit < 2:
        raise _refuse(model, f"layer {call.layer} uses an attention mask that is neither causal nor a sliding window")
    return None if limit == horizon else limit


def _first_difference(function: Any, window: int | None, query: int) -> int:
    """The smallest position whose row of the mask differs, by bisection (differences persist as texts grow)."""
    zero = torch.zeros((), dtype=torch.long)

    def agrees(position: int) -> bool:
        key = torch.arange(position + 1)
        ours = key > position - window if window is not None else torch.ones_like(key, dtype=torch.bool)
        theirs = torch.as_tensor(function(zero, zero, torch.tensor(position), key)).expand_as(key)
        return bool((theirs == ours).all())

    low, high = 0, query
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if agrees(middle) else (low, middle)
    return low


def _rope_limits(model: Any) -> list[int]:
    """RoPE whose frequencies depend on the longest position of a pass is only well defined before they change."""
    limits = []
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if kind == "dynamic" and hasattr(module, "original_max_seq_len"):
            limits.append(int(module.original_max_seq_len))
        elif kind == "longrope":  # two sets of factors, chosen by the longest position
            config = module.config
            parameters = getattr(config, "rope_parameters", None) or {}
            own = [parameters, *(x for x in parameters.values() if isinstance(x, dict)), vars(config)]
            stated = [d["original_max_position_embeddings"] for d in own if d.get("original_max_position_embeddings")]
            limits += [int(n) for n in stated] or [int(module.original_max_seq_len)]
    return limits
