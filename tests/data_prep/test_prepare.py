"""A whole preparation: the files that it writes, and what is refused before anything is created."""

import errno
import inspect
import json
import os
import pkgutil
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from widemix.cli import main
from widemix.cli.prep import print_summary
from widemix.data_prep import encode, left_out
from widemix.data_prep.adopt import adopt
from widemix.data_prep.dry_run import dry_run
from widemix.data_prep.encoding import encoding_for
from widemix.data_prep.join import join
from widemix.data_prep.prep_dir import lock_folder, prep_dir
from widemix.data_prep.prepare import plan_of, prepare, select
from widemix.data_prep.restore import restore
from widemix.data_prep.samples import Dataset, FileSlice, ImageFiles, Origin, PixelArrays
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.sources import SOURCES, check_origin, register_source, wanted_files
from widemix.data_prep.written import Written
from widemix.errors import InputError, RunError
from widemix.formats.beton import SAMPLE, open_beton
from widemix.formats.blocks import hash_blocks
from widemix.formats.checksums import crc32c
from widemix.formats.manifest import manifest_json, read_manifest
from widemix.formats.sources import read_sources

pytestmark = pytest.mark.usefixtures("small_pages")

ROOT = Path(__file__).parents[2]
SETTINGS = PrepSettings()


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_contents_of_a_prepared_folder(tmp_path, folder, image, capsys):
    image(0, mode="L").save(folder / "train/ant/grey.png")
    (folder / "val/bee/empty.jpg").touch()
    (folder / "val/bee/1.JPEG").rename(folder / "val/bee/last.JPEG")  # after the one that is left out
    out = tmp_path / "a" / "b"
    manifest = prepare("image-folder", folder, out, SETTINGS, processes=1, max_bad=0.2)
    assert manifest == read_manifest(out)
    tables = [f"{split}.{suffix}" for split in ("train", "val") for suffix in ("beton", "crc32c", "sources")]
    assert sorted(contents(out)) == ["manifest.json", *tables]
    assert manifest.classes == ("ant", "bee", "cat")
    assert {name: split.samples for name, split in manifest.splits.items()} == {"train": 22, "val": 6}
    assert manifest.exceptions == (
        {"file": "train/ant/grey.png", "rule": "grey to RGB"},
        {"file": "val/bee/empty.jpg", "rule": "left out: is empty"},
    )
    print_summary(manifest, out)
    listed = f"unusual files: 1 left out, 1 grey to RGB; listed in {out / 'manifest.json'}"
    assert capsys.readouterr().out.splitlines()[-1] == listed
    assert PrepSettings(**manifest.settings) == SETTINGS
    for name, split in manifest.splits.items():
        path = out / f"{name}.beton"
        assert (split.bytes, split.blocks) == (path.stat().st_size, hash_blocks(path))
        assert len(open_beton(path)) == split.samples
        assert split.fields == {"image": "RGBImageField", "label": "IntField", "segments": "BytesField"}
        stored = sorted(
            str(image.relative_to(folder)) for image in (folder / name).rglob("*.*") if image.stat().st_size
        )
        assert read_sources(path) == {
            image: (number, crc32c((folder / image).read_bytes())) for number, image in enumerate(stored)
        }
    assert [manifest.splits[name].per_class for name in ("train", "val")] == [(8, 7, 7), (2, 2, 2)]


def test_what_is_left_out_is_named_among_many_unusual_files(tmp_path, folder, image, capsys):
    for number, mode in enumerate(("L", "CMYK", "RGBA", "P", "I;16", "RGBA", "P", "L", "CMYK")):
        suffix = "tif" if mode in ("CMYK", "I;16") else "png"
        Image.new(mode, (20, 20)).save(folder / f"train/ant/{number}_{mode[:1]}.{suffix}")
    (folder / "val/bee/empty.jpg").touch()
    manifest = prepare("image-folder", folder, tmp_path / "out", SETTINGS, processes=1, max_bad=0.2)
    assert len({exception["rule"] for exception in manifest.exceptions}) > 4
    print_summary(manifest, tmp_path / "out")
    assert "\nunusual files: 1 left out, 2 " in capsys.readouterr().out


def test_the_same_bytes_for_any_number_of_processes(tmp_path, folder, image):
    for i in range(60):  # more chunks than one process is given at a time
        image(i).save(folder / f"train/bee/more{i}.jpg")
    one, two = (tmp_path / name for name in ("one", "two"))
    prepare("image-folder", folder, one, PrepSettings(max_size=32), processes=1)
    prepare("image-folder", folder, two, PrepSettings(max_size=32), processes=2)
    assert contents(one) == contents(two)


