"""A whole preparation: the files that it writes, and what is refused before anything is created."""

import errno
import json
import os
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data_prep.conftest import contents
from tests.data_prep.test_adopt import main
from tests.data_prep.writing import put
from widemix.cgroups import usable_cpus
from widemix.cli.prep import print_summary
from widemix.data_prep.adopt import adopt
from widemix.data_prep.encoding import encoding_for
from widemix.data_prep.join import join
from widemix.data_prep.original_jpeg import restore
from widemix.data_prep.prep_dir import lock_folder, prep_dir
from widemix.data_prep.prepare import dry_run, plan_of, prepare, select
from widemix.data_prep.samples import Dataset, FileSlice, ImageFiles
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.sources import SOURCES, check_origin, register_source, wanted_files
from widemix.errors import InputError, RunError
from widemix.formats.beton import open_beton
from widemix.formats.checksums import crc32c
from widemix.formats.chunks import hash_chunks
from widemix.formats.manifest import manifest_json, read_manifest
from widemix.formats.sources import read_sources

pytestmark = pytest.mark.usefixtures("small_pages")

ROOT = Path(__file__).parents[2]
SETTINGS = PrepSettings()
TABLES = [f"{split}.{suffix}" for split in ("train", "val") for suffix in ("beton", "crc32c", "sources")]


@pytest.fixture
def prep(folder, tmp_path):
    """`prep(...)` prepares the image folder in `out`."""

    def run(to=None, settings=SETTINGS, source="image-folder", origin=folder, processes=1, **options):
        return prepare(source, origin, to or tmp_path / "out", settings, processes=processes, **options)

    return run


def test_the_contents_of_a_prepared_folder(tmp_path, folder, image, prep, capsys):
    image(0, mode="L").save(folder / "train/ant/grey.png")
    (folder / "val/bee/empty.jpg").touch()
    (folder / "val/bee/1.JPEG").rename(folder / "val/bee/last.JPEG")  # after the one that is left out
    out = tmp_path / "a" / "b"
    manifest = prep(out, max_bad=0.2)
    assert manifest == read_manifest(out)
    assert sorted(contents(out)) == ["manifest.json", *TABLES]
    assert manifest.classes == ("ant", "bee", "cat")
    assert manifest.exceptions == (
        {"file": "train/ant/grey.png", "rule": "grey to RGB"},
        {"file": "val/bee/empty.jpg", "rule": "left out: is empty"},
    )
    print_summary(manifest, out)
    listed = f"unusual files: 1 left out, 1 grey to RGB; listed in {out / 'manifest.json'}"
    assert capsys.readouterr().out.splitlines()[-2:] == [listed, "val/bee/empty.jpg: left out: is empty"]
    assert PrepSettings(**manifest.settings) == SETTINGS
    for (name, split), samples in zip(manifest.splits.items(), (22, 6), strict=True):
        path = out / f"{name}.beton"
        assert (split.bytes, split.blocks) == (path.stat().st_size, hash_chunks(path))
        assert len(open_beton(path)) == split.samples == samples
        assert split.fields == {"image": "RGBImageField", "label": "IntField", "segments": "BytesField"}
        stored = sorted(str(file.relative_to(folder)) for file in (folder / name).rglob("*.*") if file.stat().st_size)
        numbered = {file: (number, crc32c((folder / file).read_bytes())) for number, file in enumerate(stored)}
        assert read_sources(path) == numbered
    assert [manifest.splits[name].per_class for name in ("train", "val")] == [(8, 7, 7), (2, 2, 2)]


def test_left_out_files_are_told_among_many_unusual_ones(tmp_path, folder, prep, capsys):
    for number, mode in enumerate(("L", "CMYK", "RGBA", "P", "LAB", "RGBA", "P", "L", "CMYK")):
        suffix = "tif" if mode in ("CMYK", "LAB") else "png"
        Image.new(mode, (20, 20)).save(folder / f"train/ant/{number}_{mode[:1]}.{suffix}")
    (folder / "val/bee/empty.jpg").touch()
    manifest = prep(max_bad=0.2)
    assert len({exception["rule"] for exception in manifest.exceptions}) > 4
    print_summary(manifest, tmp_path / "out")
    assert "\nunusual files: 1 left out, 2 " in capsys.readouterr().out


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


