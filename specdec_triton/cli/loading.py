"""The models behind ``--target`` and ``--draft``: options, checks that come before any weight is read, and loading."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from specdec_triton.cli.common import UsageError, integer, warn
from specdec_triton.errors import ModelNotFoundError, UnsupportedModelError
from specdec_triton.models import load_config, load_model, load_tokenizer, shipped_head
from specdec_triton.sampling import MAX_DRAFT_TOKENS

if TYPE_CHECKING:
    from specdec_triton.drafters import Drafter, DynamicTree

DTYPES = ("bfloat16", "float32", "float16")
FREE = ("ngram", "suffix")  # drafts that cost next to nothing
_WITHOUT_MODEL = (*FREE, "skip", "none")
_HEADS = ("eagle", "medusa")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("models", "a MODEL is a hub id, a folder, or the alias smollm2")
    group.add_argument(
        "--target", metavar="MODEL", default="smollm2", help="the model whose text you get (default: smollm2)"
    )
    group.add_argument(
        "--draft",
        metavar="DRAFTER",
        help="ngram, suffix: from the text so far; MODEL: a smaller model; eagle, eagle:PATH, medusa:PATH: a head on the target "
        "(eagle: the one that comes with this package); skip: its own layers, as tune-skip chose; cascade:DRAFTER: suffix, else "
        "that (cascade: eagle); none (default: cascade for smollm2, ngram for other targets)",
    )
    group.add_argument(
        "-k",
        "--num-draft-tokens",
        metavar="K",
        type=integer(0, MAX_DRAFT_TOKENS),
        default=4,
        help=f"the most tokens drafted a round, 0 (plain decoding) to {MAX_DRAFT_TOKENS} (default: 4)",
    )
    group.add_argument(
        "--tree",
        metavar="DxB",
        type=_tree,
        help="eagle, medusa: draft trees of up to K nodes that grow D deep and B wide where the drafter is sure, such as 5x8 "
        "with -k 24 (default: chains)",
    )
    group.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the weights (default: bfloat16)")
    group.add_argument(
        "--device",
        metavar="auto|cpu|cuda",
        type=device_name,
        default="auto",
        help="auto: the GPU if there is one (default); cuda:1 names one of several",
    )
    group.add_argument(
        "--no-optimize", dest="optimize", action="store_false", help="leave the loaded model's layers as they are"
    )


def _tree(text: str) -> DynamicTree:
    from specdec_triton.trees import DynamicTree

    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be a depth and a width such as 5x8, got {text!r}")
    try:
        return DynamicTree(int(match[1]), int(match[2]))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error} in {text!r}") from error


def device_name(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"must be auto, cpu or cuda, got {text!r}")
    return text


def default_draft(target: str) -> str:
    """What ``--draft`` is where nothing is said: the best that there is without being told more."""
    return "ngram" if shipped_head(target) is None else "cascade"


def split_draft(draft: str) -> tuple[bool, str, str]:
    """What ``--draft`` says: whether it is a cascade, the kind of its drafter, and the model or path behind that (or nothing: of
    ``eagle`` the head that comes with the package).

    Raises:
        UsageError: a path is missing, or the drafter of a cascade.
    """
    if draft == "cascade":
        draft = "cascade:eagle"
    cascade = draft.startswith("cascade:")
    rest = draft.removeprefix("cascade:")
    if cascade and rest in ("", "none", *FREE):
        raise UsageError(
            "--draft cascade: say what drafts where the text does not: cascade:MODEL, cascade:eagle:PATH ..."
        )
    kind, _, path = rest.partition(":")
    if kind in _HEADS:
        if not path and kind != "eagle":
            raise UsageError(f"--draft {kind}: say where the head is: {kind}:PATH")
        return cascade, kind, path
    return cascade, *((rest, "") if rest in _WITHOUT_MODEL else ("model", rest))


def pick_device(name: str) -> str:
    """The device that ``--device`` means here."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return "cuda" if count else "cpu"
    if name != "cpu" and not count:
        raise UsageError(f"--device {name}: this PyTorch ({torch.__version__}) sees no GPU")
    if ":" in name and int(name.split(":")[1]) >= count:
        raise UsageError(f"--device {name}: there are {count} GPUs, numbered from 0")
    return name


