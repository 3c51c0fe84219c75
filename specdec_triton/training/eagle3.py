"""Train an EAGLE-3 head (Li et al. 2025): on the target's own distributions, over several steps that feed on their own outputs.

At step s = 0 the head is given the target's hidden states at position i and the token at i + 1; at step s its own state of step s - 1 at i, and the
token at i + 1 + s. It learns the target's distribution at i + 1 + s. What it may look at is what it will have when it drafts: the
pairs up to i of step 0, and of the steps after that its own of index i.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from specdec_triton.adapter import ModelAdapter
from specdec_triton.drafters.heads.checkpoint import Checkpoint
from specdec_triton.drafters.heads.eagle_head import Borrowed, EagleHead
from specdec_triton.drafters.heads.load_eagle import read_eagle
from specdec_triton.errors import UnsupportedModelError
from specdec_triton.taps import decoder_layers
from specdec_triton.training.features import Example
from specdec_triton.training.student import Predictions, Student


def read_start(folder: Path, model: Any) -> tuple[EagleHead, torch.Tensor, tuple[int, ...]]:
    """A head that training begins with: itself, the ids that it drafts, int64 ``[V']``, and after how many layers it looks at the target.

    Raises:
        ModelNotFoundError: there is none.
        UnsupportedModelError: it is not one for this target, or none of EAGLE-3's.
    """
    head, taps = read_eagle(Checkpoint(folder), ModelAdapter(model), None)
    if not head.three:
        raise UnsupportedModelError(f"{str(folder)!r} is no EAGLE-3 head: training begins with no other")
    ids = torch.arange(model.get_output_embeddings().weight.shape[0]) if head.ids is None else head.ids
    return head, ids, taps


class Eagle3Student(Student):
    """Args: taps: after how many of the target's layers. start: a head of these ids and layers, see :func:`read_start`.

    Raises:
        UnsupportedModelError: ``start`` has other layers than the heads that are trained here.
    """

    module: EagleHead

    def __init__(self, model: Any, ids: torch.Tensor, taps: tuple[int, ...], start: EagleHead | None = None) -> None:
        super().__init__(model, ids)
        config = model.config.get_text_config()
        self.config = _config(config)
        self.taps = taps
        features = len(taps) * config.hidden_size
        self.module = head = EagleHead(self.config, features, three=True)
        embedding = model.get_input_embeddings().weight.detach().float()
        head.embedding, head.embedded_ids = Borrowed(lambda tokens: F.embedding(tokens, embedding)), len(embedding)
        head.lm_head = nn.Linear(config.hidden_size, len(ids), False)
        head.ids = self.ids
        head.to(self.device)
        if start is None:
            self._warm_start(model)
        else:
            self._go_on(start)

    def _go_on(self, start: EagleHead) -> None:
        weights, own = start.state_dict(), self.module.state_dict()
        other = sorted(
            name
            for name in {*weights, *own}
            if name not in weights or weights[name].shape != getattr(own.get(name), "shape", None)
        )
        if other or start.norm_first:
            what = ", ".join(other) or "the residual is of normed states"
            raise UnsupportedModelError(f"the head to begin with has other layers than the target's own: {what}")
        self.module.load_state_dict(weights)

    @torch.no_grad()
    def _warm_start(self, model: Any) -> None:
        """The target's last layer, which looks at the last of the tapped states alone, and its rows of the target's head."""
        layer: Any = decoder_layers(model)[-1]
        head: Any = self.module
        width = head.out.out_features
        head.fc.weight.zero_()
        head.fc.weight[:, -width:] = torch.eye(width, device=self.device)
        head.lm_head.weight.copy_(self.taught_by)
        try:
            attention, mlp = layer.self_attn, layer.mlp
            qkv = torch.cat([x.weight for x in (attention.q_proj, attention.k_proj, attention.v_proj)])
            head.qkv.weight.mul_(0.1)[:, width:] = qkv
            head.out.weight.copy_(attention.o_proj.weight)
            head.gate_up.weight.copy_(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
            head.down.weight.copy_(mlp.down_proj.weight)
            head.hidden_norm.weight.copy_(layer.input_layernorm.weight)
            head.mlp_norm.weight.copy_(layer.post_attention_layernorm.weight)
            head.final_norm.weight.copy_(model.get_decoder().norm.weight)
        except (AttributeError, RuntimeError):
            pass  # another structure: what could be taken is a start all the same

    def predict(self, example: Example, steps: int) -> Iterator[Predictions]:
        for hidden, at in self._steps(example, steps):

            def logits(chosen: torch.Tensor, hidden: torch.Tensor = hidden) -> torch.Tensor:
                return self.module.lm_head(self.module.finish(hidden[chosen]))  # type: ignore[no-any-return]

            yield at, logits

    def _steps(self, example: Example, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Of each step the head's states, and at which position the target says what they should know."""
        head, tokens = self.module, example.tokens.long()
        length = len(tokens) - 1
        hidden = head.fuse(example.states.float())[:length]
        index = torch.arange(length, device=self.device)
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        for step in range(steps):
            here = length - step  # indices for which there still is a token, and something to learn
            if here < 1:
                return
            at, hidden = index[:here] + 1 + step, hidden[:here]
            own = [(k[:, :here], v[:, :here]) for k, v in own]
            hidden = head(tokens[at], hidden, head.rotations(at - 1, hidden), partial(_attend, own=own))
            yield hidden, at

    def save(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """In the published layout, which other engines load too."""
        config = self.config
        head: Any = self.module
        heads, kv_heads = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        q, k, v = head.qkv.weight.split([heads, kv_heads, kv_heads])
        gate, up = head.gate_up.weight.chunk(2)
        tensors = {
            "fc.weight": head.fc.weight,
            "midlayer.self_attn.q_proj.weight": q,
            "midlayer.self_attn.k_proj.weight": k,
            "midlayer.self_attn.v_proj.weight": v,
            "midlayer.self_attn.o_proj.weight": head.out.weight,
            "midlayer.mlp.gate_proj.weight": gate,
            "midlayer.mlp.up_proj.weight": up,
            "midlayer.mlp.down_proj.weight": head.down.weight,
            "midlayer.hidden_norm.weight": head.hidden_norm.weight,
            "midlayer.input_layernorm.weight": head.input_norm.weight,
            "midlayer.post_attention_layernorm.weight": head.mlp_norm.weight,
            "norm.weight": head.final_norm.weight,
            "lm_head.weight": head.lm_head.weight,
        }
        tensors = {name: x.detach().to("cpu", dtype).contiguous() for name, x in tensors.items()}
        known = torch.zeros(config.vocab_size, dtype=torch.bool)
        ids = self.ids.cpu()
        known[ids] = True
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": known}
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "model.safetensors")
        written = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "dtype": str(dtype).removeprefix("torch."),
            "draft_vocab_size": len(self.ids),
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in self.taps]},
            "rope_theta": config.rope_parameters["rope_theta"],
        }
        names = (
            "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps",
            "hidden_act", "max_position_embeddings", "num_hidden_layers", "vocab_size", "tie_word_embeddings",
        )  # fmt: skip
        written |= {name: getattr(config, name) for name in names}
        (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n")


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, own: list[tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """``[n,Hq,D]``: the keys of step 0 up to a query's own index, and of each step since the one of that index.

    Args:
        own: keys and values ``[Hq,n,D]`` of the steps so far, of step 0 first; this step's are added.
    """
    group = q.shape[1] // k.shape[1]
    q, k, v = q.transpose(0, 1), *(x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    own.append((k, v))
    first_k, first_v = own[0]
    scale = q.shape[-1] ** -0.5
    if len(own) == 1:
        return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0].transpose(0, 1)
    count = q.shape[1]
    hidden = torch.ones(count, count, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ first_k.transpose(1, 2) * scale).masked_fill(hidden, float("-inf"))
    later = torch.stack([(q * key).sum(-1) * scale for key, _ in own[1:]], -1)
    weights = torch.cat((scores, later), -1).softmax(-1)
    out = weights[..., :count] @ first_v
    for i, (_, value) in enumerate(own[1:]):
        out = out + weights[..., count + i, None] * value
    return out.transpose(0, 1)


def _config(config: Any) -> Any:
    """A head's configuration, of the target's shapes."""
    from transformers import LlamaConfig

    given = {
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "intermediate_size": config.intermediate_size,
        "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-6),
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": _theta(config)},
        "num_hidden_layers": 1,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**given)


def _theta(config: Any) -> float:
    parameters = getattr(config, "rope_parameters", None) or {}
    return float(parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)