# What is in the folder already.


def test_a_complete_folder_is_left_alone(tmp_path, prep, system, fast_clock, capsys):
    """But for what a kill has left beside its manifest, where it may be written to."""
    out = tmp_path / "out"
    first = prep()
    times = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert prep() == first
    assert times == {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert "already prepared" in capsys.readouterr().err
    before = contents(out)
    (out / "plan.unfinished").touch()
    access = os.access
    system({"os.access": lambda path, mode: Path(path) != out and access(path, mode)})
    prep()
    assert contents(out) == before | {"plan.unfinished": b""}
    system({"os.access": access})
    with lock_folder(out), pytest.raises(InputError, match="another process is writing to it"):
        prep()
    prep()
    assert contents(out) == before


def test_other_content_is_replaced_only_by_force(tmp_path, folder, prep):
    out = tmp_path / "out"
    manifest = prep()
    # settings that came later, which its manifest does not state, have their defaults
    older = {name: value for name, value in manifest.settings.items() if name not in ("encoding", "side", "part")}
    (out / "manifest.json").write_text(manifest_json(manifest.model_copy(update={"settings": older})))
    before = contents(out)
    prep()
    for changes, word in (
        ({"settings": PrepSettings(max_size=20)}, "max_size 512, not 20"),
        ({"settings": PrepSettings(on_corrupt="error")}, "on_corrupt skip, not error"),
        ({"settings": PrepSettings(encoding="coefficients")}, "encoding jpeg, not coefficients"),
        ({"source": "digits", "origin": None}, "source image-folder, not digits"),
        ({"origin": folder / "train"}, "from .*images, not"),
    ):
        with pytest.raises(InputError, match=word):
            prep(**changes)
    assert contents(out) == before
    small = PrepSettings(max_size=20)
    prep(settings=small, force=True)
    assert read_manifest(out).settings["max_size"] == 20
    (out / "val.beton").write_bytes(b"cut")
    with pytest.raises(InputError, match="has 3 bytes"):
        prep(settings=small)
    prep(settings=small, force=True)
    assert len(open_beton(out / "val.beton")) == 6


def test_force_leaves_no_file_of_the_preparation_before(tmp_path, prep):
    out = tmp_path / "out"
    prep(settings=PrepSettings(holdout=0.2))
    (out / "notes.txt").touch()
    (out / "holdout.sources").unlink()
    prep(force=True)
    assert {path.name.partition(".")[0] for path in out.iterdir()} == {"manifest", "train", "val", "notes"}


def test_no_manifest_is_there_while_files_are_replaced(tmp_path, prep, system):
    out, rename = tmp_path / "out", os.replace
    prep()
    system({"os.replace": lambda old, new: 1 / 0 if Path(new).suffix == ".beton" else rename(old, new)})
    with pytest.raises(ZeroDivisionError):
        prep(settings=PrepSettings(max_size=20), force=True)
    assert not (out / "manifest.json").exists()
    system({"os.replace": rename})
    prep(settings=PrepSettings(max_size=20), force=True)
    assert read_manifest(out).settings["max_size"] == 20


def test_what_any_kill_leaves_is_no_strangers_file(tmp_path, prep):
    """Of each file that a preparation writes, also in the moment before it has its name."""
    names = ("lock", "plan", "train.beton", "train.crc32c", "train.sources", "tokenizer.json")
    left = [*(f"{dot}{name}.unfinished" for name in names for dot in ("", ".")), ".manifest.json"]
    opened_as_they_are = (".lock.unfinished", ".train.beton.unfinished")
    put(tmp_path / "out", {name: "{}" for name in left if name not in opened_as_they_are})
    prep()
    assert sorted(contents(tmp_path / "out")) == ["manifest.json", *TABLES]


@pytest.mark.parametrize("extend", [False, True])
def test_a_folder_without_manifest_may_be_anybodys(tmp_path, prep, extend):
    out = tmp_path / "out"
    prep()
    before = contents(out)
    (out / "manifest.json").unlink()
    put(out, {".manifest.json": "half", "train.beton": "half"})  # as a kill leaves it within its write
    strange = contents(out)
    with pytest.raises(InputError, match=r"holds train\.beton and no manifest\.json, .* anybody's; .* --force"):
        prep()
    assert contents(out) == strange
    (out / "plan.unfinished").write_text("{}")  # as a process leaves it that is killed while it renames its files
    prep(extend=extend)
    assert contents(out) == before


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        *((f"{name}", True) for name in ("train.beton", "train.crc32c", "x.sources", "tokenizer.json")),
        *((f"{name}.unfinished", True) for name in ("val.beton", "x.journal")),
        *((name, False) for name in ("thesis.tex", "thesis.unfinished", ".hidden")),
    ],
)
def test_a_strangers_file_is_replaced_only_by_force(tmp_path, prep, name, ours):
    """Where it has a name of ours, otherwise never."""
    put(tmp_path / "out", {name: "years of work"})
    words = rf"holds {name} and no manifest\.json" if ours else rf"holds other files \({name}"
    for force in (False,) if ours else (False, True):
        with pytest.raises(InputError, match=words):
            prep(force=force)
    assert contents(tmp_path / "out") == {name: b"years of work"}
    if ours:
        assert prep(force=True).splits["train"].samples == 21


