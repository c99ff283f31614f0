"""The official tars against the class folders that they unpack to."""

import io
import shutil
import tarfile

import numpy as np
import pytest
from scipy.io import savemat

from widemix.data_prep import imagenet
from widemix.data_prep.imagenet_tars import DEVKIT, TRAIN, VAL
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.errors import InputError

WNIDS = ["n01440764", "n01443537", "n01484850"]
IDS = {"n01440764": 449, "n01443537": 2, "n01484850": 1}  # the devkit's numbers follow another order


def add(tar, name, data):
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


@pytest.fixture
def images(jpeg):
    """{split: {wnid: {name: JPEG}}}, names as ImageNet has them."""

    train = {wnid: {f"{wnid}_{n}.JPEG": jpeg(n) for n in (10, 2)} for wnid in WNIDS}
    numbers = {"n01440764": (2, 5), "n01443537": (1,), "n01484850": (3, 4)}
    val = {wnid: {f"ILSVRC2012_val_{n:08}.JPEG": jpeg(20 + n) for n in numbers[wnid]} for wnid in WNIDS}
    return {"train": train, "val": val}


@pytest.fixture
def folders(tmp_path, images):
    for split, classes in images.items():
        for wnid, files in classes.items():
            for name, data in files.items():
                path = tmp_path / "folders" / split / wnid / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
    return tmp_path / "folders"


@pytest.fixture
def tars(tmp_path, images):
    root = tmp_path / "tars"
    root.mkdir()
    with tarfile.open(root / TRAIN, "w") as outer:
        for wnid in reversed(WNIDS):
            inner = io.BytesIO()
            with tarfile.open(fileobj=inner, mode="w") as tar:
                for name, data in images["train"][wnid].items():
                    add(tar, name, data)
            add(outer, f"{wnid}.tar", inner.getvalue())
    files = {name: (wnid, data) for wnid, found in images["val"].items() for name, data in found.items()}
    with tarfile.open(root / VAL, "w") as tar:
        for name in sorted(files):
            add(tar, name, files[name][1])
    truth = "".join(f"{IDS[files[name][0]]}\n" for name in sorted(files)).encode()
    kinds = [("ILSVRC2012_ID", object), ("WNID", object), ("num_children", object)]
    synsets = np.array([[(number, wnid, 0)] for wnid, number in IDS.items()], dtype=kinds)
    meta = io.BytesIO()
    savemat(meta, {"synsets": synsets})
    with tarfile.open(root / DEVKIT, "w:gz") as tar:
        add(tar, "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt", truth)
        add(tar, "ILSVRC2012_devkit_t12/data/meta.mat", meta.getvalue())
    return root


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.beton")}


@pytest.mark.parametrize("wnids", [None, [*WNIDS[::-1], "n09999999"]])
def test_tars_give_the_bytes_of_folders(tmp_path, folders, tars, wnids):
    for origin in (folders, tars):
        if wnids:
            (origin / "wnids.txt").write_text("\n".join(wnids))
        manifest = prepare("imagenet", origin, tmp_path / f"of-{origin.name}", PrepSettings(), processes=1)
        assert manifest.classes == tuple(wnids or WNIDS)
    assert contents(tmp_path / "of-tars") == contents(tmp_path / "of-folders")
    assert len(manifest.exceptions) == 3  # none of the three is the official file


def test_one_tar_alone(tars):
    """Only what it needs is read and checked: train needs no devkit."""
    assert [found["file"] for found in imagenet.read(tars).check_files()] == [TRAIN, VAL, DEVKIT]
    for name in (TRAIN, VAL):
        (tars / name).rename(tars / "away")
        (other,) = {TRAIN, VAL} - {name}
        dataset = imagenet.read(tars)
        assert list(dataset.splits) == ["train" if other == TRAIN else "val"]
        assert [found["file"] for found in dataset.check_files()] == [other, *([DEVKIT] if other == VAL else [])]
        (tars / "away").rename(tars / name)
    (tars / VAL).unlink()
    (tars / DEVKIT).unlink()
    assert [found["file"] for found in imagenet.read(tars).check_files()] == [TRAIN]


def test_other_members_of_the_train_tar_are_no_classes(tars):
    before = {sample.name for sample in imagenet.read(tars).splits["train"]}
    assert len(before) == 6
    with tarfile.open(tars / TRAIN, "a") as tar:
        add(tar, "README.txt", b"x")
        add(tar, "._n01440764.tar", b"x")
        inner = io.BytesIO()
        with tarfile.open(fileobj=inner, mode="w") as packed:
            add(packed, "./n01484850/a.JPEG", b"x")
        add(tar, "./more/n01484850.tar", inner.getvalue())
        folder = tarfile.TarInfo("old.tar")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
    before |= {"train/n01484850/a.JPEG"}
    assert {sample.name for sample in imagenet.read(tars).splits["train"]} == before


