"""Prepared folders and sources at URLs: fsspec's file system in memory, and a server here that cuts lines."""

import base64
import gzip
import hashlib
import os
import shutil
import threading
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest

from tests.data_prep.conftest import contents
from tests.data_prep.test_adopt import main
from tests.data_prep.writing import put
from widemix.data_prep import remote
from widemix.data_prep.prepare import prepare
from widemix.data_prep.remote import download
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.verify import verify
from widemix.errors import InputError, RunError
from widemix.formats.manifest import read_manifest
from widemix.launch.stage import stage

pytestmark = pytest.mark.usefixtures("small_pages")

MEMORY = "fsspec.implementations.memory.MemoryFileSystem"


@pytest.fixture(autouse=True)
def waits(system):
    """The seconds that were waited between tries."""
    waited = []
    system({"time.sleep": waited.append})
    return waited


@pytest.fixture
def prepared(tmp_path, folder):
    prepare("image-folder", folder, tmp_path / "prepared", PrepSettings(), processes=1)
    return tmp_path / "prepared"


@pytest.fixture
def memory():
    """fsspec's file system in memory, empty before and after."""
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    yield files
    files.store.clear()
    files.pseudo_dirs[:] = [""]


def sized(data: bytes, **headers: str) -> tuple[dict[str, str], bytes]:
    return {"Content-Length": str(len(data))} | {name.replace("_", "-"): text for name, text in headers.items()}, data