@pytest.mark.parametrize(("number", "raised"), [(errno.EDQUOT, InputError), (errno.EIO, OSError)])
def test_a_quota_that_is_used_up_is_a_full_disk(tmp_path, number, raised):
    """And other errors are not."""
    with pytest.raises(raised) as caught, prep_dir(tmp_path / "a" / "out", {}, force=False):
        raise OSError(number, "")
    assert ("the disk is full; free some space" in str(caught.value)) is (raised is InputError)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_that_was_there_stays(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(KeyboardInterrupt), prep_dir(tmp_path / "out", {}, force=False):
        raise KeyboardInterrupt
    assert list(tmp_path.rglob("*")) == [tmp_path / "out"]


def test_who_waits_for_a_finished_folder_is_refused(tmp_path):
    """It would prepare anew what the other has just prepared."""
    with ThreadPoolExecutor(1) as pool:
        with lock_folder(tmp_path):
            waiting = pool.submit(lambda: lock_folder(tmp_path).__enter__())
            time.sleep(0.3)
        with pytest.raises(InputError, match="another process is writing to it"):
            waiting.result()
    assert list(tmp_path.iterdir()) == []


# Images that cannot be decoded.


@pytest.mark.parametrize("processes", [1, 2])
def test_a_bad_image_stops_it_and_leaves_nothing(tmp_path, folder, prep, processes):
    put(folder, {"val/cat/0.JPEG": lambda data: data[:200]})
    with pytest.raises(InputError, match=r"val/cat/0\.JPEG"):
        prep(tmp_path / "a" / "out", PrepSettings(on_corrupt="error"), processes=processes)
    assert not (tmp_path / "a").exists()


THREE = "train/bee/0 train/bee/3 train/cat/6"


@pytest.mark.parametrize(
    ("bad", "options", "words", "listed"),
    [
        ("train/bee/0", {}, "train: 1 images are left out, more than 1 % of 22", 1),
        (THREE, {"max_bad": 0.05}, "train: 3 images are left out", 3),
        (THREE, {"max_bad": 0.15}, "", 0),
        ("val/bee/0 val/bee/1", {"max_bad": 0.5}, "val: not one image of bee can be stored; .*--max-bad 100%", 2),
        ("val/ant/0 val/ant/1", {"max_bad": 0.9}, "val: not one image of ant can be stored", 2),
        ("val/cat/0 val/cat/1", {"max_bad": 0.9}, "val: not one image of cat can be stored", 2),
        ("val/bee/0 val/bee/1", {"max_bad": 1}, "", 0),
        (
            " ".join(f"val/{name}/{i}" for name in ("ant", "bee", "cat") for i in (0, 1)),
            {"max_bad": 1},
            "not one image",
            0,
        ),
    ],
)
def test_more_bad_images_than_allowed_end_it(folder, prep, capsys, bad, options, words, listed):
    bad = bad.split()
    put(folder, {f"{name}.JPEG": b"" for name in bad} | {f"{bad[0]}.JPEG": b"no image"})
    Image.new("L", (9, 9)).save(folder / "train/ant/grey.png")  # unusual, and not left out
    if not words:
        splits = prep(**options).splits.values()
        assert sum(split.samples for split in splits) == 28 - len(bad)
        return
    with pytest.raises((RunError, InputError), match=words):
        prep(**options)
    told = [line for line in capsys.readouterr().err.splitlines() if ": left out: " in line]
    rules = ["is no image that Pillow can read", *["is empty"] * len(bad)]
    assert told == [f"{name}.JPEG: left out: {rule}" for name, rule in zip(bad, rules, strict=False)][:listed]


@pytest.mark.parametrize(("bad", "good", "more"), [(20, 60, []), (25, 90, ["... and 5 more"])])
def test_bad_images_that_fill_the_list_end_it_at_once(tmp_path, image, prep, capsys, bad, good, more):
    image(0).save(tmp_path / "good.png")
    put(tmp_path, {f"in/train/a/{number:03}.jpg": b"" for number in range(bad)})
    put(tmp_path, {f"in/train/a/x{number:03}.png": (tmp_path / "good.png").read_bytes() for number in range(good)})
    words = f"train: {bad} images of the first {bad} are left out, more than 21 % of {bad + good};"
    with pytest.raises(RunError, match=words):
        prep(origin=tmp_path / "in", max_bad=0.21)
    listed = [f"train/a/{number:03}.jpg: left out: is empty" for number in range(20)]
    told = capsys.readouterr().err.splitlines()
    assert [line for line in told if line.startswith(("train/a/", "... and "))] == listed + more


def test_one_in_a_hundred_images_may_be_bad(tmp_path, prep):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    put(tmp_path, {"bad.png": b"", "list.csv": "path,label\n" + "a.png,0\n" * 99 + "bad.png,0\n"})
    assert prep(source="csv", origin=tmp_path / "list.csv").splits["train"].samples == 99


def test_classes_that_only_train_lacks_are_told(tmp_path, image, prep, capsys):
    for name in ("train/cat", "train/dog", "val/cat", "val/dgo", "test/dog", "test/emu", "test/dgo"):
        (tmp_path / "in" / name).mkdir(parents=True)
        image(0).save(tmp_path / "in" / name / "0.png")

    def told(splits):
        prep(tmp_path / splits, PrepSettings(splits=splits), origin=tmp_path / "in")
        return capsys.readouterr().err

    line = "warning: {}: train has no images of {}, which {} has\n".format
    where = tmp_path / "train,val,test"
    assert told("train,val,test") == line(where, "dgo", "val") + line(where, "dgo, emu", "test")
    assert told("val,test") == told("train") == ""
    rows = [f"in/train/{name}/0.png,train,{name}" for name in ("cat", "dog")]
    rows += ["in/val/dgo/0.png,val,dog", "in/val/cat/0.png,val,cat"]
    put(tmp_path, {"list.csv": "\n".join(["path,split,label", *rows])})
    manifest = prep(source="csv", origin=tmp_path / "list.csv", settings=PrepSettings(part="1/2"))
    assert [split.per_class for split in manifest.splits.values()] == [(1, 0), (0, 1)]
    assert capsys.readouterr().err == ""  # the parts together have all


# Sources.


SQUARES = """
    import numpy as np
    from widemix.data_prep.samples import Dataset, PixelArrays

    def read(origin):
        pixels = np.full((int((origin / "count.txt").read_text()), 4, 4, 3), 7, np.uint8)
        return Dataset(("square",), {"train": PixelArrays("train", pixels, np.zeros(len(pixels), int))})
"""


def test_a_source_of_another_package(tmp_path, monkeypatch, prep, capsys):
    put(tmp_path, {"their_package.py": textwrap.dedent(SQUARES), "source/count.txt": "5"})
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(SOURCES, "squares", None)  # and removed afterwards
    before = list(SOURCES)
    del SOURCES["squares"]
    register_source("squares", "their_package.read", "grey squares: DIR/count.txt")
    assert list(SOURCES) == before
    with pytest.raises(ValueError, match=r"'squares' is already registered, with the reader their_package\.read"):
        register_source("squares", "elsewhere.read", "others")
    with pytest.raises(InputError, match="squares needs --from: grey squares"):
        prep(source="squares", origin=None)
    with pytest.raises(InputError, match=r"no source 'sqares'; did you mean squares\?"):
        prep(source="sqares", origin=tmp_path)
    with pytest.raises(SystemExit):
        main(["prep", "--help", "sources"])
    assert "squares       grey squares: DIR/count.txt" in capsys.readouterr().out
    estimates, _ = dry_run("squares", tmp_path / "source", tmp_path / "out", SETTINGS)
    assert [(estimate.split, estimate.samples) for estimate in estimates] == [("train", 5)]
    assert prep(source="squares", origin=tmp_path / "source").splits["train"].samples == 5
    assert (open_beton(tmp_path / "out" / "train.beton").label == 0).all()


def test_a_source_is_known_by_its_real_absolute_path(tmp_path, folder, prep, monkeypatch):
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    for path in ("images", "link", "./images/../images"):
        assert check_origin("image-folder", Path(path)) == folder
    assert prep(origin=Path("images")).origin == str(folder)
    monkeypatch.chdir(folder)
    assert prep(origin=tmp_path / "link") == read_manifest(tmp_path / "out")


@pytest.mark.parametrize(
    ("source", "splits", "wanted"),
    [
        ("parquet", "val", [1, 2]),
        ("webdataset", "train,test", [0, 2, 3]),
        ("parquet", "", [0, 1, 2, 3]),
        ("image-folder", "val", [0, 1, 2, 3]),
    ],
)
def test_only_shards_of_the_chosen_splits_are_wanted(source, splits, wanted):
    paths = ("data/train-0.parquet", "data/validation-0.parquet", "README.md", "test/0.parquet")
    assert [number for number, path in enumerate(paths) if wanted_files(source, splits)(path)] == wanted


def test_a_plan_tells_all_that_the_files_depend_on(tmp_path):
    """Else a preparation would go on with what another one has written."""

    def plan(
        names=("a", "b"), labels=(0, 1), split="train", settings=SETTINGS, where=tmp_path, targets=(), **changes
    ):
        files = ImageFiles(where, names, labels, [np.array([number], "<f4") for number in targets] or None)
        dataset = Dataset(("x", "y"), {split: files}, targets=bool(targets))
        encoding = encoding_for(dataset, where, settings, 1)._replace(**changes)
        return plan_of("image-folder", where, settings, dataset, encoding)

    assert plan() == plan()
    assert plan()["versions"].keys() == {"widemix", "numpy", "pillow", "jpeg"}
    others = [
        plan(names="ba"),
        plan(names="ac"),
        plan(labels=(1, 0)),
        plan(names="a", labels=(0,)),
        plan(split="val"),
        plan(settings=PrepSettings(seed=1)),
        plan(where=tmp_path / "else"),
        plan(versions={"jpeg": "other"}),
        plan(files={"tokenizer.json": b"1"}),
        plan(files={"tokenizer.json": b"2"}),
        plan(targets=(1, 2)),
        plan(targets=(2, 3)),
    ]
    assert len({json.dumps(other) for other in [plan(), *others]}) == 1 + len(others)


def test_a_part_has_its_share_of_the_samples(tmp_path):
    files = ImageFiles(tmp_path, ("a", "b", "c"), (0, 0, 0))
    dataset = Dataset(("x",), {"train": files}, check_files=lambda: ({"file": "a", "rule": "b"},))
    part = select(dataset, PrepSettings(part="2/3"))
    assert [sample.name for sample in part.splits["train"]] == ["b"]
    assert part.check_files() == ()  # which reads all of the source, where each machine prepares a part
    assert select(dataset, SETTINGS).check_files() != ()


def test_as_many_processes_encode_as_the_caller_says(tmp_path, prep, folder, image, limits, system):
    for name, value in {"MIN_SECONDS_PER_PROCESS": 1e-9, "TIMED": 1}.items():
        limits({f"widemix.data_prep.image_processes.{name}": value})
    for i in range(60):  # more chunks than one process is given at a time
        image(i).save(folder / f"train/bee/more{i}.jpg")
    started, start = [], subprocess.Popen
    system({"subprocess.Popen": lambda words, **more: started.append(words) or start(words, **more)})

    def count(make, *given, **options):
        started.clear()
        make(*given, **options)
        return len(started)

    train, small = PrepSettings(splits="train", max_size=32), PrepSettings(raw=True, splits="train")
    assert count(prep, settings=train, processes=3) == 2
    assert count(prep, tmp_path / "one", settings=train, processes=1) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "one")
    assert count(prep, tmp_path / "all", settings=train, processes=None) == usable_cpus() - 1
    assert count(prep, tmp_path / "digits", PrepSettings(), "digits", None, processes=3) == 0  # which are in memory
    assert count(prep, tmp_path / "raw", settings=small, processes=1) == 0
    assert count(adopt, {"train": tmp_path / "out/train.beton"}, tmp_path / "adopted", processes=2) == 1
    assert count(adopt, {"train": tmp_path / "raw/train.beton"}, tmp_path / "pixels", processes=2) == 0


