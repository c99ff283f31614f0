"""Damage of every kind is named by `verify`, and what sizes, layout and counts show is refused at opening."""

import errno
import json
import os
import re
import shlex
import shutil
import threading
from pathlib import Path

import pytest

from tests.data_prep.test_sources import ROWS
from tests.data_prep.writing import put
from widemix.cli.commands import run_command
from widemix.cli.parser import make_parser
from widemix.data.split import open_split
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.verify import repair_command, verify
from widemix.errors import InputError
from widemix.formats.beton import open_beton
from widemix.formats.chunks import map_chunks
from widemix.formats.manifest import manifest_json, read_manifest
from widemix.recipe.data import DataSection


@pytest.fixture
def prepared(tmp_path, folder, limits):
    """A small prepared folder of many small blocks and pages."""
    for module in ("formats.chunks", "formats.manifest", "data_prep.verify"):
        limits({f"widemix.{module}.CHUNK": 4096})
    limits({"widemix.data_prep.beton_writer.PAGE": 8192})
    prepare("image-folder", folder, tmp_path / "out", PrepSettings(), processes=1)
    return tmp_path / "out"


def test_a_file_that_may_not_be_read_is_not_damaged(prepared, system):
    """Root may read all, so the system's answer is played."""
    system({"os.access": lambda path, _: path.name != "train.beton"})
    with pytest.raises(InputError, match=r"train\.beton: cannot be read \(Permission denied\)$"):
        verify(prepared)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda whole: "{}", "source: Field required.*prepare it again"),
        (lambda whole: whole.replace('"samples"', '"sampels"'), "splits: train: Field required"),
        (lambda whole: whole.replace('"train.beton"', '"../train.beton"'), ".*String should match pattern"),
        (lambda whole: whole.replace('"files": {', '"files": {"/etc/hosts": "",'), ".*String should match pattern"),
        (lambda whole: re.sub(r'("blocks": \[)\s*"[^"]*",', r"\1", whole), ".*blocks do not cover"),
    ],
)
def test_what_is_no_manifest_is_named(prepared, change, words):
    path = prepared / "manifest.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(InputError, match=rf"not a manifest \({words}"):
        verify(prepared)


def special(path, kind):
    """In place of a file: what would be waited for, read without end, or led around in a circle."""
    path.unlink(missing_ok=True)
    {
        "FIFO": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "device": lambda: path.symlink_to("/dev/zero"),
        "loop": lambda: path.symlink_to(path),
    }[kind]()


@pytest.mark.parametrize("kind", ["FIFO", "folder", "device", "loop"])
def test_what_is_no_file_is_not_read(prepared, kind):
    special(prepared / "train.beton", kind)
    assert verify(prepared) == [f"{prepared / 'train.beton'}: is missing"]
    section = DataSection(path=str(prepared), num_classes=3)
    with pytest.raises(InputError, match=r"train\.beton: is missing"):
        open_split(section, "train", open_beton)
    special(prepared / "manifest.json", kind)
    with pytest.raises(InputError, match=r"manifest\.json: (is not a regular file|cannot be read)"):
        verify(prepared)


def test_a_changed_manifest_is_refused(prepared, folder):
    """Valid in itself, but with other classes, splits or settings than were written."""
    path, section = prepared / "manifest.json", DataSection(path=str(prepared), num_classes=3)
    words = r"manifest\.json: was changed since it was written \(its hash differs"
    whole = json.loads(path.read_text())
    swapped = {"train": whole["splits"]["val"], "val": whole["splits"]["train"]}
    for change in (
        {"classes": whole["classes"][::-1]},
        {"splits": swapped},
        {"settings": whole["settings"] | {"quality": 91}},
        {"exceptions": [{"file": "a", "rule": "b"}]},
        {"hash": "0" * 32},
    ):
        path.write_text(json.dumps(whole | change))
        for check in (verify, lambda _: open_split(section, "train", open_beton)):
            with pytest.raises(InputError, match=words):
                check(prepared)
    path.write_text(json.dumps({name: value for name, value in whole.items() if name != "hash"}))
    with pytest.raises(InputError, match="its hash differs"):
        verify(prepared)
    path.write_text(json.dumps(whole, indent=3))
    assert verify(prepared) == []


def test_what_is_ended_early_reads_no_further_blocks():
    begun, ended = [], threading.Event()

    def one(block):
        begun.append(block)
        if block:
            ended.wait(300)

    timer = threading.Timer(0.5, ended.set)  # of those that have begun
    with map_chunks(one, 1000, threads=3) as found:
        next(found)
        timer.start()
    timer.join()
    assert len(begun) <= 4


def test_the_file_of_another_split_is_named(prepared):
    shutil.copy(prepared / "val.beton", prepared / "train.beton")
    lines = verify(prepared)
    assert any("has" in line and "bytes, the manifest says" in line for line in lines)
    assert any("holds 6 samples, the manifest says 21" in line for line in lines)


@pytest.fixture
def thirty(tmp_path):
    """Thirty tiny images in one block."""
    put(tmp_path, {f"in/train/a/{i:02}.pgm": b"P5\n4 4\n255\n" + bytes([i] * 16) for i in range(30)})
    prepare("image-folder", tmp_path / "in", tmp_path / "thirty", PrepSettings(raw=True), processes=1)
    return tmp_path / "thirty"


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([4], "4"),
        ([0, 1, 2, 5], "0 to 2, 5"),
        (range(0, 20, 2), "0, 2, 4, 6, 8, 10, 12, 14, 16, 18"),
        ([*range(0, 20, 2), 19, 22], "0, 2, 4, 6, 8, 10, 12, 14, 16, 18 to 19 and 1 more run"),
        (range(0, 26, 2), "0, 2, 4, 6, 8, 10, 12, 14, 16, 18 and 3 more runs"),
        (range(20), "0 to 19"),
        (range(1, 22), "1 to 21"),
    ],
)
def test_ten_runs_and_twenty_samples_are_named(thirty, numbers, text):
    path = thirty / "train.beton"
    beton, data = open_beton(path), bytearray(path.read_bytes())
    for number in numbers:
        data[int(beton.offset[number]) + 3] ^= 1
    path.write_bytes(data)
    block, *samples = verify(thirty)
    assert block.startswith(
        f"{path}: block 0 (bytes 0 to {(64 << 20) - 1}) is damaged; it holds samples {text} and the"
    )
    named = [f"{path}: sample {n} (train/a/{n:02}.pgm) is damaged" for n in numbers]
    more = [f"{path}: {len(numbers)} samples are damaged in all: {text}"] if len(numbers) > 20 else []
    assert samples == named[:20] + more


