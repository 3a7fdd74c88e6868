"""A web server on this machine that can misbehave in chosen ways."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Web:
    """What it serves and what it was asked for."""

    files: dict[str, bytes] = field(default_factory=dict)
    breaks: int = 0  # so many answers more are cut short
    cut: int = 1000  # bytes of the body that come before the break
    ranges: bool = True
    status: list[int] = field(default_factory=list)  # answers before the proper ones
    lengths: bool = True
    url: str = ""
    asked: list[str | None] = field(default_factory=list)  # the Range header of every request


@contextmanager
def serving(web: Web) -> Iterator[Web]:
    """While the block runs, the server answers at `web.url`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            web.asked.append(self.headers.get("Range"))
            self.close_connection = True
            content = web.files.get(self.path.lstrip("/").partition("?")[0])
            if web.status or content is None:
                self.send_error(web.status.pop(0) if web.status else 404)
                return
            asked, start = self.headers.get("Range"), 0
            if web.ranges and asked:
                start = int(asked.removeprefix("bytes=").rstrip("-"))
                if start >= len(content):
                    self.send_error(416)
                    return
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            body = content[start:]
            if web.lengths:
                self.send_header("Content-Length", str(len(body)))
            self.send_header("Connection", "close")
            self.end_headers()
            if web.breaks:
                web.breaks -= 1
                body = body[: web.cut]
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    web.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield web
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
