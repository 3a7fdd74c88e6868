"""What comes over the network: answers of a lying server, and archives that are downloaded and unpacked."""

from __future__ import annotations

import functools
import hashlib
import socket
import threading
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from fedveil.tasks.fetch import Patience, download, fetch
from fedveil.tasks.sources import Remote, Source
from fuzz.data_readers import ENTRIES
from fuzz.mutate import damaged
from fuzz.reader import Files, Reader
from fuzz.structures import tar_gz_files

BODY = bytes(range(250)) * 4
QUICK = Patience(attempts=2, pause=0.0, timeout=5.0)


class Server:
    """Answers every request with the next of the given bytes, whatever was asked, and hangs up."""

    def __init__(self) -> None:
        self.answers: list[bytes] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/file"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            with connection:
                connection.settimeout(2)
                try:
                    connection.recv(65536)
                    connection.sendall(self.answers.pop(0) if self.answers else b"")
                    connection.shutdown(socket.SHUT_WR)
                    connection.recv(65536)  # until the other side has read everything
                except OSError:
                    continue


@functools.cache
def server() -> Server:
    """The server of this process."""
    return Server()


@st.composite
def _answer(draw: DrawFn) -> bytes:
    """An answer over HTTP whose parts do not fit together."""
    start = draw(st.sampled_from((0, 0, 0, 500, 999, 1000)))
    lines = [draw(st.sampled_from(("HTTP/1.1 200 OK",) * 4 + ("HTTP/1.1 206 Partial Content",) * 3 + STATUS))]
    lines += draw(st.lists(st.sampled_from(FIELDS), max_size=3))
    if draw(st.booleans()):
        lines.append(f"Content-Length: {len(BODY) - start}")
    if draw(st.booleans()):
        lines.append(f"Content-Range: bytes {start}-999/1000")
    return "\r\n".join(lines).encode("latin1") + b"\r\n\r\n" + BODY[start:]


STATUS = (
    *(
        "HTTP/1.1 404 Not Found",
        "HTTP/1.1 416 No",
        "HTTP/1.1 500 Error\x1b[2J",
        "HTTP/1.1 302 Found",
        "HTTP/1.1 204 No",
    ),
    *("HTTP/1.1 100 Continue", "HTTP/1.1 999 x", "HTTP/1.1 -1 x", "HTTP/9.9 200 OK", "HTTP/1.1", "ICY 200 OK", ""),
)
FIELDS = (
    *(
        "Content-Length: 99999999999",
        "Content-Length: -1",
        "Content-Length: \xb2",
        "Content-Length: 0",
        "Content-Length: x",
    ),
    *(
        "Content-Range: bytes 0-0/0",
        "Content-Range: x",
        "Content-Range: bytes 500-999/1000",
        "Transfer-Encoding: chunked",
    ),
    *(
        "Content-Encoding: gzip",
        "Location: file:///x",
        "Location: //[",
        "Location: http://[::1",
        "Location: ftp://127.0.0.1:1/x",
    ),
    *("Location: http://127.0.0.1:1/x", "Location: /x", "Location: \xe9", "Location: http://127.0.0.1:x/", "x" * 70000),
    *(
        "a: b\r\n" * 120,
        "Content-Length: " + "9" * 5000,
        ": ",
        "\0: \0",
        " folded",
        "Set-Cookie: a=b",
        "Retry-After: x",
    ),
)


@st.composite
def _answers(draw: DrawFn) -> Files:
    files = {f"answers/{number}": draw(_answer().flatmap(lambda content: damaged(content, 1))) for number in range(3)}
    part = draw(st.sampled_from((None, b"", BODY[:500], BODY, BODY + b"x", b"x" * 500, BODY[:999])))
    if part is not None:
        files["to/file.bin.part"] = part
    files["size"] = draw(st.sampled_from((b"", b"1000")))
    return files


def _read_download(folder: Path) -> object:
    web = server()
    web.answers = [path.read_bytes() for path in sorted((folder / "answers").iterdir())]
    size = int((folder / "size").read_bytes() or 0) or None
    remote = Remote(web.url, "file.bin", f"sha256:{hashlib.sha256(BODY).hexdigest()}", size)
    (folder / "to").mkdir(exist_ok=True)
    path = download(remote, folder / "to", patience=QUICK)
    assert path.read_bytes() == BODY
    assert [each.name for each in path.parent.iterdir()] == ["file.bin"]
    return path


def _download() -> SearchStrategy[Files]:
    server()  # its thread must start before memory is limited
    return _answers()


def _fetched() -> SearchStrategy[Files]:
    server()
    return tar_gz_files(ENTRIES).map(lambda content: {"served/set.tar.gz": content})


def _read_fetched(folder: Path) -> object:
    """Fetch a hostile archive that has its published checksum."""
    content = (folder / "served" / "set.tar.gz").read_bytes()
    web = server()
    web.answers = [f"HTTP/1.1 200 OK\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content]
    remote = Remote(web.url, "set.tar.gz", f"sha256:{hashlib.sha256(content).hexdigest()}", len(content))
    source = Source(("set",), ("test_batch",), (remote,), archive=True, optional=("data_batch_1",))
    try:
        found = fetch("set", source, folder, patience=QUICK)
    finally:
        left = {path.name for path in folder.iterdir()} - {"served", "set", "set.tar.gz"}
        assert not left, f"left behind: {left}"
    assert [path.name for path in found] == ["test_batch", "data_batch_1"]
    return found


WEB_READERS = (
    Reader("download", _download, _read_download, 1200),
    Reader("fetched archive", _fetched, _read_fetched, 800),
)
