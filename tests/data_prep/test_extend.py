"""What is new in a source is told and added, and parts of several machines joined: the bytes of one preparation."""

import shutil

import numpy as np
import pytest

from tests import layouts
from tests.data_prep.conftest import contents
from tests.data_prep.test_adopt import main
from tests.data_prep.test_sources import ROWS, assert_says
from tests.data_prep.writing import put
from widemix.data_prep.join import join
from widemix.data_prep.prepare import dry_run, prepare
from widemix.data_prep.settings import PrepSettings
from widemix.errors import InputError, RunError
from widemix.formats.beton import open_beton
from widemix.formats.manifest import manifest_json, read_manifest

pytestmark = pytest.mark.usefixtures("small_pages")

SETTINGS = PrepSettings()


@pytest.fixture
def prep(tmp_path, folder):
    """`prep(...)` prepares the image folder in `out`."""

    def run(to="out", settings=SETTINGS, **options):
        return prepare("image-folder", folder, tmp_path / to, settings, processes=1, **options)

    return run


def grow(folder, image):
    """Another class, before the others, and images among those of another."""
    for name in ("train/aardvark/0.jpg", "train/aardvark/1.png", "val/aardvark/0.jpg", "train/bee/2b.jpg"):
        (folder / name).parent.mkdir(exist_ok=True)
        image(len(name), 44, 33, "L" if name.endswith("png") else "RGB").save(folder / name)


@pytest.mark.parametrize(
    "settings",
    [
        PrepSettings(),
        PrepSettings(raw=True),
        PrepSettings(restart_markers=False, holdout=0.3),
        PrepSettings(encoding="coefficients"),
    ],
    ids=str,
)
def test_what_is_new_is_told_and_added(tmp_path, folder, image, settings, decoded, prep):
    image(0, mode="L").save(folder / "train/ant/grey.png")
    out = tmp_path / "out"
    prep(settings=settings)
    before = contents(out)
    grow(folder, image)
    new = r"it had the classes aardvark and it had train/aardvark/0\.jpg, .*\(4 in all\)"
    for function in (prepare, dry_run):
        with pytest.raises(InputError, match=rf"out: was prepared from .*images before {new}; add --extend"):
            function("image-folder", folder, out, settings, processes=1)
    assert contents(out) == before
    assert dry_run("image-folder", folder, out, settings, processes=1, extend=True)[0]
    decoded.clear()
    prep(settings=settings, extend=True)
    assert len(decoded) == (4 if settings.raw else 1)  # the others are JPEGs, which stay as they are
    prep("fresh", settings)
    assert contents(out) == contents(tmp_path / "fresh")
    assert prep(settings=settings, extend=True).classes[0] == "aardvark"


def test_what_other_versions_encoded_is_encoded_again(tmp_path, folder, image, decoded, prep):
    """Else the bytes of one file would be those of two versions, and its manifest would state one."""
    settings = PrepSettings(raw=True)
    manifest = prep(settings=settings)
    older = manifest.model_copy(update={"versions": manifest.versions | {"pillow": "1.0"}})
    (tmp_path / "out/manifest.json").write_text(manifest_json(older))
    grow(folder, image)
    decoded.clear()
    assert prep(settings=settings, extend=True).versions == manifest.versions
    assert len(decoded) == 21 + 6 + 4


def test_an_image_that_was_left_out_is_not_new(tmp_path, folder, prep):
    put(folder, {"train/bee/8.JPEG": "no image"})
    manifest = prep(max_bad=0.1)
    assert prep() == manifest
    assert dry_run("image-folder", folder, tmp_path / "out", PrepSettings())[0] == []


def test_what_is_gone_or_changed_is_told(tmp_path, folder, image, prep):
    out = tmp_path / "out"
    prep()
    grow(folder, image)
    shutil.copy(folder / "train/bee/5.JPEG", folder / "train/bee/3.JPEG")
    before = contents(out)
    with pytest.raises(InputError, match=r"^train/bee/3\.JPEG: changed since it was prepared; add --force"):
        prep(extend=True)
    (folder / "train/bee/3.JPEG").unlink()
    told = r"out: holds train/bee/3\.JPEG, no longer in .*images, which now has .*\(4 in all\); add --force"
    with pytest.raises(InputError, match=told):
        prep(extend=True)
    assert {name: data for name, data in contents(out).items() if not name.endswith(".unfinished")} == before
    prep(force=True)
    prep("fresh")
    assert contents(out) == contents(tmp_path / "fresh")