CHUNKED = {"Transfer-Encoding": "chunked"}
# Answers that state the end of a file otherwise than by its length: headers and body.
CODED = {
    "chunked": lambda data: (CHUNKED, b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)),
    "endless": lambda data: (CHUNKED, (b"10000\r\n" + bytes(65_536) + b"\r\n") * 64),
    "close": lambda data: ({}, data),
    "gzip": lambda data: sized(gzip.compress(data), Content_Encoding="gzip"),
    "gzip cut": lambda data: sized(gzip.compress(data)[:30], Content_Encoding="gzip"),
    "gzip bomb": lambda data: sized(gzip.compress(bytes(1 << 21)), Content_Encoding="gzip"),
    "br": lambda data: sized(data, Content_Encoding="br"),
    "part": lambda data: sized(data[: len(data) // 2]),
}


class Server(SimpleHTTPRequestHandler):
    """Serves ranges; cuts the line in the middle of some answers."""

    cuts: list[str]  # names of files whose next answer is cut short, one for each time
    asked: list[str]
    coding = "length"  # of a .csv: or one of `CODED`
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        path, status = Path(self.translate_path(self.path)), 200
        self.asked.append(path.name)
        if not path.is_file():
            super().do_GET()
            return
        data = path.read_bytes()
        if self.coded(path):
            status = 206 if self.coding == "part" else 200
            headers, body = CODED[self.coding](data)
            headers = headers | {"Connection": "close"}
        elif "Range" in self.headers:
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            status, last = 206, min(last, len(data) - 1)
            headers, body = sized(data[first : last + 1], Content_Range=f"bytes {first}-{last}/{len(data)}")
        else:
            headers, body = sized(data)
        if path.name in self.cuts:
            self.cuts.remove(path.name)
            body, self.close_connection = body[: len(body) // 2], True
        self.answer(status, headers, body)

    def do_HEAD(self):
        if self.coded(Path(self.translate_path(self.path))):
            self.answer(200, {"Connection": "close"}, b"")
        else:
            super().do_HEAD()

    def coded(self, path):
        return path.suffix == ".csv" and self.coding != "length"

    def answer(self, status, headers, body):
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name, text)
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(body)


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


def test_a_prepared_folder_is_staged_from_a_url(tmp_path, prepared, memory, system):
    memory.put(str(prepared), "/bucket/digits", recursive=True)
    copy = stage("memory://bucket/digits", tmp_path / "local")
    assert contents(copy) == contents(prepared)
    assert verify(copy) == []
    asked, read = [], type(memory).cat_file
    system({f"{MEMORY}.cat_file": lambda *words, **more: asked.append(words[1]) or read(*words, **more)})
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
    for words, line in (
        (["stage", "memory://bucket/nothing"], "memory://bucket/nothing/manifest.json: no such file"),
        (["stage", "nonsense://bucket/digits"], "nonsense://bucket/digits: cannot be opened (Protocol not known"),
        (["prep", "webdataset", "--from", "memory://bucket/nothing"], "memory://bucket/nothing: holds no files"),
    ):
        assert main([*words, "--to", str(tmp_path / "out")]) == 2
        assert line in capsys.readouterr().err


def version_of(memory, path):
    """What a part of a file is named by, so that it is not resumed with another one."""
    return hashlib.sha256(memory.ukey(path).encode()).hexdigest()[:8]


def test_shards_at_a_url_are_prepared(tmp_path, jpeg, memory, capsys):
    """The same bytes as from a folder; downloaded once, and a part of a file is completed."""
    shards, out = tmp_path / "shards", tmp_path / "out"
    for number in range(2):
        members = [(f"{i}.jpg", jpeg(10 * number + i)) for i in range(6)] + [
            (f"{i}.cls", str(i % 2)) for i in range(6)
        ]
        put(shards, {f"train-{number}.tar": dict(members)})
    memory.put(str(shards), "/bucket/shards", recursive=True)
    part = f"train-1.tar.{version_of(memory, '/bucket/shards/train-1.tar')}.partial"
    put(tmp_path / "out.source", {part: (shards / "train-1.tar").read_bytes()[:1000]})
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


SHA, MD5 = hashlib.sha256(b"abc").hexdigest(), hashlib.md5(b"abc").hexdigest()
ENCODED, TAG = base64.b64encode(bytes.fromhex(MD5)).decode(), {"StorageClass": "STANDARD"}


@pytest.mark.parametrize(
    ("stated", "kind"),
    [
        ({"lfs": {"sha256": SHA}, "md5Hash": "q80="}, "sha256"),
        ({"md5Hash": ENCODED}, "md5"),
        ({"ETag": f'"{MD5}"'} | TAG, "md5"),
        ({"ETag": f'"{"a" * 30}-2"'} | TAG, ""),  # uploaded in parts
        ({"ETag": f'"{"a" * 64}"'} | TAG, ""),
        ({"ETag": f'"{"a" * 32}"'}, ""),  # of any server
        ({"lfs": None}, ""),
    ],
)
def test_a_hash_that_the_store_states_is_compared(tmp_path, memory, system, stated, kind):
    find = type(memory).find
    system({f"{MEMORY}.find": lambda *words, **more: {path: i | stated for path, i in find(*words, **more).items()}})
    memory.pipe_file("/bucket/a.tar", b"abc")
    assert download("memory://bucket/a.tar", tmp_path).read_bytes() == b"abc"
    memory.pipe_file("/bucket/b.tar", b"abd")
    if kind:
        with pytest.raises(RunError, match=rf"b\.tar: differs from the {kind} that its store states"):
            download("memory://bucket/b.tar", tmp_path)
        assert os.listdir(tmp_path) == ["a.tar"]
    else:
        assert download("memory://bucket/b.tar", tmp_path).read_bytes() == b"abd"


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
        server.cuts += ["train.beton", "val.beton"]
        assert contents(download(f"{url}/prepared/", tmp_path / "downloaded")) == contents(prepared)


def test_a_file_is_read_in_ranges(tmp_path):
    """Of 16 MiB; of one that is cut only its own range comes again."""
    (tmp_path / "a.bin").write_bytes(os.urandom(1 << 20) * 40)
    with serve(tmp_path) as (url, server):
        server.cuts.append("a.bin")
        assert download(f"{url}/a.bin", tmp_path / "to").read_bytes() == (tmp_path / "a.bin").read_bytes()
        assert server.asked == ["a.bin"] * 4


@pytest.fixture
def table(tmp_path, folder):
    """A folder with a table of images by their paths in it."""
    place = tmp_path / "served" / "some images"
    shutil.copytree(folder / "train", place)
    images = sorted(path.relative_to(place.parent) for path in place.rglob("*") if path.is_file())
    rows = [f"{path},{number % 2}\n" for number, path in enumerate(images)]
    (place.parent / "list.csv").write_text("path,label\n" + "".join(rows))
    return place.parent / "list.csv", len(images)


NO_SIZE = "cannot be read (its server states no size, so that a cut would not be noticed"
NOT_WHOLE = "cannot be read (its server sends no whole {}, or more than 1 MiB; download it yourself)"


@pytest.mark.parametrize(
    ("coding", "cuts", "words"),
    [
        ("length", 0, ""),
        ("length", 1, ""),
        ("chunked", 0, ""),
        ("chunked", 1, ""),
        ("chunked", 50, "cannot be read (ClientPayloadError: "),
        ("close", 0, NO_SIZE),
        ("close", 1, NO_SIZE),
        ("gzip", 0, ""),
        *((f"gzip {how}", 0, NOT_WHOLE.format("gzip")) for how in ("cut", "bomb")),
        ("br", 0, NOT_WHOLE.format("br")),
        ("part", 0, "cannot be read (its server answers with a part that was not asked for; download it yourself)"),
        ("endless", 0, "cannot be read (its server answers with more than 1 MiB at once; download it yourself)"),
    ],
)
def test_half_a_table_is_never_a_whole_one(tmp_path, table, capsys, limits, coding, cuts, words):
    limits({"widemix.data_prep.remote.WHOLE": 1 << 20})
    path, count = table
    with serve(path.parent) as (url, server):
        server.cuts, server.coding = ["list.csv"] * cuts, coding
        if coding == "chunked":  # of whose size nothing is known, a part that a kill has left is begun anew
            part = version_of(remote.open_remote(url).files, f"{url}/list.csv")
            put(tmp_path / "o.source", {f"list.csv.{part}.partial": "path,label\n"})
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


def test_a_table_lists_nothing_outside_of_its_folder(tmp_path, table, capsys):
    path, _ = table
    path.write_text("path,label\n../secret.jpg,0\n")
    with serve(path.parent) as (url, _):
        assert main(["prep", "csv", "--from", f"{url}/list.csv", "--to", str(tmp_path / "o")]) == 2
    assert "lists ../secret.jpg, which lies outside of it" in capsys.readouterr().err


CUT, SHORT = OSError("the line was cut\nat 3 bytes"), b"12"


@pytest.fixture
def answers(memory, system):
    """`answers(...)`: what the store gives one after the other; returns what is asked."""

    def give(*given):
        left, asked = list(given), []

        def answer(_, path, start=None, end=None):
            asked.append((path, start, end))
            if isinstance(now := left.pop(0), Exception):
                raise now
            return now

        system({f"{MEMORY}.cat_file": answer})
        return asked

    memory.pipe_file("/bucket/a", b"whole")
    return give


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ([SHORT, CUT, CUT, SHORT, CUT], RunError, "(OSError: the line was cut); the same command resumes"),
        ([CUT] * 4 + [SHORT], RunError, "(2 of 3 bytes came: the line was cut, or the server gives no ranges); the"),
        ([PermissionError("no")], InputError, "a: cannot be read (no)"),  # which no further try cures
        ([FileNotFoundError()], InputError, "a: no such file"),
        ([IsADirectoryError()], InputError, "a: no such file"),
        ([type("NoCredentialsError", (OSError,), {})("none")], InputError, "a: needs credentials (none)"),
        ([CUT, CUT, SHORT, CUT, b"123"], None, ""),
    ],
)
def test_a_file_is_tried_again_after_longer_waits(answers, waits, given, kind, words):
    asked, file = answers(*given), remote.open_remote("memory://bucket")
    if kind is None:
        assert file.read("a", 5, 8) == b"123"
    else:
        with pytest.raises(kind) as error:
            file.read("a", 5, 8)
        assert str(error.value).startswith("memory://bucket/a")
        assert words in str(error.value)
    assert asked == [("/bucket/a", 5, 8)] * len(given)
    assert waits == [1, 2, 4, 8][: len(given) - 1]


