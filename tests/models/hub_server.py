"""A server on this machine that speaks as much of the Hugging Face hub's API as a download needs."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import pathlib
import re
import socket
import threading
from collections.abc import Iterator

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer(http.server.ThreadingHTTPServer):
    """Serves the files of one folder as the model ``tiny/model``; ``tiny/gated`` is gated, nothing else exists.

    cut: the connection is cut after half of this file, the first ``cuts`` times that it is asked for.
    gets: (file, Range header or None) of each download, in order.
    """

    daemon_threads = True

    def __init__(self, folder: pathlib.Path, cut: str, cuts: int):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.cut, self.cuts = folder, cut, cuts
        self.gets: list[tuple[str, str | None]] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address) -> None:
        """A client that is gone is no news."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, format, *args) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        info = re.match(r"/api/models/([^/]+/[^/?]+)(/\w+/[^/?]+)?(/[^?]*)?(\?.*)?$", self.path)
        file = re.match(r"/([^/]+/[^/]+)/resolve/[^/]+/([^?]+)", self.path)
        model = (info or file).group(1) if info or file else ""
        if model == "tiny/gated":
            self._refuse(403, "GatedRepo")
        elif model != "tiny/model":
            self._refuse(404, "RepoNotFound")
        elif file:
            self._file(file.group(2), with_body)
        elif info and (info.group(2) or "").startswith("/tree"):
            entries = [
                {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": _digest(path)}
                for path in self._files()
            ]
            self._json(entries)
        else:
            siblings = [{"rfilename": path.name, "size": path.stat().st_size} for path in self._files()]
            self._json({"id": model, "modelId": model, "sha": COMMIT, "siblings": siblings})

    def _files(self) -> list[pathlib.Path]:
        return sorted(self.server.folder.iterdir())

    def _json(self, value) -> None:
        content = json.dumps(value).encode()
        self._head(200, {"Content-Type": "application/json", "Content-Length": str(len(content))})
        self.wfile.write(content)

    def _refuse(self, status: int, code: str) -> None:
        self._head(status, {"X-Error-Code": code, "X-Error-Message": code, "Content-Length": "0"})

    def _file(self, name: str, with_body: bool) -> None:
        path = self.server.folder / name
        if not path.exists():
            self._refuse(404, "EntryNotFound")
            return
        content = path.read_bytes()
        headers = {"ETag": f'"{_digest(path)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        asked, status, start = self.headers.get("Range"), 200, 0
        if asked:
            start, status = int(asked.removeprefix("bytes=").split("-")[0]), 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._head(status, {**headers, "Content-Length": str(len(content) - start)})
        if not with_body:
            return
        self.server.gets.append((name, asked))
        if name == self.server.cut and self.server.cuts:
            self.server.cuts -= 1
            self.wfile.write(content[start : len(content) // 2])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        else:
            self.wfile.write(content[start:])

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


def _digest(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextlib.contextmanager
def serving(folder: pathlib.Path, cut: str = "", cuts: int = 0) -> Iterator[HubServer]:
    with HubServer(folder, cut, cuts) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
