"""Prepared folders and sources at URLs: fsspec's file system in memory, and a server here that cuts lines."""

import gzip
import hashlib
import os
import shutil
import tarfile
import threading
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest

from tests.data_prep.test_adopt import main
from widemix.data_prep import remote
from widemix.data_prep.prepare import prepare
from widemix.data_prep.remote import download
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.verify import verify
from widemix.errors import InputError, RunError
from widemix.formats.manifest import read_manifest
from widemix.launch.stage import stage

pytestmark = pytest.mark.usefixtures("small_pages")


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(remote, "WAIT_S", 0.01)
    monkeypatch.setattr(remote, "PIECE", 1 << 20)


@pytest.fixture
def prepared(tmp_path, folder):
    prepare("image-folder", folder, tmp_path / "prepared", PrepSettings(), processes=1)
    return tmp_path / "prepared"


@pytest.fixture
def memory():
    """fsspec's file system in memory, empty before and after."""
    files = fsspec.filesystem("memory")
    files.rm("/", recursive=True)
    yield files
    files.rm("/", recursive=True)


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Server(SimpleHTTPRequestHandler):
    """Serves ranges; cuts the line in the middle of some answers."""

    cuts: list[str]  # names of files whose next answer is cut short, one for each time
    asked: list[str]
    coding = "length"  # how the end of a .csv is stated: by its length, by chunks, or not at all; or it has none
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        path = Path(self.translate_path(self.path))
        self.asked.append(path.name)
        if path.suffix == ".csv" and self.coding != "length":
            self.send_without_length(path)
            return
        if path.is_dir() or not path.exists():
            super().do_GET()
            return
        data = path.read_bytes()
        begin, end = 0, len(data)
        if "Range" in self.headers:
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            begin, end = int(first), min(int(last) + 1, len(data))
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("Content-Length", str(end - begin))
        self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
        self.end_headers()
        if path.name in self.cuts:
            self.cuts.remove(path.name)
            end = (begin + end) // 2
            self.close_connection = True
        self.wfile.write(data[begin:end])

    def do_HEAD(self):
        path = Path(self.translate_path(self.path))
        if path.suffix != ".csv" or self.coding == "length":
            super().do_HEAD()
            return
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True

    def send_without_length(self, path):
        data, self.close_connection = path.read_bytes(), True
        if self.coding.startswith(("gzip", "br", "part")):
            data = gzip.compress(bytes(1 << 21)) if "bomb" in self.coding else data
            if self.coding.startswith("gzip") and "bomb" not in self.coding:
                data = gzip.compress(data)
            data = data[: len(data) // 2] if self.coding in ("gzip cut", "part") else data
            self.send_response(206 if self.coding == "part" else 200)
            self.send_header("Content-Length", str(len(data)))
            if self.coding != "part":
                self.send_header("Content-Encoding", self.coding.partition(" ")[0])
            self.end_headers()
            self.wfile.write(data)
            return
        chunk = b"" if self.coding == "close" else b"%x\r\n" % len(data)
        self.send_response(200)
        if chunk:
            self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Connection", "close")
        self.end_headers()
        with suppress(OSError):
            while self.coding == "endless":
                self.wfile.write(b"10000\r\n" + bytes(65536) + b"\r\n")
        if path.name in self.cuts:
            self.cuts.remove(path.name)
            self.wfile.write(chunk + data[: len(data) // 2])
        elif self.coding != "endless":
            self.wfile.write(chunk + data + (b"\r\n0\r\n\r\n" if chunk else b""))


@contextmanager
def serve(folder):
    pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'widemix[remote]'")
    handler = type("Handler", (Server,), {"cuts": [], "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", handler
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_prepared_folder_is_staged_from_a_url(tmp_path, prepared, memory, monkeypatch):
    memory.put(str(prepared), "/bucket/digits", recursive=True)
    copy = stage("memory://bucket/digits", tmp_path / "local")
    assert contents(copy) == contents(prepared)
    assert verify(copy) == []
    asked = []
    read = type(memory).cat_file
    monkeypatch.setattr(
        type(memory), "cat_file", lambda *words, **more: asked.append(words[1]) or read(*words, **more)
    )
    assert stage("memory://bucket/digits/", tmp_path / "local") == copy
    assert [Path(path).name for path in asked] == ["manifest.json"]


@pytest.mark.parametrize("name", ["manifest.json", "train.beton", "train.crc32c"])
def test_what_is_damaged_on_the_way_is_not_staged(tmp_path, prepared, memory, name):
    memory.put(str(prepared), "/bucket/digits", recursive=True)
    data = bytearray(memory.cat_file(f"/bucket/digits/{name}"))
    data[len(data) // 2] ^= 1
    memory.pipe_file(f"/bucket/digits/{name}", bytes(data))
    with pytest.raises(InputError, match=rf"^memory://bucket/digits/{name}: .*(damaged|changed|JSON|manifest)"):
        stage("memory://bucket/digits", tmp_path / "local")
    assert not [path for path in (tmp_path / "local").glob("digits-*") if "unfinished" not in path.name]


def test_what_is_not_there_or_unknown_is_one_line(tmp_path, memory, capsys):
    for url, words in (
        ("memory://bucket/nothing", "memory://bucket/nothing/manifest.json: no such file"),
        ("nonsense://bucket/digits", "nonsense://bucket/digits: cannot be opened (Protocol not known"),
    ):
        assert main(["stage", url, "--to", str(tmp_path / "local")]) == 2
        assert words in capsys.readouterr().err
    assert main(["prep", "webdataset", "--from", "memory://bucket/nothing", "--to", str(tmp_path / "out")]) == 2
    assert "memory://bucket/nothing: holds no files" in capsys.readouterr().err


def test_shards_at_a_url_are_prepared(tmp_path, jpeg, memory, capsys):
    """The same bytes as from a folder; downloaded once, and a part of a file is completed."""
    shards = tmp_path / "shards"
    shards.mkdir()
    for number in range(2):
        with tarfile.open(shards / f"train-{number}.tar", "w") as tar:
            for i in range(6):
                for suffix, data in (("jpg", jpeg(10 * number + i)), ("cls", b"%d" % (i % 2))):
                    (tmp_path / "member").write_bytes(data)
                    tar.add(tmp_path / "member", f"{i}.{suffix}")
    memory.put(str(shards), "/bucket/shards", recursive=True)
    out = tmp_path / "out"
    version = hashlib.sha256(memory.ukey("/bucket/shards/train-1.tar").encode()).hexdigest()[:8]
    partial = tmp_path / "out.source" / f"train-1.tar.{version}.partial"
    partial.parent.mkdir()
    partial.write_bytes((shards / "train-1.tar").read_bytes()[:1000])
    words = ["prep", "webdataset", "--processes", "1", "--from"]
    assert main([*words, "memory://bucket/shards", "--to", str(out)]) == 0
    assert contents(tmp_path / "out.source") == contents(shards)
    assert main([*words, str(shards), "--to", str(tmp_path / "local")]) == 0
    assert (out / "train.beton").read_bytes() == (tmp_path / "local" / "train.beton").read_bytes()
    capsys.readouterr()
    assert main([*words, "memory://bucket/shards", "--to", str(out)]) == 0
    assert "downloading" not in capsys.readouterr().err
    memory.put(str(shards / "train-1.tar"), "/bucket/shards/val-0.tar")
    memory.pipe_file("/bucket/shards/classes.txt", b"cat\ndog\n")
    chosen = [*words, "memory://bucket/shards", "--to", str(tmp_path / "val"), "--splits"]
    assert main([*chosen, "val"]) == 0
    assert sorted(path.name for path in (tmp_path / "val.source").iterdir()) == ["classes.txt", "val-0.tar"]
    assert read_manifest(tmp_path / "val").classes == ("cat", "dog")
    assert main([*chosen, "holdout"]) == 2
    assert "webdataset has no 'holdout'; it has train, val, test" in capsys.readouterr().err
    one = download("memory://bucket/shards/train-0.tar", tmp_path / "one")
    assert one.read_bytes() == (shards / "train-0.tar").read_bytes()


def test_a_hash_that_the_store_states_is_compared(tmp_path, memory, monkeypatch):
    memory.pipe_file("/bucket/a.tar", b"abc")
    stated = {"lfs": {"sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"}}
    find = type(memory).find

    def with_hashes(*words, **more):
        found = find(*words, **more)
        return {path: info | stated for path, info in found.items()} if more.get("detail") else found

    monkeypatch.setattr(type(memory), "find", with_hashes)
    assert download("memory://bucket/a.tar", tmp_path).read_bytes() == b"abc"
    stated["lfs"]["sha256"] = "0" * 64
    (tmp_path / "a.tar").unlink()
    with pytest.raises(RunError, match=r"a\.tar: differs from the sha256 that its store states"):
        download("memory://bucket/a.tar", tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_line_that_is_cut_is_taken_up_again(tmp_path, prepared):
    with serve(prepared.parent) as (url, server):
        server.cuts += ["train.beton", "train.beton", "val.beton", "manifest.json", "train.crc32c"]
        copy = stage(f"{url}/prepared", tmp_path / "local")
        assert server.cuts == []
        assert contents(copy) == contents(prepared)
        shutil.rmtree(copy)
        server.cuts += ["val.beton"] * remote.TRIES
        with pytest.raises(RunError, match=r"/prepared/val\.beton: cannot be read \(.*; the same command resumes"):
            stage(f"{url}/prepared", tmp_path / "local")
        server.asked.clear()
        assert contents(stage(f"{url}/prepared", tmp_path / "local")) == contents(prepared)
        assert "train.beton" not in server.asked
        server.asked.clear()
        server.cuts += ["train.beton", "val.beton"]
        pieces = -(-(prepared / "train.beton").stat().st_size // remote.PIECE)
        assert contents(download(f"{url}/prepared/", tmp_path / "downloaded")) == contents(prepared)
        assert server.asked.count("train.beton") == pieces + 1


@pytest.fixture
def table(tmp_path, folder):
    """A folder with a table of images by their paths in it."""
    place = tmp_path / "served" / "some images"
    shutil.copytree(folder / "train", place)
    images = sorted(path.relative_to(place.parent) for path in place.rglob("*") if path.is_file())
    rows = [f"{path},{number % 2}\n" for number, path in enumerate(images)]
    (place.parent / "list.csv").write_text("path,label\n" + "".join(rows))
    return place.parent / "list.csv", len(images)


@pytest.mark.parametrize(
    ("coding", "cuts", "words"),
    [
        ("length", 0, ""),
        ("length", 1, ""),
        ("chunked", 0, ""),
        ("chunked", 1, ""),
        ("chunked", 50, "cannot be read (ClientPayloadError: "),
        ("close", 0, "cannot be read (its server states no size, so that a cut would not be noticed"),
        ("close", 1, "cannot be read (its server states no size, so that a cut would not be noticed"),
        ("gzip", 0, ""),
        ("gzip cut", 0, "cannot be read (its server sends no whole gzip, or more than 1 MiB; download it yourself)"),
        ("gzip bomb", 0, "cannot be read (its server sends no whole gzip, or more than 1 MiB; download it yourself)"),
        ("br", 0, "cannot be read (its server sends no whole br, or more than 1 MiB; download it yourself)"),
        ("part", 0, "cannot be read (its server answers with a part that was not asked for; download it yourself)"),
        ("endless", 0, "cannot be read (its server answers with more than 1 MiB at once; download it yourself)"),
    ],
)
def test_half_a_table_is_never_taken_for_a_whole_one(tmp_path, table, capsys, monkeypatch, coding, cuts, words):
    """And what it lists comes too, from beside it."""
    monkeypatch.setattr(remote, "WHOLE", 1 << 20)
    path, count = table
    with serve(path.parent) as (url, server):
        server.cuts, server.coding = ["list.csv"] * cuts, coding
        ended = main(["prep", "csv", "--from", f"{url}/list.csv", "--to", str(tmp_path / "o"), "--processes", "1"])
    told = capsys.readouterr().err
    assert words in told
    assert (ended == 0) == (words == ""), told
    if words:
        assert not (tmp_path / "o").exists()
        assert not list((tmp_path / "o.source").glob("*.csv"))
    else:
        assert read_manifest(tmp_path / "o").splits["train"].samples == count
        assert contents(tmp_path / "o.source") == contents(path.parent)


def test_a_url_of_one_file_is_read_once(tmp_path):
    (tmp_path / "a.bin").write_bytes(os.urandom(3 * remote.PIECE))
    with serve(tmp_path) as (url, server):
        server.cuts.append("a.bin")
        assert download(f"{url}/a.bin", tmp_path / "to").read_bytes() == (tmp_path / "a.bin").read_bytes()
        assert server.asked == ["a.bin"] * 4  # three ranges, one of them twice


def test_a_table_lists_nothing_outside_of_its_folder_at_a_url(tmp_path, table, capsys):
    path, _ = table
    path.write_text("path,label\n../secret.jpg,0\n")
    with serve(path.parent) as (url, _):
        assert main(["prep", "csv", "--from", f"{url}/list.csv", "--to", str(tmp_path / "o")]) == 2
    assert "lists ../secret.jpg, which lies outside of it" in capsys.readouterr().err


def test_why_a_file_cannot_be_read_is_the_first_line_of_the_last_try(memory, monkeypatch):
    answers = [b"12", OSError("the line was cut\nat 3 bytes"), b"12", OSError("the line was cut\nat 3 bytes")]

    def answer(*_, **__):
        if isinstance(given := answers.pop(), Exception):
            raise given
        return given

    monkeypatch.setattr(type(memory), "cat_file", answer)
    folder = remote.open_remote("memory://bucket")
    monkeypatch.setattr(remote, "TRIES", 1)
    for why in ("OSError: the line was cut", "2 of 3 bytes came: the line was cut, or the server gives no ranges"):
        with pytest.raises(
            RunError, match=rf"^memory://bucket/a: cannot be read \({why}\); the same command resumes$"
        ):
            folder.read("a", 5, 8)
    monkeypatch.setattr(remote, "TRIES", 2)
    with pytest.raises(RunError, match=r"\(2 of 3 bytes came"):
        folder.read("a", 5, 8)
    assert answers == []


def test_a_file_is_tried_again_after_longer_and_longer_waits(memory, monkeypatch):
    """Until it comes; what no further try cures is told at once."""
    answers, waits, asked = [b"123", OSError("cut"), b"12", OSError("cut"), OSError("cut")], [], []

    def answer(_, path, start=None, end=None):
        asked.append((path, start, end))
        if isinstance(given := answers.pop(), Exception):
            raise given
        return given

    memory.pipe_file("/bucket/a", b"whole")
    monkeypatch.setattr(type(memory), "cat_file", answer)
    monkeypatch.setattr(remote, "WAIT_S", 1.0)
    monkeypatch.setattr(remote.time, "sleep", waits.append)
    folder = remote.open_remote("memory://bucket")
    assert folder.read("a", 5, 8) == b"123"
    assert waits == [1, 2, 4, 8]
    assert set(asked) == {("/bucket/a", 5, 8)}
    for error in (
        PermissionError("no"),
        FileNotFoundError(),
        IsADirectoryError(),
        type("NoCredentialsError", (OSError,), {})(),
    ):
        answers[:] = [error]
        with pytest.raises(
            InputError, match=r"^memory://bucket/a: (cannot be read .no|no such file|needs credentials)"
        ):
            folder.read("a", 5, 8)
    answers[:] = [b"whole"]
    assert folder.read("a") == b"whole"
    assert asked[-1] == ("/bucket/a", 0, 5)
    assert len(waits) == 4


def test_a_store_that_cannot_be_reached_or_listed_is_one_line(tmp_path, memory, monkeypatch):
    for error, kind, words in (
        (type("NoCredentialsError", (Exception,), {})("none"), InputError, r"needs credentials \(none\)"),
        (OSError("away\nand more"), RunError, r"cannot be listed \(OSError: away\); the same command resumes$"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(type(memory), "find", lambda *_, error=error, **__: (_ for _ in ()).throw(error))
            with pytest.raises(kind, match=rf"^memory://bucket/x: {words}"):
                download("memory://bucket/x", tmp_path / "x")
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda _: (_ for _ in ()).throw(ConnectionRefusedError("no")))
    with pytest.raises(InputError, match=r"^ftp://host/x: cannot be reached \(no\)"):
        remote.open_remote("ftp://host/x")


@pytest.mark.parametrize(
    ("info", "stated"),
    [
        ({"lfs": {"sha256": "ab"}, "md5Hash": "q80="}, ("sha256", "ab")),
        ({"md5Hash": "q80="}, ("md5", "abcd")),
        ({"ETag": f'"{"a" * 32}"', "StorageClass": "STANDARD"}, ("md5", "a" * 32)),
        ({"ETag": f'"{"a" * 30}-2"', "StorageClass": "STANDARD"}, ("", "")),  # uploaded in parts
        ({"ETag": f'"{"a" * 64}"', "StorageClass": "STANDARD"}, ("", "")),
        ({"ETag": f'"{"a" * 32}"'}, ("", "")),  # of any server
        ({"lfs": None}, ("", "")),
    ],
)
def test_the_hash_that_a_store_states(info, stated):
    assert remote._stated_hash(info) == stated


def test_what_is_complete_is_kept_and_what_is_longer_is_not(tmp_path, memory, monkeypatch):
    """Folders within; a list without a type; and no file outside of the one to write to."""
    memory.pipe({"/bucket/set/a/b.bin": b"123", "/bucket/set/c.bin": b"4567", "/bucket/set/d.txt": b"89"})
    (tmp_path / "out/a").mkdir(parents=True)
    (tmp_path / "out/a/b.bin").write_bytes(b"abc")  # of the right size
    (tmp_path / "out/c.bin").write_bytes(b"abcde")  # a byte too long
    version = hashlib.sha256(memory.ukey("/bucket/set/c.bin").encode()).hexdigest()[:8]
    (tmp_path / f"out/c.bin.{version}.partial").write_bytes(b"12345")
    assert download("memory://bucket/set/", tmp_path / "out", lambda name: name != "d.txt") == tmp_path / "out"
    assert contents(tmp_path / "out") == {"a/b.bin": b"abc", "c.bin": b"4567"}
    memory.pipe({"/bucket/few/a/b.bin": b"1"})  # a folder of one file is a folder
    assert download("memory://bucket/few", tmp_path / "few", lambda name: name == "a/b.bin") == tmp_path / "few"
    assert contents(tmp_path / "few") == {"a/b.bin": b"1"}
    one = download("memory://bucket/set/d.txt", tmp_path / "one", lambda name: False)  # which was asked for
    assert (one, one.read_bytes()) == (tmp_path / "one/d.txt", b"89")
    for path in ("/bucket/x.bin", "/bucket/set/../x.bin"):
        with monkeypatch.context() as patch:
            patch.setattr(type(memory), "find", lambda *_, path=path, **__: {path: {"size": 1}})
            with pytest.raises(InputError, match=rf"^memory://bucket/set: lists {path}, which lies outside of it"):
                download("memory://bucket/set", tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "find", lambda *_, **__: {"/bucket/set/a": {"size": 0, "type": "directory"}})
        with pytest.raises(InputError, match=r"^memory://bucket/set: holds no files"):
            download("memory://bucket/set", tmp_path / "out")


def test_a_store_that_states_no_size_is_refused(tmp_path, memory, monkeypatch):
    memory.pipe_file("/bucket/a.txt", b"abcdef")
    info = type(memory).info
    monkeypatch.setattr(type(memory), "info", lambda *words, **more: info(*words, **more) | {"size": None})
    monkeypatch.setattr(type(memory), "find", lambda *_, **__: {"/bucket/a.txt": {"type": "file"}})
    with pytest.raises(InputError, match=r"a\.txt: its store states no size, so that a cut would not be noticed"):
        download("memory://bucket/a.txt", tmp_path)
    assert not (tmp_path / "a.txt").exists()


def test_ctrl_c_stops_all_downloads(tmp_path, memory, monkeypatch):
    """It comes to the thread that waits for them."""
    stopped = threading.Event()

    def interrupt(*_):
        raise KeyboardInterrupt

    memory.pipe_file("/bucket/set/a", b"1")
    monkeypatch.setattr(Future, "result", interrupt)
    monkeypatch.setattr(remote, "Event", lambda: stopped)
    with pytest.raises(KeyboardInterrupt):
        download("memory://bucket/set", tmp_path / "set")
    assert stopped.is_set()


def test_files_are_downloaded_at_once_and_all_stop_with_one(tmp_path, memory, monkeypatch):
    together, read, asked, stopped = threading.Barrier(4), type(memory).cat_file, [], threading.Event()

    def read_together(files, path, start=None, end=None):
        asked.append(path)
        if start == 0:
            together.wait(timeout=300)
        if path.endswith("3"):
            raise PermissionError("no")
        if start:
            assert stopped.wait(300)
        return read(files, path, start=start, end=end)

    for number in range(4):
        memory.pipe_file(f"/bucket/many/{number}", bytes(50 * remote.PIECE))
    monkeypatch.setattr(remote, "AT_ONCE", 4)
    monkeypatch.setattr(remote, "Event", lambda: stopped)
    monkeypatch.setattr(type(memory), "cat_file", read_together)
    with pytest.raises(InputError, match=r"many/3: cannot be read \(no\)"):
        download("memory://bucket/many", tmp_path / "many")
    assert len(asked) <= 4 + 3
    monkeypatch.setattr(type(memory), "cat_file", read)
    assert len(contents(download("memory://bucket/many", tmp_path / "many"))) == 4
