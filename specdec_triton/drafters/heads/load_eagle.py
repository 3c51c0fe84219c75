"""Build an EAGLE head from its published files, for a target."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from specdec_triton.adapter import ModelAdapter
from specdec_triton.drafters.heads.checkpoint import Checkpoint
from specdec_triton.drafters.heads.eagle_head import Borrowed, EagleHead, target_ids
from specdec_triton.drafters.heads.placing import packed
from specdec_triton.fusion.norms import FusedRMSNorm

_MTP = r"^mtp\.|\.(eh_proj|enorm|hnorm|shared_head)\."  # DeepSeek's names, and Qwen's
_SHAPE = ("hidden_size", "num_attention_heads", "intermediate_size")
_OPTIONAL = ("rms_norm_eps", "hidden_act", "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters")


def load_eagle(
    checkpoint: Checkpoint, target: ModelAdapter, aux_layers: Sequence[int] | None
) -> tuple[EagleHead, tuple[int, ...]]:
    """The head on the target's device, as :func:`read_eagle` has it in plain layers and fp32."""
    head, taps = read_eagle(checkpoint, target, aux_layers)
    return _placed(head, target), taps


def read_eagle(
    checkpoint: Checkpoint, target: ModelAdapter, aux_layers: Sequence[int] | None
) -> tuple[EagleHead, tuple[int, ...]]:
    """The head, and which of the target's hidden states it is shown (see ``ModelAdapter.forward``).

    Layouts: those of the EAGLE repository (``fc``, ``layers.0`` or ``midlayer``), also with the prefix ``model.``, and with ``layers.0`` in
    place of ``midlayer``. Embedding and lm_head are the target's where the head has none.

    Raises:
        UnsupportedModelError: a tensor is missing, of another shape, not finite or of no known use; the head is not one for
            this target, or none of EAGLE's.
    """
    c = checkpoint
    c.strip("model.")
    if any(re.search(_MTP, name) for name in c.names):
        raise c.error(
            "it holds multi-token-prediction modules, which transformers does not load with their model either; heads in EAGLE's"
            " or Medusa's layout are supported"
        )
    if c.has("layers.0.hidden_norm.weight"):
        c.rename("layers.0.", "midlayer.")
    three = c.has("midlayer.hidden_norm.weight")
    layer = "midlayer." if three else "layers.0."
    if (count := c.config.get("num_hidden_layers", 1)) != 1:
        raise c.error(f"it has {count} layers; heads of one layer are supported")
    config = _config(c)
    width, target_width = config.hidden_size, target.hidden_size
    taps = _taps(c, target, aux_layers) if three else (target.config.num_hidden_layers,)
    features = len(taps) * target_width
    if not three and width != target_width:
        raise c.error(f"its hidden size is {width}, the target's {target_width}")

    bias = c.has("fc.bias"), c.has(f"{layer}self_attn.q_proj.bias")
    norm_first = bool(c.config.get("norm_before_residual", False))
    head = EagleHead(config, features, three=three, norm_first=norm_first, bias=bias)
    heads, kv_heads = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    inputs = 2 * width if three else width
    attention, mlp = f"{layer}self_attn.", f"{layer}mlp."
    joined = [c.take("fc.weight", (width, features if three else features + width))]
    _copy(head.fc, joined, [c.take("fc.bias", (width,))] if bias[0] else [])
    parts = [("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)]
    weights = [c.take(f"{attention}{name}.weight", (size, inputs)) for name, size in parts]
    biases = [c.take(f"{attention}{name}.bias", (size,)) for name, size in parts] if bias[1] else []
    _copy(head.qkv, weights, biases)
    _copy(head.out, [c.take(f"{attention}o_proj.weight", (width, heads))], [])
    inner = config.intermediate_size
    _copy(head.gate_up, [c.take(f"{mlp}{name}_proj.weight", (inner, width)) for name in ("gate", "up")], [])
    _copy(head.down, [c.take(f"{mlp}down_proj.weight", (width, inner))], [])
    norms = {"mlp_norm": f"{layer}post_attention_layernorm.weight"}
    if three:
        norms |= {
            "hidden_norm": f"{layer}hidden_norm.weight",
            "input_norm": f"{layer}input_layernorm.weight",
            "final_norm": "norm.weight",
        }
    for name, tensor in norms.items():
        getattr(head, name).weight.data.copy_(c.take(tensor, (width,)))
    _give_vocabulary(c, head, target, width)
    c.finish()
    return head, taps


def _config(c: Checkpoint) -> Any:
    """The head's own shapes, as a configuration of transformers, which knows all forms of RoPE and both ways to write them."""
    from transformers import LlamaConfig

    given: dict[str, Any] = {name: c.number(name) for name in _SHAPE}
    given |= {name: c.config[name] for name in _OPTIONAL if c.config.get(name) is not None}
    heads = given["num_attention_heads"]
    given["num_key_value_heads"] = c.number("num_key_value_heads", heads)
    given["head_dim"] = c.number("head_dim", given["hidden_size"] // heads)
    if heads % given["num_key_value_heads"]:
        raise c.error(f"it has {heads} heads, which {given['num_key_value_heads']} KV heads do not divide")
    try:
        return LlamaConfig(**given)
    except Exception as error:
        raise c.error(f"transformers does not take its configuration: {error}") from error


def _taps(c: Checkpoint, target: ModelAdapter, aux_layers: Sequence[int] | None) -> tuple[int, ...]:
    """After how many of the target's layers the hidden states are taken.

    Two habits of counting are in use: SpecForge and SGLang write, inside ``eagle_config``, the layers whose outputs are meant; vLLM and
    speculators write, at the top, those whose inputs are.
    """
    layers = target.config.num_hidden_layers
    inside = (c.config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    outside = c.config.get("eagle_aux_hidden_state_layer_ids")
    if aux_layers is not None:
        taps = list(aux_layers)
    elif inside is not None:
        taps = [layer + 1 for layer in inside]
    else:
        taps = list(outside) if outside is not None else [2, layers // 2, layers - 3]
    if not taps or not all(isinstance(tap, int) and 0 <= tap < layers for tap in taps):
        raise c.error(f"it looks at hidden states after {taps} layers; the target has {layers} (aux_layers= overrides)")
    width = c.shape("fc.weight")[-1]
    if width != len(taps) * target.hidden_size:
        raise c.error(
            f"its fc takes {width} numbers, but {len(taps)} hidden states of the target have"
            f" {len(taps)} x {target.hidden_size} (aux_layers= overrides which they are)"
        )
    return tuple(taps)


def _give_vocabulary(c: Checkpoint, head: EagleHead, target: ModelAdapter, width: int) -> None:
    """Embedding, lm_head and ids: the head's own, or the target's where it has none."""
    size, theirs = target.vocab_size, target.model.get_input_embeddings()
    if c.has("embed_tokens.weight"):
        own = c.take("embed_tokens.weight", (c.shape("embed_tokens.weight")[0], width))
        head.embedding = nn.Embedding.from_pretrained(own.clone())
        head.embedded_ids = len(own)
    elif theirs.weight.shape[1] != width:
        raise c.error(f"it has no embedding, and the target's has {theirs.weight.shape[1]} columns, not {width}")
    else:
        head.embedding, head.embedded_ids = Borrowed(theirs), theirs.weight.shape[0]
    draft_size = c.number("draft_vocab_size", c.shape("lm_head.weight")[0] if c.has("lm_head.weight") else size)
    head.ids = target_ids(c, draft_size, size)
    weight = c.take_if("lm_head.weight", (draft_size, width))
    if weight is not None:
        head.lm_head = nn.Linear(width, draft_size, False)
        _copy(head.lm_head, [weight], [])
    elif width != target.hidden_size or draft_size != size:
        raise c.error(f"it has no lm_head, and the target's does not fit {draft_size} ids of {width} numbers")
    else:
        head.lm_head = Borrowed(target.logits_of)


def _placed(head: EagleHead, target: ModelAdapter) -> EagleHead:
    for name, module in list(head.named_children()):
        if isinstance(module, nn.RMSNorm):
            assert module.eps is not None
            setattr(head, name, FusedRMSNorm(module.weight, module.eps, add_one=False))
    for module in head.modules():
        if isinstance(module, (nn.Linear, nn.Embedding, FusedRMSNorm)):
            module.to(target.device, target.dtype)
    head.rotary.to(target.device)  # in fp32
    if head.ids is not None:
        head.ids = head.ids.to(target.device)
    head.dtype = torch.float32 if packed(head) else target.dtype
    return head.eval().requires_grad_(False)


def _copy(layer: nn.Linear, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> None:
    layer.weight.data.copy_(torch.cat([weight.float() for weight in weights]))
    if biases:
        layer.bias.data.copy_(torch.cat([bias.float() for bias in biases]))
