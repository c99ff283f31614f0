"""A source that has grown: it is told, and what is new is added, to the bytes of preparing all of it."""

import shutil

import numpy as np
import pytest

from tests import layouts
from tests.data_prep.conftest import contents
from widemix.data_prep.changes import name_some
from widemix.data_prep.dry_run import dry_run
from widemix.data_prep.encoding import encoding_for
from widemix.data_prep.extend import Prepared
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.sources import read_source
from widemix.errors import InputError
from widemix.formats.manifest import manifest_json

pytestmark = pytest.mark.usefixtures("small_pages")


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
def test_what_is_new_is_told_and_added(tmp_path, folder, image, settings, decoded):
    image(0, mode="L").save(folder / "train/ant/grey.png")
    out, fresh = tmp_path / "out", tmp_path / "fresh"
    prepare("image-folder", folder, out, settings, processes=1)
    before = contents(out)
    grow(folder, image)
    new = r"it had the classes aardvark and it had train/aardvark/0\.jpg, .*\(4 in all\)"
    for function in (prepare, dry_run):
        with pytest.raises(InputError, match=rf"out: was prepared from .*images before {new}; add --extend"):
            function("image-folder", folder, out, settings, processes=1)
    assert contents(out) == before
    assert dry_run("image-folder", folder, out, settings, processes=1, extend=True)[0]
    decoded.clear()
    prepare("image-folder", folder, out, settings, processes=1, extend=True)
    assert len(decoded) == (4 if settings.raw else 1)  # the others are JPEGs, which stay as they are
    prepare("image-folder", folder, fresh, settings, processes=1)
    assert contents(out) == contents(fresh)
    assert prepare("image-folder", folder, out, settings, processes=1, extend=True).classes[0] == "aardvark"


def test_images_that_other_versions_encoded_are_encoded_again(tmp_path, folder, image, decoded):
    """Else the bytes of one file would be those of two versions, and its manifest would state one."""
    out, settings = tmp_path / "out", PrepSettings(raw=True)
    manifest = prepare("image-folder", folder, out, settings, processes=1)
    older = manifest.model_copy(update={"versions": manifest.versions | {"pillow": "1.0"}})
    (out / "manifest.json").write_text(manifest_json(older))
    grow(folder, image)
    decoded.clear()
    assert prepare("image-folder", folder, out, settings, processes=1, extend=True).versions == manifest.versions
    assert len(decoded) == 21 + 6 + 4


def test_an_extension_that_was_killed_goes_on(tmp_path, folder, image):
    """From any sample on; also where the manifest is gone already, since the files are being replaced."""
    manifest = prepare("image-folder", folder, tmp_path / "out", PrepSettings(), processes=1)
    grow(folder, image)
    dataset = read_source("image-folder", folder, PrepSettings())
    train, encoding = dataset.splits["train"], encoding_for(dataset, folder, PrepSettings(), 1)
    prepared = Prepared({tmp_path / "out": manifest})
    whole = list(prepared.records(train, 0, encoding))
    assert [record.name for record in whole] == [sample.name for sample in train]
    assert [record.label for record in whole] == [sample.label for sample in train]
    for start in (1, 2, len(train) - 1, len(train)):
        assert list(prepared.records(train, start, encoding)) == whole[start:]
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed/plan.unfinished").write_text("{}")
    prepare("image-folder", folder, tmp_path / "killed", PrepSettings(), processes=1, extend=True)
    prepare("image-folder", folder, tmp_path / "fresh", PrepSettings(), processes=1)
    assert contents(tmp_path / "killed") == contents(tmp_path / "fresh")


def test_an_image_that_was_left_out_is_not_new(tmp_path, folder):
    (folder / "train/bee/8.JPEG").write_bytes(b"no image")
    manifest = prepare("image-folder", folder, tmp_path / "out", PrepSettings(), processes=1, max_bad=0.1)
    assert prepare("image-folder", folder, tmp_path / "out", PrepSettings(), processes=1) == manifest
    assert dry_run("image-folder", folder, tmp_path / "out", PrepSettings())[0] == []