def test_coefficients_need_the_compiled_code(tmp_path, request):
    files = Dataset(("x",), {"train": ImageFiles(tmp_path, ("a",), (0,))})
    assert encoding_for(files, None, SETTINGS, 1).versions["jpeg"].startswith("libjpeg")
    request.getfixturevalue("uncompiled")
    assert encoding_for(files, None, SETTINGS, 1).versions == {"jpeg": "none"}
    with pytest.raises(InputError, match="encoding coefficients: needs the compiled code; leave it out to store"):
        encoding_for(files, None, PrepSettings(encoding="coefficients"), 1)


def test_a_file_is_read_in_pieces(tmp_path, limits):
    limits({"widemix.data_prep.samples.PIECE": 7})
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


def test_a_page_has_the_size_that_the_settings_ask_for(tmp_path, prep):
    prep(settings=PrepSettings(raw=True, max_size=1700, splits="val"))
    assert open_beton(tmp_path / "out/val.beton").offset[0] == 16 << 20


# Permissions, of a user without root's.


@pytest.fixture
def unprivileged(tmp_path):
    """`unprivileged()`: from now on this process is a user without root's permissions, if root runs it."""
    for path in (tmp_path, *tmp_path.parents):  # pytest's own, for its user alone
        if path.name.startswith(("test_", "popen-", "pytest-", "tmp")) and path != Path("/tmp"):
            path.chmod(0o711)
    root = os.geteuid() == 0
    yield lambda: os.seteuid(65_534) if root else None
    if root:
        os.seteuid(0)


@pytest.mark.parametrize("closed", ["images", "images/train", "images/train/ant", "images/train/ant/3.JPEG", "to"])
def test_missing_permissions_are_named(tmp_path, prep, closed, unprivileged):
    (tmp_path / "to").mkdir()
    (tmp_path / "to").chmod(0o777)
    (tmp_path / closed).chmod(0)
    unprivileged()
    with pytest.raises(InputError, match=rf"{closed}.*(no permission to enter|cannot be (read|written to))"):
        prep(tmp_path / "to" / "out")


@pytest.mark.parametrize(
    "command",
    [
        lambda path: dry_run("image-folder", path / "deep", path.parent / "out", SETTINGS),
        lambda path: join([path], path / "out"),
        lambda path: adopt({"train": path / "a.beton"}, path / "out"),
        lambda path: restore(path / "deep", path / "out"),
    ],
)
def test_other_commands_name_missing_permissions_too(tmp_path, command, unprivileged):
    (tmp_path / "closed/deep").mkdir(parents=True)
    (tmp_path / "closed").chmod(0)
    unprivileged()
    words = r"closed\S*: (this user has no permission|cannot be read \(Permission denied)"
    with pytest.raises(InputError, match=words):
        command(tmp_path / "closed")
