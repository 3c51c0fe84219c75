"""Ctrl-C between steps instead of inside them: half a step's bookkeeping would leave tokens or pages behind."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Deliver a SIGINT at the end of the block; a second one, of somebody who cannot wait, at once.

    Without effect outside the main thread, which is the only one that is interrupted.
    """
    before: Any = None
    if threading.current_thread() is threading.main_thread():
        before = signal.getsignal(signal.SIGINT)
    if not callable(before):
        yield
        return
    held = 0

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal held
        held += 1
        if held > 1:
            before(number, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held == 1:
            signal.raise_signal(signal.SIGINT)
