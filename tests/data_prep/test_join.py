"""Parts that several machines prepare, joined: the bytes of one preparation."""

import shutil

import numpy as np
import pytest

from tests import layouts
from tests.data_prep.conftest import contents
from tests.data_prep.test_adopt import main
from widemix.data_prep.join import join
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.errors import InputError, RunError
from widemix.formats.beton import open_beton
from widemix.formats.manifest import manifest_json, read_manifest

pytestmark = pytest.mark.usefixtures("small_pages")

PARTS = 3


def prepare_parts(source, origin, root, options, max_bad=0.01):
    folders = []
    for number in range(1, PARTS + 1):
        folders.append(root / str(number))
        settings = PrepSettings(part=f"{number}/{PARTS}", **options)
        prepare(source, origin, folders[-1], settings, processes=1, max_bad=max_bad)
    return folders


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {"restart_markers": False, "shuffle": False, "holdout": 0.3, "seed": 1},
        {"encoding": "coefficients"},
    ],
    ids=["markers", "own", "coefficients"],
)
def test_the_joined_parts_have_the_bytes_of_one_preparation(tmp_path, folder, image, options):
    """With images that a rule applied to, and some that cannot be decoded; pages of several images."""
    image(0, mode="L").save(folder / "train/ant/grey.png")
    for name in ("train/ant/bad.JPEG", "train/cat/bad.JPEG", "val/bee/bad.JPEG"):
        (folder / name).write_bytes(b"no image")
    prepare("image-folder", folder, tmp_path / "one", PrepSettings(**options), processes=1, max_bad=0.5)
    parts = prepare_parts("image-folder", folder, tmp_path, options, max_bad=0.5)
    counts = [len(open_beton(part / "train.beton")) for part in parts]
    assert sum(counts) == len(open_beton(tmp_path / "one" / "train.beton"))
    assert max(counts) - min(counts) <= 2
    for path in folder.rglob("*.*"):  # listed, but no longer read
        path.write_bytes(b"")
    join(parts[::-1], tmp_path / "joined", max_bad=0.5)
    assert contents(tmp_path / "joined") == contents(tmp_path / "one")


def test_arrays_are_joined_too(tmp_path):
    source, make = layouts.LAYOUTS["cifar10"]
    (tmp_path / "cifar").mkdir()
    make(tmp_path / "cifar")
    prepare(source, tmp_path / "cifar", tmp_path / "one", PrepSettings())
    parts = prepare_parts(source, tmp_path / "cifar", tmp_path, {})
    join(parts, tmp_path / "joined")
    assert contents(tmp_path / "joined") == contents(tmp_path / "one")


def test_parts_of_a_source_without_a_folder_are_joined(tmp_path):
    """And what was joined before is replaced only by force."""
    for part in ("1/2", "2/2", "13/13"):
        prepare("digits", None, tmp_path / part.replace("/", "of"), PrepSettings(splits="test", part=part))
    prepare("digits", None, tmp_path / "one", PrepSettings(splits="test"))
    halves, out = [tmp_path / "1of2", tmp_path / "2of2"], tmp_path / "joined"
    join(halves, out)
    assert contents(out) == contents(tmp_path / "one")
    (out / "test.beton").write_bytes(b"")
    with pytest.raises(InputError, match="joined: is already prepared; name another folder, or add --force"):
        join(halves, out)
    join(halves, out, force=True)
    assert contents(out) == contents(tmp_path / "one")
    with pytest.raises(InputError, match=r"^parts 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 2 more of 13 are missing"):
        join([tmp_path / "13of13"], out, force=True)
    with pytest.raises(InputError, match=r"13of13: is a part of another preparation than .*/1of2"):
        join([halves[0], tmp_path / "13of13"], out, force=True)
    assert contents(out) == contents(tmp_path / "one")


