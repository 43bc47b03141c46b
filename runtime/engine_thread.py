"""The thread that drives an engine, and the door through which other threads reach it."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Ids

from absl import logging

from precast.runtime.config import EngineConfig
from precast.runtime.engine import Engine, EngineStats
from precast.runtime.request import OutputDelta, RequestError, SamplingParams


class EngineUnavailable(RuntimeError):
    """New work is refused: the engine is draining, has stopped or has failed."""


class EngineThread:
    """Runs ``engine.step`` for as long as there is work.

    Attributes:
      failure: what went wrong when a step raised; then every request has ended with ERROR and new work is refused.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.failure: str | None = None
        self._changed = threading.Condition()
        self._inbox: collections.deque[Callable[[], None]] = collections.deque()
        # Output sequences of each request that have not ended, by request id.
        self._live: dict[str, int] = {}
        self._refusal: str | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def config(self) -> EngineConfig:
        return self.engine.config

    def start(self) -> None:
        self._thread.start()

    def submit(
        self,
        request_id: str,
        prompt_token_ids: Ids[int],
        params: SamplingParams,
        sink: Callable[[OutputDelta], None],
        *,
        priority: int = 0,
        salt: str = "",
        tenant: str = "",
    ) -> None:
        """Queues a request.

        Args:
          request_id: must not be that of a request still running.
          prompt_token_ids, params: see ``Engine.prepare``.
          sink: called in the engine's thread, once a step and output sequence; it must not block.
          priority: lower runs first.
          salt: only requests of one salt share cached prefixes.
          tenant: on whose behalf; "" for nobody in particular.

        Raises:
          RequestError: the request is refused; nothing of it is kept.
          EngineUnavailable: draining, stopped or failed.
        """

        def deliver(delta: OutputDelta) -> None:
            if delta.finish_reason is not None:
                self._count_down(request_id)
            try:
                sink(delta)
            except Exception:
                logging.exception("the reader of request %s (tenant %r) raised; it is aborted", request_id, tenant)
                self.abort(request_id)

        request = self.engine.prepare(
            request_id, prompt_token_ids, params, deliver, priority=priority, salt=salt, tenant=tenant
        )
        with self._changed:
            if self._refusal is not None:
                raise EngineUnavailable(self._refusal)
            if request_id in self._live:
                raise RequestError(f"request_id is {request_id[:64]!r}: a request with this id is running")
            self._live[request_id] = params.n
            self._post(lambda: self.engine.add(request))

    def abort(self, request_id: str) -> None:
        """Ends a request with ABORT before the next step; nothing happens for one that is not running."""
        with self._changed:
            self._post(lambda: self.engine.abort(request_id))

    def flush_cache(self) -> None:
        """Forgets every cached prefix: no request submitted after this finds one from before."""
        with self._changed:
            self._post(self.engine.flush_cache)

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def drain(self, timeout: float) -> bool:
        """Refuses new work and waits for what is queued and running.

        Returns whether all of it ended within ``timeout`` seconds; the rest is aborted.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            self._refusal = self._refusal or "the server is draining"
            finished = self._changed.wait_for(lambda: not self._live, max(0.0, deadline - time.monotonic()))
            for request_id in list(self._live):
                self.abort(request_id)
            self._changed.wait_for(lambda: not self._live, timeout=10.0)
        return finished

    def stop(self) -> None:
        """Ends the thread after the step in hand; requests still running are aborted."""
        with self._changed:
            self._refusal = self._refusal or "the server has stopped"
            for request_id in list(self._live):
                self.abort(request_id)
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def _post(self, command: Callable[[], None]) -> None:
        self._inbox.append(command)
        self._changed.notify_all()

    def _count_down(self, request_id: str) -> None:
        with self._changed:
            self._live[request_id] -= 1
            if not self._live[request_id]:
                del self._live[request_id]
                self._changed.notify_all()

    def _run(self) -> None:
        try:
            while self._take_commands():
                self.engine.step()
        except Exception as error:
            self._fail(error)

    def _take_commands(self) -> bool:
        """Waits for work and takes in what was posted; False when the thread is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._inbox or self.engine.has_work or self._stopping)
            commands, self._inbox = self._inbox, collections.deque()
            stopping = self._stopping
        for command in commands:
            command()
        return not stopping

    def _fail(self, error: Exception) -> None:
        logging.error("a step failed; the engine stops: %s", error, exc_info=error)
        with self._changed:
            self.failure = f"{type(error).__name__}: {error}"
            self._refusal = f"the engine has failed: {self.failure[:500]}"
            commands, self._inbox = self._inbox, collections.deque()
        for command in commands:
            command()
        self.engine.fail(self._refusal)
