"""What the target knew at each token of its texts, on disk: a pass over a text is made once, and read in every epoch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from specdec_triton.taps import Taps

SHARD = 256  # examples


@dataclass(frozen=True)
class Example:
    """A text of L tokens, and what the target made of it.

    Attributes:
        tokens: int32 ``[L]``. learnt: bool ``[L]``, which of them are an answer's: what a drafter is judged by. best: int32 ``[L]``, the target's
            likeliest token after each; -1 where the next one is nothing to learn from. states: bf16 ``[L,F]``, after each of the tapped layers side by side. last: bf16 ``[L,H]``,
            what the target's head is given.
    """

    tokens: torch.Tensor
    learnt: torch.Tensor
    best: torch.Tensor
    states: torch.Tensor
    last: torch.Tensor

    def to(self, device: torch.device) -> Example:
        """The same on a device."""
        return Example(*(getattr(self, field.name).to(device) for field in fields(self)))


class Features:
    """Shards of examples in a folder; it holds whole ones only, so that making them can be taken up again.

    Args:
        taps: after how many of the target's layers, besides what its head is given.

    Raises:
        ValueError: the folder's are of other layers.
    """

    def __init__(self, folder: Path, taps: Sequence[int]) -> None:
        self.folder = folder
        self.taps = tuple(taps)
        folder.mkdir(parents=True, exist_ok=True)
        facts, stated = folder / "facts.json", {"taps": list(taps)}
        if facts.is_file() and json.loads(facts.read_text()) != stated:
            raise ValueError(f"{folder} holds features of other layers: {facts.read_text().strip()}; remove it")
        facts.write_text(json.dumps(stated) + "\n")

    @property
    def shards(self) -> list[Path]:
        return sorted(self.folder.glob("shard-*.safetensors"))

    def append(self, examples: Sequence[Example]) -> None:
        """A shard more."""
        tensors = {
            f"{i}.{field.name}": getattr(example, field.name).cpu().contiguous()
            for i, example in enumerate(examples)
            for field in fields(Example)
        }
        path = self.folder / f"shard-{len(self.shards):05d}.safetensors"
        save_file(tensors, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)

    def read(self, shards: Sequence[Path]) -> Iterator[Example]:
        for path in shards:
            with safe_open(path, "pt") as file:
                for i in range(_count(file)):
                    yield Example(*(file.get_tensor(f"{i}.{field.name}") for field in fields(Example)))

    def learnt_tokens(self, shards: Sequence[Path] | None = None) -> Iterator[torch.Tensor]:
        """Of each example the tokens that are to be learnt; reads nothing else."""
        for path in self.shards if shards is None else shards:
            with safe_open(path, "pt") as file:
                for i in range(_count(file)):
                    yield file.get_tensor(f"{i}.tokens")[file.get_tensor(f"{i}.learnt")]


def _count(file: Any) -> int:
    return len({name.partition(".")[0] for name in file.keys()})  # noqa: SIM118


class TextReader:
    """Makes examples of texts that the target did not write: all but a text's first token are learnt.

    Args:
        model: loaded. tokenizer: of the texts. taps: as for :class:`Features`. length: tokens at which a text is cut.
    """

    def __init__(self, model: Any, tokenizer: Any, taps: Sequence[int], length: int = 512) -> None:
        self._model, self._tokenizer, self._length = model, tokenizer, length
        self._taps = Taps(model, (*taps, model.config.get_text_config().num_hidden_layers))

    def examples(self, texts: Iterable[str]) -> Iterator[Example]:
        for text in texts:
            ids = torch.tensor(self._tokenizer(text)["input_ids"], dtype=torch.int32, device=self._model.device)
            yield from (self.example(part) for part in ids.split(self._length) if len(part) > 8)

    @torch.inference_mode()
    def example(self, tokens: torch.Tensor) -> Example:
        """Args: tokens: int32 ``[L]``."""
        with self._taps.watching():
            logits = self._model(input_ids=tokens[None].long(), use_cache=False).logits[0]
        self._taps.take()
        learnt = torch.ones(len(tokens), dtype=torch.bool, device=tokens.device)
        learnt[0] = False
        best = logits.argmax(-1).int()
        best[-1] = -1
        return Example(tokens, learnt, best, *split_states(self._taps.states[0], self._model))


def split_states(states: torch.Tensor, model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Tapped hidden states ``[L,F+H]`` as an example keeps them: those of the layers, and what the head is given."""
    width = model.config.get_text_config().hidden_size
    states = states.to(torch.bfloat16)
    return states[:, :-width], states[:, -width:]


def fill(features: Features, examples: Iterator[Example]) -> Iterator[int]:
    """Append shards of examples; gives the number of learnt tokens of each."""
    while shard := list(islice(examples, SHARD)):
        features.append(shard)
        yield sum(int(example.learnt.sum()) for example in shard)


def frequent_ids(texts: Iterable[torch.Tensor], size: int, special: Iterable[int], vocab_size: int) -> torch.Tensor:
    """The ids that are used most, int64 ``[size]`` in order, the special ones among them; all that there are if those are fewer."""
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(text.tolist())
    always = (i for i in special if 0 <= i < vocab_size)
    ranked = dict.fromkeys([*always, *(i for i, _ in counts.most_common()), *range(vocab_size)])
    return torch.tensor(sorted([*ranked][:size]))
