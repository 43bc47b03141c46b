"""Where a server listens."""

from __future__ import annotations

import dataclasses
import socket


class StartError(RuntimeError):
    """The server cannot start: one line that says why and what to change."""


@dataclasses.dataclass(frozen=True)
class Address:
    """A host with the ports for gRPC and for /health and /metrics; port 0 takes a free one."""

    host: str
    port: int
    metrics_port: int

    def check(self) -> None:
        """Raises StartError if the ports cannot be had now."""
        if self.port and self.port == self.metrics_port:
            raise StartError(f"--port and --metrics_port are both {self.port}: they must differ")
        for flag, port in (("--port", self.port), ("--metrics_port", self.metrics_port)):
            try:
                family, kind, _, _, address = socket.getaddrinfo(self.host, port, type=socket.SOCK_STREAM)[0]
                with socket.socket(family, kind) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(address)
            except OSError as error:
                raise StartError(
                    f"{flag} {port} on {self.host} cannot be had ({error.strerror}): free it or choose another"
                ) from None
