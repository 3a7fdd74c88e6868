from __future__ import annotations

import contextlib
import hashlib
import io
import re
import socket
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedveil.errors import FedveilError
from fedveil.registry import datasets
from fedveil.tasks.fetch import Patience, download, fetch, matches
from fedveil.tasks.formats.archive import unpack
from fedveil.tasks.sources import SOURCES, Remote, Source, locate

from .web import Web, serving

CONTENT = bytes(n * n % 251 for n in range(300_000))
QUICK = Patience(attempts=4, pause=0.0, timeout=600)


def sha256(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def web() -> Iterator[Web]:
    with serving(Web({"file.bin": CONTENT})) as web:
        yield web


def remote(web: Web, digest: str = sha256(CONTENT), size: int | None = len(CONTENT)) -> Remote:
    return Remote(f"{web.url}/file.bin", "file.bin", digest, size)


@pytest.mark.parametrize("digest", [sha256(CONTENT), f"md5:{hashlib.md5(CONTENT).hexdigest()}"])
@pytest.mark.parametrize("size", [None, len(CONTENT)])
def test_a_file_comes_whole_and_is_counted(tmp_path: Path, web: Web, digest: str, size: int | None) -> None:
    seen: list[tuple[str, int, int | None]] = []
    path = download(remote(web, digest, size), tmp_path, lambda *told: seen.append(told), QUICK)
    assert path.read_bytes() == CONTENT
    assert [each.name for each in tmp_path.iterdir()] == ["file.bin"]
    assert seen[-1] == ("file.bin", len(CONTENT), len(CONTENT))
    assert web.asked == [None]


def test_a_broken_connection_goes_on_where_it_broke(tmp_path: Path, web: Web) -> None:
    web.breaks, web.cut = 2, 100_000
    assert download(remote(web), tmp_path, None, QUICK).read_bytes() == CONTENT
    assert web.asked == [None, "bytes=100000-", "bytes=200000-"]


@pytest.mark.parametrize("size", [None, len(CONTENT)])
def test_a_server_that_ignores_ranges_sends_all_again(tmp_path: Path, web: Web, size: int | None) -> None:
    web.breaks, web.ranges = 2, False
    assert download(remote(web, size=size), tmp_path, None, QUICK).read_bytes() == CONTENT
    assert web.asked == [None, "bytes=1000-", "bytes=1000-"]


def test_a_stopped_download_goes_on_in_the_next_run(tmp_path: Path, web: Web) -> None:
    web.breaks = 99
    with pytest.raises(
        FedveilError, match=r"the connection broke \(4 attempts\); 4,000 bytes are kept in .*part"
    ) as caught:
        download(remote(web), tmp_path, None, QUICK)
    assert "\n" not in str(caught.value)
    assert len(web.asked) == 4
    assert not (tmp_path / "file.bin").exists()
    web.breaks = 0
    assert download(remote(web), tmp_path, None, QUICK).read_bytes() == CONTENT
    assert web.asked[-1] == "bytes=4000-"


def test_a_part_that_is_whole_needs_no_request(tmp_path: Path, web: Web) -> None:
    (tmp_path / "file.bin.part").write_bytes(CONTENT)
    assert download(remote(web), tmp_path, None, QUICK).read_bytes() == CONTENT
    assert web.asked == []


def test_a_part_that_is_too_long_is_thrown_away(tmp_path: Path, web: Web) -> None:
    for size in (None, len(CONTENT)):
        (tmp_path / "file.bin.part").write_bytes(CONTENT + b"more")
        assert download(remote(web, size=size), tmp_path, None, QUICK).read_bytes() == CONTENT


def test_a_wrong_checksum_removes_what_came(tmp_path: Path, web: Web) -> None:
    with pytest.raises(FedveilError, match="does not have the published sha256 checksum; it was removed") as caught:
        download(remote(web, sha256(b"other")), tmp_path, None, QUICK)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file.bin.part").write_bytes(b"x" * 500)  # a part of something else
    with pytest.raises(FedveilError, match="checksum"):
        download(remote(web), tmp_path, None, QUICK)
    assert download(remote(web), tmp_path, None, QUICK).read_bytes() == CONTENT


def test_more_than_expected_is_not_taken(tmp_path: Path, web: Web) -> None:
    web.lengths = False
    with pytest.raises(FedveilError, match="sends more than the 1,000 bytes expected"):
        download(remote(web, size=1000), tmp_path, None, QUICK)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("status, requests", [(404, 1), (403, 1), (500, 4), (503, 4)])
def test_the_server_says_no(tmp_path: Path, web: Web, status: int, requests: int) -> None:
    web.status = [status] * 9
    with pytest.raises(FedveilError, match=f"the server says {status}"):
        download(remote(web), tmp_path, None, QUICK)
    assert len(web.asked) == requests


def test_a_server_that_recovers(tmp_path: Path, web: Web) -> None:
    web.status = [503, 500]
    assert download(remote(web), tmp_path, None, QUICK).read_bytes() == CONTENT


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: \xb2\r\n\r\nx",  # a digit for Python, and no number
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\nx",
        b"HTTP/1.1 302 Found\r\nLocation: http://[\r\n\r\n",
        b"H\x1b[2JTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 404 Not\x1b[2J found\r\n\r\n",
        b"",
    ],
    ids=["superscript", "digits", "address", "status", "reason", "nothing"],
)
def test_answers_that_make_no_sense_get_one_line(tmp_path: Path, answer: bytes) -> None:
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):  # one attempt may be enough, and the server is closed
            for _ in range(2):
                connection, _ = server.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    made = Remote(f"http://127.0.0.1:{server.getsockname()[1]}/file.bin", "file.bin", sha256(CONTENT))
    with server, pytest.raises(FedveilError) as caught:
        download(made, tmp_path, None, Patience(attempts=2, pause=0.0, timeout=600))
    assert str(caught.value).isprintable()