def raises(error):
    def raise_it(*_, **__):
        raise error

    return raise_it


def test_a_store_that_cannot_be_reached_is_one_line(tmp_path, memory, system):
    for error, kind, words in (
        (type("NoCredentialsError", (Exception,), {})("none"), InputError, r"needs credentials \(none\)"),
        (OSError("away\nand more"), RunError, r"cannot be listed \(OSError: away\); the same command resumes$"),
    ):
        system({f"{MEMORY}.find": raises(error)})
        with pytest.raises(kind, match=rf"^memory://bucket/x: {words}"):
            download("memory://bucket/x", tmp_path / "x")
    system({"fsspec.core.url_to_fs": raises(ConnectionRefusedError("no"))})
    with pytest.raises(InputError, match=r"^ftp://host/x: cannot be reached \(no\)"):
        remote.open_remote("ftp://host/x")


def test_complete_files_are_kept_and_longer_ones_are_not(tmp_path, memory):
    memory.pipe({"/bucket/set/a/b.bin": b"123", "/bucket/set/c.bin": b"4567", "/bucket/set/d.txt": b"89"})
    put(tmp_path / "out", {"a/b.bin": "abc", "c.bin": "abcde"})  # of the right size, and a byte too long
    put(tmp_path / "out", {f"c.bin.{version_of(memory, '/bucket/set/c.bin')}.partial": "12345"})
    assert download("memory://bucket/set/", tmp_path / "out", lambda name: name != "d.txt") == tmp_path / "out"
    assert contents(tmp_path / "out") == {"a/b.bin": b"abc", "c.bin": b"4567"}
    memory.pipe({"/bucket/few/a/b.bin": b"1"})  # a folder of one file is a folder
    assert download("memory://bucket/few", tmp_path / "few", lambda name: name == "a/b.bin") == tmp_path / "few"
    assert contents(tmp_path / "few") == {"a/b.bin": b"1"}
    one = download("memory://bucket/set/d.txt", tmp_path / "one", lambda name: False)  # which was asked for
    assert (one, one.read_bytes()) == (tmp_path / "one/d.txt", b"89")


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        ({"/bucket/x.bin": {"size": 1}}, "lists /bucket/x.bin, which lies outside of it"),
        ({"/bucket/set/../x.bin": {"size": 1}}, "lists /bucket/set/../x.bin, which lies outside of it"),
        ({"/bucket/set/a": {"size": 0, "type": "directory"}}, "holds no files"),
        ({"/bucket/set/a": {"type": "file"}}, "its store states no size, so that a cut would not be noticed"),
    ],
)
def test_lists_of_stores_are_not_trusted(tmp_path, memory, system, listed, words):
    memory.pipe_file("/bucket/set/a", b"1")
    info = type(memory).info
    system({f"{MEMORY}.info": lambda *given, **more: info(*given, **more) | {"size": None}})
    system({f"{MEMORY}.find": lambda *_, **__: listed})
    with pytest.raises(InputError) as error:
        download("memory://bucket/set", tmp_path / "out")
    assert words in str(error.value)
    assert contents(tmp_path) == {} or list(contents(tmp_path).values()) == [b""]  # a part without bytes


