"""The way of one request's output from the engine's thread to the coroutine that sends it."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable

from precast.runtime.request import OutputDelta


class DeltaQueue:
    """A bounded queue of deltas: written by the engine's thread, read by one coroutine.

    The writer never waits.  When the reader is more than ``limit`` deltas behind, the queue drops
    what it holds, calls ``on_overflow`` once and is closed: a client that does not read costs a
    bounded amount of memory, and no other request notices.
    """

    def __init__(self, limit: int, on_overflow: Callable[[], None]):
        """Belongs to the running event loop; on_overflow is called in it."""
        self._loop = asyncio.get_running_loop()
        self._limit = limit
        self._on_overflow = on_overflow
        self._deltas: collections.deque[OutputDelta] = collections.deque()
        self._changed = asyncio.Event()
        self.overflowed = False

    def put(self, delta: OutputDelta) -> None:
        """Called by the engine's thread; a delta after the loop has ended goes nowhere."""
        try:
            self._loop.call_soon_threadsafe(self._append, delta)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    async def get(self) -> OutputDelta | None:
        """The next delta, or None once the queue has overflowed."""
        while not self._deltas and not self.overflowed:
            self._changed.clear()
            await self._changed.wait()
        return self._deltas.popleft() if self._deltas else None

    def _append(self, delta: OutputDelta) -> None:
        if self.overflowed:
            return
        if len(self._deltas) >= self._limit:
            self.overflowed = True
            self._deltas.clear()
            self._on_overflow()
        else:
            self._deltas.append(delta)
        self._changed.set()
