"""The estimates of a dry run against the preparation that follows."""

import shutil
from itertools import count
from types import SimpleNamespace

import pytest

from widemix.cli.parser import make_parser
from widemix.command_line.commands import run_command
from widemix.data_prep import dry_run as dry_run_module
from widemix.data_prep.dry_run import Estimate, dry_run
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.errors import InputError


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


def test_seconds_are_those_of_the_sampled_images_for_all_by_all_processes_and_of_the_disk(
    tmp_path, folder, image, monkeypatch
):
    for i in range(200):
        image(i).save(folder / f"train/bee/more{i}.jpg")
    clock = count(10.0, 3.0)  # each look is three seconds after the last
    monkeypatch.setattr(dry_run_module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    estimates, _ = dry_run("image-folder", folder, tmp_path / "out", PrepSettings(raw=True), processes=4)
    for estimate in estimates:
        scale = estimate.samples / min(64, estimate.samples)
        assert estimate.seconds == pytest.approx(3 * scale / 4 + estimate.bytes / 500e6)
    assert max(estimate.samples for estimate in estimates) > 64


def test_the_command_prints_the_estimates_and_the_room(tmp_path, folder, monkeypatch, capsys):
    found = [Estimate("train", 1200, 5 << 20, 9.6), Estimate("val", 30, 1536 << 10, 0.2)]
    words = ["prep", "image-folder", "--from", str(folder), "--to", str(tmp_path / "out"), "--dry-run"]
    monkeypatch.setattr(dry_run_module, "dry_run", lambda *_, **__: (found, 3 << 29))
    assert run_command(make_parser(), argv=words) == 0
    assert capsys.readouterr().out.splitlines() == [
        "train: 1200 samples, about 5.0 MiB, about 10 s",
        "val: 30 samples, about 1.5 MiB, about 0 s",
        "1.5 GiB are free on that disk",
    ]
    monkeypatch.setattr(dry_run_module, "dry_run", lambda *_, **__: ([], 1))
    assert run_command(make_parser(), argv=words) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'}: is already prepared with these settings\n"


def test_pages_are_counted(tmp_path, folder, monkeypatch):
    monkeypatch.setattr("widemix.data_prep.write.PAGE", 16_384)  # four raw images a page
    estimates, _ = dry_run("image-folder", folder, tmp_path / "out", PrepSettings(raw=True))
    manifest = prepare("image-folder", folder, tmp_path / "out", PrepSettings(raw=True), processes=1)
    assert [estimate.split for estimate in estimates] == list(manifest.splits)
    for estimate in estimates:
        assert estimate.bytes == pytest.approx(manifest.splits[estimate.split].bytes, rel=0.15)


@pytest.mark.parametrize(
    ("source", "origin", "word"),
    [
        ("imagenett", "images", "did you mean"),
        ("imagenet", "images", "WordNet id"),
        ("imagenet", "x", "no such file"),
    ],
)
def test_wrong_arguments_are_refused_as_by_prepare(tmp_path, folder, source, origin, word):
    with pytest.raises(InputError, match=word):
        dry_run(source, tmp_path / origin, tmp_path / "out", PrepSettings())
