"""Files at URLs (https://, s3://, gs://, hf://, ...), read by fsspec: in ranges, and again where the line was cut."""

import base64
import functools
import hashlib
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock
from typing import Any, NamedTuple
from urllib.parse import quote

from widemix.errors import InputError, RunError, install_extra
from widemix.files import MOST, open_to_write
from widemix.progress_line import print_status

TRIES = 5
WAIT_S = 1.0  # before the second try; before each further one twice as long
PIECE = 16 << 20  # bytes that are requested at once
AT_ONCE = 8  # files: of small ones each waits for the server's answer
HTTP = ("http://", "https://")
WHOLE = 256 << 20  # bytes of an answer that is held in memory at most: a listing, or a file whose size is not stated
PARTIAL = ".partial"  # after the name of a file that is not complete


class Remote(NamedTuple):
    """A folder or a file at a URL."""

    url: str
    root: str  # the file system's name for it
    files: Any  # fsspec's file system

    def read(self, name: str, begin: int = 0, end: int | None = None, most: int = MOST) -> bytes:
        """The bytes from `begin` to `end` of a file in the folder, by default all, of which there are at most `most`.

        Raises `InputError` if there is no such file, or it is larger, and `RunError` if several tries fail.
        """
        file = self.file(name)
        if end is not None:
            return file._read(begin, end)
        size = file.info().get("size")
        if size is not None and size > most:
            raise InputError(f"{file.url}: has {size:,} bytes; such a file has at most {most:,}")
        if size is None:
            return file._read()
        return b"".join(file._read(start, min(start + PIECE, size)) for start in range(0, size, PIECE))

    def file(self, name: str) -> "Remote":
        """A file in the folder; itself for an empty name."""
        url, root = (f"{place.rstrip('/')}/{name}".rstrip("/") for place in (self.url, self.root))
        return Remote(url, root, self.files)

    def info(self) -> dict[str, Any]:
        """Return what is known of a file at the URL. Raises `InputError` if there is none."""

        def ask() -> Any:
            try:
                return self.files.info(self.root)
            except FileNotFoundError as error:  # fsspec's of HTTP whatever has failed
                cause = error.__cause__
                raise error if cause is None or _status(cause) else cause from None

        return dict(_try(self.url, "read", ask))

    def _read(self, begin: int = 0, end: int | None = None) -> bytes:
        def read() -> bytes:
            data: bytes = self.files.cat_file(self.root, **({"start": begin, "end": end} if end else {}))
            if end is not None and len(data) != end - begin:
                came = f"{len(data)} of {end - begin} bytes came"
                raise _Said(f"{came}: the line was cut, or the server gives no ranges")
            return data

        return bytes(_try(self.url, "read", read))


class _Said(Exception):
    """The message says what is wrong with an answer."""


class _NotKnown(_Said):
    """It cannot be known whether the answer is whole, or will ever be."""


def _status(error: BaseException | None) -> int:
    """The HTTP status with which a server has refused a file, which no further try changes; 0 for other errors."""
    response = getattr(error, "response", None)
    metadata = response.get("ResponseMetadata", {}) if isinstance(response, Mapping) else {}  # of S3
    statuses = (getattr(error, "status", 0), getattr(response, "status_code", 0), metadata.get("HTTPStatusCode", 0))
    status = next((status for status in statuses if isinstance(status, int) and status), 0)
    return status if 400 <= status < 500 and status not in (408, 429) else 0  # out of time; too many requests


def _try(where: str, what: str, action: Callable[[], Any]) -> Any:
    """Return the action's result, of several tries; `InputError` for what no further one cures, else `RunError`."""
    reason = ""
    for attempt in range(TRIES):
        if attempt:
            time.sleep(WAIT_S * 2 ** (attempt - 1))
        try:
            return action()
        except Exception as error:  # each file system has its own types for a line that was cut
            if "Credential" in type(error).__name__:
                raise InputError(
                    f"{where}: needs credentials ({error}); set those of its client, such as AWS_ACCESS_KEY_ID and "
                    "AWS_SECRET_ACCESS_KEY for s3://"
                ) from None
            named = "" if isinstance(error, _Said | PermissionError) else f"{type(error).__name__}: "
            reason = f"{named}{error}".partition("\n")[0]
            missing = isinstance(error, FileNotFoundError | IsADirectoryError) or _status(error) == 404
            if missing and what == "read":
                raise InputError(f"{where}: no such file") from None
            if missing or isinstance(error, PermissionError | _NotKnown) or _status(error):
                raise InputError(f"{where}: cannot be {what} ({reason})") from None
    raise RunError(f"{where}: cannot be {what} ({reason}); the same command resumes")


