"""Mutations that know the container: tar and zip entries, safetensors headers, pickle instructions, PNG chunks."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import pickletools
import struct
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from fuzz.mutate import any_of, damaged, json_text, odd_json

LEAVING = (
    "../x",
    "../../../x",
    "/tmp/fedveil-fuzz-x",
    "a/../../x",
    "..",
    ".",
    "",
    "a\\..\\x",
    "C:x",
    "a/./b",
    "x" * 300,
)
TYPES = (
    *(tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE),
    *(tarfile.FIFOTYPE, tarfile.GNUTYPE_SPARSE, tarfile.CONTTYPE, b"L", b"K", b"x", b"g", b"Z"),
)
HUGE = 3 * 2**20  # zeros, which compress to three kilobytes


# ---- archives ------------------------------------------------------------------------------------------------


def tar_bytes(entries: Mapping[str, bytes]) -> bytes:
    """A tar archive of plain files."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in entries.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return file.getvalue()


@st.composite
def _tar(draw: DrawFn, entries: Mapping[str, bytes]) -> bytes:
    file = io.BytesIO()
    form = draw(st.sampled_from((tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)))
    odd = draw(st.integers(0, len(entries)))  # which entry is odd; one past the last: none
    with tarfile.open(fileobj=file, mode="w", format=form) as tar:
        for place, (name, content) in enumerate(entries.items()):
            info = tarfile.TarInfo(name)
            data = content
            if place == odd:
                info.name = draw(st.sampled_from((name, *LEAVING, *entries)))
                info.type = draw(st.sampled_from((tarfile.REGTYPE, *TYPES)))
                info.linkname = draw(st.sampled_from(("", "../x", "/etc/passwd", *entries)))
                data = draw(st.sampled_from((content, b"", b"\0" * HUGE)))
                if form == tarfile.PAX_FORMAT:
                    key = draw(
                        st.sampled_from(("path", "size", "linkpath", "GNU.sparse.map", "GNU.sparse.size", "uid"))
                    )
                    info.pax_headers = {
                        key: draw(st.sampled_from(("../x", "-1", "9" * 30, "0,1,2", "x" * 5000, "1e9")))
                    }
            info.size = len(data)
            try:
                tar.addfile(info, io.BytesIO(data))
            except ValueError:  # a name too long for the format
                continue
    return file.getvalue()


def tar_gz_files(entries: Mapping[str, bytes]) -> SearchStrategy[bytes]:
    """Archives whose entries leave their folder, are not plain files, lie about their size or are damaged."""
    inside = st.one_of(_tar(entries), _tar(entries), damaged(tar_bytes(entries)))
    return any_of(inside.map(lambda content: gzip.compress(content, 6, mtime=0)))


METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)


@st.composite
def zips(draw: DrawFn, entries: Mapping[str, SearchStrategy[bytes]]) -> bytes:
    """A zip archive of these entries, each packed in some way under some name; some flags and fields are wrong."""
    file = io.BytesIO()
    with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(file, "w") as archive:  # about duplicate names
        for name, contents in entries.items():
            named = draw(st.sampled_from((name,) * 12 + ("../x.npy", "/x.npy", "é", name.upper())))
            method = draw(st.sampled_from((zipfile.ZIP_DEFLATED,) * 6 + METHODS))
            info = zipfile.ZipInfo(named)
            info.compress_type = method
            archive.writestr(info, draw(contents))
    content = bytearray(file.getvalue())
    deed = draw(st.sampled_from(("nothing", "nothing", "flags", "method", "sizes")))
    mark, offset, form = {
        "flags": (b"PK\x01\x02", 8, "<H"),
        "method": (b"PK\x01\x02", 10, "<H"),
        "sizes": (b"PK\x01\x02", draw(st.sampled_from((16, 20, 24, 28, 30, 42))), "<I"),
    }.get(deed, (b"", 0, "<H"))
    place = content.find(mark, draw(st.integers(0, len(content)))) if mark else -1
    if 0 <= place < len(content) - 46:
        number = draw(st.sampled_from((0, 1, 8, 12, 14, 93, 0x800, 0x20, 0x40, 0xFFFF, 2**31, 2**32 - 1)))
        struct.pack_into(form, content, place + offset, number % (1 << 8 * struct.calcsize(form)))
    return bytes(content)


