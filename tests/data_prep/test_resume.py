"""An interrupted preparation resumes, and ends in the bytes of an uninterrupted one."""

import errno
import gzip
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from tests import layouts
from tests.data_prep import kills
from widemix.data_prep import disk, encode, write
from widemix.data_prep.changes import check_unchanged
from widemix.data_prep.image import Encoded
from widemix.data_prep.journal import Journal
from widemix.data_prep.prepare import prepare
from widemix.data_prep.samples import ImageFiles, ImageSlices
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.written import ORIGIN
from widemix.errors import InputError
from widemix.formats.beton import JPEG
from widemix.formats.checksums import crc32c

pytestmark = pytest.mark.usefixtures("small_pages")

ROOT = Path(__file__).parents[2]
RAW = PrepSettings(raw=True, on_corrupt="error")

# A process that prepares in child processes, kills each before a random line of data_prep that it executes, and lets
# the next one resume: as random as kills by a clock, but the same on every machine.
KILLS = """
    import os, random, signal, sys
    from pathlib import Path
    from widemix.data_prep import write
    from widemix.data_prep.prepare import prepare
    from widemix.data_prep.settings import PrepSettings

    write.SHARD = 60_000

    def child(out, last=0):
        pid = os.fork()
        if pid == 0:
            sys.settrace(counter(last))
            prepare("image-folder", Path(sys.argv[1]), out, PrepSettings(raw=True), processes=1)
            sys.settrace(None)
            out.with_suffix(".lines").write_text(str(lines))
            os._exit(0)
        return os.waitpid(pid, 0)[1]

    lines = 0

    def counter(last):
        def trace(frame, event, argument):
            global lines
            if "data_prep" not in frame.f_code.co_filename:
                return None
            lines += 1
            if lines == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace
        return trace

    def contents(folder):
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    whole = Path(sys.argv[2])
    assert child(whole) == 0
    executed = int(whole.with_suffix(".lines").read_text())

    random, went_on = random.Random(0), 0
    for kill in range(20):
        out = whole.with_name(f"out{kill}")
        assert child(out, random.randint(1, executed)) == signal.SIGKILL
        went_on += any(out.glob("*.journal.unfinished"))
        assert child(out) == 0
        assert contents(out) == contents(whole)
    assert went_on >= 5, went_on
"""


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def images(tmp_path, image):
    """150 training images of 3.6 kB each when raw, and 20 to validate."""
    for split, count in (("train", 150), ("val", 20)):
        for i in range(count):
            path = tmp_path / f"images/{split}/{'ab'[i % 2]}/{i}.bmp"
            path.parent.mkdir(parents=True, exist_ok=True)
            image(i).save(path)
    return tmp_path / "images"


@pytest.fixture
def uninterrupted(tmp_path, images):
    prepare("image-folder", images, tmp_path / "uninterrupted", RAW, processes=1)
    return contents(tmp_path / "uninterrupted")


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(write, "SHARD", 20_000)


@pytest.fixture
def encoded(monkeypatch):
    """The names of the images that were encoded, as they are."""
    names = []

    def watched(sample, settings):
        names.append(sample.name)
        return original(sample, settings)

    original = encode.encode
    monkeypatch.setattr(encode, "encode", watched)
    return names


def damage(path):
    """Truncate an image; returns a function that repairs it."""
    data = path.read_bytes()
    path.write_bytes(data[:100])
    return lambda: path.write_bytes(data)


