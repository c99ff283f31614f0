"""A source that has grown: it is told, and what is new is added, to the bytes of preparing all of it."""

import shutil

import numpy as np
import pytest

from tests import layouts
from tests.data_prep.conftest import contents
from tests.data_prep.test_sources import ROWS, assert_says
from tests.data_prep.writing import put
from widemix.data_prep.prepare import dry_run, prepare
from widemix.data_prep.settings import PrepSettings
from widemix.errors import InputError
from widemix.formats.manifest import manifest_json

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
