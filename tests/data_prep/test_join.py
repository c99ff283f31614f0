"""Parts that several machines prepare, joined: the bytes of one preparation."""

import shutil

import numpy as np
import pytest

from tests import layouts
from tests.data_prep.conftest import contents
from tests.data_prep.test_adopt import main
from tests.data_prep.writing import put
from widemix.data_prep.join import join
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.errors import InputError, RunError
from widemix.formats.beton import open_beton
from widemix.formats.manifest import manifest_json, read_manifest

pytestmark = pytest.mark.usefixtures("small_pages")


def parts_of(source, origin, root, count=3, max_bad=0.01, **options):
    """The folders of the parts, in `root`."""
    for number in range(1, count + 1):
        settings = PrepSettings(part=f"{number}/{count}", **options)
        prepare(source, origin, root / str(number), settings, processes=1, max_bad=max_bad)
    return [root / str(number) for number in range(1, count + 1)]


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {"restart_markers": False, "shuffle": False, "holdout": 0.3, "seed": 1},
        {"encoding": "coefficients"},
    ],
    ids=["markers", "own", "coefficients"],
)
def test_joined_parts_have_the_bytes_of_one_preparation(tmp_path, folder, image, options):
    """With images that a rule applied to, and some that cannot be decoded; pages of several images."""
    image(0, mode="L").save(folder / "train/ant/grey.png")
    put(folder, dict.fromkeys(("train/ant/bad.JPEG", "train/cat/bad.JPEG", "val/bee/bad.JPEG"), b"no image"))
    prepare("image-folder", folder, tmp_path / "one", PrepSettings(**options), processes=1, max_bad=0.5)
    parts = parts_of("image-folder", folder, tmp_path, max_bad=0.5, **options)
    counts = [len(open_beton(part / "train.beton")) for part in parts]
    assert sum(counts) == len(open_beton(tmp_path / "one" / "train.beton"))
    assert max(counts) - min(counts) <= 2
    for path in folder.rglob("*.*"):  # listed, but no longer read
        path.write_bytes(b"")
    join(parts[::-1], tmp_path / "joined", max_bad=0.5)
    assert contents(tmp_path / "joined") == contents(tmp_path / "one")


@pytest.mark.parametrize("source", ["cifar10", "digits"])
def test_parts_of_arrays_are_joined_too(tmp_path, source, capsys):
    """Also without a folder; and what was joined before is replaced only by force."""
    make, origin, out = layouts.LAYOUTS[source][1], None, tmp_path / "joined"
    if make:
        origin = tmp_path / "in"
        origin.mkdir()
        make(origin)
    parts = parts_of(source, origin, tmp_path, count=2, splits="test")
    prepare(source, origin, tmp_path / "one", PrepSettings(splits="test"))
    assert main(["join", *map(str, parts), "--to", str(out)]) == 0
    assert "test.beton: " in capsys.readouterr().out
    assert contents(out) == contents(tmp_path / "one")
    (out / "test.beton").write_bytes(b"")
    with pytest.raises(InputError, match="joined: is already prepared; name another folder, or add --force"):
        join(parts, out)
    join(parts, out, force=True)
    assert contents(out) == contents(tmp_path / "one")


def test_many_missing_parts_are_counted(tmp_path):
    prepare("digits", None, tmp_path / "13", PrepSettings(splits="test", part="13/13"))
    with pytest.raises(InputError, match=r"^parts 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 2 more of 13 are missing"):
        join([tmp_path / "13"], tmp_path / "out")


@pytest.fixture
def parts(tmp_path, folder):
    """Three parts, and others that do not belong to them, by name."""
    found = {path.name: path for path in parts_of("image-folder", folder, tmp_path)}
    for name, settings in {
        "whole": PrepSettings(),
        "other": PrepSettings(part="3/3", quality=80),
        "of four": PrepSettings(part="3/4"),
    }.items():
        found[name] = tmp_path / name
        prepare("image-folder", folder, found[name], settings, processes=1)
    found["copy"] = shutil.copytree(found["2"], tmp_path / "copy")
    for package in ("pillow", "numpy"):
        found[package] = shutil.copytree(found["3"], tmp_path / package)
        manifest = read_manifest(found[package])
        changed = manifest.model_copy(update={"versions": manifest.versions | {package: "1.0"}})
        (found[package] / "manifest.json").write_text(manifest_json(changed))
    found["damaged"] = shutil.copytree(found["2"], tmp_path / "damaged")
    beton = open_beton(found["damaged"] / "train.beton")
    np.memmap(beton.path, np.uint8, "r+")[beton.offset[2] + 100] ^= 1
    return found


def test_parts_that_do_not_belong_together_are_refused(tmp_path, folder, parts):
    out = tmp_path / "out"
    for chosen, words in (
        (["1", "2"], "^part 3 of 3 is missing"),
        (["3"], "^parts 1, 2 of 3 are missing"),
        (["1", "2", "3", "copy"], r"copy: is the same part as .*/2"),
        (["1", "2", "other"], r"other: is a part of another preparation than .*/1"),
        (["1", "2", "of four"], r"of four: is a part of another preparation than .*/1"),
        (["whole"], "whole: is no part"),
        *((["1", "2", name], f"{name}: was prepared with other package versions") for name in ("pillow", "numpy")),
        (["1", "damaged", "3"], r"train\.beton: sample 2 is damaged"),
    ):
        with pytest.raises(InputError, match=words):
            join([parts[name] for name in chosen], out)
    own = [parts[name] for name in "123"]
    with pytest.raises(InputError, match="lies within the source"):
        join(own, folder / "train/out")
    put(folder, {"train/ant/new.JPEG": (folder / "train/ant/0.JPEG").read_bytes()})
    with pytest.raises(InputError, match=r"train/ant/new\.JPEG: is in none of the parts"):
        join(own, out)
    assert not (out / "manifest.json").exists()


def test_parts_of_another_origin_or_classes_are_refused(tmp_path, jpeg):
    """And what may be anybody's is replaced by force alone."""
    table = "path,label\n0.jpg,ant\n1.jpg,bee\n"
    for name in ("one", "two"):
        put(tmp_path / name, {"0.jpg": jpeg(0), "1.jpg": jpeg(1), "list.csv": table})
    one, two = (parts_of("csv", tmp_path / name / "list.csv", tmp_path / f"of {name}", 2) for name in ("one", "two"))
    out = tmp_path / "out"
    with pytest.raises(InputError, match=r"two/2: is a part of another preparation than .*one/1"):
        join([one[0], two[1]], out)
    put(out, {"train.beton": "anybody's"})
    with pytest.raises(InputError, match=r"out: holds train\.beton and no manifest\.json"):
        join(one, out)
    assert (out / "train.beton").read_bytes() == b"anybody's"
    assert join(one, out, force=True).classes == ("ant", "bee")
    put(tmp_path, {"one/list.csv": table.replace("bee", "cow")})
    with pytest.raises(InputError, match="one/1: was prepared with other package versions or classes"):
        join(one, out, force=True)


def test_a_class_that_loses_all_is_found_at_the_join(tmp_path, folder):
    put(folder, {str(path.relative_to(folder)): b"" for path in (folder / "train/ant").iterdir()})
    parts = parts_of("image-folder", folder, tmp_path, max_bad=0.9, shuffle=True)
    with pytest.raises(RunError, match="train: not one image of ant can be stored"):
        join(parts, tmp_path / "out", max_bad=0.9)
    with pytest.raises(RunError, match=r"train: \d images are left out, more than 1 % of 21"):
        join(parts, tmp_path / "out")