@pytest.mark.parametrize(("names", "text"), [("a", "a"), ("abc", "a, b, c"), ("abcd", "a, b, c, ... (4 in all)")])
def test_three_of_many_samples_are_named(names, text):
    assert name_some(names) == text


def test_what_is_gone_or_changed_is_told(tmp_path, folder, image):
    out = tmp_path / "out"
    prepare("image-folder", folder, out, PrepSettings(), processes=1)
    grow(folder, image)
    shutil.copy(folder / "train/bee/5.JPEG", folder / "train/bee/3.JPEG")
    before = contents(out)
    with pytest.raises(InputError, match=r"^train/bee/3\.JPEG: changed since it was prepared; add --force"):
        prepare("image-folder", folder, out, PrepSettings(), processes=1, extend=True)
    (folder / "train/bee/3.JPEG").unlink()
    told = r"out: holds train/bee/3\.JPEG, no longer in .*images, which now has .*\(4 in all\); add --force"
    with pytest.raises(InputError, match=told):
        prepare("image-folder", folder, out, PrepSettings(), processes=1, extend=True)
    assert {name: data for name, data in contents(out).items() if not name.endswith(".unfinished")} == before
    prepare("image-folder", folder, out, PrepSettings(), processes=1, force=True)
    prepare("image-folder", folder, tmp_path / "fresh", PrepSettings(), processes=1)
    assert contents(out) == contents(tmp_path / "fresh")


def test_text_and_pixels_grow_too(tmp_path):
    for name in ("mnli", "svhn"):
        source, make = layouts.LAYOUTS[name]
        origin = tmp_path / name
        origin.mkdir()
        make(origin)
        out, settings = tmp_path / f"{name}.out", PrepSettings(length=16)
        prepare(source, origin, out, settings)
        if name == "mnli":
            *_, last = (origin / "train.tsv").read_text(encoding="utf-8").splitlines(keepends=True)
            with (origin / "train.tsv").open("a", encoding="utf-8") as file:
                file.write(last)
        else:
            pixels = np.zeros((32, 32, 3, 5), np.uint8)
            layouts.savemat(origin / "extra_32x32.mat", {"X": pixels, "y": np.ones((5, 1), np.uint8)})
        with pytest.raises(InputError, match=r"before it had (train\.tsv:10|extra\[0\]).*--extend"):
            prepare(source, origin, out, settings)
        prepare(source, origin, out, settings, extend=True)
        prepare(source, origin, tmp_path / f"{name}.fresh", settings)
        assert contents(out) == contents(tmp_path / f"{name}.fresh")


CLASSES = "path,split,label\na.jpg,train,ant\nb.jpg,train,bee\nc.jpg,val,ant\nd.jpg,val,bee\n"
NUMBERS = "path,split,one,other\na.jpg,train,1,2\nb.jpg,train,3,4\n"
LISTS = "path,labels\na.jpg,ant|bee\nb.jpg,\n"
TWICE = "path,label\na.jpg,ant\nb.jpg,ant\nb.jpg,bee\nc.jpg,bee\n"


