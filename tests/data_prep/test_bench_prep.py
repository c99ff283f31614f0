"""The other writers of `widemix bench prep`."""

import pytest

from widemix.bench import prep as bench


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