MANY = 1000  # pieces of a file


def slowly(system, memory, limits, first=lambda path: None):
    """Pieces of 1 KiB, each of which takes 10 ms; returns those that are asked for."""
    asked, read = [], type(memory).cat_file

    def answer(files, path, start=None, end=None):
        asked.append(path)
        if start == 0:
            first(path)
        threading.Event().wait(0.01)
        return read(files, path, start=start, end=end)

    limits({"widemix.data_prep.remote.PIECE": 1024})
    system({f"{MEMORY}.cat_file": answer})
    return asked


def test_ctrl_c_stops_all_downloads(tmp_path, memory, system, limits):
    """It comes to the thread that waits for them."""
    begun = threading.Event()

    def interrupt(*_):
        assert begun.wait(300)
        raise KeyboardInterrupt

    memory.pipe_file("/bucket/set/a", bytes(MANY * 1024))
    asked = slowly(system, memory, limits, first=lambda _: begun.set())
    system({"concurrent.futures.Future.result": interrupt})
    with pytest.raises(KeyboardInterrupt):
        download("memory://bucket/set", tmp_path / "set")
    assert 0 < len(asked) < MANY


def test_files_come_at_once_and_all_stop_with_one(tmp_path, memory, system, limits):
    together = threading.Barrier(8)

    def begin(path):
        together.wait(timeout=300)
        if path.endswith("3"):
            raise PermissionError("no")

    for number in range(8):
        memory.pipe_file(f"/bucket/many/{number}", bytes(MANY * 1024))
    asked = slowly(system, memory, limits, first=begin)
    with pytest.raises(InputError, match=r"many/3: cannot be read \(no\)"):
        download("memory://bucket/many", tmp_path / "many")
    assert 8 <= len(asked) < 7 * MANY
