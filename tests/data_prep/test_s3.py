"""Sources and prepared folders on S3, against moto's server; needs `pip install 'moto[server]' s3fs`."""

import json
import socket
import threading
from contextlib import contextmanager, suppress

import pytest

from widemix.data_prep.prepare import prepare
from widemix.data_prep.remote import download
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.verify import verify
from widemix.errors import InputError, RunError
from widemix.launch.stage import stage

for name in ("s3fs", "boto3", "moto.server"):
    pytest.importorskip(name, reason=f"{name} is not installed: pip install 'moto[server]' s3fs")

import boto3  # noqa: E402
import fsspec  # noqa: E402
from moto.server import ThreadedMotoServer  # noqa: E402

KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture(autouse=True)
def server(monkeypatch, tmp_path, limits):
    """An empty store with one bucket, `images`."""
    limits({"widemix.data_prep.remote.WAIT_S": 0.01})
    for key, value in (KEYS | {"AWS_EC2_METADATA_DISABLED": "true", "HOME": str(tmp_path)}).items():
        monkeypatch.setenv(key, value)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    port = server.get_host_and_port()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    fsspec.filesystem("s3").clear_instance_cache()
    boto3.client("s3").create_bucket(Bucket="images")
    yield port
    server.stop()


def upload(folder, prefix):
    client = boto3.client("s3")
    for path in folder.rglob("*"):
        if path.is_file():
            client.upload_file(str(path), "images", f"{prefix}/{path.relative_to(folder)}")


@contextmanager
def line(to: int, cuts: list[int]):
    """A proxy that cuts an answer after each of these numbers of bytes, those that are as large; yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def pump(source, target, is_answer):
            sent = 0
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
            while True:
                try:
                    client, _ = listening.accept()
                except OSError:
                    return
                server = socket.create_connection(("127.0.0.1", to))
                for ends in ((client, server, False), (server, client, True)):
                    threading.Thread(target=_quietly, args=(pump, *ends), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield listening.getsockname()[1]


def _quietly(function, *arguments):
    with suppress(OSError):
        function(*arguments)


def test_a_source_is_prepared_and_a_prepared_folder_staged(server, folder, tmp_path):
    upload(folder, "set")
    origin = download("s3://images/set", tmp_path / "downloaded")
    prepare("image-folder", origin, tmp_path / "there", PrepSettings(), processes=1)
    prepare("image-folder", folder, tmp_path / "here", PrepSettings(), processes=1)
    for name in ("train.beton", "val.beton", "train.crc32c", "train.sources"):
        assert (tmp_path / "there" / name).read_bytes() == (tmp_path / "here" / name).read_bytes()
    upload(tmp_path / "here", "prepared")
    copy = stage("s3://images/prepared", tmp_path / "disk")
    assert verify(copy) == []
    assert json.loads((copy / "manifest.json").read_text()) == json.loads(
        (tmp_path / "here/manifest.json").read_text()
    )


def test_a_line_that_is_cut_is_resumed(server, folder, tmp_path, monkeypatch):
    prepare("image-folder", folder, tmp_path / "here", PrepSettings(), processes=1)
    upload(tmp_path / "here", "prepared")
    cuts = [2 << 20, 1 << 20, 3 << 20]
    with line(server, cuts) as port:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        fsspec.filesystem("s3").clear_instance_cache()
        copy = stage("s3://images/prepared", tmp_path / "disk")
        assert cuts == []
    assert verify(copy) == []


def test_each_mistake_is_one_line(folder, tmp_path, monkeypatch, limits):
    upload(folder, "set")
    for url, words in (
        ("s3://nobodys/set", "s3://nobodys/set: cannot be listed"),
        ("s3://images/sett", "s3://images/sett: holds no files"),
    ):
        with pytest.raises(InputError, match=words) as raised:
            download(url, tmp_path / "downloaded")
        assert "\n" not in str(raised.value)
    with pytest.raises(InputError, match=r"s3://nobodys/set/manifest\.json: no such file"):
        stage("s3://nobodys/set", tmp_path / "disk")
    for key in KEYS:
        monkeypatch.delenv(key)
    fsspec.filesystem("s3").clear_instance_cache()
    for action in (download, stage):
        with pytest.raises(InputError, match=r"needs credentials .*AWS_ACCESS_KEY_ID"):
            action("s3://images/set", tmp_path / "x")
    for key, value in KEYS.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    limits({"widemix.data_prep.remote.TRIES": 1})
    fsspec.filesystem("s3").clear_instance_cache()
    with pytest.raises(RunError, match="the same command resumes"):
        stage("s3://images/set", tmp_path / "disk")