@functools.cache
def _bounded_answers() -> dict[str, Any]:
    """Arguments of fsspec's client for HTTP, whose answers are then whole when they are read, and not endless."""
    import aiohttp

    class Bounded(aiohttp.ClientResponse):
        async def start(self, connection: Any) -> aiohttp.ClientResponse:
            await super().start(connection)
            if self.status == 206 and "Range" not in self.request_info.headers:
                raise _NotKnown("its server answers with a part that was not asked for; download it yourself")
            return self

        async def read(self) -> bytes:
            coding = self.headers.get("Transfer-Encoding", "").lower()
            if "Content-Length" not in self.headers and "chunked" not in coding:
                raise _NotKnown("its server states no size, so that a cut would not be noticed; download it yourself")
            pieces, size = [], 0
            async for piece in self.content.iter_chunked(1 << 20):
                size += len(piece)
                if size > WHOLE:
                    self.close()
                    raise _NotKnown(
                        f"its server answers with more than {WHOLE >> 20} MiB at once; download it yourself"
                    )
                pieces.append(piece)
            coding, data = self.headers.get("Content-Encoding", "identity"), b"".join(pieces)
            self._body = data if coding == "identity" else _unpacked(data, coding)  # where `text` looks for it
            return self._body

    plain = {"Accept-Encoding": "identity"}  # aiohttp takes half of what is compressed for a whole
    return {"client_kwargs": {"response_class": Bounded, "headers": plain, "auto_decompress": False}}


def _unpacked(data: bytes, coding: str) -> bytes:
    stream = zlib.decompressobj(31)
    with suppress(zlib.error):  # of another coding
        data = stream.decompress(data, WHOLE)
    if not stream.eof:
        raise _NotKnown(f"its server sends no whole {coding}, or more than {WHOLE >> 20} MiB; download it yourself")
    return data


def open_remote(url: str) -> Remote:
    """The folder at a URL. Raises `InputError` if fsspec cannot open URLs of that kind, or lacks a package for it."""
    from fsspec.core import url_to_fs

    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs a traceback of each try
    try:
        files, root = url_to_fs(url, **(_bounded_answers() if url.startswith(HTTP) else {}))
    except (ImportError, ValueError) as error:
        raise InputError(f"{url}: cannot be opened ({error}); {install_extra('remote')}") from None
    except OSError as error:  # a file system that connects at once, such as ftp://
        raise InputError(f"{url}: cannot be reached ({error})") from None
    return Remote(url.rstrip("/"), root, files)


def download(url: str, to: Path, wanted: Callable[[str], bool] = lambda name: True) -> Path:
    """Download the files at a URL (of a folder, or of one file) to the folder `to`; returns the path to read from.

    Of a folder only those whose paths in it are `wanted`. Complete files are kept, and others resumed. A file is
    compared with its size, and with its MD5 or SHA-256 where the store states one. Raises `InputError` if there is
    nothing, and `RunError` if the line stays cut or data differ.
    """
    remote = open_remote(url)
    print_status(f"{url}: listing its files")
    found = _list(remote)
    files = [path for path, info in found.items() if info.get("type", "file") == "file"]
    if not files:
        raise InputError(f"{url}: holds no files, or cannot be reached")
    single = files == [remote.root.rstrip("/")]
    named = [(path, Path(path).name if single else os.path.relpath(path, remote.root)) for path in files]
    chosen = [(path, _within(url, name, path)) for path, name in named if single or wanted(name)]
    _download_all(
        (Remote(remote.files.unstrip_protocol(path), path, remote.files), found[path], to / name)
        for path, name in chosen
    )
    return to / Path(files[0]).name if single else to


