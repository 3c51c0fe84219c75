"""What all commands share: the argument parser, its types, and messages on stderr."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from typing import NoReturn

PROGRAM = "specdec-triton"
_LONGEST_MESSAGE = 600


class UsageError(Exception):
    """The user's mistake; the message is the one line to show."""


class Parser(argparse.ArgumentParser):
    """Raises :class:`UsageError` instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of descriptions, and an option and its help on one line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=110)


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """An argument type: an integer from ``low`` to ``high`` (None: no limit)."""
    allowed = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"must be {allowed}, got {text!r}")
        return value

    return parse


def number(low: float, high: float = math.inf) -> Callable[[str], float]:
    """An argument type: a finite number from ``low`` to ``high``."""
    allowed = f"a number >= {low:g}" if high == math.inf else f"a number from {low:g} to {high:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (low <= value <= high and math.isfinite(value)):
            raise argparse.ArgumentTypeError(f"must be {allowed}, got {text!r}")
        return value

    return parse


def one_line(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= _LONGEST_MESSAGE else line[:_LONGEST_MESSAGE] + " ..."


def note(message: str) -> None:
    """A line on stderr."""
    print(message, file=sys.stderr, flush=True)


def warn(message: str) -> None:
    note(f"{PROGRAM}: warning: {one_line(message)}")


def write(text: str) -> None:
    """Text on stdout, at once; characters that its encoding lacks become question marks."""
    try:
        print(text, end="", flush=True)
    except UnicodeEncodeError:
        encoding = sys.stdout.encoding
        print(text.encode(encoding, "replace").decode(encoding), end="", flush=True)
