"""What class folders become."""

import os

import pytest

from widemix.data_prep import image_folder, imagenet
from widemix.errors import InputError


@pytest.fixture
def fill(tmp_path, image):
    """`fill(name, ...)` puts a JPEG under each name."""

    def make(*names):
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            image(0).save(tmp_path / name, "JPEG")

    return make


def listed(dataset, split):
    return [(sample.name, sample.label) for sample in dataset.splits[split]]


def test_image_folder_labels_by_the_union_of_class_folders(tmp_path, fill):
    fill(
        "train/b/2.JPG",
        "train/b/1.jpeg",
        "train/a/sub/x.png",
        "train/a/y.jpg",
        "val/c/1.jpg",
        "val/b/1.jpg",
    )
    (tmp_path / "train/a/notes.txt").touch()
    (tmp_path / "train/a/.hidden.jpg").touch()
    (tmp_path / "train/.cache").mkdir()
    dataset = image_folder.read(tmp_path)
    assert dataset.classes == ("a", "b", "c")
    train = [("train/a/sub/x.png", 0), ("train/a/y.jpg", 0), ("train/b/1.jpeg", 1), ("train/b/2.JPG", 1)]
    assert listed(dataset, "train") == train
    assert listed(dataset, "val") == [("val/b/1.jpg", 1), ("val/c/1.jpg", 2)]
    assert dataset.splits["val"][1].image.read() == (tmp_path / "val/c/1.jpg").read_bytes()


@pytest.mark.parametrize(
    ("make", "word"),
    [
        ((), "none of the folders train, val and test"),
        (("train/",), "holds no class folders"),
        (("train/a/",), "holds no images"),
    ],
)
def test_empty_folders_are_refused(tmp_path, make, word):
    for name in make:
        (tmp_path / name).mkdir(parents=True)
    with pytest.raises(InputError, match=word):
        image_folder.read(tmp_path)


def test_what_is_no_file_is_not_waited_for(tmp_path, fill):
    fill("train/n00000001/a.JPEG")
    os.mkfifo(tmp_path / "train/n00000001/b.JPEG")
    samples = imagenet.read(tmp_path).splits["train"]
    with pytest.raises(InputError, match=r"b\.JPEG: is not a regular file"):
        samples[1].image.read()
    os.mkfifo(tmp_path / "wnids.txt")
    with pytest.raises(InputError, match=r"wnids\.txt: is not a regular file"):
        imagenet.read(tmp_path)


def test_what_a_folder_in_another_layout_needs(tmp_path, fill):
    fill("a/1.JPG", "b/1.png")
    with pytest.raises(InputError, match=r"; move its class folders into .*/train, and --holdout 10%"):
        image_folder.read(tmp_path)
    with pytest.raises(InputError, match=r", but images without classes; put them into folders .*/train/CLASS"):
        image_folder.read(tmp_path / "a")
    fill("test/c/1.jpg")
    assert list(image_folder.read(tmp_path).splits) == ["test"]


def test_a_class_may_be_called_as_a_split_beside_others(tmp_path, fill):
    fill("train/test/deep/1.jpg", "train/owl/1.jpg")
    assert image_folder.read(tmp_path).classes == ("owl", "test")
    (tmp_path / "train/owl").rename(tmp_path / "train/valid")
    with pytest.raises(InputError, match="train/test: is named as a split, and holds folders"):
        image_folder.read(tmp_path)


def test_all_classes_may_be_called_as_splits_are_where_they_hold_images(tmp_path, fill):
    fill("train/test/1.jpg", "train/valid/1.jpg")
    assert image_folder.read(tmp_path).classes == ("test", "valid")