def test_what_comes_with_a_redirect_is_not_read(tmp_path: Path, web: Web) -> None:
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(4096)
            place = f"Location: {web.url}/file.bin".encode()
            connection.sendall(b"HTTP/1.1 302 Found\r\n" + place + b"\r\nContent-Length: 99999999999999\r\n\r\n")
            connection.recv(1)  # until the other side has enough

    threading.Thread(target=serve, daemon=True).start()
    made = Remote(f"http://127.0.0.1:{server.getsockname()[1]}/file.bin", "file.bin", sha256(CONTENT))
    with server:
        assert download(made, tmp_path, None, QUICK).read_bytes() == CONTENT


def test_a_file_that_should_be_empty(tmp_path: Path, web: Web) -> None:
    web.files["file.bin"] = b""
    assert download(remote(web, sha256(b""), 0), tmp_path, None, QUICK).read_bytes() == b""


def test_no_server_at_all(tmp_path: Path) -> None:
    with serving(Web()) as web:
        gone = remote(web)
    with pytest.raises(FedveilError, match=r"cannot download .*refused.*\(4 attempts\)") as caught:
        download(gone, tmp_path, None, QUICK)
    assert "\n" not in str(caught.value)


# ---- sets --------------------------------------------------------------------------------------------


def test_only_what_is_missing_is_fetched(tmp_path: Path, web: Web) -> None:
    web.files |= {"a.gz": b"a", "b.gz": b"b"}
    remotes = tuple(Remote(f"{web.url}/{n}.gz", f"{n}.gz", sha256(n.encode()), 1) for n in "ab")
    source = Source(("toy", "."), ("a", "b"), remotes)
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "a").write_bytes(b"plain")
    assert fetch("toy", source, tmp_path, None, QUICK) == [tmp_path / "toy" / "b.gz"]
    assert locate(source, tmp_path).complete
    assert fetch("toy", source, tmp_path, None, QUICK) == []
    assert len(web.asked) == 1


def test_a_set_without_a_checksum_is_not_downloaded(tmp_path: Path) -> None:
    with pytest.raises(
        FedveilError, match=r"nih-chestxray: no source with a published checksum.*nihcc.*nih-chestxray$"
    ):
        fetch("nih-chestxray", SOURCES["nih-chestxray"], tmp_path)


def test_every_source_has_a_proper_checksum_and_is_a_set() -> None:
    for name, source in SOURCES.items():
        assert name in datasets.entries()
        assert source.remotes or source.how
        for each in source.remotes:
            assert each.url.startswith("https://")
            assert re.fullmatch(r"sha256:[0-9a-f]{64}|md5:[0-9a-f]{32}", each.digest)


def test_the_real_fashion_mnist_has_the_published_checksums(real_data: Path) -> None:
    for each in SOURCES["fashion-mnist"].remotes:
        path = real_data / "fashion-mnist" / each.file
        assert matches(path, each.digest)
        assert path.stat().st_size == each.size


# ---- archives ----------------------------------------------------------------------------------------


