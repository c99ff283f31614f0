"""Sources and prepared folders on Google's storage, against an emulator; `pip install gcp-storage-emulator gcsfs`."""

import os
from urllib.parse import quote
from urllib.request import Request, urlopen

import pytest

from tests.data_prep.test_s3 import line
from widemix.data_prep.prepare import prepare
from widemix.data_prep.remote import download
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.verify import verify
from widemix.errors import InputError
from widemix.launch.stage import stage

# Else gcsfs asks for the kind of each bucket over gRPC, which the emulator does not speak, and keeps trying.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
for name in ("gcsfs", "gcp_storage_emulator"):
    pytest.importorskip(name, reason=f"{name} is not installed: pip install gcp-storage-emulator gcsfs")

import fsspec  # noqa: E402
from gcp_storage_emulator.server import create_server  # noqa: E402


@pytest.fixture
def address(monkeypatch, limits):
    """The address of an empty store with one bucket, `images`."""
    limits({"widemix.data_prep.remote.WAIT_S": 0.01})
    server = create_server("127.0.0.1", 0, in_memory=True, default_bucket="images")
    server.start()
    address = f"127.0.0.1:{server._api._httpd.server_port}"
    use(monkeypatch, address)
    yield address
    server.stop()


def use(monkeypatch, address):
    monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon", "endpoint_url": f"http://{address}"})
    fsspec.filesystem("gs").clear_instance_cache()


def upload(address, folder, prefix):
    for path in folder.rglob("*"):
        if path.is_file():
            name = quote(f"{prefix}/{path.relative_to(folder)}", safe="")
            url = f"http://{address}/upload/storage/v1/b/images/o?uploadType=media&name={name}"
            headers = {"Content-Type": "application/octet-stream"}
            urlopen(Request(url, data=path.read_bytes(), headers=headers, method="POST")).close()


def test_a_source_is_prepared_and_a_prepared_folder_staged(address, folder, tmp_path):
    upload(address, folder, "set")
    origin = download("gs://images/set", tmp_path / "downloaded")
    prepare("image-folder", origin, tmp_path / "there", PrepSettings(), processes=1)
    prepare("image-folder", folder, tmp_path / "here", PrepSettings(), processes=1)
    for name in ("train.beton", "val.beton", "train.crc32c", "train.sources"):
        assert (tmp_path / "there" / name).read_bytes() == (tmp_path / "here" / name).read_bytes()
    upload(address, tmp_path / "here", "prepared")
    assert verify(stage("gs://images/prepared", tmp_path / "disk")) == []


def test_a_line_that_is_cut_is_resumed(address, folder, tmp_path, monkeypatch):
    prepare("image-folder", folder, tmp_path / "here", PrepSettings(), processes=1)
    upload(address, tmp_path / "here", "prepared")
    cuts = [2 << 20, 1 << 20]
    with line(int(address.rpartition(":")[2]), cuts) as port:
        use(monkeypatch, f"127.0.0.1:{port}")
        assert verify(stage("gs://images/prepared", tmp_path / "disk")) == []
        assert cuts == []


def test_each_mistake_is_one_line(address, folder, tmp_path, capfd):
    upload(address, folder, "set")
    for url, words in (("gs://nobodys/set", "gs://nobodys/set: "), ("gs://images/sett", "sett: holds no files")):
        with pytest.raises(InputError, match=words) as raised:
            download(url, tmp_path / "downloaded")
        assert "\n" not in str(raised.value)
    with pytest.raises(InputError, match=r"gs://nobodys/set/manifest\.json: no such file"):
        stage("gs://nobodys/set", tmp_path / "disk")
    assert "Traceback" not in capfd.readouterr().err