@pytest.mark.long
def test_killed_at_random_moments(tmp_path, images):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(KILLS))
    command = [sys.executable, script, images, tmp_path / "whole"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_repaired_source_resumes_without_redoing_shards(
    tmp_path, images, uninterrupted, small_shards, encoded, capsys
):
    out = tmp_path / "out"
    repair = damage(images / "train/b/101.bmp")
    with pytest.raises(InputError, match=r"train/b/101\.bmp"):
        prepare("image-folder", images, out, RAW, processes=1)
    assert f"{out}: finished parts are kept; the same command resumes" in capsys.readouterr().err
    before = list(encoded)
    repair()
    encoded.clear()
    prepare("image-folder", images, out, RAW, processes=1)
    assert f"{out}: resuming" in capsys.readouterr().err
    assert contents(out) == uninterrupted
    again = set(before) & set(encoded)
    assert len(before) > 70
    assert len(again) <= 20_000 // 3_600 + 1


def test_a_source_file_that_went_and_came_back(tmp_path, images, uninterrupted, small_shards):
    out = tmp_path / "out"
    repair = damage(images / "val/b/7.bmp")
    with pytest.raises(InputError, match=r"val/b/7\.bmp"):
        prepare("image-folder", images, out, RAW, processes=1)
    (images / "val/b/7.bmp").unlink()
    with pytest.raises(InputError, match="an interrupted preparation of other samples"):
        prepare("image-folder", images, out, RAW, processes=1)
    repair()
    with pytest.raises(InputError, match="an interrupted preparation with quality 90, not 50"):
        prepare("image-folder", images, out, PrepSettings(raw=True, on_corrupt="error", quality=50), processes=1)
    prepare("image-folder", images, out, RAW, processes=1)
    assert contents(out) == uninterrupted


def test_force_starts_again(tmp_path, images, small_shards, encoded):
    out = tmp_path / "out"
    repair = damage(images / "val/b/7.bmp")
    with pytest.raises(InputError):
        prepare("image-folder", images, out, RAW, processes=1)
    repair()
    encoded.clear()
    manifest = prepare("image-folder", images, out, PrepSettings(max_size=8), processes=1, force=True)
    assert manifest.settings["max_size"] == 8
    assert len(encoded) == 170
    assert {path.suffix for path in out.iterdir()} == {".json", ".beton", ".crc32c", ".sources"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("what", ["journal", "beton"])
def test_files_torn_by_a_crash(tmp_path, images, uninterrupted, small_shards, what):
    out = tmp_path / "out"
    path = out / f"train.{what}.unfinished"
    for fraction in (0.0, 0.3, 0.7, 0.999):
        repair = damage(images / "train/b/99.bmp")
        with pytest.raises(InputError):
            prepare("image-folder", images, out, RAW, processes=1)
        os.truncate(path, int(path.stat().st_size * fraction))
        repair()
        prepare("image-folder", images, out, RAW, processes=1)
        assert contents(out) == uninterrupted
        for file in out.iterdir():
            file.unlink()


def test_a_disk_that_was_full(tmp_path, images, uninterrupted, small_shards, encoded):
    small = tmp_path / "small"
    small.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "none", small]).returncode:
        pytest.skip("needs root and the right to mount a small tmpfs")
    try:
        with pytest.raises(InputError, match="the disk is full; free some space"):
            prepare("image-folder", images, small / "out", RAW, processes=1)
        assert "manifest.json" not in contents(small / "out")
        subprocess.run(["mount", "-o", "remount,size=3m", small], check=True)
        before = len(encoded)
        prepare("image-folder", images, small / "out", RAW, processes=1)
        assert contents(small / "out") == uninterrupted
        assert 0 < len(encoded) - before < 170
    finally:
        subprocess.run(["umount", small], check=True)


def test_the_journal_has_no_entry_after_a_page_that_failed(
    tmp_path, images, uninterrupted, small_shards, encoded, monkeypatch
):
    """A disk that is full for one page and has space for the next: all that the journal lists must be on disk."""
    write_page, calls = disk.DiskFile._write, []

    def fail_once(self, position, parts):
        calls.append(position)
        if len(calls) == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_page(self, position, parts)

    monkeypatch.setattr(disk.DiskFile, "_write", fail_once)
    out = tmp_path / "out"
    with pytest.raises(InputError, match="the disk is full; free some space"):
        prepare("image-folder", images, out, RAW, processes=1)
    assert len(calls) == 5
    before = len(encoded)
    prepare("image-folder", images, out, RAW, processes=1)
    assert contents(out) == uninterrupted
    assert 0 < len(encoded) - before < 170


