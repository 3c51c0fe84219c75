"""What the target knows at each token of its chats, on disk: a pass over each chat is made once, and read in every epoch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from specdec_triton.taps import Taps
from specdec_triton.training.chats import Chat

_SHARD = 256  # chats


@dataclass(frozen=True)
class Example:
    """A chat, and the target's hidden states at its tokens.

    Attributes:
        tokens: int64 ``[L]``. learnt: bool ``[L]``, which tokens were the answers'. states: ``[L,F]``, after each of the tapped layers side by
            side. last: ``[L,H]``, what the head is given.
    """

    tokens: torch.Tensor
    learnt: torch.Tensor
    states: torch.Tensor
    last: torch.Tensor


class Features:
    """Shards of examples in a folder.

    Args:
        taps: after how many of the target's layers, besides what its head is given.
    """

    def __init__(self, folder: Path, taps: Sequence[int]) -> None:
        self.folder = folder
        self.taps = tuple(taps)

    @property
    def shards(self) -> list[Path]:
        return sorted(self.folder.glob("shard-*.safetensors"))

    def collect(
        self,
        model: Any,
        chats: Iterable[Chat],
        *,
        longest: int = 512,
        progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        """Make the shards that are missing; of the same chats the same ones."""
        self.folder.mkdir(parents=True, exist_ok=True)
        facts = self.folder / "facts.json"
        stated = {"taps": list(self.taps), "longest": longest}
        if facts.is_file() and json.loads(facts.read_text()) != stated:
            raise ValueError(f"{self.folder} holds features of other layers: {facts.read_text().strip()}; remove it")
        facts.write_text(json.dumps(stated) + "\n")
        taps = Taps(model, (*self.taps, model.config.get_text_config().num_hidden_layers))
        have, shard, held = len(self.shards), 0, []
        for chat in chats:
            held.append(chat)
            if len(held) == _SHARD:
                if shard >= have:
                    self._write(model, taps, held, shard, longest)
                shard, held = shard + 1, []
                progress(shard * _SHARD)
        if held and shard >= have:
            self._write(model, taps, held, shard, longest)

    @torch.inference_mode()
    def _write(self, model: Any, taps: Taps, chats: Sequence[Chat], shard: int, longest: int) -> None:
        width = model.config.get_text_config().hidden_size
        tensors: dict[str, torch.Tensor] = {}
        for i, chat in enumerate(chats):
            ids = torch.tensor(chat.tokens[:longest])
            learnt = torch.zeros(len(ids), dtype=torch.bool)
            for start, stop in chat.answer:
                learnt[start:stop] = True
            with taps.watching():
                model(input_ids=ids[None].to(model.device), use_cache=False, logits_to_keep=1)
            taps.take()
            states = taps.states[0].to(torch.bfloat16).cpu()
            tensors |= {
                f"{i}.tokens": ids,
                f"{i}.learnt": learnt,
                f"{i}.states": states[:, :-width].contiguous(),
                f"{i}.last": states[:, -width:].contiguous(),
            }
        path = self.folder / f"shard-{shard:05d}.safetensors"
        save_file(tensors, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)

    def read(self, shards: Sequence[Path]) -> Iterator[Example]:
        for path in shards:
            with safe_open(path, "pt") as file:
                count = len({name.split(".")[0] for name in file.keys()})  # noqa: SIM118
                for i in range(count):
                    parts = (file.get_tensor(f"{i}.{name}") for name in ("tokens", "learnt", "states", "last"))
                    yield Example(*parts)


def frequent_ids(chats: Iterable[Chat], size: int, special: Iterable[int], vocab_size: int) -> torch.Tensor:
    """The ids that answers use most, int64 ``[size]`` in order, the special ones among them; all that there are if those are fewer."""
    counts: Counter[int] = Counter()
    for chat in chats:
        for start, stop in chat.answer:
            counts.update(chat.tokens[start:stop])
    always = (i for i in special if 0 <= i < vocab_size)
    ranked = dict.fromkeys([*always, *(i for i, _ in counts.most_common()), *range(vocab_size)])
    return torch.tensor(sorted([*ranked][:size]))
