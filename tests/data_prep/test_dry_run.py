"""The estimates of a dry run against the preparation that follows."""

import shutil
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from widemix.cli.commands import run_command
from widemix.cli.parser import make_parser
from widemix.data_prep.prepare import dry_run, prepare
from widemix.data_prep.settings import PrepSettings


@pytest.mark.parametrize("settings", [PrepSettings(raw=True), PrepSettings(fraction=0.5), PrepSettings(max_size=20)])
def test_estimated_sizes_are_right(tmp_path, folder, image, settings):
    for i in range(200):
        image(i).save(folder / f"train/bee/more{i}.jpg")
    out = tmp_path / "a" / "out"
    estimates, free = dry_run("image-folder", folder, out, settings, processes=1)
    assert not (tmp_path / "a").exists()
    assert 0 < free <= shutil.disk_usage(tmp_path).total
    manifest = prepare("image-folder", folder, out, settings, processes=1)
    assert [estimate.split for estimate in estimates] == list(manifest.splits)
    for estimate in estimates:
        split = manifest.splits[estimate.split]
        tables = 8 << 20  # the first page, whatever the images
        assert estimate.samples == split.samples
        assert estimate.bytes - tables == pytest.approx(split.bytes - tables, rel=0.1)
        assert estimate.seconds > 0
    assert dry_run("image-folder", folder, out, settings)[0] == []


def test_seconds_are_those_of_all_images_and_the_disk(tmp_path, folder, image, system):
    """As the sampled images take, by all processes."""
    for i in range(200):
        image(i).save(folder / f"train/bee/more{i}.jpg")
    clock = count(10.0, 3.0)  # each look is three seconds after the last
    system({"time.perf_counter": clock.__next__})
    estimates, _ = dry_run("image-folder", folder, tmp_path / "out", PrepSettings(), processes=4)
    for estimate in estimates:
        scale = estimate.samples / min(64, estimate.samples)
        assert estimate.seconds == pytest.approx(3 * scale / 4 + estimate.bytes / 500e6)
    assert max(estimate.samples for estimate in estimates) > 64
    settings = PrepSettings(fraction=0.05)
    for estimate in dry_run("digits", None, tmp_path / "out", settings, processes=4)[0]:  # arrays, by one process
        scale = estimate.samples / min(64, estimate.samples)
        assert estimate.seconds == pytest.approx(3 * scale + estimate.bytes / 500e6)


def test_the_room_is_free_on_the_disk_of_the_folder(tmp_path, folder, system, monkeypatch):
    asked = []
    system({"shutil.disk_usage": lambda path: asked.append(path) or SimpleNamespace(free=300)})
    assert dry_run("image-folder", folder, tmp_path / "a/b", PrepSettings())[1] == 300
    (tmp_path / "disk").mkdir()
    dry_run("image-folder", folder, tmp_path / "disk", PrepSettings())
    monkeypatch.chdir(tmp_path)
    dry_run("image-folder", folder, Path("disk/new"), PrepSettings())
    assert asked == [tmp_path, tmp_path / "disk", tmp_path / "disk"]


def test_a_prepared_folder_is_estimated_again_with_force(tmp_path, folder):
    out = tmp_path / "out"
    prepare("image-folder", folder, out, PrepSettings(), processes=1)
    assert dry_run("image-folder", folder, out, PrepSettings())[0] == []
    assert dry_run("image-folder", folder, out, PrepSettings(), force=True)[0] != []


def test_the_command_prints_the_estimates_and_the_room(tmp_path, folder, system, capsys):
    words = f"prep image-folder --from {folder} --to {tmp_path / 'out'} --processes 1 --raw".split()
    system({"time.perf_counter": count(10.0, 9.6).__next__})
    system({"shutil.disk_usage": lambda _: SimpleNamespace(free=3 << 29)})
    told = [
        f"{split} samples, about {size} MiB, about 10 s" for split, size in (("train: 21", 8.1), ("val: 6", "8.0"))
    ]
    done = [f"{tmp_path / 'out'}: is already prepared with these settings"]
    for options, lines in (
        (["--dry-run"], [*told, "1.5 GiB are free on that disk"]),
        ([], None),
        (["--dry-run"], done),
    ):
        assert run_command(make_parser(), argv=[*words, *options]) == 0
        printed = capsys.readouterr().out.splitlines()
        assert lines is None or printed == lines


def test_pages_are_counted(tmp_path, folder, limits):
    limits({"widemix.data_prep.beton_writer.PAGE": 16_384})  # four raw images a page
    estimates, _ = dry_run("image-folder", folder, tmp_path / "out", PrepSettings(raw=True))
    manifest = prepare("image-folder", folder, tmp_path / "out", PrepSettings(raw=True), processes=1)
    sizes = {split: pytest.approx(found.bytes, rel=0.15) for split, found in manifest.splits.items()}
    assert {estimate.split: estimate.bytes for estimate in estimates} == sizes
    large = PrepSettings(raw=True, max_size=1700)  # whose first page of 16 MiB begins after the tables
    estimates, _ = dry_run("image-folder", folder, tmp_path / "large", large)
    assert [estimate.bytes >> 20 for estimate in estimates] == [16, 16]


def test_estimates_have_the_fields_and_pages_that_are_written(tmp_path, folder):
    """A table of segments for each sample, and pages of 16 MiB for large images."""
    sizes = []
    for settings in (PrepSettings(splits="val"), PrepSettings(splits="val", restart_markers=False)):
        [estimate], _ = dry_run("image-folder", folder, tmp_path / "out", settings)
        manifest = prepare("image-folder", folder, tmp_path / str(len(sizes)), settings, processes=1)
        sizes.append(manifest.splits["val"].bytes - estimate.bytes)
    assert sizes[0] == pytest.approx(sizes[1], abs=15)  # of a page that is half full; a table takes 16 and more
