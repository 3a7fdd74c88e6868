"""Downloads that are checked against a published checksum, resumed after a break, and never left half done."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import shutil
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from fedveil.errors import FedveilError, one_line
from fedveil.tasks.formats.archive import unpack
from fedveil.tasks.formats.zip_archive import unpack_zip
from fedveil.tasks.sources import Remote, Source, data_root, locate
from fedveil.version import __version__

LARGEST = 2**32  # bytes of a file whose size is not known in advance
BLOCK = 2**18

Progress = Callable[[str, int, int | None], None]  # file, bytes so far, bytes in all if known


@dataclass(frozen=True)
class Patience:
    """How often to retry a broken connection, and how long to wait for it."""

    attempts: int = 5
    pause: float = 1.0  # seconds before the second attempt; doubles
    timeout: float = 30.0


def fetch(
    name: str,
    source: Source,
    root: Path | None = None,
    progress: Progress | None = None,
    patience: Patience | None = None,
) -> list[Path]:
    """Download the missing files of a set, and return them; none if all were there."""
    top = data_root(root)
    there = locate(source, root)
    wanted = (*source.files, *source.optional)
    missing = [stem for stem in wanted if stem not in there.found]
    if not missing:
        return []
    if not source.remotes:
        raise FedveilError(
            f"{name}: no source with a published checksum is known, so nothing is downloaded: "
            f"{source.how or 'put its files'}, in {top / source.folders[0]}"
        )
    folder = top if source.archive else top / source.folders[0]
    if there.found:
        folder = top if source.archive else there.folder
    _make(folder)
    if source.archive:
        archive = download(source.remotes[0], folder, progress, patience)
        return _place(archive, source, folder, there.folder if there.found else top / source.folders[0])
    chosen = [
        remote for remote in source.remotes if remote.file.removesuffix(".gz") in missing or remote.file in missing
    ]
    return [download(remote, folder, progress, patience) for remote in chosen]


def download(remote: Remote, folder: Path, progress: Progress | None = None, patience: Patience | None = None) -> Path:
    """Download one file into the folder. What arrived before a break is kept as `.part`, and the rest requested."""
    patience = patience or Patience()
    part, target = folder / f"{remote.file}.part", folder / remote.file
    why = ""
    for attempt in range(patience.attempts):
        if attempt:
            time.sleep(patience.pause * 2 ** (attempt - 1))
        try:
            if _receive(remote, part, progress, patience.timeout):
                break
            why = "the connection broke"
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 416 and _size(part):  # the part is not of the server's file
                part.unlink(missing_ok=True)
            elif error.code < 500 and error.code not in (408, 429):
                said = one_line(f"{error.code} {error.reason}")
                raise FedveilError(f"{remote.url}: the server says {said}: try again later") from None
            why = f"the server says {error.code}"
        except urllib.error.URLError as error:
            why = one_line(error.reason)
        except (http.client.HTTPException, ConnectionError, TimeoutError, ValueError) as error:
            why = one_line(error)  # a ValueError is a redirect to an invalid address
        except OSError as error:
            raise FedveilError(f"cannot write {part}: {error.strerror or error}") from None
    else:
        kept = f"; {_size(part):,} bytes are kept in {part} and the next try continues there" if _size(part) else ""
        raise FedveilError(f"cannot download {remote.url}: {why} ({patience.attempts} attempts){kept}")
    if not matches(part, remote.digest):
        part.unlink(missing_ok=True)
        kind = remote.digest.partition(":")[0]
        raise FedveilError(f"{remote.url}: the download does not have the published {kind} checksum; it was removed")
    os.replace(part, target)
    return target


def matches(path: Path, digest: str) -> bool:
    """Whether the file has this checksum, "sha256:…" or "md5:…"."""
    kind, _, wanted = digest.partition(":")
    if kind not in ("sha256", "md5") or not wanted:
        raise ValueError(f"not a checksum: {digest}")
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest() == wanted


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects without reading their bodies, which may claim any length."""

    def http_error_302(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> Any:
        return super().http_error_302(req, cast(IO[bytes], _Unread(fp)), code, msg, headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


class _Unread:
    """An answer whose body is not read."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def read(self, *length: int) -> bytes:
        return b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._answer, name)


def _receive(remote: Remote, part: Path, progress: Progress | None, timeout: float) -> bool:
    """One request, from where the part ends. Returns whether the file is complete."""
    start = _size(part)
    if remote.size and start >= remote.size:
        if start == remote.size:
            return True
        part.unlink()
        start = 0
    request = urllib.request.Request(remote.url, headers={"User-Agent": f"fedveil/{__version__}"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    opener = urllib.request.build_opener(_Redirects)
    with contextlib.closing(opener.open(request, timeout=timeout)) as answer:
        if start and not _continues(answer, start):
            start = 0  # a server without support for ranges sends everything again
        length = answer.headers.get("Content-Length", "")
        known = length.isascii() and length.isdigit() and len(length) < 20
        total = start + int(length) if known else remote.size
        bound = remote.size or min(total or LARGEST, LARGEST)
        done = start
        with part.open("ab" if start else "wb") as file:
            while block := answer.read(BLOCK):
                done += len(block)
                if done > bound:
                    file.close()
                    part.unlink()
                    raise FedveilError(f"{remote.url}: sends more than the {bound:,} bytes expected; it was removed")
                file.write(block)
                if progress is not None:
                    progress(remote.file, done, total)
    return done == total if total is not None else True


def _continues(answer: http.client.HTTPResponse, start: int) -> bool:
    return answer.status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {start}-")


def _place(archive: Path, source: Source, top: Path, folder: Path) -> list[Path]:
    """Unpack into a temporary folder, then move the files of the set one by one."""
    wanted = (*source.files, *source.optional)
    with tempfile.TemporaryDirectory(dir=top, prefix=f".{archive.name}.") as temporary:
        if archive.suffix == ".zip":
            came = unpack_zip(archive, Path(temporary), [f"{source.inside}/{name}" for name in wanted])
        else:
            came = unpack(archive, Path(temporary))
        unpacked = {path.name: path for path in came}
        lacking = [name for name in wanted if name not in unpacked]
        if lacking:
            raise FedveilError(f"{archive}: does not hold {', '.join(lacking)}")
        _make(folder)
        for name in wanted:
            shutil.move(unpacked[name], folder / name)
    archive.unlink()
    return [folder / name for name in wanted]


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FedveilError(f"cannot write to {folder}: {error.strerror}; choose another with --data-root") from None


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