@pytest.mark.parametrize(("name", "new"), [("mnli", r"train\.tsv:10"), ("svhn", r"extra\[0\]")])
def test_text_and_pixels_grow_too(tmp_path, name, new):
    source, make = layouts.LAYOUTS[name]
    origin, out, settings = tmp_path / name, tmp_path / "out", PrepSettings(length=16)
    origin.mkdir()
    make(origin)
    prepare(source, origin, out, settings)
    if name == "mnli":
        put(origin, {"train.tsv": lambda data: data + data.splitlines(keepends=True)[-1]})
    else:
        arrays = {"X": np.zeros((32, 32, 3, 5), np.uint8), "y": np.ones((5, 1), np.uint8)}
        layouts.savemat(origin / "extra_32x32.mat", arrays)
    with pytest.raises(InputError, match=f"before it had {new}.*--extend"):
        prepare(source, origin, out, settings)
    prepare(source, origin, out, settings, extend=True)
    prepare(source, origin, tmp_path / "fresh", settings)
    assert contents(out) == contents(tmp_path / "fresh")


@pytest.mark.parametrize("row", ROWS["changed"], ids=lambda row: row["says"])
def test_other_labels_and_targets_are_told_and_taken_over(tmp_path, image, decoded, row):
    for seed, name in enumerate("abcd"):
        image(seed).save(tmp_path / f"{name}.jpg", "PNG")
    origin, out, fresh = tmp_path / "table.csv", tmp_path / "out", tmp_path / "fresh"
    settings, changed = PrepSettings(**row.get("settings", {})), row["table"].replace(*row["change"])
    assert changed != row["table"]
    origin.write_text(row["table"])
    prepare("csv", origin, out, settings, processes=1)
    before = contents(out)
    prepare("csv", origin, out, settings, processes=1)
    assert contents(out) == before
    origin.write_text(changed)
    for function in (prepare, dry_run):
        with pytest.raises(InputError) as error:
            function("csv", origin, out, settings, processes=1)
        words = f"{{in}}/out: was prepared from ... before ... {row['says']} ... ; add --extend"
        assert_says(str(error.value), words, tmp_path)
    assert contents(out) == before
    prepare("csv", origin, fresh, settings, processes=1)
    decoded.clear()
    prepare("csv", origin, out, settings, processes=1, extend=True)
    assert decoded == []
    assert contents(out) == contents(fresh) != before


def test_the_rows_of_one_image_may_change_places(tmp_path, image):
    for seed, name in enumerate("abc"):
        image(seed).save(tmp_path / f"{name}.jpg")
    manifests = []
    for rows in ("b.jpg,ant\nb.jpg,bee", "b.jpg,bee\nb.jpg,ant"):
        put(tmp_path, {"table.csv": f"path,label\na.jpg,ant\n{rows}\nc.jpg,bee\n"})
        manifests.append(prepare("csv", tmp_path / "table.csv", tmp_path / "out", PrepSettings(), processes=1))
    assert manifests[0] == manifests[1]


@pytest.mark.parametrize(
    ("source", "files", "change", "told"),
    [
        (
            "imagenet",
            {"train/n00000001/0.JPEG": "", "train/n00000002/0.JPEG": ""},
            {"wnids.txt": "n00000002\nn00000001\n"},
            r"order of its classes changed \(class 0 was n00000001, and is n00000002\)",
        ),
        (
            "mnli",
            {"train.tsv": "gold_label\tsentence1\tsentence2\nneutral\tsome eat\tthey eat"},
            {"train.tsv": lambda data: data.replace(b"neutral", b"entailment")},
            r"train\.tsv:2 changed \(train\.tsv:2: neutral of train became entailment of train\)",
        ),
    ],
    ids=["classes", "pairs"],
)
def test_other_sources_tell_changes_too(tmp_path, jpeg, source, files, change, told):
    put(tmp_path / "in", {name: content or jpeg(0) for name, content in files.items()})
    prepare(source, tmp_path / "in", tmp_path / "out", PrepSettings(length=16), processes=1)
    put(tmp_path / "in", change)
    with pytest.raises(InputError, match=told):
        prepare(source, tmp_path / "in", tmp_path / "out", PrepSettings(length=16), processes=1)


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


def test_a_lone_train_is_told_with_what_join_can_do(tmp_path, folder, capsys):
    shutil.rmtree(folder / "val")
    parts = parts_of("image-folder", folder, tmp_path, count=2)
    assert main(["join", *map(str, parts), "--to", str(tmp_path / "out")]) == 0
    advice = "out: has no split to evaluate on; parts that are prepared with --holdout 10% have one\n"
    assert capsys.readouterr().out.endswith(advice)


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