def tar(*members: tuple[str, bytes] | tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
                continue
            info = tarfile.TarInfo(member[0])
            info.size = len(member[1])
            archive.addfile(info, io.BytesIO(member[1]))
    return buffer.getvalue()


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def test_an_archive_is_fetched_and_unpacked_into_its_folder(tmp_path: Path, web: Web) -> None:
    content = tar(special("top", tarfile.DIRTYPE), ("top/one", b"1"), ("top/two", b"2"), ("top/readme.html", b"x"))
    web.files["set.tar.gz"] = content
    source = Source(
        ("top", "toy"),
        ("one",),
        (Remote(f"{web.url}/set.tar.gz", "set.tar.gz", sha256(content), len(content)),),
        archive=True,
        optional=("two",),
    )
    assert fetch("toy", source, tmp_path, None, QUICK) == [tmp_path / "top" / "one", tmp_path / "top" / "two"]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["one", "top", "two"]
    assert fetch("toy", source, tmp_path, None, QUICK) == []
    (tmp_path / "top" / "two").unlink()
    assert fetch("toy", source, tmp_path, None, QUICK)
    assert (tmp_path / "top" / "two").read_bytes() == b"2"


@pytest.mark.parametrize(
    "member, line",
    [
        (("../out", b"x"), "an entry leaves its folder: '../out'"),
        (("a/../../out", b"x"), "leaves its folder"),
        (("/out", b"x"), "leaves its folder"),
        (("a\\..\\out", b"x"), "leaves its folder"),
        (("C:/out", b"x"), "leaves its folder"),
        (special("link", tarfile.SYMTYPE, "/etc"), "'link' is not a plain file"),
        (special("link", tarfile.SYMTYPE, "inside"), "is not a plain file"),
        (special("link", tarfile.LNKTYPE, "../out"), "is not a plain file"),
        (special("pipe", tarfile.FIFOTYPE), "is not a plain file"),
        (special("disk", tarfile.CHRTYPE), "is not a plain file"),
        (("", b"x"), "a file has no name"),
        ((".", b"x"), "a file has no name"),
    ],
)
def test_entries_that_leave_their_folder_are_refused(
    tmp_path: Path, member: tuple[str, bytes] | tarfile.TarInfo, line: str
) -> None:
    (tmp_path / "a.tar.gz").write_bytes(tar(("fine", b"x"), member))
    target = tmp_path / "deep" / "target"
    target.mkdir(parents=True)
    with pytest.raises(FedveilError, match=line) as caught:
        unpack(tmp_path / "a.tar.gz", target)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.tar.gz", "deep", "fine", "target"]


def test_a_refused_archive_leaves_nothing_behind(tmp_path: Path, web: Web) -> None:
    content = tar(("top/one", b"1"), ("../evil", b"x"))
    web.files["set.tar.gz"] = content
    archive = Remote(f"{web.url}/set.tar.gz", "set.tar.gz", sha256(content))
    with pytest.raises(FedveilError, match="leaves its folder"):
        fetch("toy", Source(("top",), ("one",), (archive,), archive=True), tmp_path / "root", None, QUICK)
    assert [path.name for path in (tmp_path / "root").rglob("*")] == ["set.tar.gz"]
    assert not (tmp_path / "evil").exists()


def test_size_and_number_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    path.write_bytes(tar(("a", bytes(600)), ("b", bytes(600))))
    assert len(unpack(path, tmp_path / "fine", limit=1200)) == 2
    with pytest.raises(FedveilError, match="unpacks to more than 1,199 bytes"):
        unpack(path, tmp_path / "much", limit=1199)
    path.write_bytes(tar(("n" * 3_000_000, b"x")))  # a name that would have to be read at once
    with pytest.raises(FedveilError, match=r"too long|damaged"):
        unpack(path, tmp_path / "name")
    path.write_bytes(tar(("a", b"1"), ("a", b"2")))
    with pytest.raises(FedveilError, match="same file twice"):
        unpack(path, tmp_path / "twice")


@pytest.mark.parametrize("size", ["1e9", "x" * 5000, "-1"])
def test_numbers_in_headers_that_are_none_get_one_line(tmp_path: Path, size: str) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("a")
        member.pax_headers = {"GNU.sparse.size": size, "GNU.sparse.map": size}
        archive.addfile(member)
    (tmp_path / "a.tar.gz").write_bytes(file.getvalue())
    with pytest.raises(FedveilError) as caught:
        unpack(tmp_path / "a.tar.gz", tmp_path)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("length", [0, 1, 50, 300])
def test_archives_cut_short_get_one_line(tmp_path: Path, length: int) -> None:
    (tmp_path / "a.tar.gz").write_bytes(tar(("a", CONTENT))[:length])
    with pytest.raises(FedveilError, match=r"cut short or damaged|cannot unpack") as caught:
        unpack(tmp_path / "a.tar.gz", tmp_path / "out")
    assert "\n" not in str(caught.value)
