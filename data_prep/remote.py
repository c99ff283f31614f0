"""Files at URLs (https://, s3://, gs://, hf://, ...), read by fsspec: in ranges, and again where the line was cut."""

import base64
import hashlib
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

from widemix.errors import InputError, RunError
from widemix.tally import print_status

TRIES = 5
WAIT_S = 1.0  # before the second try; before each further one twice as long
PIECE = 16 << 20  # bytes that are requested at once
AT_ONCE = 8  # files: of small ones each waits for the server's answer
PARTIAL = ".partial"  # after the name of a file that is not complete


class Remote(NamedTuple):
    """A folder at a URL."""

    url: str
    files: Any  # fsspec's file system
    root: str  # its name for the folder

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """The bytes from `begin` to `end` of a file in the folder, by default all.

        Raises `InputError` if there is no such file, and `RunError` if it cannot be read after several tries.
        """
        path, where = (f"{start.rstrip('/')}/{name}".rstrip("/") for start in (self.root, self.url))
        reason = ""
        for attempt in range(TRIES):
            if attempt:
                time.sleep(WAIT_S * 2 ** (attempt - 1))
            try:
                data = self.files.cat_file(path, start=begin, end=end) if end else self.files.cat_file(path)
            except (FileNotFoundError, IsADirectoryError):
                raise InputError(f"{where}: no such file") from None
            except PermissionError as error:
                raise InputError(f"{where}: cannot be read ({error})") from None
            except Exception as error:  # each file system has its own types for a line that was cut
                _check_credentials(where, error)
                reason = _first_line(error)
                continue
            if end is None or len(data) == end - begin:
                return data
            reason = f"{len(data)} of {end - begin} bytes came: the line was cut, or the server gives no ranges"
        raise RunError(f"{where}: cannot be read ({reason}); the same command resumes")


def open_remote(url: str) -> Remote:
    """The folder at a URL. Raises `InputError` if fsspec cannot open URLs of that kind, or lacks a package for it."""
    from fsspec.core import url_to_fs

    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs a traceback of each try
    try:
        files, root = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise InputError(f"{url}: cannot be opened ({error}); pip install 'widemix[remote]'") from None
    except OSError as error:  # a file system that connects at once, such as ftp://
        raise InputError(f"{url}: cannot be reached ({error})") from None
    return Remote(url.rstrip("/"), files, root)


def download(url: str, to: Path, wanted: Callable[[str], bool] = lambda name: True) -> Path:
    """Download the files at a URL (of a folder, or of one file) to the folder `to`; returns the path to read from.

    Of a folder only those whose paths in it are `wanted`. Complete files are kept, and others resumed. A file is
    compared with its size, and with its MD5 or SHA-256 where the store states one. Raises `InputError` if there is
    nothing, and `RunError` if the line stays cut or data differ.
    """
    remote = open_remote(url)
    print_status(f"{url}: listing its files")
    try:
        found = remote.files.find(remote.root, detail=True)
    except Exception as error:  # each file system has its own
        _check_credentials(url, error)
        raise InputError(f"{url}: cannot be listed ({_first_line(error)})") from None
    files = [path for path, info in found.items() if info.get("type", "file") == "file"]
    if not files:
        raise InputError(f"{url}: holds no files, or cannot be reached")
    single = files == [remote.root.rstrip("/")]
    named = []
    for path in files:
        name = Path(path).name if single else os.path.relpath(path, remote.root)
        if ".." in Path(name).parts or os.path.isabs(name):
            raise InputError(f"{url}: lists {path}, which lies outside of it")
        if single or wanted(name):
            named.append((path, name))
    left, stopped = iter(named), Event()

    def work() -> None:
        for path, name in left:
            if stopped.is_set():
                return
            file = Remote(remote.files.unstrip_protocol(path), remote.files, path)
            try:
                _download(file, found[path], to / name, stopped)
            except BaseException:
                stopped.set()
                raise

    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            for worker in [pool.submit(work) for _ in range(AT_ONCE)]:
                worker.result()
        finally:
            stopped.set()
    return to / Path(files[0]).name if single else to


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _check_credentials(url: str, error: Exception) -> None:
    """Raise `InputError` for an error of a store's client that trying again does not cure; each has its own type."""
    if "Credential" in type(error).__name__:
        raise InputError(
            f"{url}: needs credentials ({error}); set those of its client, such as AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY for s3://"
        ) from None


def _download(remote: Remote, listed: dict[str, Any], to: Path, stopped: Event) -> None:
    """Download a file, unless `stopped`, which leaves a part of it."""
    info = remote.files.info(remote.root) if listed.get("size") is None else listed  # web servers list no sizes
    size = info.get("size")
    if to.exists() and to.stat().st_size == size:
        return
    to.parent.mkdir(parents=True, exist_ok=True)
    version = hashlib.sha256(remote.files.ukey(remote.root).encode()).hexdigest()[:8]  # not resumed with another one
    partial = to.with_name(f"{to.name}.{version}{PARTIAL}")
    print_status(f"{remote.url}: downloading {'' if size is None else f'{size / 2**20:,.1f} MiB '}to {to}")
    with partial.open("ab") as file:
        if size is None or file.tell() > size:
            file.seek(0)
            file.truncate()
        if size is None:
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
