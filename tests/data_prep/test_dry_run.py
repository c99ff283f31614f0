"""The estimates of a dry run against the preparation that follows."""

import shutil

import pytest

from widemix.data_prep.dry_run import dry_run
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
