"""Whose turn it is: a lock that threads get in the order in which they came.

A thread that gives a plain lock back and takes it again at once, as ``run()`` does between its steps, nearly always gets it before
those that wait.
"""

from __future__ import annotations

import threading
from collections import deque


class Turns:
    """A fair lock.

    Attributes:
        owner: the thread that has it, None if nobody does.
    """

    def __init__(self) -> None:
        self.owner: int | None = None
        self._mutex = threading.Lock()
        self._waiting: deque[tuple[int, threading.Event]] = deque()

    @property
    def mine(self) -> bool:
        """Whether the calling thread has it."""
        return self.owner == threading.get_ident()

    def take(self, *, wait: bool = True) -> bool:
        """Whether the calling thread has it now; without ``wait`` only if it was free."""
        me, turn = threading.get_ident(), threading.Event()
        with self._mutex:
            if self.owner is None:
                self.owner = me
                return True
            if not wait:
                return False
            self._waiting.append((me, turn))
        try:
            turn.wait()
        except BaseException:  # Ctrl-C
            with self._mutex:
                given = turn.is_set()
                if not given:
                    self._waiting.remove((me, turn))
            if given:
                self.give()
            raise
        return True

    def give(self) -> None:
        """Hand it to the thread that has waited longest."""
        with self._mutex:
            self.owner = None
            if self._waiting:
                self.owner, turn = self._waiting.popleft()
                turn.set()
