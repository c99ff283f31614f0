"""The other writers of `widemix bench prep`."""

import sys
from collections import namedtuple
from functools import partial
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from widemix.bench import prep as bench
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings


def test_writers_that_are_not_installed_are_left_out_with_a_line(monkeypatch, capsys):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    assert bench._peers([]) == {}
    said = capsys.readouterr().err.splitlines()
    assert [line.split(" is not installed")[0] for line in said] == ["litdata", "mosaicml-streaming"]


def test_litdata_gets_every_byte_and_removes_nothing_of_others(tmp_path, jpeg, monkeypatch):
    pytest.importorskip("litdata", reason="litdata is not installed: pip install 'widemix[bench]'")
    from litdata import StreamingDataset

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # of which it removes `data`, by default
    (tmp_path / "data").mkdir()
    files = [tmp_path / f"{i}.JPEG" for i in range(3)]
    for i, file in enumerate(files):
        file.write_bytes(jpeg(i))
    bench._litdata(files, tmp_path / "out")
    stored = StreamingDataset(str(tmp_path / "out/litdata"))
    assert sorted(sample["image"] for sample in stored) == sorted(file.read_bytes() for file in files)
    assert (tmp_path / "data").is_dir()


def test_cpu_time_is_that_of_all_processes_also_of_ended_ones_without_waiting(monkeypatch):
    times = namedtuple("times", "user system children_user children_system iowait")
    child = SimpleNamespace(cpu_times=lambda: times(100, 200, 400, 800, 5000))
    this = SimpleNamespace(cpu_times=lambda: times(1, 2, 4, 8, 5000), children=lambda recursive: [child] * recursive)
    monkeypatch.setattr(bench, "psutil", SimpleNamespace(Process=lambda: this))
    assert bench._cpu_seconds() == 1515


def test_the_loss_of_stored_images_is_that_of_their_middle(tmp_path):
    """Two of 120 x 80 pixels, grey but for a frame: 48 x 48 pixels of them are compared."""

    def write(name, value, frame):
        pixels = np.full((80, 120, 3), frame, np.uint8)
        pixels[8:72, 32:88] = value
        file = tmp_path / name / "train/a"
        file.mkdir(parents=True, exist_ok=True)
        number = len(list(file.iterdir()))
        Image.fromarray(pixels).save(file / f"{number}.JPEG", quality=100)
        return file / f"{number}.JPEG"

    same = [write("stored", value, 0) for value in (100, 50)]
    assert bench._crop(Image.open(same[0])).shape == (224, 224, 3)
    prepare("image-folder", tmp_path / "stored", tmp_path / "data", PrepSettings())
    assert bench._psnr(tmp_path / "data/train.beton", same) == 100
    others = [write("others", value, 255) for value in (110, 20)]
    error = (10**2 + 30**2) / 2
    assert bench._psnr(tmp_path / "data/train.beton", others) == pytest.approx(10 * np.log10(255**2 / error))


def test_each_size_has_writers_that_store_images_as_their_rows_say(tmp_path, monkeypatch):
    """FFCV's first; its quality is that of ours by default. The peers take part once, beside the larger images."""
    named, calls = [tmp_path / "a.JPEG"], []
    monkeypatch.setattr(bench, "jpegs", lambda origin: [origin])
    monkeypatch.setattr(bench, "link_repeatedly", lambda files, folder, count: [(files, folder.name, count)])
    monkeypatch.setattr(bench, "_peers", lambda named: {"litdata": named})
    monkeypatch.setattr(bench, "_rows", lambda writers, folder, *rest: [(writers, *rest)])
    rows = bench.run(SimpleNamespace(origin="from", samples=7, rounds=3))
    assert [rest for _, *rest in rows] == [[[(["from"], "images", 7)], 3]] * 2
    assert [next(iter(writers)) for writers, *_ in rows] == [f"FFCV's DatasetWriter, {n} pixels" for n in (512, 400)]
    assert ["litdata" in writers for writers, *_ in rows] == [True, False]
    for (writers, given, _), size in zip(rows, (512, 400), strict=True):
        theirs, *ours = (write.args for write in writers.values() if isinstance(write, partial))
        assert (theirs, [folder.name for _, folder in ours]) == ((size, given), ["images", "images"])
    monkeypatch.setattr("widemix.data_prep.prepare.prepare", lambda *given: calls.append(given))
    monkeypatch.setattr(bench, "_cost", lambda work, out: (work(), out))
    for size, kept in ((512, "original coding kept"), (400, "re-encoded")):
        theirs, *ours = bench._writers(size, tmp_path / "images", named).items()
        assert (theirs[0], theirs[1].args) == (f"FFCV's DatasetWriter, {size} pixels", (size, named))
        for (name, write), marked in zip(ours, (False, True), strict=True):
            assert name == f"ours, {size} pixels, {kept}" + ", restart markers" * marked
            assert write(tmp_path) == (None, tmp_path)
            settings = PrepSettings(max_size=size, restart_markers=marked)
            assert calls.pop() == ("image-folder", tmp_path / "images", tmp_path / "ours", settings)


