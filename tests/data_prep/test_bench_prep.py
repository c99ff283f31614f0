"""The other writers of `widemix bench prep`, and how their costs are compared."""

import os
import sys
from collections import namedtuple
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import numpy as np
import pytest
from PIL import Image

from tests.data_prep.writing import put
from widemix.bench import prep as bench
from widemix.cgroups import usable_cpus
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.formats.manifest import read_manifest


@pytest.fixture
def files(tmp_path, jpeg):
    """Three JPEGs in class folders."""
    put(tmp_path, {f"images/train/a/{i}.JPEG": jpeg(i) for i in range(3)})
    return sorted((tmp_path / "images").rglob("*.JPEG"))


@pytest.mark.long
def test_all_writers_take_part(tmp_path, files):
    pytest.importorskip("ffcv", reason="FFCV is not installed")
    rows = bench.run(SimpleNamespace(origin=tmp_path / "images", samples=7, rounds=1))
    kinds = [["FFCV's DatasetWriter", "ours", "ours"][number % 3] for number in range(6)]
    assert [row["name"].partition(",")[0] for row in rows if "bytes" not in row["name"]] == kinds
    assert all(row["images_per_s"] > 0 for row in rows)


def test_writers_that_are_not_installed_are_told(system, capsys):
    system({"importlib.util.find_spec": lambda name: None})
    assert bench.peers([]) == {}
    said = capsys.readouterr().err.splitlines()
    assert [line.split(" is not installed")[0] for line in said] == ["litdata", "mosaicml-streaming"]


def test_litdata_removes_nothing_of_others(tmp_path, files, system):
    pytest.importorskip("litdata", reason="litdata is not installed: pip install 'widemix[bench]'")
    from litdata import StreamingDataset

    system({"tempfile.tempdir": str(tmp_path)})  # of which it removes `data`, by default
    (tmp_path / "data").mkdir()
    bench.by_litdata(files, tmp_path / "out")
    stored = StreamingDataset(str(tmp_path / "out/litdata"))
    assert sorted(sample["image"] for sample in stored) == sorted(file.read_bytes() for file in files)
    assert (tmp_path / "data").is_dir()


def test_the_loss_of_stored_images_is_that_of_their_middle(tmp_path):
    """Two of 120 x 80 pixels, grey but for a frame: 48 x 48 pixels of them are compared."""

    def write(name, value, frame):
        pixels = np.full((80, 120, 3), frame, np.uint8)
        pixels[8:72, 32:88] = value
        folder = tmp_path / name / "train/a"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{len(list(folder.iterdir()))}.JPEG"
        Image.fromarray(pixels).save(file, quality=100)
        return file

    same = [write("stored", value, 0) for value in (100, 50)]
    prepare("image-folder", tmp_path / "stored", tmp_path / "data", PrepSettings())
    assert bench.psnr(tmp_path / "data/train.beton", same) == 100
    others = [write("others", value, 255) for value in (110, 20)]
    error = (10**2 + 30**2) / 2
    assert bench.psnr(tmp_path / "data/train.beton", others) == pytest.approx(10 * np.log10(255**2 / error))


@pytest.mark.parametrize(("size", "kept"), [(512, "original coding kept"), (400, "re-encoded")])
def test_writers_store_images_as_their_rows_say(tmp_path, files, size, kept):
    """FFCV's first; its quality is that of ours by default."""
    (theirs, of_ffcv), *ours = bench.writers_of(size, tmp_path / "images", files).items()
    assert (theirs, of_ffcv.args) == (f"FFCV's DatasetWriter, {size} pixels", (size, files))
    for (name, write), marked in zip(ours, (False, True), strict=True):
        assert name == f"ours, {size} pixels, {kept}" + ", restart markers" * marked
        cost = write(tmp_path / name)
        manifest = read_manifest(tmp_path / name / "ours")
        assert PrepSettings(**manifest.settings) == PrepSettings(max_size=size, restart_markers=marked)
        assert manifest.splits["train"].samples == 3
        assert cost.bytes == sum(path.stat().st_size for path in (tmp_path / name / "ours").iterdir())