def quiet_transformers() -> None:
    """Its warnings concern training and such; its progress bars are for terminals, not for log files."""
    from transformers.utils import logging

    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        logging.set_verbosity_error()
    if sys.stderr is None or not sys.stderr.isatty():
        logging.disable_progress_bar()


class Tokenizers(NamedTuple):
    """Attributes: target: the target's. draft: the draft model's, if it is another one."""

    target: Any
    draft: Any = None


def check_models(args: argparse.Namespace) -> Tokenizers:
    """Find both models and compare their vocabularies."""
    _, kind, name = split_draft(args.draft)
    if args.tree is not None and kind not in _HEADS:
        raise UsageError(f"--tree is for --draft eagle and medusa, not for {args.draft}")
    load_config(args.target)
    if kind == "eagle":
        _head(args.target, name)
    if kind == "model":
        load_config(name)
    tokenizer = load_tokenizer(args.target)
    if kind == "model" and name != args.target:
        try:
            drafts = load_tokenizer(name)
        except ModelNotFoundError:  # then the sizes of the logits must do
            return Tokenizers(tokenizer)
        if (difference := vocabularies_differ(tokenizer, drafts, name)) is not None:
            warn(f"the draft {name!r} has another vocabulary: {difference}; what both have is drafted")
            return Tokenizers(tokenizer, drafts)
    return Tokenizers(tokenizer)


def vocabularies_differ(target: Any, draft: Any, name: str) -> str | None:
    """The first id that means one text to the target and another to the draft; None: there is none. Added special tokens that differ
    only cost acceptance.
    """
    texts = [{index: text for text, index in tokenizer.get_vocab().items()} for tokenizer in (target, draft)]
    special = [{*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids} for tokenizer in (target, draft)]
    warned = False
    for index in sorted(texts[0].keys() | texts[1].keys()):
        ours, theirs = (of.get(index) for of in texts)
        if ours == theirs:
            continue
        shown = f"id {index} is {_quote(ours)} for the target and {_quote(theirs)} for the draft"
        if all(index in ids for ids, text in zip(special, (ours, theirs), strict=True) if text is not None):
            if not warned:
                warn(f"the special tokens of the draft {name!r} differ from the target's: {shown}")
            warned = True
        else:
            return shown
    return None


def _quote(token: str | None) -> str:
    return "missing" if token is None else repr(token)


def load_target(args: argparse.Namespace, device: str) -> Any:
    return _load(args.target, args, device)


def load_drafter(args: argparse.Namespace, device: str, target: Any, tokenizers: Tokenizers) -> Drafter:
    """What ``--draft`` names; a model that is the target too is loaded once."""
    from specdec_triton import drafters

    cascade, kind, name = split_draft(args.draft)
    drafter: Drafter
    if kind == "model":
        model = target if name == args.target else _load(name, args, device)
        drafter = drafters.DraftModel(model)
        if tokenizers.draft is not None:
            drafter = drafters.DraftModel(model, tokenizer=tokenizers.draft, target_tokenizer=tokenizers.target)
    elif kind == "eagle":
        drafter = drafters.EagleDrafter(_head(args.target, name), tree=args.tree)
    elif kind == "medusa":
        drafter = drafters.MedusaDrafter(name, tree=args.tree)
    else:
        makers: dict[str, Callable[[], Drafter]] = {
            "none": drafters.NoDraft,
            "ngram": drafters.PromptLookup,
            "suffix": drafters.SuffixDrafter,
            "skip": drafters.LayerSkip,
        }
        drafter = makers[kind]()
    return drafters.Cascade.after_suffix(drafter) if cascade else drafter


def _head(target: str, path: str) -> str:
    """Where an EAGLE head lies: where the user says, else in the package.

    Raises:
        UsageError: none comes with the package for that target.
    """
    if path:
        return path
    shipped = shipped_head(target)
    if shipped is None:
        raise UsageError(
            f"--draft eagle: no head for {target!r} comes with this package; say where one is (eagle:PATH), or train one:"
            " specdec-triton train"
        )
    return str(shipped)


def _load(name: str, args: argparse.Namespace, device: str) -> Any:
    import torch

    from specdec_triton import optimize

    model = load_model(name, dtype=getattr(torch, args.dtype), device=device)
    if not args.optimize:
        return model
    try:
        return optimize(model)
    except UnsupportedModelError as error:
        raise UsageError(f"{error}; --no-optimize decodes the model {name!r} as it is") from error