def test_images_beside_the_class_folders_are_told(tmp_path, fill, capsys):
    """By their suffix, whatever its case; a split of one class with images and folders is one."""
    fill("val/x/1.jpg", "val/x/deep/2.jpg", "val/1.JPG", "val/2.png")
    (tmp_path / "val/notes.txt").touch()
    (tmp_path / "val/.hidden.jpg").touch()
    assert listed(image_folder.read(tmp_path), "val") == [("val/x/1.jpg", 0), ("val/x/deep/2.jpg", 0)]
    told = f"{tmp_path}/val: left out 2 images that are in no class folder\n"
    assert capsys.readouterr().err == told


def test_other_files_of_all_classes_and_splits_are_counted(tmp_path, fill, capsys):
    fill("train/a/1.jpg", "train/b/1.jpg", "val/a/1.jpg")
    for name in ("train/a/1.txt", "train/b/2.txt", "val/a/3.txt", "train/a/x.csv"):
        (tmp_path / name).touch()
    image_folder.read(tmp_path)
    assert [line.partition(": ")[2] for line in capsys.readouterr().err.splitlines()] == [
        "left out 3 files *.txt: no images by name or content",
        "left out 1 file *.csv: no images by name or content",
    ]


def test_imagenet_of_one_flat_split(tmp_path, fill, capsys):
    """Its test images have no labels, and no class is made of them."""
    fill("train/n00000001/a.JPEG", "test/ILSVRC2012_test_00000001.JPEG")
    assert list(imagenet.read(tmp_path).splits) == ["train"]
    assert f"{tmp_path}/test: left out, since nobody has published its labels" in capsys.readouterr().err


def test_imagenet_follows_wnids_txt(tmp_path, fill):
    fill("train/n00000002/a.JPEG", "train/n00000001/b.JPEG", "val/n00000002/c.JPEG")
    sorted_labels = [("train/n00000001/b.JPEG", 0), ("train/n00000002/a.JPEG", 1)]
    assert listed(imagenet.read(tmp_path), "train") == sorted_labels
    (tmp_path / "wnids.txt").write_text("n00000009\tnewt\n \t\nn00000002\ttench\nn00000001 goldfish, carp\n")
    dataset = imagenet.read(tmp_path)
    assert dataset.classes == ("n00000009", "n00000002", "n00000001")
    assert listed(dataset, "train") == [("train/n00000001/b.JPEG", 2), ("train/n00000002/a.JPEG", 1)]
    assert listed(dataset, "val") == [("val/n00000002/c.JPEG", 1)]


def test_imagenet_21k_has_no_splits(tmp_path, fill):
    fill("n00000002/a.JPEG", "n00000001/deep/b.JPEG", "n00000001/a.JPEG")
    dataset = imagenet.read(tmp_path)
    assert dataset.classes == ("n00000001", "n00000002")
    names = ["n00000001/a.JPEG", "n00000001/deep/b.JPEG", "n00000002/a.JPEG"]
    assert listed(dataset, "train") == list(zip(names, (0, 0, 1), strict=True))
    fill("n00000002/b.JPEG", "tench/a.JPEG")
    with pytest.raises(InputError, match="tench: not a WordNet id"):
        imagenet.read(tmp_path)


@pytest.mark.parametrize(
    ("wnids", "folder", "word"),
    [
        ("", "train/tench", "not a WordNet id"),
        ("", "train/n000000001", "not a WordNet id"),
        ("n000000001\n", "train/n00000001", "'n000000001' is not a WordNet id"),
        ("n00000001\n", "train/n00000002", r"is not in .*wnids\.txt"),
        ("n00000001\nn00000001\n", "train/n00000001", "n00000001 is listed twice"),
        ("n00000001\ntench\n", "train/n00000001", "'tench' is not a WordNet id"),
        ("tench n00000001\n", "train/n00000001", "'tench' is not a WordNet id"),
    ],
)
def test_imagenet_refuses_other_names(tmp_path, wnids, folder, word, fill):
    fill(f"{folder}/a.JPEG")
    if wnids:
        (tmp_path / "wnids.txt").write_text(wnids)
    with pytest.raises(InputError, match=word):
        imagenet.read(tmp_path)