# ---- safetensors ---------------------------------------------------------------------------------------------


def safetensors_parts(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the data."""
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def safetensors_bytes(header: Any, data: bytes) -> bytes:
    """The inverse of `safetensors_parts`, for any header."""
    text = json_text(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@st.composite
def _odd_header(draw: DrawFn, content: bytes) -> bytes:
    """A file with odd metadata, types, shapes, offsets or names."""
    header, data = safetensors_parts(content)
    return safetensors_bytes(draw(odd_json(header)), data)


@st.composite
def odd_metadata(draw: DrawFn, content: bytes) -> bytes:
    """A valid file with odd JSON texts in its metadata."""
    header, data = safetensors_parts(content)
    metadata = header.get("__metadata__", {})
    texts = [key for key, text in metadata.items() if text[:1] in '{["']
    if texts:
        key = draw(st.sampled_from(texts))
        metadata[key] = json_text(draw(odd_json(json.loads(metadata[key]))))
    return safetensors_bytes(header, data)


@st.composite
def odd_tensors(draw: DrawFn, content: bytes) -> bytes:
    """Valid files in which a tensor has another name, type, shape or other values."""
    header, data = safetensors_parts(content)
    names = [name for name in header if name != "__metadata__"]
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(names))
        if name not in header:
            continue
        start, end = header[name]["data_offsets"]
        deed = draw(st.sampled_from(("type", "shape", "rename", "values")))
        if deed == "type" and header[name]["shape"]:
            kind, width = draw(
                st.sampled_from((("I8", 1), ("BOOL", 1), ("F16", 2), ("BF16", 2), ("F8_E4M3", 1), ("I32", 4)))
            )
            header[name] |= {"dtype": kind, "shape": [(end - start) // width]}
        elif deed == "shape":
            shape = header[name]["shape"]
            header[name]["shape"] = draw(st.sampled_from((shape[::-1], [1, *shape], [*shape, 1], [], [0, *shape])))
        elif deed == "rename":
            prefix = name.partition("/")[0]
            new = draw(
                st.sampled_from(
                    ("x", "", "/", "x/y", f"{prefix}/x", f"{prefix}/", f"{prefix}/-1/0/x", f"{prefix}/x/y/z")
                )
            )
            header[new] = header.pop(name)
        else:
            filling = draw(st.sampled_from((b"\xff", b"\0", b"\x7f")))
            data = data[:start] + filling * (end - start) + data[end:]
    return safetensors_bytes(header, data)


def safetensors_files(content: bytes) -> SearchStrategy[bytes]:
    """Files like this one."""
    return any_of(damaged(content), _odd_header(content), odd_metadata(content), odd_tensors(content))


# ---- pickles -------------------------------------------------------------------------------------------------


class Payload:
    """Is pickled as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


def _payloads() -> tuple[bytes, ...]:
    """Instructions that would run something, for any position in a pickle."""
    calls: list[tuple[str, str]] = [
        ("os", "system"),
        ("posix", "system"),
        ("builtins", "eval"),
        ("builtins", "exec"),
        ("builtins", "open"),
    ]
    calls += [
        ("subprocess", "Popen"),
        ("nt", "system"),
        ("importlib", "import_module"),
        ("numpy", "load"),
        ("os", "mkdir"),
    ]
    text = "__import__('os').system('touch ../../x')"
    found: list[bytes] = []
    for module, name in calls:
        asked = f"c{module}\n{name}\n".encode()
        said = b"X" + struct.pack("<I", len(text)) + text.encode()
        found += [
            asked + said + b"\x85R",
            b"(" + said + f"i{module}\n{name}\n".encode(),
            b"(" + asked + said + b"o",
            asked + said + b"\x85\x81",
            pickle.dumps(module, 4)[2:-1] + pickle.dumps(name, 4)[2:-1] + b"\x93" + said + b"\x85R",
        ]
    state = b"cnumpy\nndarray\n}" + b"X\x05\x00\x00\x00callsX\x01\x00\x00\x00xs" + b"b"
    wide = [
        b"\x8e" + struct.pack("<Q", 2**62),
        b"\x8b" + struct.pack("<i", 2**31 - 1),
        b"\x95" + struct.pack("<Q", 2**62),
    ]
    wide += [
        b"B" + struct.pack("<I", 2**32 - 1),
        b"r" + struct.pack("<I", 2**32 - 1),
        b"\x96" + struct.pack("<Q", 2**50),
    ]
    return (
        *found,
        state,
        *wide,
        b"\x82\x01",
        b"Pid\n",
        b"]Q",
        b"L9999999999L\n",
        b"(" * 2000,
        b"]2" * 2000,
        b"]\x85" * 500,
    )


PAYLOADS = _payloads()


@st.composite
def _odd_pickle(draw: DrawFn, content: bytes) -> bytes:
    """A pickle with instructions removed, doubled, swapped or inserted."""
    starts = [place for _, _, place in pickletools.genops(content) if place is not None]
    parts = [content[a:b] for a, b in zip(starts, [*starts[1:], len(content)], strict=True)]
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, max(len(parts) - 1, 0)))
        deed = draw(st.sampled_from(("payload", "payload", "remove", "double", "swap", "number")))
        if deed == "payload" or not parts:
            parts.insert(place, draw(st.sampled_from(PAYLOADS)))
        elif deed == "remove":
            del parts[place]
        elif deed == "double":
            parts.insert(place, parts[place])
        elif deed == "swap":
            other = draw(st.integers(0, len(parts) - 1))
            parts[place], parts[other] = parts[other], parts[place]
        else:
            parts[place] = draw(damaged(parts[place], 1))
    return b"".join(parts)