@pytest.mark.parametrize(
    ("table", "settings", "old", "new", "words"),
    [
        (
            CLASSES,
            {},
            "b.jpg,train,bee",
            "b.jpg,train,ant",
            r"b\.jpg changed \(b\.jpg: bee of train became ant of train\)",
        ),
        (CLASSES, {}, "b.jpg,train", "b.jpg,val", r"b\.jpg changed \(b\.jpg: bee of train became bee of val\)"),
        (CLASSES, {}, "bee", "cow", "it had the classes cow and it lost the classes bee and b"),
        (CLASSES, {"splits": "train"}, "c.jpg,val,ant", "c.jpg,val,aardvark", "it had the classes aardvark"),
        (
            CLASSES,
            {"raw": True},
            "c.jpg,val,ant\n",
            "c.jpg,val,ant\n" * 2,
            "ant of val became ant of val, ant",
        ),
        (NUMBERS, {"targets": "*"}, "1,2", "1,7", r"a\.jpg changed \(a\.jpg: 1, 2 of train became 1, 7 of train\)"),
        (CLASSES.replace("val", "holdout"), {}, "b.jpg,train", "b.jpg,holdout", "bee of train became bee of holdout"),
        (TWICE, {}, "b.jpg,ant", "b.jpg,bee", "ant of train, bee of train became bee of train, bee of train"),
        (
            NUMBERS,
            {"targets": "*"},
            "3,4",
            "3,4.000001",
            r"b\.jpg: 3, 4 of train became 3, 4\.000001",
        ),
        (NUMBERS, {"targets": "*"}, "one,other", "other,one", "the order of its classes changed"),
        (LISTS, {}, "b.jpg,", "b.jpg,ant", r"b\.jpg changed \(b\.jpg: 0, 0 of train became 1, 0 of train\)"),
    ],
)
def test_other_classes_and_targets_are_told_and_taken_over(
    tmp_path, image, decoded, table, settings, old, new, words
):
    for seed, name in enumerate("abcd"):
        image(seed).save(tmp_path / f"{name}.jpg", "PNG")
    origin, out, fresh = tmp_path / "table.csv", tmp_path / "out", tmp_path / "fresh"
    origin.write_text(table)
    prepare("csv", origin, out, PrepSettings(**settings), processes=1)
    before = contents(out)
    prepare("csv", origin, out, PrepSettings(**settings), processes=1)
    assert contents(out) == before
    origin.write_text(table.replace(old, new))
    for function in (prepare, dry_run):
        with pytest.raises(InputError, match=rf"out: was prepared from .* before .*{words}.*; add --extend"):
            function("csv", origin, out, PrepSettings(**settings), processes=1)
    assert contents(out) == before
    prepare("csv", origin, fresh, PrepSettings(**settings), processes=1)
    decoded.clear()
    prepare("csv", origin, out, PrepSettings(**settings), processes=1, extend=True)
    assert decoded == []
    assert contents(out) == contents(fresh) != before


def test_the_rows_of_one_image_may_change_places(tmp_path, image):
    for seed, name in enumerate("abc"):
        image(seed).save(tmp_path / f"{name}.jpg")
    (tmp_path / "table.csv").write_text(TWICE)
    manifest = prepare("csv", tmp_path / "table.csv", tmp_path / "out", PrepSettings(), processes=1)
    (tmp_path / "table.csv").write_text(TWICE.replace("b.jpg,ant\nb.jpg,bee", "b.jpg,bee\nb.jpg,ant"))
    assert prepare("csv", tmp_path / "table.csv", tmp_path / "out", PrepSettings(), processes=1) == manifest


def test_another_order_of_classes_and_labels_of_pairs_are_told(tmp_path, jpeg):
    origin, out = tmp_path / "origin", tmp_path / "out"
    for wnid in ("n00000001", "n00000002"):
        (origin / "train" / wnid).mkdir(parents=True)
        (origin / "train" / wnid / "0.JPEG").write_bytes(jpeg(0))
    prepare("imagenet", origin, out, PrepSettings(), processes=1)
    (origin / "wnids.txt").write_text("n00000002\nn00000001\n")
    with pytest.raises(InputError, match=r"order of its classes changed \(class 0 was n00000001, and is n00000002\)"):
        prepare("imagenet", origin, out, PrepSettings(), processes=1)
    pairs, lines = tmp_path / "pairs", ["gold_label\tsentence1\tsentence2", "neutral\tsome eat\tthey eat"]
    pairs.mkdir()
    (pairs / "train.tsv").write_text("\n".join(lines))
    prepare("mnli", pairs, tmp_path / "text", PrepSettings(length=16))
    (pairs / "train.tsv").write_text("\n".join(lines).replace("neutral", "entailment"))
    told = r"train\.tsv:2 changed \(train\.tsv:2: neutral of train became entailment of train\)"
    with pytest.raises(InputError, match=told):
        prepare("mnli", pairs, tmp_path / "text", PrepSettings(length=16))