def test_parts_that_do_not_belong_together_are_refused(tmp_path, folder):
    parts = prepare_parts("image-folder", folder, tmp_path, {})
    out = tmp_path / "out"
    whole, other, copy = (tmp_path / name for name in ("whole", "other", "copy"))
    prepare("image-folder", folder, whole, PrepSettings(), processes=1)
    prepare("image-folder", folder, other, PrepSettings(part="3/3", quality=80), processes=1)
    shutil.copytree(parts[1], copy)
    for chosen, words in (
        (parts[:2], "^part 3 of 3 is missing"),
        (parts[2:], "^parts 1, 2 of 3 are missing"),
        ([*parts, copy], r"copy: is the same part as .*/2"),
        ([*parts[:2], other], r"other: is a part of another preparation than .*/1"),
        ([whole], "whole: is no part"),
    ):
        with pytest.raises(InputError, match=words):
            join(chosen, out)
    for package in ("pillow", "numpy"):
        shutil.rmtree(copy)
        shutil.copytree(parts[2], copy)
        manifest = read_manifest(copy)
        changed = manifest.model_copy(update={"versions": manifest.versions | {package: "1.0"}})
        (copy / "manifest.json").write_text(manifest_json(changed))
        with pytest.raises(InputError, match="copy: was prepared with other package versions"):
            join([*parts[:2], copy], out)
    with pytest.raises(InputError, match="lies within the source"):
        join(parts, folder / "train/out")
    (folder / "train/ant/new.JPEG").write_bytes((folder / "train/ant/0.JPEG").read_bytes())
    with pytest.raises(InputError, match=r"train/ant/new\.JPEG: is in none of the parts"):
        join(parts, out)
    (folder / "train/ant/new.JPEG").unlink()
    beton = open_beton(parts[1] / "train.beton")
    mapped = np.memmap(beton.path, np.uint8, "r+")
    mapped[beton.offset[2] + 100] ^= 1
    mapped.flush()
    with pytest.raises(InputError, match=r"train\.beton: sample 2 is damaged"):
        join(parts, out)
    assert not (out / "manifest.json").exists()


def test_parts_of_another_origin_or_classes_are_refused(tmp_path, jpeg):
    """And what may be anybody's is replaced by force alone."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for i in range(2):
            (tmp_path / name / f"{i}.jpg").write_bytes(jpeg(i))
        (tmp_path / name / "list.csv").write_text("path,label\n0.jpg,ant\n1.jpg,bee\n")
    parts = {}
    for number, name in ((1, "one"), (2, "one"), (2, "two")):
        to = parts[number, name] = tmp_path / f"{number}-{name}"
        prepare("csv", tmp_path / name / "list.csv", to, PrepSettings(part=f"{number}/2"), processes=1)
    out, own = tmp_path / "out", [parts[1, "one"], parts[2, "one"]]
    with pytest.raises(InputError, match=r"2-two: is a part of another preparation than .*/1-one"):
        join([parts[1, "one"], parts[2, "two"]], out)
    out.mkdir()
    (out / "train.beton").write_bytes(b"anybody's")
    with pytest.raises(InputError, match=r"out: holds train\.beton and no manifest\.json"):
        join(own, out)
    assert (out / "train.beton").read_bytes() == b"anybody's"
    assert join(own, out, force=True).classes == ("ant", "bee")
    (tmp_path / "one/list.csv").write_text("path,label\n0.jpg,ant\n1.jpg,cow\n")
    with pytest.raises(InputError, match="1-one: was prepared with other package versions or classes"):
        join(own, out, force=True)


def test_a_class_that_loses_all_is_found_at_the_join(tmp_path, folder):
    for path in (folder / "train/ant").iterdir():
        path.write_bytes(b"")
    parts = prepare_parts("image-folder", folder, tmp_path, {"shuffle": True}, max_bad=0.9)
    with pytest.raises(RunError, match="train: not one image of ant can be decoded"):
        join(parts, tmp_path / "out", max_bad=0.9)
    with pytest.raises(RunError, match=r"train: \d images cannot be decoded, more than 1 % of 21"):
        join(parts, tmp_path / "out")


def test_wrong_parts_are_one_line(tmp_path, folder, capsys):
    for words, line in (
        (["prep", "image-folder", "--from", folder, "--to", tmp_path / "a", "--part", "4/3"], "part '4/3': must be"),
        (["prep", "image-folder", "--from", folder, "--to", tmp_path / "a", "--part", "3"], "part '3': must be"),
        (["prep", "image-folder", "--from", folder, "--to", tmp_path / "a", "--part", "1/7"], "val has 6 samples"),
        (["join", folder, "--to", tmp_path / "a"], "has no manifest.json"),
    ):
        assert main([str(word) for word in words]) == 2
        assert line in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
    assert main(["prep", "image-folder", "--from", str(folder), "--to", str(tmp_path / "1"), "--part", "1/1"]) == 0
    assert main(["join", str(tmp_path / "1"), "--to", str(tmp_path / "a")]) == 0
    assert "train.beton: 21 samples" in capsys.readouterr().out