def test_the_command_lists_damage_and_its_repair(prepared, capsys):
    words = ["verify", str(prepared)]
    assert run_command(make_parser(), argv=words) == 0
    assert capsys.readouterr().out == f"{prepared}: no damage\n"
    path = prepared / "train.beton"
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    assert run_command(make_parser(), argv=words) == 1
    *damages, again = capsys.readouterr().out.splitlines()
    assert damages == verify(prepared)
    assert damages
    assert again == f"to prepare it again: {repair_command(prepared)}"


def test_without_its_checksums_a_splits_blocks_are_checked(prepared):
    """And the samples in a damaged one are all of which it has a part."""
    path = prepared / "train.beton"
    beton, data = open_beton(path), bytearray(path.read_bytes())
    spanning = next(n for n in range(21) if beton.offset[n] // 4096 < (beton.stop[n] - 1) // 4096)
    start = (int(beton.stop[spanning]) - 1) // 4096 * 4096
    data[start] ^= 1
    path.write_bytes(data)
    (prepared / "train.crc32c").unlink()
    (prepared / "val.crc32c").write_bytes(b"")
    lines = verify(prepared)
    assert any(f"{prepared}/val.crc32c: has 0 bytes, and the samples need 24" in line for line in lines)
    assert lines[-2:] == [f"{prepared}/train.crc32c: is missing", f"{prepared}/val.crc32c: is damaged"]
    *_, last = [n for n in range(21) if beton.offset[n] < start + 4096 and beton.stop[n] > start]
    (damaged,) = (line for line in lines if ": block " in line)
    assert damaged.startswith(f"{path}: block {start // 4096} (bytes {start} to {start + 4095}) is damaged; ")
    assert f"it holds samples {spanning} to {last}" in damaged


def test_what_the_disk_does_not_give_is_damaged(prepared, system):
    path, open_path = prepared / "train.beton", Path.open
    beton = open_beton(path)

    def answer(self, *words, **more):
        if self == path:
            raise OSError(errno.EIO, "Input/output error")
        return open_path(self, *words, **more)

    system({"pathlib.Path.open": answer})
    lines = verify(prepared)
    assert [line for line in lines if ": sample " in line] == [
        f"{path}: sample {n} (train/{['ant', 'bee', 'cat'][n // 7]}/{n % 7}.JPEG) is damaged" for n in range(20)
    ]
    whole = [line for line in lines if ": block " in line]
    assert len(whole) == len(read_manifest(prepared).splits["train"].blocks)
    for block, line in enumerate(whole):
        held = [n for n in range(21) if beton.offset[n] < 4096 * (block + 1) and beton.stop[n] > 4096 * block]
        begin = f"{path}: block {block} (bytes {block * 4096} to {block * 4096 + 4095}) is damaged"
        assert line.startswith(f"{begin} (cannot be read: Input/output error); it holds ")
        samples = f"{held[0]} to {held[-1]}" if len(held) > 1 else "".join(map(str, held))
        assert (f"samples {samples}" in line) is bool(held)
        edge = block * 4096 < beton.offset.min() or (block + 1) * 4096 > beton.stop.max()
        assert ("the tables (labels, sizes, positions) or the space between them" in line) == edge


@pytest.mark.parametrize(("settings", "words"), ROWS["repaired"], ids=str)
def test_the_repair_command_has_all_settings(tmp_path, prepared, settings, words):
    manifest = read_manifest(prepared)
    (prepared / "manifest.json").write_text(manifest_json(manifest.model_copy(update={"settings": settings})))
    first, *rest = shlex.split(repair_command(prepared).removeprefix("widemix prep "))
    assert first == "image-folder"
    assert rest[-3:] == ["--to", str(prepared), "--force"]
    pairs = [" ".join(word) for word in re.findall(r"(--\S+)((?: (?!--)\S+)?)", " ".join(rest[:-3]))]
    wanted = re.findall(r"(--\S+)((?: (?!--)\S+)?)", f"--from {tmp_path}/images {words}")
    assert sorted(pairs) == sorted(" ".join(word) for word in wanted)
    arguments = make_parser().parse_args(["prep", first, *rest])
    assert arguments.command is not None


def test_the_command_for_a_source_without_a_folder_names_none(tmp_path, digits):
    assert "--from" not in repair_command(digits)
    assert repair_command(digits).startswith("widemix prep digits --no-shuffle --to ")