def test_names_of_any_bytes(tmp_path, image):
    """Spaces, line breaks, and what is no UTF-8; on a terminal whose encoding is strict."""
    root = tmp_path / os.fsdecode(b"p\xff\nq r")
    for name in (b"a\xfe/x\xfd.jpg", b"b\nc/y.jpg", b"b\nc/bad\xfc.jpg"):
        path = root / "train" / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        image(0).save(path)
    path.write_bytes(b"no image")
    out = tmp_path / os.fsdecode(b"out\xff")
    prep = ["prep", "image-folder", "--from", root, "--to", out, "--max-bad", "100%"]
    for words in (prep, prep, ["verify", out], ["stage", out, "--to", tmp_path / os.fsdecode(b"\xfe")]):
        done = subprocess.run(
            [sys.executable, "-m", "widemix", *words],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8:strict"},
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr
        assert os.fsencode(out.name) in done.stdout
    manifest = read_manifest(out)
    assert (manifest.origin, manifest.classes) == (str(root), (os.fsdecode(b"a\xfe"), "b\nc"))
    assert manifest.exceptions[0]["file"] == os.fsdecode(b"train/b\nc/bad\xfc.jpg")


def test_digits_are_the_same_every_time(tmp_path):
    for name in ("one", "two"):
        prepare("digits", None, tmp_path / name, SETTINGS)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_a_complete_folder_is_left_alone(tmp_path, folder, capsys):
    out = tmp_path / "out"
    first = prepare("image-folder", folder, out, SETTINGS, processes=1)
    times = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert prepare("image-folder", folder, out, SETTINGS, processes=1) == first
    assert times == {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert "already prepared" in capsys.readouterr().err


def test_what_a_kill_left_beside_the_manifest_is_removed_where_the_folder_may_be_written_to(
    tmp_path, folder, monkeypatch
):
    out = tmp_path / "out"
    prepare("image-folder", folder, out, SETTINGS, processes=1)
    before = contents(out)
    (out / "plan.unfinished").touch()
    with monkeypatch.context() as patch:
        patch.setattr("widemix.data_prep.prep_dir.os.access", lambda *_: False)
        prepare("image-folder", folder, out, SETTINGS, processes=1)
    assert contents(out) == before | {"plan.unfinished": b""}
    monkeypatch.setattr("widemix.lock.KILLED_S", 0.1)
    with lock_folder(out), pytest.raises(InputError, match="another process is writing to it"):
        prepare("image-folder", folder, out, SETTINGS, processes=1)
    prepare("image-folder", folder, out, SETTINGS, processes=1)
    assert contents(out) == before


def test_other_content_is_replaced_only_by_force(tmp_path, folder):
    out = tmp_path / "out"
    prepare("image-folder", folder, out, SETTINGS, processes=1)
    before = contents(out)
    small = PrepSettings(max_size=20)
    for source, origin, settings, word in (
        ("image-folder", folder, small, "max_size 512, not 20"),
        ("digits", None, SETTINGS, "source image-folder, not digits"),
        ("image-folder", folder / "train", SETTINGS, "from .*images, not"),
    ):
        with pytest.raises(InputError, match=word):
            prepare(source, origin, out, settings, processes=1)
    assert contents(out) == before
    prepare("image-folder", folder, out, small, processes=1, force=True)
    assert read_manifest(out).settings["max_size"] == 20
    (out / "val.beton").write_bytes(b"cut")
    with pytest.raises(InputError, match="has 3 bytes"):
        prepare("image-folder", folder, out, small, processes=1)
    prepare("image-folder", folder, out, small, processes=1, force=True)
    assert len(open_beton(out / "val.beton")) == 6


@pytest.mark.parametrize(
    ("source", "origin", "to", "word"),
    [
        ("imagenett", "images", "out", "did you mean imagenet?"),
        ("zzz", "images", "out", "there are .*digits"),
        ("image-folder", "nowhere", "out", "no such file or folder"),
        ("image-folder", None, "out", "needs --from"),
        ("digits", "images", "out", "leave out --from"),
        ("digits", "nowhere", "out", "leave out --from"),
        ("image-folder", "file", "out", "none of the folders train"),
        ("imagenet", "images", "out", "not a WordNet id"),
        ("image-folder", "images", "file", "is a file"),
        ("image-folder", "images", "file/out", "cannot be written to"),
        ("image-folder", "images", ".", "holds other files"),
    ],
)
def test_wrong_arguments_create_nothing(tmp_path, folder, source, origin, to, word):
    (tmp_path / "file").write_text("x")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match=word):
        prepare(source, tmp_path / origin if origin else None, tmp_path / to, SETTINGS, processes=1)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("processes", [1, 2])
def test_a_bad_image_stops_it_and_leaves_nothing(tmp_path, folder, processes):
    path = folder / "val/cat/0.JPEG"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(InputError, match=r"val/cat/0\.JPEG"):
        prepare("image-folder", folder, tmp_path / "a" / "out", PrepSettings(on_corrupt="error"), processes=processes)
    assert not (tmp_path / "a").exists()


def test_a_split_without_a_good_image_is_refused(tmp_path, folder):
    for path in (folder / "val").rglob("*.JPEG"):
        path.write_bytes(b"")
    with pytest.raises(InputError, match="not one image of val"):
        prepare("image-folder", folder, tmp_path / "out", SETTINGS, processes=1, max_bad=1)


def test_more_bad_images_than_allowed_end_it_with_a_list(tmp_path, folder, monkeypatch, capsys):
    names = [f"train/{name}.JPEG" for name in ("bee/0", "bee/3", "cat/6")]
    for name in names:
        (folder / name).write_bytes(b"")
    listed = [f"{name}: left out: is empty" for name in names]
    with pytest.raises(RunError, match=r"train: 3 images cannot be decoded, more than 5 % of 21; .*--max-bad"):
        prepare("image-folder", folder, tmp_path / "out", SETTINGS, processes=1, max_bad=0.05)
    assert capsys.readouterr().err.splitlines()[:3] == listed
    monkeypatch.setattr(left_out, "LISTED", 2)
    with pytest.raises(RunError, match=r"train: 2 images of the first 11 cannot be decoded, more than 5 % of 21"):
        prepare("image-folder", folder, tmp_path / "out", SETTINGS, processes=1, max_bad=0.05)
    assert capsys.readouterr().err.splitlines()[:2] == listed[:2]
    manifest = prepare("image-folder", folder, tmp_path / "out", SETTINGS, processes=1, max_bad=0.15)
    assert manifest.splits["train"].per_class == (7, 5, 6)


def taken(rules, stored):
    """What a writer knows of samples with these rules, of which some were stored."""
    written = Written(len(rules), SAMPLE, 1, 0)
    for number, rule in enumerate(rules):
        written.take(str(number), rule, Origin())
        if number in stored:
            written.add((0, 0), [], 0, b"")
    return written


def test_as_many_bad_images_as_are_allowed_do_not_end_it(monkeypatch, capsys):
    """And the list names those that are left out, not all that are unusual."""
    rules = ["left out: is empty", "grey to RGB", "left out: is text", "left out: is cut", ""]
    written = taken(rules, stored=(1, 4))
    left_out.check_fraction("train", written, 5, 0.6, finished=True)
    left_out.check_fraction("train", written, 10, 0.1, finished=False)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(left_out, "LISTED", 3)
    left_out.check_fraction("train", written, 30, 0.1, finished=False)
    with pytest.raises(RunError, match="train: 3 images of the first 5 cannot be decoded, more than 10 % of 10;"):
        left_out.check_fraction("train", written, 10, 0.1, finished=False)
    listed = ["0: left out: is empty", "2: left out: is text", "3: left out: is cut"]
    assert capsys.readouterr().err.splitlines() == listed
    monkeypatch.setattr(left_out, "LISTED", 2)
    with pytest.raises(RunError, match="train: 3 images cannot be decoded"):
        left_out.check_fraction("train", written, 5, 0.59, finished=True)
    assert capsys.readouterr().err.splitlines() == [*listed[:2], "... and 1 more"]


def test_a_class_whose_only_image_is_the_first_is_missed_too():
    samples = [SimpleNamespace(label=label) for label in (1, 0, 0, 2)]
    for bad, name in ((0, "b"), (3, "c")):
        written = taken(["left out: is empty" if number == bad else "" for number in range(4)], {0, 1, 2, 3} - {bad})
        with pytest.raises(RunError, match=f"val: not one image of {name} can be decoded"):
            left_out.check_classes("val", written, samples, "abc", 0.9)
        left_out.check_classes("val", written, samples, "abc", 1.0)
    left_out.check_classes("val", taken(["", "", "left out: is empty", ""], {0, 1, 3}), samples, "abc", 0.9)


def test_a_class_without_a_good_image_ends_it_with_a_list(tmp_path, folder, capsys):
    for path in (folder / "val/bee").iterdir():
        path.write_bytes(b"no image")
    with pytest.raises(RunError, match=r"val: not one image of bee can be decoded; .*--max-bad 100%"):
        prepare("image-folder", folder, tmp_path / "out", SETTINGS, processes=1, max_bad=0.5)
    assert capsys.readouterr().err.count("val/bee/") == 2
    manifest = prepare("image-folder", folder, tmp_path / "out", SETTINGS, processes=1, max_bad=1)
    assert manifest.splits["val"].per_class == (2, 0, 2)


def test_classes_that_only_train_lacks_are_told(tmp_path, image, capsys):
    for name in ("train/cat", "train/dog", "val/cat", "val/dgo", "test/dog", "test/emu", "test/dgo"):
        (tmp_path / "in" / name).mkdir(parents=True)
        image(0).save(tmp_path / "in" / name / "0.png")

    def told(splits):
        prepare("image-folder", tmp_path / "in", tmp_path / splits, PrepSettings(splits=splits), processes=1)
        return capsys.readouterr().err

    line = "warning: {}: train has no images of {}, which {} has\n".format
    where = tmp_path / "train,val,test"
    assert told("train,val,test") == line(where, "dgo", "val") + line(where, "dgo, emu", "test")
    assert told("val,test") == told("train") == ""
    rows = ["path,split,label", *(f"in/{name}/0.png,{name.replace('/', ',')}" for name in ("train/cat", "train/dog"))]
    rows += ["in/val/dgo/0.png,val,dog", "in/val/cat/0.png,val,cat"]
    (tmp_path / "list.csv").write_text("\n".join(rows))
    prepare("csv", tmp_path / "list.csv", tmp_path / "part", PrepSettings(part="1/2"), processes=1)
    assert [split.per_class for split in read_manifest(tmp_path / "part").splits.values()] == [(1, 0), (0, 1)]
    assert capsys.readouterr().err == ""  # the parts together have all


@pytest.mark.parametrize("fraction", ["-1%", "101%", "x"])
def test_max_bad_is_a_fraction(tmp_path, folder, monkeypatch, capsys, fraction):
    words = ["prep", "image-folder", "--from", str(folder), "--to", str(tmp_path / "out"), f"--max-bad={fraction}"]
    monkeypatch.setattr("sys.argv", ["widemix", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert fraction in capsys.readouterr().err


def test_every_source_is_described_and_has_a_function_that_reads_it():
    assert {"digits", "image-folder", "imagenet"} <= set(SOURCES)
    for source in SOURCES.values():
        assert source.description
        assert "\n" not in source.description
        assert inspect.isfunction(pkgutil.resolve_name(source.reader))


SQUARES = """
    import numpy as np
    from widemix.data_prep.samples import Dataset, PixelArrays

    def read(origin):
        pixels = np.full((int((origin / "count.txt").read_text()), 4, 4, 3), 7, np.uint8)
        return Dataset(("square",), {"train": PixelArrays("train", pixels, np.zeros(len(pixels), int))})
"""


def test_a_source_from_outside_is_registered_in_one_line(tmp_path, monkeypatch, capsys):
    """It is imported by its full name, prepared, estimated, and listed in the help and in errors."""
    (tmp_path / "their_package.py").write_text(textwrap.dedent(SQUARES))
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "count.txt").write_text("5")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("widemix.data_prep.sources.SOURCES", sources := dict(SOURCES))
    register_source("squares", "their_package.read", "grey squares: DIR/count.txt")
    assert list(sources) == [*SOURCES, "squares"]
    with pytest.raises(ValueError, match=r"'squares' is already registered, with the reader their_package\.read"):
        register_source("squares", "elsewhere.read", "others")
    with pytest.raises(InputError, match="squares needs --from: grey squares"):
        prepare("squares", None, tmp_path / "out", SETTINGS)
    with pytest.raises(InputError, match=r"no source 'sqares'; did you mean squares\?"):
        prepare("sqares", tmp_path, tmp_path / "out", SETTINGS)
    monkeypatch.setattr("sys.argv", ["widemix", "prep", "--help", "sources"])
    with pytest.raises(SystemExit):
        main()
    assert "squares       grey squares: DIR/count.txt" in capsys.readouterr().out
    estimates, _ = dry_run("squares", tmp_path / "source", tmp_path / "out", SETTINGS)
    assert [(estimate.split, estimate.samples) for estimate in estimates] == [("train", 5)]
    assert prepare("squares", tmp_path / "source", tmp_path / "out", SETTINGS).splits["train"].samples == 5
    assert (open_beton(tmp_path / "out" / "train.beton").label == 0).all()


def test_a_folder_is_recognised_by_settings_that_came_later(tmp_path, folder):
    """Those that its manifest does not state have their defaults."""
    out = tmp_path / "out"
    manifest = prepare("image-folder", folder, out, SETTINGS, processes=1)
    settings = {name: value for name, value in manifest.settings.items() if name not in ("encoding", "side", "part")}
    (out / "manifest.json").write_text(manifest_json(manifest.model_copy(update={"settings": settings})))
    before = contents(out)
    prepare("image-folder", folder, out, SETTINGS, processes=1)
    assert contents(out) == before
    with pytest.raises(InputError, match="on_corrupt skip, not error"):
        prepare("image-folder", folder, out, PrepSettings(on_corrupt="error"), processes=1)
    with pytest.raises(InputError, match="encoding jpeg, not coefficients"):
        prepare("image-folder", folder, out, PrepSettings(encoding="coefficients"), processes=1)


def test_a_plan_tells_of_all_that_the_files_depend_on(tmp_path, monkeypatch):
    """Else a preparation would go on with what another one has written."""

    def plan(
        names=("a", "b"), labels=(0, 1), split="train", settings=SETTINGS, where=tmp_path, version="1", **changes
    ):
        monkeypatch.setattr("widemix.data_prep.prepare.version", lambda name: version if name == "pillow" else "2")
        dataset = Dataset(("x", "y"), {split: ImageFiles(where, names, labels)})
        encoding = encoding_for(dataset, where, settings, 1)._replace(**changes)
        return plan_of("image-folder", where, settings, dataset, encoding)

    assert plan() == plan()
    assert plan()["versions"].keys() == {"widemix", "numpy", "pillow", "jpeg"}
    others = [
        plan(names=("b", "a")),
        plan(names=("a", "c")),
        plan(labels=(1, 0)),
        plan(names=("a",), labels=(0,)),
        plan(split="val"),
        plan(settings=PrepSettings(seed=1)),
        plan(where=tmp_path / "else"),
        plan(version="1.1"),
        plan(versions={"jpeg": "other"}),
        plan(files={"tokenizer.json": b"1"}),
        plan(files={"tokenizer.json": b"2"}),
    ]
    texts = {json.dumps(other) for other in [plan(), *others]}
    assert len(texts) == 1 + len(others)
    rows = [np.array([number], "<f4") for number in (1, 2, 3)]
    plans = []
    for targets in (rows[:2], rows[1:]):
        dataset = Dataset(("age",), {"train": ImageFiles(tmp_path, ("a", "b"), (-1, -1), targets)}, targets=True)
        plans.append(plan_of("csv", tmp_path, SETTINGS, dataset, encoding_for(dataset, tmp_path, SETTINGS, 1)))
    assert plans[0] != plans[1]


def test_parts_have_as_many_samples_as_there_are_parts_at_least(tmp_path):
    files = ImageFiles(tmp_path, ("a", "b", "c"), (0, 0, 0))
    dataset = Dataset(("x",), {"train": files}, check_files=lambda: ({"file": "a", "rule": "b"},))
    part = select(dataset, PrepSettings(part="2/3"))
    assert [sample.name for sample in part.splits["train"]] == ["b"]
    assert part.check_files() == ()  # which reads all of the source, where each machine prepares a part
    assert select(dataset, SETTINGS).check_files() != ()
    with pytest.raises(InputError, match="part 2/4: train has 3 samples; use fewer parts"):
        select(dataset, PrepSettings(part="2/4"))
    with pytest.raises(InputError, match="part: sentence pairs are prepared by one machine"):
        select(Dataset(("x",), {"train": files}, text=True), PrepSettings(part="2/3"))


def test_how_many_processes_encode_what(tmp_path, monkeypatch):
    """As many as are asked for, or usable; what is in memory is not sent to others."""
    monkeypatch.setattr("widemix.data_prep.encoding.usable_cpus", lambda: 5)
    files = Dataset(("x",), {"train": ImageFiles(tmp_path, ("a",), (0,))})
    pixels = Dataset(("x",), {"train": PixelArrays("train", np.zeros((1, 2, 2, 3), np.uint8), np.zeros(1, int))})
    both = Dataset(("x",), files.splits | {"val": pixels.splits["train"]})
    swapped = Dataset(("x",), {"val": pixels.splits["train"], "train": files.splits["train"]})
    for dataset, settings, processes, expected in (
        (files, SETTINGS, None, 5),
        (files, SETTINGS, 3, 3),
        (files, PrepSettings(raw=True), None, 5),
        (both, PrepSettings(raw=True), 2, 2),
        (swapped, PrepSettings(raw=True), 2, 2),
        (files, SETTINGS, 1, 1),
        (files, PrepSettings(raw=True), 1, 1),
        (pixels, SETTINGS, 3, 1),
    ):
        encoding = encoding_for(dataset, None, settings, processes)
        assert encoding.records.keywords["processes"] == expected
        assert encoding.parallel is (dataset is not pixels)  # also where one is asked for
        fields = [name for name, *_ in encoding.layout.fields]
        assert fields == ["image", "label", *(["segments"] if not settings.raw and dataset is files else [])]


@pytest.mark.parametrize(("processes", "expected"), [(3, 3), (None, 7)])
def test_as_many_processes_encode_as_the_caller_says(tmp_path, folder, monkeypatch, processes, expected):
    asked, encode_all = [], encode.encode_all

    def watched(samples, start, settings, processes):
        asked.append(processes)
        return encode_all(samples, start, settings, 1)

    for module in ("encoding", "adopt"):
        monkeypatch.setattr(f"widemix.data_prep.{module}.encode_all", watched)
        monkeypatch.setattr(f"widemix.data_prep.{module}.usable_cpus", lambda: 7)
    prepare("image-folder", folder, tmp_path / "out", SETTINGS, processes=processes)
    prepare("image-folder", folder, tmp_path / "raw", PrepSettings(raw=True, splits="val"), processes=1)
    adopt({"train": tmp_path / "out/train.beton"}, tmp_path / "adopted", processes=processes)
    adopt({"val": tmp_path / "raw/val.beton"}, tmp_path / "pixels", processes=processes)  # which need no decoding
    assert asked == [expected, expected, 1, expected, 1]


def test_one_in_a_hundred_images_may_be_left_out_unless_told(tmp_path, folder):
    (folder / "train/ant/0.JPEG").write_bytes(b"")
    with pytest.raises(RunError, match="train: 1 images cannot be decoded, more than 1 % of 21"):
        prepare("image-folder", folder, tmp_path / "out", SETTINGS)
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    (tmp_path / "bad.png").touch()
    (tmp_path / "list.csv").write_text("path,label\n" + "a.png,0\n" * 99 + "bad.png,0\n")
    assert prepare("csv", tmp_path / "list.csv", tmp_path / "out", SETTINGS).splits["train"].samples == 99


@pytest.mark.parametrize(
    ("function", "called"),
    [
        (lambda path: dry_run("image-folder", path, path / "out", SETTINGS), "dry_run.check_origin"),
        (lambda path: join([path], path / "out"), "join.read_manifest"),
        (lambda path: adopt({"train": path / "a.beton"}, path / "out"), "adopt.check_target"),
        (lambda path: restore(path, path / "out"), "restore.read_manifest"),
    ],
    ids=["dry run", "join", "adopt", "restore"],
)
def test_missing_permissions_are_one_line_of_other_commands_too(tmp_path, monkeypatch, function, called):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", "some/file")

    monkeypatch.setattr(f"widemix.data_prep.{called}", refuse)
    with pytest.raises(InputError, match=r"^some/file: this user has no permission to enter, read or write it$"):
        function(tmp_path)


def test_coefficients_need_the_compiled_code(tmp_path, monkeypatch):
    files = Dataset(("x",), {"train": ImageFiles(tmp_path, ("a",), (0,))})
    compiled = SimpleNamespace(jpeg_library=lambda: b"libjpeg 9")
    monkeypatch.setattr("widemix.data_prep.encoding.library", lambda: compiled)
    assert encoding_for(files, None, SETTINGS, 1).versions == {"jpeg": "libjpeg 9"}
    monkeypatch.setattr("widemix.data_prep.encoding.library", lambda: None)
    assert encoding_for(files, None, SETTINGS, 1).versions == {"jpeg": "none"}
    with pytest.raises(
        InputError, match="encoding coefficients: needs the compiled code; leave it out to store JPEGs"
    ):
        encoding_for(files, None, PrepSettings(encoding="coefficients"), 1)


def test_a_source_is_known_by_its_real_absolute_path(tmp_path, folder, monkeypatch):
    """From any working directory, and by links."""
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    for path in ("images", "link", "./images/../images"):
        assert check_origin("image-folder", Path(path)) == folder
    prepare("image-folder", Path("images"), tmp_path / "out", SETTINGS, processes=1)
    assert read_manifest(tmp_path / "out").origin == str(folder)
    monkeypatch.chdir(folder)
    assert prepare("image-folder", tmp_path / "link", tmp_path / "out", SETTINGS) == read_manifest(tmp_path / "out")


def test_only_shards_of_the_chosen_splits_are_wanted():
    paths = ("data/train-0.parquet", "data/validation-0.parquet", "README.md", "test/0.parquet")
    for source, splits, count in (
        ("parquet", "val", [1, 2]),
        ("webdataset", "train,test", [0, 2, 3]),
        ("parquet", "", [0, 1, 2, 3]),
        ("image-folder", "val", [0, 1, 2, 3]),
    ):
        wanted = wanted_files(source, splits)
        assert [number for number, path in enumerate(paths) if wanted(path)] == count


def test_a_file_is_read_in_pieces(tmp_path, monkeypatch):
    """Of a size that one call of the system reads."""
    monkeypatch.setattr("widemix.data_prep.samples.PIECE", 7)
    path, data = tmp_path / "file", bytes(range(100))
    path.write_bytes(data)
    for offset, size, expected in ((3, 20, data[3:23]), (3, 21, data[3:24]), (90, -1, data[90:]), (120, -1, b"")):
        assert FileSlice(str(path), offset, size).read() == expected
    assert FileSlice(str(path), 0, 0).read() == b""
    with pytest.raises(InputError, match="/dev/null: is not a regular file"):
        FileSlice("/dev/null").read()
    with pytest.raises(InputError, match="file: ends at 100 bytes, within a sample"):
        FileSlice(str(path), 95, 6).read()
    for function in (FileSlice.read, FileSlice.status):
        with pytest.raises(InputError, match=r"gone: cannot be read \(No such file or directory\)"):
            function(FileSlice(str(tmp_path / "gone")))


@pytest.mark.parametrize(("number", "raised"), [(errno.EDQUOT, InputError), (errno.EIO, OSError)])
def test_a_quota_that_is_used_up_is_a_full_disk_and_other_errors_are_not(tmp_path, number, raised):
    with pytest.raises(raised) as caught, prep_dir(tmp_path / "a" / "out", {}, force=False):
        raise OSError(number, "")
    assert ("the disk is full; free some space" in str(caught.value)) is (raised is InputError)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_that_was_there_stays_after_an_error(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(ZeroDivisionError), prep_dir(tmp_path / "out", {}, force=False):
        raise ZeroDivisionError
    assert list(tmp_path.rglob("*")) == [tmp_path / "out"]


def test_who_waits_for_a_folder_that_is_then_finished_is_refused(tmp_path):
    """It would prepare anew what the other has just prepared."""
    with ThreadPoolExecutor(1) as pool:
        with lock_folder(tmp_path):
            waiting = pool.submit(lambda: lock_folder(tmp_path).__enter__())
            time.sleep(0.3)
        with pytest.raises(InputError, match="another process is writing to it"):
            waiting.result()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_not_prepared_while_its_files_are_replaced(tmp_path, folder, monkeypatch):
    out = tmp_path / "out"
    prepare("image-folder", folder, out, SETTINGS, processes=1)
    rename = os.replace
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda old, new: 1 / 0 if Path(new).suffix == ".beton" else rename(old, new))
        with pytest.raises(ZeroDivisionError):
            prepare("image-folder", folder, out, PrepSettings(max_size=20), processes=1, force=True)
    assert not (out / "manifest.json").exists()
    prepare("image-folder", folder, out, PrepSettings(max_size=20), processes=1, force=True)
    assert read_manifest(out).settings["max_size"] == 20


def test_a_page_has_the_size_that_the_settings_ask_for(tmp_path, folder):
    settings = PrepSettings(raw=True, max_size=1700, splits="val")
    prepare("image-folder", folder, tmp_path / "out", settings, processes=1)
    assert open_beton(tmp_path / "out/val.beton").offset[0] == 16 << 20


def test_what_any_kill_leaves_is_no_strangers_file(tmp_path, folder):
    """Of each file that a preparation writes, also in the moment before it has its name."""
    out = tmp_path / "out"
    out.mkdir()
    names = ("lock", "plan", "train.beton", "train.crc32c", "train.sources", "tokenizer.json")
    for name in (*(f"{dot}{name}.unfinished" for name in names for dot in ("", ".")), ".manifest.json"):
        if name not in (".lock.unfinished", ".train.beton.unfinished"):  # which are opened as they are
            (out / name).write_text("{}")
    prepare("image-folder", folder, out, SETTINGS, processes=1)
    tables = [f"{split}.{suffix}" for split in ("train", "val") for suffix in ("beton", "crc32c", "sources")]
    assert sorted(contents(out)) == ["manifest.json", *tables]


def test_a_folder_without_manifest_may_be_anybodys(tmp_path, folder):
    out = tmp_path / "out"
    prepare("image-folder", folder, out, SETTINGS, processes=1)
    before = contents(out)
    (out / "manifest.json").unlink()
    (out / ".manifest.json").write_bytes(b"half")  # as a process leaves it that is killed while it writes
    (out / "train.beton").write_bytes(b"half")
    strange = contents(out)
    with pytest.raises(InputError, match=r"holds train\.beton and no manifest\.json, .* anybody's; .* --force"):
        prepare("image-folder", folder, out, SETTINGS, processes=1)
    assert contents(out) == strange
    (out / "plan.unfinished").write_text("{}")  # as a process leaves it that is killed while it renames its files
    prepare("image-folder", folder, out, SETTINGS, processes=1)
    assert contents(out) == before


@pytest.mark.parametrize(
    "name",
    ["train.beton", "val.beton.unfinished", "x.journal.unfinished", "train.crc32c", "x.sources", "tokenizer.json"],
)
def test_a_strangers_file_is_replaced_only_by_force(tmp_path, folder, name):
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_bytes(b"years of work")
    with pytest.raises(InputError, match=rf"holds {name} and no manifest\.json"):
        prepare("image-folder", folder, out, SETTINGS, processes=1)
    assert contents(out) == {name: b"years of work"}
    prepare("image-folder", folder, out, SETTINGS, processes=1, force=True)
    assert read_manifest(out).splits["train"].samples == 21


@pytest.mark.parametrize("name", ["thesis.tex", "thesis.unfinished", ".hidden"])
def test_other_files_are_never_touched(tmp_path, folder, name):
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_bytes(b"years of work")
    for force in (False, True):
        with pytest.raises(InputError, match=rf"holds other files \({name}"):
            prepare("image-folder", folder, out, SETTINGS, processes=1, force=force)
    assert contents(out) == {name: b"years of work"}


@pytest.mark.parametrize("to", ["images/prepared", "images/train", "images", "link/new"])
def test_a_folder_within_the_source_is_refused(tmp_path, folder, to):
    (tmp_path / "link").symlink_to(folder / "train")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match=r"--to .*: lies within the source .*images; name a folder outside of it"):
        prepare("image-folder", folder, tmp_path / to, SETTINGS, processes=1, force=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_class_folders_may_be_links(tmp_path, folder):
    """As of a part of ImageNet's classes."""
    (tmp_path / "part/train").mkdir(parents=True)
    for name in ("ant", "cat"):
        (tmp_path / "part/train" / name).symlink_to(folder / "train" / name)
    manifest = prepare("image-folder", tmp_path / "part", tmp_path / "out", SETTINGS, processes=1)
    assert manifest.classes == ("ant", "cat")
    assert manifest.splits["train"].per_class == (7, 7)


@pytest.mark.parametrize("option", ["--to", "--from"])
def test_an_empty_path_is_not_the_working_directory(folder, tmp_path, monkeypatch, capsys, option):
    monkeypatch.chdir(tmp_path)
    places = {"--from": str(folder), "--to": "out"} | {option: ""}
    words = [word for pair in places.items() for word in pair]
    monkeypatch.setattr("sys.argv", ["widemix", "prep", "image-folder", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {option}: is empty; give a value")
    assert [path.name for path in tmp_path.iterdir()] == ["images"]


def test_force_leaves_no_file_of_the_preparation_before(tmp_path, folder):
    out = tmp_path / "out"
    prepare("image-folder", folder, out, PrepSettings(holdout=0.2), processes=1)
    (out / "notes.txt").touch()
    (out / "holdout.sources").unlink()
    prepare("image-folder", folder, out, SETTINGS, processes=1, force=True)
    assert {path.name.partition(".")[0] for path in out.iterdir()} == {"manifest", "train", "val", "notes"}


@pytest.fixture
def unprivileged():
    """For tests that root runs: a user without root's permissions."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65_534)
    yield
    if root:
        os.seteuid(0)


@pytest.mark.parametrize("closed", ["images", "images/train", "images/train/ant", "images/train/ant/3.JPEG", "to"])
def test_missing_permissions_are_named(tmp_path, folder, closed, request):
    (tmp_path / "to").mkdir()
    (tmp_path / "to").chmod(0o777)
    for path in (tmp_path, *tmp_path.parents):  # pytest's own, for its user alone
        if path.name.startswith(("test_", "popen-", "pytest-")):
            path.chmod(0o711)
    (tmp_path / closed).chmod(0)
    request.getfixturevalue("unprivileged")
    with pytest.raises(InputError, match=rf"{closed}.*(no permission to enter|cannot be (read|written to))"):
        prepare("image-folder", folder, tmp_path / "to" / "out", SETTINGS, processes=1)