def test_two_at_once_are_refused(tmp_path, images, uninterrupted, monkeypatch):
    out = tmp_path / "out"
    refused = []

    def meanwhile(sample, settings):
        if not refused:
            with pytest.raises(InputError, match="another process is writing to it"):
                prepare("image-folder", images, out, RAW, processes=1)
            refused.append(True)
        return original(sample, settings)

    original = encode.encode
    monkeypatch.setattr(encode, "encode", meanwhile)
    monkeypatch.setattr("widemix.lock.KILLED_S", 0.1)
    prepare("image-folder", images, out, RAW, processes=1)
    assert refused
    assert contents(out) == uninterrupted


def interrupted(images, out, at="val/b/7.bmp"):
    """A preparation that a damaged image stopped; its source is repaired."""
    repair = damage(images / at)
    with pytest.raises(InputError):
        prepare("image-folder", images, out, RAW, processes=1)
    repair()
    assert any(out.glob("*.journal.unfinished"))
    assert not (out / "lock.unfinished").exists()


@pytest.mark.parametrize("name", ["lock", "leases", "plan", ".plan", "train.beton", "train.journal"])
def test_no_link_in_an_output_folder_is_followed(tmp_path, images, small_shards, name):
    """Of an interrupted preparation that someone has sent."""
    out, theirs = tmp_path / "out", tmp_path / "theirs"
    interrupted(images, out)
    link = out / f"{name}.unfinished"
    theirs.write_bytes(link.read_bytes() if link.exists() else b"")
    before = theirs.stat()
    link.unlink(missing_ok=True)
    link.symlink_to(theirs)
    with pytest.raises(InputError, match=f"{link}: is a link to {theirs}"):
        prepare("image-folder", images, out, RAW, processes=1)
    assert (theirs.stat().st_mtime_ns, theirs.stat().st_size) == (before.st_mtime_ns, before.st_size)


@pytest.mark.parametrize("what", ["size", "content"])
def test_a_source_that_changed_meanwhile_is_refused(tmp_path, images, uninterrupted, small_shards, what):
    """An image that was taken before: of another size, or of the same one with other bytes; but not its time."""
    out, path = tmp_path / "out", images / "train/a/4.bmp"
    interrupted(images, out)
    data = path.read_bytes()
    path.write_bytes(data + b"\0" if what == "size" else data[:-1] + bytes([data[-1] ^ 1]))
    journal = (out / "train.journal.unfinished").read_bytes()
    with pytest.raises(InputError, match=r"^train/a/4\.bmp: changed since the interrupted preparation .* --force"):
        prepare("image-folder", images, out, RAW, processes=1)
    assert (out / "train.journal.unfinished").read_bytes() == journal
    path.write_bytes(data)
    prepare("image-folder", images, out, RAW, processes=1)
    assert contents(out) == uninterrupted


def test_a_change_is_noticed_by_size_by_either_time_and_by_content(tmp_path):
    """A file that was only touched is the same."""
    samples = ImageFiles(tmp_path, ["a", "b"], [0, 0])
    for sample in samples:
        (tmp_path / sample.name).write_bytes(b"12345")
    origins = np.array([(crc32c(b"12345"), *sample.status()) for sample in samples], ORIGIN)
    path, before = tmp_path / "b", (tmp_path / "b").stat()
    check_unchanged(samples, origins, tmp_path)
    os.utime(path, ns=(1, 1))
    check_unchanged(samples, origins, tmp_path)
    path.write_bytes(b"12346")
    for times in ((before.st_atime_ns, before.st_mtime_ns), (1, 1)):  # as `rsync -t` and `cp -p` leave them
        os.utime(path, ns=times)
        with pytest.raises(InputError, match=r"^b: changed since the interrupted preparation"):
            check_unchanged(samples, origins, tmp_path)
        check_unchanged(samples, origins[:1], tmp_path)  # which was not taken yet