def download_beside(url: str, names: Iterable[str], to: Path) -> None:
    """Download files, named by paths from the folder of the file at a URL, to the folder `to`, as `download`."""
    folder = open_remote(url.rpartition("/")[0])
    for name in names:
        _within(folder.url, name, name)
    _download_all((folder.file(quote(name) if url.startswith(HTTP) else name), {}, to / name) for name in names)


def _within(url: str, name: str, path: str) -> str:
    """The name; `InputError` for one of a file that lies outside of the folder at the URL."""
    if ".." in Path(name).parts or os.path.isabs(name):
        raise InputError(f"{url}: lists {path}, which lies outside of it")
    return name


def _download_all(files: Iterable[tuple[Remote, dict[str, Any], Path]]) -> None:
    """Download files, with what is known of each, to paths; all stop with one that fails."""
    left, stopped, lock = iter(files), Event(), Lock()

    def work() -> None:
        while not stopped.is_set():
            with lock:
                file = next(left, None)
            if file is None:
                return
            try:
                _download(*file, stopped)
            except BaseException:
                stopped.set()
                raise

    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            for worker in [pool.submit(work) for _ in range(AT_ONCE)]:
                worker.result()
        finally:
            stopped.set()


def _list(remote: Remote) -> Mapping[str, Any]:
    """Return what fsspec says of each file of a folder, or of the one file at the URL, by path."""
    is_http = remote.url.startswith(HTTP)
    if is_http and not remote.root.endswith("/"):  # fsspec would read it to find links in it
        info = remote.info()
        if info.get("mimetype") != "text/html":
            return {remote.root: info}

    def refuse(error: Exception) -> None:  # otherwise a folder whose list does not come is left out
        if not isinstance(error, FileNotFoundError):
            raise error

    options = {"on_error": refuse} if is_http else {}
    return dict(_try(remote.url, "listed", lambda: remote.files.find(remote.root, detail=True, **options)))


def _download(remote: Remote, listed: dict[str, Any], to: Path, stopped: Event) -> None:
    """Download a file, unless `stopped`, which leaves a part of it."""
    info = remote.info() if listed.get("size") is None else listed  # web servers list no sizes
    size = info.get("size")
    if to.exists() and to.stat().st_size == size:
        return
    to.parent.mkdir(parents=True, exist_ok=True)
    version = hashlib.sha256(remote.files.ukey(remote.root).encode()).hexdigest()[:8]  # not resumed with another one
    partial = to.with_name(f"{to.name}.{version}{PARTIAL}")
    print_status(f"{remote.url}: downloading {'' if size is None else f'{size / 2**20:,.1f} MiB '}to {to}")
    with open_to_write(partial, "ab") as file:
        if size is None or file.tell() > size:
            file.seek(0)
            file.truncate()
        if size is None:
            if not remote.url.startswith(HTTP):  # whose answers are whole, or refused
                raise InputError(f"{remote.url}: its store states no size, so that a cut would not be noticed")
            file.write(remote.read(""))
        else:
            for begin in range(file.tell(), size, PIECE):
                if stopped.is_set():
                    return
                file.write(remote.read("", begin, min(begin + PIECE, size)))
        file.flush()
        os.fsync(file.fileno())
    kind, stated = _stated_hash(info)
    if kind:
        with partial.open("rb") as file:
            if hashlib.file_digest(file, kind).hexdigest() != stated:
                partial.unlink()
                raise RunError(f"{remote.url}: differs from the {kind} that its store states; try again")
    partial.replace(to)


def _stated_hash(info: dict[str, Any]) -> tuple[str, str]:
    """The kind and the hex of the hash of a file's content that its store states; ("", "") if it states none."""
    large, tag, encoded = info.get("lfs"), str(info.get("ETag", "")).strip('"'), info.get("md5Hash")
    if large:  # hf://
        return "sha256", large["sha256"]
    if encoded:  # gs://
        return "md5", base64.b64decode(encoded).hex()
    if info.get("StorageClass") and len(tag) == 32 and "-" not in tag:  # s3://, unless uploaded in parts
        return "md5", tag
    return "", ""