def test_rows_compare_the_costs_of_one_round(tmp_path, monkeypatch):
    """Medians of ratios, which are not those of the medians; the loss is that of the first round's files."""
    costs = {
        "theirs": iter([bench.Cost(10, 20, 3 << 20), bench.Cost(20, 60, 4 << 20), bench.Cost(80, 40, 3 << 20)]),
        "ours": iter([bench.Cost(7, 2, 2_450_000), bench.Cost(60, 21, 2 << 20), bench.Cost(2, 40, 2 << 20)]),
        "mds": iter([bench.Cost(10, 20, 6 << 20)] * 3),
    }
    read = []

    def write(name, out):
        assert out.parent == tmp_path
        assert [*out.iterdir()] == []
        (out / "data").mkdir()
        (out / "data" / f"{name}.{'bin' if name == 'mds' else 'beton'}").touch()
        return next(costs[name])

    def psnr(beton, named):
        read.append((beton.name, named))
        return {"theirs": 40.126, "ours": 100.0}[beton.stem]

    monkeypatch.setattr(bench, "_in_process", lambda write, out: write(out))
    monkeypatch.setattr(bench, "_psnr", psnr)
    writers = {name: (lambda out, name=name: write(name, out)) for name in costs}
    theirs, ours, mds = bench._rows(writers, tmp_path, [None] * 110, 3)
    assert read == [("theirs.beton", [None] * 110), ("ours.beton", [None] * 110)]
    ratios = {"time_ratio": 1, "ratio": 1, "bytes_ratio": 1}
    speeds = {"images_per_s": 5.5, "images_per_cpu_s": 2.8}  # 110 images in 20 s, and in 40 s of CPU time
    assert theirs == {"name": "theirs", **speeds, **ratios, "mib": 3, "psnr_db": 40.13}
    ratios = {"time_ratio": 1.429, "ratio": 2.857, "bytes_ratio": 0.779}  # 10 / 7 of 1/3 and 40; 60 / 21 of 10 and 1
    speeds = {"images_per_s": 15.7, "images_per_cpu_s": 5.2}  # in 7 s, and in 21 s
    assert ours == {"name": "ours", **speeds, **ratios, "mib": 2.3, "psnr_db": 100}
    ratios = {"time_ratio": 2, "ratio": 2, "bytes_ratio": 2}  # of 1, 2 and 8; of 1, 3 and 2
    speeds = {"images_per_s": 11, "images_per_cpu_s": 5.5}
    assert mds == {"name": "mds", **speeds, **ratios, "mib": 6, "psnr_db": None}


def test_a_writer_costs_what_it_takes_until_its_files_are_on_disk(tmp_path, monkeypatch):
    """And not what others still had to write; its bytes are those of all its files."""
    clock, used = [5.0], [7.0]

    def sync():
        clock[0] += 100

    def work():
        clock[0] += 3
        used[0] += 2
        (tmp_path / "a/b").mkdir(parents=True)
        (tmp_path / "a/c").write_bytes(bytes(10))
        (tmp_path / "a/b/d").write_bytes(bytes(5))

    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(bench.os, "sync", sync)
    monkeypatch.setattr(bench, "_cpu_seconds", lambda: used[0])
    assert bench._cost(work, tmp_path) == bench.Cost(103, 2, 15)


def test_the_other_writers_are_given_every_image_or_the_bytes_of_its_file(tmp_path, jpeg, monkeypatch):
    """With modules in their place, since not all are installed where the tests run."""
    files = [tmp_path / f"{i}.JPEG" for i in range(3)]
    for i, file in enumerate(files):
        file.write_bytes(jpeg(i))
    found = []

    def keep(*given, **options):
        found.append((given, options))
        return Writer()

    class Writer:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            found.append("closed")

        def write(self, sample):
            found.append(sample)

        def from_indexed_dataset(self, images):
            found.extend(images[i] for i in range(len(images)))

    modules = {
        "ffcv.fields": {"RGBImageField": lambda mode, **options: (mode, options), "IntField": lambda: "int"},
        "ffcv.writer": {"DatasetWriter": keep},
        "litdata": {"optimize": keep},
        "streaming": {"MDSWriter": keep},
    }
    for name, functions in modules.items():
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules[name].__dict__.update(functions)
    started = []
    monkeypatch.setattr(
        bench.multiprocessing, "set_start_method", lambda *own, **chosen: started.append((own, chosen))
    )
    monkeypatch.setattr(bench, "usable_cpus", lambda: 6)
    monkeypatch.setattr(bench, "_cost", lambda work, out: work() or out)
    for name in ("CACHE", "DATA_CACHE"):
        monkeypatch.setenv(f"DATA_OPTIMIZER_{name}_FOLDER", "unset")

    assert bench._ffcv(400, files, tmp_path) == tmp_path
    [((beton, fields), options), *images] = found
    assert (beton, options) == (str(tmp_path / "theirs.beton"), {"num_workers": 6})
    assert started == [(("fork",), {"force": True})]
    assert fields == {
        "image": ("jpg", {"max_resolution": 400, "jpeg_quality": PrepSettings().quality}),
        "label": "int",
    }
    for (image, label), file in zip(images, files, strict=True):
        assert (np.array(image).tobytes(), label) == (np.array(Image.open(file).convert("RGB")).tobytes(), 0)

    found.clear()
    assert bench._litdata(files, tmp_path) == tmp_path
    [((sample, inputs, to), options)] = found
    stored = [{"image": file.read_bytes(), "label": 0} for file in files]
    assert ([sample(each) for each in inputs], to) == (stored, str(tmp_path / "litdata"))
    chosen = {"num_workers": 6, "start_method": "fork", "verbose": False}
    assert options == {"chunk_bytes": 64 * 1024 * 1024} | chosen
    assert bench.os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] == str(tmp_path / "CACHE")

    found.clear()
    assert bench._mds(files, tmp_path) == tmp_path
    sizes = {"columns": {"image": "bytes", "label": "int"}, "size_limit": 64 * 1024 * 1024}
    assert found == [((), {"out": str(tmp_path / "mds")} | sizes), *stored, "closed"]