def test_a_link_has_the_status_of_its_file(tmp_path):
    """Else each image of a folder of links would have changed since it was read."""
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("a")
    (sample,) = ImageFiles(tmp_path, ["link"], [0])
    data, status = sample.image.read_with_status()
    assert (data, status.size, sample.status()) == (b"12345", 5, status)


def test_a_file_of_several_images_that_has_another_size_has_changed(tmp_path):
    """As a tar to which more was added: where the first images lie the bytes are the same."""
    path = tmp_path / "a.tar"
    path.write_bytes(b"1234567890")
    samples = ImageSlices(str(path), ["a", "b"], [0, 0], np.array([0, 5]), np.array([5, 5]))
    origins = np.array([(crc32c(sample.content()), *sample.status()) for sample in samples], ORIGIN)
    check_unchanged(samples, origins, tmp_path)
    path.write_bytes(b"1234567890+")
    with pytest.raises(InputError, match=r"^a, b: changed since the interrupted preparation"):
        check_unchanged(samples, origins, tmp_path)


def test_what_was_left_out_or_changed_before_a_kill_is_not_encoded_again(tmp_path, image, encoded, monkeypatch):
    """And is in the list of unusual files, as if nothing had happened."""
    monkeypatch.setattr(write, "SHARD", 1_000)
    for i in range(6):
        path = tmp_path / f"images/train/a/{i}.bmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        image(i, mode="L" if i == 2 else "RGB").save(path)
    (tmp_path / "images/train/a/1.bmp").write_bytes(b"no image")
    words = {"settings": PrepSettings(raw=True), "processes": 1, "max_bad": 0.2}
    prepare("image-folder", tmp_path / "images", tmp_path / "uninterrupted", **words)
    with monkeypatch.context() as patch:
        patch.setattr(write.BetonWriter, "finish", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare("image-folder", tmp_path / "images", tmp_path / "out", **words)
    encoded.clear()
    path = tmp_path / "images/train/a/5.bmp"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))  # the sixth that was taken, and the fifth that was stored
    with pytest.raises(InputError, match=r"^train/a/5\.bmp: changed since the interrupted preparation"):
        prepare("image-folder", tmp_path / "images", tmp_path / "out", **words)
    path.write_bytes(data)
    prepare("image-folder", tmp_path / "images", tmp_path / "out", **words)
    assert encoded == []
    assert contents(tmp_path / "out") == contents(tmp_path / "uninterrupted")


