"""A source and a prepared folder in a dataset repository of Hugging Face, against a server here."""

import fsspec
import huggingface_hub
import pytest

from tests.models import hub_server
from widemix.data_prep.prepare import prepare
from widemix.data_prep.remote import download
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.verify import verify
from widemix.errors import InputError
from widemix.launch.stage import stage

ENTRY = "datasets/lab/images"


@pytest.fixture
def hub(monkeypatch, system):
    """An empty hub, whose lines the library tries again without waiting."""
    system({"time.sleep": lambda _: None})
    with hub_server.serve() as hub:
        monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": hub.address, "token": "hf_of_this_test"})
        huggingface_hub.HfFileSystem.clear_instance_cache()
        yield hub
        huggingface_hub.HfFileSystem.clear_instance_cache()


def upload(hub, folder, to):
    for path in folder.rglob("*"):
        if path.is_file():
            hub.files[f"{ENTRY}/{to}/{path.relative_to(folder)}"] = path.read_bytes()


def test_folders_come_whole_over_lines_that_are_cut(hub, folder, tmp_path):
    upload(hub, folder, "set")
    hub.cuts += sorted(hub.files)[:2]
    origin = download(f"hf://{ENTRY}/set", tmp_path / "downloaded")
    prepare("image-folder", origin, tmp_path / "there", PrepSettings(), processes=1)
    prepare("image-folder", folder, tmp_path / "here", PrepSettings(), processes=1)
    for name in ("train.beton", "val.beton", "train.crc32c", "train.sources"):
        assert (tmp_path / "there" / name).read_bytes() == (tmp_path / "here" / name).read_bytes()
    upload(hub, tmp_path / "here", "prepared")
    hub.cuts.append(f"{ENTRY}/prepared/train.beton")
    copy = stage(f"hf://{ENTRY}/prepared", tmp_path / "disk")
    assert verify(copy) == []
    assert hub.cuts == []


def test_each_mistake_is_one_line(hub, folder, tmp_path):
    upload(hub, folder, "set")
    for url, words in (
        ("hf://datasets/lab/nothing", r"datasets/lab/nothing: cannot be listed \(FileNotFoundError: .*not found"),
        (f"hf://{ENTRY}/sett", "sett: holds no files"),
    ):
        with pytest.raises(InputError, match=words) as raised:
            download(url, tmp_path / "downloaded")
        assert "\n" not in str(raised.value)
    with pytest.raises(InputError, match=r"nothing/manifest\.json: no such file"):
        stage("hf://datasets/lab/nothing", tmp_path / "disk")
    hub.refuse = 401
    huggingface_hub.HfFileSystem.clear_instance_cache()
    with pytest.raises(InputError, match=r"set: cannot be listed .*401") as raised:
        download(f"hf://{ENTRY}/set", tmp_path / "downloaded")
    assert "\n" not in str(raised.value)