@st.composite
def _calling_pickle(draw: DrawFn, value: dict[Any, Any]) -> bytes:
    """A valid pickle in which making one of the values calls something."""
    import os
    import subprocess

    functions = (
        (os.system, "touch ../../x"),
        (eval, "1"),
        (exec, "x=1"),
        (open, "../../x", "w"),
        (subprocess.call, "true"),
    )
    called = Payload(*draw(st.sampled_from(functions)))
    key = draw(st.sampled_from(list(value)))
    changed = draw(st.sampled_from(({**value, key: called}, {**value, b"more": [called]}, called)))
    return pickle.dumps(changed, draw(st.integers(0, 5)))


def pickle_files(value: dict[Any, Any]) -> SearchStrategy[bytes]:
    """Pickles like that of this value, in all protocols."""
    plain = [pickle.dumps(value, protocol) for protocol in range(6)]
    odd = st.sampled_from(plain[2:]).flatmap(_odd_pickle)
    return any_of(st.sampled_from(plain).flatmap(damaged), odd, odd, _calling_pickle(value))


# ---- PNG -----------------------------------------------------------------------------------------------------


@st.composite
def odd_png(draw: DrawFn, content: bytes) -> bytes:
    """A file with chunks removed, doubled, swapped, invented or changed, and with right checksums."""
    chunks, place = [], 8
    while place < len(content):
        (length,) = struct.unpack(">I", content[place : place + 4])
        chunks.append((content[place + 4 : place + 8], content[place + 8 : place + 8 + length]))
        place += 12 + length
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, max(len(chunks) - 1, 0)))
        deed = draw(st.sampled_from(("header", "number", "remove", "double", "new")))
        if deed == "header" or not chunks:
            side = st.sampled_from((0, 1, 7, 9, 2000, 4096, 8192, 2**16, 2**31 - 1))
            kind = bytes(draw(st.tuples(st.sampled_from((1, 2, 4, 8, 16)), st.sampled_from((0, 2, 3, 4, 6)))))
            chunks[:1] = [(b"IHDR", struct.pack(">II", draw(side), draw(side)) + kind + b"\0\0\0")]
        elif deed == "number":
            chunks[place] = (chunks[place][0], draw(damaged(chunks[place][1], 1)))
        elif deed == "remove":
            del chunks[place]
        elif deed == "double":
            chunks.insert(place, chunks[place])
        else:
            name = draw(
                st.sampled_from(
                    (b"tRNS", b"iCCP", b"zTXt", b"iTXt", b"PLTE", b"acTL", b"fcTL", b"fdAT", b"eXIf", b"pHYs")
                )
            )
            bomb = b"a\0\0" + zlib.compress(b"\0" * HUGE)
            chunks.insert(
                place, (name, draw(st.sampled_from((b"", b"\0", b"\0" * 26, bomb, b"a\0\0\0\0\0" + bomb[3:]))))
            )
    return content[:8] + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
