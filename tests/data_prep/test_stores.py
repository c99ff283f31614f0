"""Sources and prepared folders on S3 (moto), Google's storage (an emulator) and Hugging Face (a server here)."""

import json
import os
import socket
import threading
from contextlib import contextmanager, suppress
from urllib.parse import quote
from urllib.request import Request, urlopen

import fsspec
import pytest

from tests.models import hub_server
from widemix.data_prep.prepare import prepare
from widemix.data_prep.remote import download
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.verify import verify
from widemix.errors import InputError, RunError
from widemix.launch.stage import stage

# Else gcsfs asks for the kind of each bucket over gRPC, which the emulator does not speak, and keeps trying.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}


@contextmanager
def line(to: int, cuts: list[int]):
    """A proxy that cuts an answer after each of these numbers of bytes, those that are as large; yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def pump(source, target, is_answer):
            sent = 0
            with suppress(OSError):
                while data := source.recv(1 << 16):
                    sent += len(data)
                    if is_answer and cuts and sent > cuts[0]:
                        cuts.pop(0)
                        break
                    target.sendall(data)
                for end in (source, target):  # close() alone would wait for the other thread, which reads it
                    with suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)
                    end.close()

        def serve():
            with suppress(OSError):
                while True:
                    client, _ = listening.accept()
                    server = socket.create_connection(("127.0.0.1", to))
                    for ends in ((client, server, False), (server, client, True)):
                        threading.Thread(target=pump, args=ends, daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield listening.getsockname()[1]


class Store:
    """A store of an empty bucket or repository, and how its client reaches it through another port."""

    def __init__(self, kind, base, port, write, reach):
        self.kind, self.base, self.port, self.write, self._reach = kind, base, port, write, reach
        self.reach(port)

    def reach(self, port):
        self._reach(port)
        fsspec.filesystem(self.kind).clear_instance_cache()

    def upload(self, folder, prefix):
        for path in folder.rglob("*"):
            if path.is_file():
                self.write(f"{prefix}/{path.relative_to(folder)}", path.read_bytes())
        return f"{self.base}/{prefix}"

    @contextmanager
    def cut(self, url):
        """Lines that are cut, of which each is used up in this block."""
        if self.kind == "hf":
            self.hub.cuts += [f"{url.removeprefix('hf://')}/{name}" for name in ("train.beton", "manifest.json")]
            yield
            assert self.hub.cuts == []
            return
        cuts = [2 << 20, 1 << 20, 3 << 20]
        with line(self.port, cuts) as port:
            self.reach(port)
            yield
            assert cuts == []
        self.reach(self.port)


@contextmanager
def on_s3(monkeypatch, tmp_path):
    for name in ("s3fs", "boto3", "moto.server"):
        pytest.importorskip(name, reason=f"{name} is not installed: pip install 'moto[server]' s3fs")
    import boto3
    from moto.server import ThreadedMotoServer

    for key, value in (KEYS | {"AWS_EC2_METADATA_DISABLED": "true", "HOME": str(tmp_path)}).items():
        monkeypatch.setenv(key, value)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    port = server.get_host_and_port()[1]

    def write(name, data):
        boto3.client("s3").put_object(Bucket="images", Key=name, Body=data)

    reach = lambda port: monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")  # noqa: E731
    store = Store("s3", "s3://images", port, write, reach)
    boto3.client("s3").create_bucket(Bucket="images")
    yield store
    server.stop()


@contextmanager
def on_gs(monkeypatch, tmp_path):
    for name in ("gcsfs", "gcp_storage_emulator"):
        pytest.importorskip(name, reason=f"{name} is not installed: pip install gcp-storage-emulator gcsfs")
    from gcp_storage_emulator.server import create_server

    server = create_server("127.0.0.1", 0, in_memory=True, default_bucket="images")
    server.start()
    port = server._api._httpd.server_port

    def write(name, data):
        url = f"http://127.0.0.1:{port}/upload/storage/v1/b/images/o?uploadType=media&name={quote(name, safe='')}"
        headers = {"Content-Type": "application/octet-stream"}
        urlopen(Request(url, data=data, headers=headers, method="POST")).close()

    def reach(port):
        options = {"token": "anon", "endpoint_url": f"http://127.0.0.1:{port}"}
        monkeypatch.setitem(fsspec.config.conf, "gs", options)

    yield Store("gs", "gs://images", port, write, reach)
    server.stop()


@contextmanager
def on_hf(monkeypatch, tmp_path):
    entry = "datasets/lab/images"
    with hub_server.serve() as hub:
        options = {"endpoint": hub.address, "token": "hf_of_this_test"}
        monkeypatch.setitem(fsspec.config.conf, "hf", options)
        write = lambda name, data: hub.files.__setitem__(f"{entry}/{name}", data)  # noqa: E731
        store = Store("hf", f"hf://{entry}", 0, write, lambda port: None)
        store.hub = hub
        yield store
        store.reach(0)


@pytest.fixture(params=[on_s3, on_gs, on_hf], ids=["s3", "gs", "hf"])
def store(request, monkeypatch, tmp_path, limits, system):
    limits({"widemix.data_prep.remote.WAIT_S": 0.01})
    if request.param is on_hf:
        system({"time.sleep": lambda _: None})  # of the library's own tries
    with request.param(monkeypatch, tmp_path) as store:
        yield store


def test_sources_and_prepared_folders_come_whole_over_cut_lines(store, folder, tmp_path):
    origin = download(store.upload(folder, "set"), tmp_path / "downloaded")
    prepare("image-folder", origin, tmp_path / "there", PrepSettings(), processes=1)
    prepare("image-folder", folder, tmp_path / "here", PrepSettings(), processes=1)
    for name in ("train.beton", "val.beton", "train.crc32c", "train.sources"):
        assert (tmp_path / "there" / name).read_bytes() == (tmp_path / "here" / name).read_bytes()
    url = store.upload(tmp_path / "here", "prepared")
    with store.cut(url):
        copy = stage(url, tmp_path / "disk")
    assert verify(copy) == []
    texts = [(place / "manifest.json").read_text() for place in (copy, tmp_path / "here")]
    assert json.loads(texts[0]) == json.loads(texts[1])


def test_each_mistake_is_one_line(store, folder, tmp_path, monkeypatch, limits, capfd):
    url, nothing = store.upload(folder, "set"), {"hf": "hf://datasets/lab/nothing"}.get(store.kind)
    nothing = nothing or f"{store.kind}://nobodys/set"
    for wrong, words in ((nothing, f"{nothing}: "), (f"{url}t", f"{url}t: holds no files")):
        with pytest.raises(InputError, match=words) as raised:
            download(wrong, tmp_path / "downloaded")
        assert "\n" not in str(raised.value)
    with pytest.raises(InputError, match=rf"{nothing}/manifest\.json: no such file"):
        stage(nothing, tmp_path / "disk")
    assert "Traceback" not in capfd.readouterr().err
    if store.kind == "hf":
        store.hub.refuse = 401
        store.reach(0)
        with pytest.raises(InputError, match=r"set: cannot be listed .*401") as raised:
            download(url, tmp_path / "downloaded")
        assert "\n" not in str(raised.value)
    if store.kind == "s3":
        for key in KEYS:
            monkeypatch.delenv(key)
        store.reach(store.port)
        for action in (download, stage):
            with pytest.raises(InputError, match=r"needs credentials .*AWS_ACCESS_KEY_ID"):
                action(url, tmp_path / "x")
        for key, value in KEYS.items():
            monkeypatch.setenv(key, value)
        limits({"widemix.data_prep.remote.TRIES": 1})
        store.reach(1)
        with pytest.raises(RunError, match="the same command resumes"):
            stage(url, tmp_path / "disk")