def test_a_journal_of_another_plan_is_not_believed(tmp_path, image, encoded, monkeypatch):
    """Whatever the file of the plan says."""
    monkeypatch.setattr(write, "SHARD", 1)
    (tmp_path / "images/train/a").mkdir(parents=True)
    for i in range(3):
        image(i).save(tmp_path / f"images/train/a/{i}.png")
    out, plan = tmp_path / "out", tmp_path / "out/plan.unfinished"
    with monkeypatch.context() as patch:
        patch.setattr(write.BetonWriter, "finish", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare("image-folder", tmp_path / "images", out, PrepSettings(), processes=1)
    plan.write_text(plan.read_text().replace('"quality": 90', '"quality": 50'))
    encoded.clear()
    prepare("image-folder", tmp_path / "images", out, PrepSettings(quality=50), processes=1)
    assert len(encoded) == 3


def test_a_journal_of_another_seed_has_no_entries(tmp_path):
    for seed, found in (("a", []), ("a", [{"x": 1}]), ("b", []), ("b", [{"x": 1}])):
        journal = Journal(tmp_path / "journal", seed)
        assert list(journal.entries()) == found
        if not found:
            journal.append({"x": 1})


def test_the_entry_that_is_taken_last_goes_if_no_more_is_asked_for(tmp_path):
    """And what is appended then follows those before it."""
    journal = Journal(tmp_path / "journal")
    for number in range(4):
        journal.append({"x": number})
    again = Journal(tmp_path / "journal")
    entries = again.entries()
    assert [next(entries) for _ in range(3)] == [{"x": number} for number in range(3)]
    entries.close()
    again.append({"x": 7})
    assert list(Journal(tmp_path / "journal").entries()) == [{"x": 0}, {"x": 1}, {"x": 7}]


def test_an_entry_is_in_the_file_when_that_is_flushed_to_disk(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda _: flushed.append((tmp_path / "journal").read_bytes()))
    Journal(tmp_path / "journal").append({"x": 1})
    assert flushed == [(tmp_path / "journal").read_bytes()] != [b""]


def test_data_that_were_lost_after_the_journal_are_written_again_each_time(tmp_path, monkeypatch):
    """All of them, or those of the last image; and what was taken over once more is taken over once."""
    monkeypatch.setattr(write, "SHARD", 1)
    path = tmp_path / "beton"

    def taken(stop):
        """How many of four images a writer takes over, before it writes those up to `stop`."""
        with write.BetonWriter(path, tmp_path / "journal", 4) as writer:
            found = writer.written.taken
            for number in range(found, stop):
                writer.add(Encoded(str(number), number, JPEG, 2, 3, bytes([number] * 9), ""))
            writer.disk.wait()
        return found

    assert [taken(2), taken(3)] == [0, 2]
    path.unlink()
    assert [taken(2), taken(4), taken(4)] == [0, 2, 4]
    for _ in range(2):
        os.truncate(path, path.stat().st_size - 5)
        assert [taken(4), taken(4)] == [3, 4]


@pytest.mark.parametrize("plan", ["[]", '{"source":'])
def test_a_damaged_plan_is_replaced_only_by_force(tmp_path, folder, plan):
    for force in (False, True):
        (tmp_path / "out").mkdir(exist_ok=True)
        for name, text in (("plan", plan), ("train.journal", ""), ("train.beton", "")):
            (tmp_path / f"out/{name}.unfinished").write_text(text)
        words = {"settings": PrepSettings(splits="val"), "processes": 1, "force": force}
        if force:
            assert prepare("image-folder", folder, tmp_path / "out", **words).splits["val"].samples == 6
            assert not list((tmp_path / "out").glob("*.unfinished"))
            continue
        with pytest.raises(InputError, match=r"plan\.unfinished: is damaged; add --force to start again"):
            prepare("image-folder", folder, tmp_path / "out", **words)
        assert (tmp_path / "out/plan.unfinished").read_text() == plan


def test_an_image_that_changes_between_its_encoding_and_its_writing_is_refused(tmp_path, folder, monkeypatch):
    """JPEGs that are kept as they are, are read again when they are written."""
    path, encode_image = folder / "val/bee/1.JPEG", encode.encode

    def encode_and_change(sample, settings):
        record = encode_image(sample, settings).for_transfer()
        if sample.name == "val/bee/1.JPEG":
            data = path.read_bytes()
            path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        return record

    monkeypatch.setattr(encode, "encode", encode_and_change)
    settings = PrepSettings(restart_markers=False)
    with pytest.raises(InputError, match=r"val/bee/1\.JPEG: was changed while it was prepared; run the same command"):
        prepare("image-folder", folder, tmp_path / "out", settings, processes=1)


def test_numbers_of_a_table_that_changed_meanwhile_are_refused(tmp_path, image, monkeypatch):
    """Those of an image that was taken before: the file would mix both tables."""
    monkeypatch.setattr(write, "SHARD", 1_000)
    out, table = tmp_path / "out", tmp_path / "table.csv"
    for i in range(3):
        image(i).save(tmp_path / f"{i}.bmp")
    settings = PrepSettings(raw=True, targets="age", on_corrupt="error")
    table.write_text("path,age\n0.bmp,1\n1.bmp,2\n2.bmp,3\n")
    repair = damage(tmp_path / "2.bmp")
    with pytest.raises(InputError):
        prepare("csv", table, out, settings, processes=1)
    repair()
    assert any(out.glob("*.journal.unfinished"))
    table.write_text("path,age\n0.bmp,7\n1.bmp,2\n2.bmp,3\n")
    with pytest.raises(InputError, match=r"an interrupted preparation of other samples; .* --force"):
        prepare("csv", table, out, settings, processes=1)


def test_force_starts_a_changed_source_again(tmp_path, images, small_shards):
    out, path = tmp_path / "out", images / "train/a/4.bmp"
    interrupted(images, out)
    path.write_bytes((images / "train/a/6.bmp").read_bytes())
    prepare("image-folder", images, out, RAW, processes=1, force=True)
    prepare("image-folder", images, tmp_path / "fresh", RAW, processes=1)
    assert contents(out) == contents(tmp_path / "fresh")


def test_pixels_that_changed_meanwhile_are_refused(tmp_path, monkeypatch):
    """Of a source that is read whole, with its listing."""
    monkeypatch.setattr(write, "SHARD", 1_000)
    layouts.mnist(tmp_path)
    out = tmp_path.with_name("mnist-out")
    shutil.copy(tmp_path / "t10k-labels-idx1-ubyte.gz", tmp_path / "kept")
    with monkeypatch.context() as patch:
        patch.setattr(write.BetonWriter, "finish", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare("mnist", tmp_path, out, PrepSettings())
    path = tmp_path / "train-images-idx3-ubyte.gz"
    body = bytearray(gzip.decompress(path.read_bytes()))
    body[20] ^= 1
    path.write_bytes(gzip.compress(body))
    with pytest.raises(InputError, match=r"^train\[0\]: changed since the interrupted preparation"):
        prepare("mnist", tmp_path, out, PrepSettings())


@pytest.mark.one_in(5)
@pytest.mark.parametrize("line", [0, 1, -1])
@pytest.mark.parametrize("change", ["character", "{}", "other", "twice"])
def test_a_changed_journal_is_not_believed(tmp_path, images, uninterrupted, small_shards, line, change, capsys):
    out = tmp_path / "out"
    interrupted(images, out)
    path = out / "train.journal.unfinished"
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) > 10
    lines[line] = {
        "character": lines[line].replace(b'"taken": ', b'"taken": 1', 1),
        "{}": b"{}\n",
        "other": lines[2],
        "twice": lines[line] * 2,
    }[change]
    path.write_bytes(b"".join(lines))
    prepare("image-folder", images, out, RAW, processes=1)
    assert contents(out) == uninterrupted
    if (change, line) != ("twice", -1):
        assert "is damaged; what follows it is prepared again" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["cut", "zeros", "bit"])
def test_changed_data_are_not_believed(tmp_path, images, uninterrupted, small_shards, change):
    out = tmp_path / "out"
    interrupted(images, out)
    path = out / "train.beton.unfinished"
    data = bytearray(path.read_bytes())
    at = write.PAGE + 100_003
    if change == "bit":
        data[at] ^= 4
    else:
        data[at:] = bytes(len(data) - at if change == "zeros" else 0)
    path.write_bytes(data)
    prepare("image-folder", images, out, RAW, processes=1)
    assert contents(out) == uninterrupted


@pytest.mark.long
def test_some_random_kills_and_damages(tmp_path):
    """A few of those of `python -m tests.data_prep.kills`, which does hundreds."""
    found = list(kills.run(["digits", "mnist"], count=2, seed=0, root=tmp_path))
    assert len(found) == 2
    assert not [line for line in found if line[1] in kills.BAD]