@pytest.mark.parametrize("name", [TRAIN, VAL, DEVKIT])
def test_cut_tars_are_named(tars, name):
    whole = (tars / name).read_bytes()
    for cut in (0, len(whole) // 9, len(whole) // 3):
        (tars / name).write_bytes(whole[:cut])
        with pytest.raises(InputError, match=name):
            imagenet.read(tars)


def test_what_is_missing_or_strange_is_named(tars):
    (tars / "wnids.txt").write_text("\n".join(WNIDS[1:]))
    with pytest.raises(InputError, match=r"holds n01440764, which is not in .*wnids\.txt"):
        imagenet.read(tars)
    (tars / TRAIN).rename(tars / "away")
    (tars / "wnids.txt").write_text(f"{WNIDS[0]}\n{WNIDS[2]}")
    with pytest.raises(
        InputError, match=r"img_val\.tar: holds n01443537, which is not in .*wnids\.txt"
    ):  # of one image
        imagenet.read(tars)
    (tars / "away").rename(tars / TRAIN)
    (tars / "wnids.txt").unlink()
    (tars / "train").mkdir()
    with pytest.raises(InputError, match="and the folder train; keep only one of them"):
        imagenet.read(tars)
    (tars / "train").rmdir()
    (tars / DEVKIT).unlink()
    with pytest.raises(InputError, match=f"{DEVKIT}: is missing"):
        imagenet.read(tars)


def test_the_devkit_labels_a_flat_folder_too(tars, folders):
    expected = {(s.name.split("/")[-1], s.label) for s in imagenet.read(folders).splits["val"]}
    for path in sorted(folders.glob("val/*/*.JPEG")):
        path.rename(folders / "val" / path.name)
    for folder in folders.glob("val/n*"):
        folder.rmdir()
    shutil.copy(tars / DEVKIT, folders)
    assert {(s.name.split("/")[-1], s.label) for s in imagenet.read(folders).splits["val"]} == expected
    (folders / "val/ILSVRC2012_val_00000006.JPEG").write_bytes(b"x")
    with pytest.raises(InputError, match=rf"ILSVRC2012_val_00000006\.JPEG: has no label in .*{DEVKIT}"):
        imagenet.read(folders)
    (folders / "val/ILSVRC2012_val_00000006.JPEG").unlink()
    shutil.rmtree(folders / "train/n01443537")
    with pytest.raises(
        InputError, match=r"val_00000001\.JPEG: is of class n01443537, which the training split lacks"
    ):
        imagenet.read(folders)


def test_classes_are_those_of_both_tars(tars):
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w") as tar:
        add(tar, f"{WNIDS[1]}_1.JPEG", b"x")
    with tarfile.open(tars / TRAIN, "w") as outer:
        add(outer, f"{WNIDS[1]}.tar", inner.getvalue())
    dataset = imagenet.read(tars)
    assert dataset.classes == tuple(WNIDS)
    assert [sample.label for sample in dataset.splits["train"]] == [1]


def test_a_tar_without_images_is_named(tars):
    with tarfile.open(tars / TRAIN, "w"):
        pass
    with pytest.raises(InputError, match=rf"{TRAIN}: holds no images; download it again"):
        imagenet.read(tars)


def test_val_and_devkit_must_agree(tars):
    with tarfile.open(tars / VAL, "a") as tar:
        add(tar, "ILSVRC2012_val_00000006.JPEG", b"x")
    with pytest.raises(InputError, match=f"holds 6 images, and {DEVKIT} labels 5"):
        imagenet.read(tars)
    with tarfile.open(tars / VAL, "w") as tar:
        for number in (1, 2, 3, 5):
            add(tar, f"ILSVRC2012_val_0000000{number}.JPEG", b"x")
    with pytest.raises(InputError, match=f"holds 4 images, and {DEVKIT} labels 5"):
        imagenet.read(tars)
    for wrong in (6, 0, "x"):
        with tarfile.open(tars / VAL, "w") as tar:
            for number in (1, 2, 3, 4, wrong):
                add(tar, f"ILSVRC2012_val_0000000{number}.JPEG", b"x")
        with pytest.raises(InputError, match=rf"has no label for ILSVRC2012_val_0000000{wrong}\.JPEG"):
            imagenet.read(tars)