def test_rows_compare_the_costs_of_one_round():
    """Medians of ratios, which are not those of the medians; the bytes are those of the first round."""
    theirs = [bench.Cost(10, 20, 3 << 20), bench.Cost(20, 60, 4 << 20), bench.Cost(80, 40, 3 << 20)]
    ours = [bench.Cost(7, 2, 2_450_000), bench.Cost(60, 21, 2 << 20), bench.Cost(2, 40, 2 << 20)]
    for name, costs, speeds, ratios, mib in (
        ("theirs", theirs, (5.5, 2.8), (1, 1, 1), 3),  # 110 images in 20 s, and in 40 s of CPU time
        # in 7 s, and in 21 s; 10 / 7 of 1/3 and 40; 60 / 21 of 10 and 1
        ("ours", ours, (15.7, 5.2), (1.429, 2.857, 0.779), 2.3),
        ("mds", [bench.Cost(10, 20, 6 << 20)] * 3, (11, 5.5), (2, 2, 2), 6),  # of 1, 2 and 8; of 1, 3 and 2
    ):
        numbers = dict(zip(("images_per_s", "images_per_cpu_s"), speeds, strict=True))
        numbers |= dict(zip(("time_ratio", "ratio", "bytes_ratio"), ratios, strict=True))
        row = bench.row_of(name, costs, theirs, 40.13, 110)
        assert row == {"name": name, "mib": mib, "psnr_db": 40.13} | numbers


def test_a_writer_costs_its_time_until_all_is_on_disk(tmp_path, system):
    """And not what others still had to write; CPU time is that of all processes, without waiting for disks."""
    clock, used = [5.0], [7.0]
    times = namedtuple("times", "user system children_user children_system iowait")
    child = SimpleNamespace(cpu_times=lambda: times(100, 200, 400, 800, 5000))
    this = SimpleNamespace(
        cpu_times=lambda: times(used[0], 2, 4, 8, 5000), children=lambda recursive: [child] * recursive
    )
    system(
        {
            "psutil.Process": lambda: this,
            "time.perf_counter": lambda: clock[0],
            "os.sync": lambda: clock.__setitem__(0, clock[0] + 100),
        }
    )
    assert bench.cpu_seconds() == 7 + 14 + 1500

    def work():
        clock[0] += 3
        used[0] += 2
        put(tmp_path, {"a/c": bytes(10), "a/b/d": bytes(5)})

    assert bench.cost_of(work, tmp_path) == bench.Cost(103, 2, 15)


def test_other_writers_get_every_image_or_its_bytes(tmp_path, files, monkeypatch, system):
    """With mocks in their place, since not all are installed where the tests run."""
    fields, ffcv, litdata, streaming, start = (MagicMock() for _ in range(5))
    for name, module in {
        "ffcv.fields": fields,
        "ffcv.writer": ffcv,
        "litdata": litdata,
        "streaming": streaming,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("CACHE", "DATA_CACHE"):
        monkeypatch.setenv(f"DATA_OPTIMIZER_{name}_FOLDER", "unset")
    system({"multiprocessing.set_start_method": start})
    stored, size = [{"image": file.read_bytes(), "label": 0} for file in files], 64 << 20

    bench.by_ffcv(400, files, tmp_path)
    image, label = fields.RGBImageField, fields.IntField
    image.assert_called_once_with("jpg", max_resolution=400, jpeg_quality=PrepSettings().quality)
    columns = {"image": image.return_value, "label": label.return_value}
    ffcv.DatasetWriter.assert_called_once_with(str(tmp_path / "theirs.beton"), columns, num_workers=usable_cpus())
    start.assert_called_once_with("fork", force=True)
    [images] = ffcv.DatasetWriter.return_value.from_indexed_dataset.call_args.args
    assert len(images) == len(files)
    for number, file in enumerate(files):
        assert images[number] == (Image.open(file).convert("RGB"), 0)

    bench.by_litdata(files, tmp_path)
    sample, inputs, to = litdata.optimize.call_args.args
    assert ([sample(each) for each in inputs], to) == (stored, str(tmp_path / "litdata"))
    chosen = {"num_workers": usable_cpus(), "start_method": "fork", "verbose": False}
    assert litdata.optimize.call_args.kwargs == {"chunk_bytes": size} | chosen
    assert os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] == str(tmp_path / "CACHE")

    bench.by_mds(files, tmp_path)
    writer = streaming.MDSWriter
    writer.assert_called_once_with(
        out=str(tmp_path / "mds"), columns={"image": "bytes", "label": "int"}, size_limit=size
    )
    assert writer.return_value.__enter__.return_value.write.call_args_list == [call(each) for each in stored]
    writer.return_value.__exit__.assert_called_once()
