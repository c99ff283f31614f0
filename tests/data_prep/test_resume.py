"""Whatever ends a preparation, the same call ends in the bytes of an undisturbed one, or says why it can't."""

import gzip
import itertools
import os
import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.data_prep.conftest import contents
from tests.data_prep.interruptions import DONE, FAILED, LINES, PREPARED, RAW, bmps, change, make_job, run_in_child
from tests.shims import disk_of
from widemix.data_prep import beton_writer
from widemix.data_prep.beton_writer import ORIGIN
from widemix.data_prep.image import encode
from widemix.data_prep.prep_dir import lock_folder
from widemix.data_prep.prepare import prepare
from widemix.data_prep.records import Encoded
from widemix.data_prep.samples import ImageFiles, TarImages
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.unfinished import Journal
from widemix.data_prep.write_dataset import check_unchanged
from widemix.errors import InputError, RunError
from widemix.formats.beton import JPEG
from widemix.formats.checksums import crc32c

pytestmark = pytest.mark.usefixtures("small_shards")

STRICT = PrepSettings(raw=True, on_corrupt="error")
JOBS = [*PREPARED, "join", "extend", "restore"]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory, small_shards):
    """The jobs by name, made when one is asked for."""
    made = {}

    def find(name):
        if name not in made:
            made[name] = make_job(name, tmp_path_factory.mktemp(name))
        return made[name]

    return find


class Interruptions(RuleBasedStateMachine):
    """A folder to which a job writes again and again: it is killed, its disk is full, its files are damaged."""

    job = root = None  # of the test
    numbers = itertools.count()
    fractions = st.floats(0, 1, exclude_max=True)

    @initialize()
    def begin(self):
        self.to = self.root / f"to.{next(self.numbers)}"
        self.plan_is_damaged = False
        if self.job.before:
            shutil.copytree(self.job.before, self.to)

    @rule(at=fractions)
    def kill(self, at):
        run_in_child(self.job.act, self.to, last=1 + int(at * self.job.lines))

    @rule(at=fractions)
    def fill_the_disk(self, at):
        largest = max(map(len, self.job.whole.values()))
        assert run_in_child(self.job.act, self.to, most=int(at * largest))[0] in (DONE, FAILED)

    def unfinished(self):
        return sorted(path for path in self.to.glob("*.unfinished") if path.is_file() and path.stat().st_size)

    @precondition(unfinished)
    @rule(
        which=fractions, how=st.sampled_from(["cut", "zeros", "bit", "line", "other"]), at=fractions, other=fractions
    )
    def damage(self, which, how, at, other):
        files = self.unfinished()
        path, source = (files[int(number * len(files))] for number in (which, other))
        data = path.read_bytes()
        path.write_bytes(change(data, how, int(at * len(data)), source.read_bytes()))
        self.plan_is_damaged |= path.name == "plan.unfinished"

    @rule()
    def go_on(self):
        try:
            self.job.act(to=self.to)
        except InputError as error:
            if not self.plan_is_damaged and f"{self.to}: is already prepared" not in str(error):  # as a join is
                raise
            self.job.act(to=self.to, force=True)
        self.plan_is_damaged = False
        assert contents(self.to) == self.job.whole

    def teardown(self):
        self.go_on()
        shutil.rmtree(self.to)


@pytest.mark.parametrize("count", [3, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", JOBS)
def test_whatever_interrupts_it_the_bytes_are_the_same(tmp_path, jobs, name, count):
    machine = type("Machine", (Interruptions,), {"job": jobs(name), "root": tmp_path})
    run_state_machine_as_test(machine, settings=settings(max_examples=count, stateful_step_count=4))


@pytest.fixture(scope="module")
def cut(tmp_path_factory, small_shards):
    """An image folder, the bytes of its preparation, and one that a damaged image has stopped, which is repaired."""
    root = tmp_path_factory.mktemp("cut")
    bmps(root / "in", 24)
    prepare("image-folder", root / "in", root / "whole", STRICT, processes=1)
    with (
        changed(root / "in/train/b/19.bmp", lambda data: data[:100]),
        pytest.raises(InputError, match=r"train/b/19\.bmp"),
    ):
        prepare("image-folder", root / "in", root / "out", STRICT, processes=1)
    return root


@pytest.fixture
def out(tmp_path, cut):
    """The folder of the stopped one."""
    return shutil.copytree(cut / "out", tmp_path / "out")


def go_on(cut, out, settings=STRICT, **words):
    prepare("image-folder", cut / "in", out, settings, processes=1, **words)
    return contents(out)


@contextmanager
def changed(path, change):
    """In this block a file holds what `change` makes of its bytes; with None it is gone."""
    before = path.read_bytes()
    after = change(before)
    path.unlink() if after is None else path.write_bytes(after)
    try:
        yield
    finally:
        path.write_bytes(before)


def test_what_is_recorded_is_not_encoded_again(cut, out, decoded, capsys):
    assert go_on(cut, out) == contents(cut / "whole")
    assert f"{out}: resuming an interrupted preparation" in capsys.readouterr().err
    assert len(decoded) == 3 + 3  # the last of train, and val


def test_a_stopped_preparation_says_how_it_goes_on(cut, out, capsys):
    with changed(cut / "in/val/a/02.bmp", lambda _: b""), pytest.raises(InputError, match=r"val/a/02\.bmp"):
        go_on(cut, out)
    assert f"{out}: finished parts are kept; the same command resumes" in capsys.readouterr().err
    assert go_on(cut, out) == contents(cut / "whole")


@pytest.mark.parametrize(
    ("file", "how", "at"),
    [
        *itertools.product(["journal"], LINES, [0, 1, -1]),
        *itertools.product(["journal", "beton"], ["cut", "zeros", "bit", "longer"], [0.0, 0.8, 0.999]),
        *itertools.product(["beton"], ["bit"], [0.1, 0.3, 0.5]),  # between the tables and the data
    ],
)
def test_torn_and_changed_files_are_not_believed(cut, out, file, how, at, capsys):
    path = out / f"train.{file}.unfinished"
    data = path.read_bytes()
    path.write_bytes(change(data, how, at if how in LINES else int(at * len(data))))
    assert go_on(cut, out) == contents(cut / "whole")
    assert how not in LINES or "is damaged; what follows it is prepared again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "change", "settings", "words"),
    [
        ("in/train/a/04.bmp", lambda data: data + b"\0", STRICT, r"^train/a/04\.bmp: changed since .* --force"),
        ("in/train/a/04.bmp", lambda data: data[:-1] + b"?", STRICT, r"^train/a/04\.bmp: changed since .* --force"),
        ("in/val/a/02.bmp", lambda data: None, STRICT, "holds an interrupted preparation of other samples"),
        ("in/val/a/02.bmp", lambda data: data, replace(STRICT, quality=50), "preparation with quality 90, not 50"),
        ("out/plan.unfinished", lambda data: b"[]", STRICT, r"plan\.unfinished: is damaged; add --force to start"),
        ("out/plan.unfinished", lambda data: data[:9], STRICT, r"plan\.unfinished: is damaged; add --force to start"),
    ],
)
def test_what_changed_meanwhile_is_refused_until_it_is_undone(cut, out, file, change, settings, words):
    """Or replaced by force: then all is prepared again, as it is now."""
    where = (out if file.startswith("out") else cut / "in") / file.partition("/")[2]
    journal = (out / "train.journal.unfinished").read_bytes()
    with changed(where, change):
        with pytest.raises(InputError, match=words):
            go_on(cut, out, settings)
        assert (out / "train.journal.unfinished").read_bytes() == journal
        forced = shutil.copytree(out, out.with_name("forced"))
        fresh = out.with_name("fresh")
        assert go_on(cut, forced, settings, force=True) == go_on(cut, fresh, settings)
    assert go_on(cut, out) == contents(cut / "whole")


@pytest.mark.parametrize(
    ("name", "file", "change", "words"),
    [
        ("targets", "table.csv", lambda data: data.replace(b",0.0,", b",7.0,"), "of other samples; .* --force"),
        ("arrays", "train-images-idx3-ubyte.gz", lambda data: brighter(data), r"^train\[0\]: changed since"),
    ],
)
def test_numbers_and_pixels_that_changed_meanwhile_are_refused(tmp_path, jobs, name, file, change, words):
    """Of sources that are read whole, with their listing."""
    job = jobs(name)
    with disk_of(len(job.whole["train.beton"]) - 1), pytest.raises(OSError, match="File too large"):
        job.act(to=tmp_path / "out")
    with changed(job.act.args[1] / file, change), pytest.raises(InputError, match=words):
        job.act(to=tmp_path / "out")


def brighter(data):
    """MNIST's images with another first pixel."""
    body = bytearray(gzip.decompress(data))
    body[16] ^= 1
    return gzip.compress(body)


def test_a_disk_that_was_full(tmp_path, cut, decoded):
    """Of one that is full before anything is recorded nothing is left."""
    small = tmp_path / "small"
    small.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "none", small]).returncode:
        pytest.skip("needs root and the right to mount a small tmpfs")
    try:
        full = "the disk is full; free some space and run the same command again"
        with pytest.raises(InputError, match=full):
            go_on(cut, small / "out")
        assert list(small.iterdir()) == []
        subprocess.run(["mount", "-o", "remount,size=100k", small], check=True)
        with pytest.raises(InputError, match=full):
            go_on(cut, small / "out")
        assert "manifest.json" not in contents(small / "out")
        subprocess.run(["mount", "-o", "remount,size=3m", small], check=True)
        decoded.clear()
        assert go_on(cut, small / "out") == contents(cut / "whole")
        assert 0 < len(decoded) < 27
    finally:
        subprocess.run(["umount", small], check=True)


def test_two_at_once_are_refused(cut, out, fast_clock):
    with lock_folder(out), pytest.raises(InputError, match="another process is writing to it"):
        go_on(cut, out)
    assert go_on(cut, out) == contents(cut / "whole")


@pytest.mark.parametrize("name", ["lock", "leases", "plan", ".plan", "train.beton", "train.journal"])
def test_no_link_in_an_output_folder_is_followed(tmp_path, cut, out, name):
    """Of an interrupted preparation that someone has sent."""
    theirs, link = tmp_path / "theirs", out / f"{name}.unfinished"
    theirs.write_bytes(link.read_bytes() if link.exists() else b"")
    before = theirs.stat()
    link.unlink(missing_ok=True)
    link.symlink_to(theirs)
    with pytest.raises(InputError, match=f"{link}: is a link to {theirs}"):
        go_on(cut, out)
    assert (theirs.stat().st_mtime_ns, theirs.stat().st_size) == (before.st_mtime_ns, before.st_size)


def origins_of(samples):
    return np.array([(crc32c(sample.content()), *sample.status()) for sample in samples], ORIGIN)


def test_a_change_is_noticed_by_size_times_and_content(tmp_path):
    samples = ImageFiles(tmp_path, ["a", "b"], [0, 0])
    for sample in samples:
        (tmp_path / sample.name).write_bytes(b"12345")
    path, before, origins = tmp_path / "b", (tmp_path / "b").stat(), origins_of(samples)
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


def test_a_tar_of_another_size_has_changed(tmp_path):
    """As a tar to which more was added: where the first images lie the bytes are the same."""
    path = tmp_path / "a.tar"
    path.write_bytes(b"1234567890")
    zeros, names = np.zeros(2, int), np.array([b"a", b"b"])
    samples = TarImages([path], ["x"], zeros, names, zeros, np.array([0, 5]), np.array([5, 5]))
    origins = origins_of(samples)
    check_unchanged(samples, origins, tmp_path)
    path.write_bytes(b"1234567890+")
    with pytest.raises(InputError, match=r"^x/a, x/b: changed since the interrupted preparation"):
        check_unchanged(samples, origins, tmp_path)


def test_what_was_left_out_or_changed_is_not_encoded_again(tmp_path, image, decoded):
    train, val = tmp_path / "images/train/a", tmp_path / "images/val/a"
    for place, count in ((train, 6), (val, 1)):
        place.mkdir(parents=True)
        for i in range(count):
            image(i, mode="L" if i == 2 else "RGB").save(place / f"{i}.bmp")
    (train / "1.bmp").write_bytes(b"no image")
    act = partial(prepare, "image-folder", tmp_path / "images", settings=RAW, processes=1, max_bad=0.2)
    act(to=tmp_path / "whole")
    with changed(val / "0.bmp", lambda _: b"no image"), pytest.raises(RunError, match="val: 1 images are left out"):
        act(to=tmp_path / "out")
    words = r"^train/a/5\.bmp: changed since the interrupted preparation"  # the sixth taken, and the fifth stored
    with changed(train / "5.bmp", lambda data: data[:-1] + b"?"), pytest.raises(InputError, match=words):
        act(to=tmp_path / "out")
    decoded.clear()
    act(to=tmp_path / "out")
    assert len(decoded) == 1  # of val
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_journal_of_another_plan_is_not_believed(cut, out, decoded):
    plan = out / "plan.unfinished"
    plan.write_text(plan.read_text().replace('"quality": 90', '"quality": 50'))
    go_on(cut, out, replace(STRICT, quality=50))
    assert len(decoded) == 27


def test_an_entry_is_in_the_file_when_that_is_flushed(tmp_path, system):
    flushed = []
    system({"os.fsync": lambda _: flushed.append((tmp_path / "journal").read_bytes())})
    Journal(tmp_path / "journal").append({"x": 1})
    assert flushed == [(tmp_path / "journal").read_bytes()] != [b""]


def test_data_that_were_lost_are_written_again_each_time(tmp_path):
    """All of them, or those of the last image; and what was taken over once more is taken over once."""
    path = tmp_path / "beton"

    def taken(stop):
        """How many of four images a writer takes over, before it writes those up to `stop`."""
        with beton_writer.BetonWriter(path, tmp_path / "journal", 4) as writer:
            found = writer.written.taken
            for number in range(found, stop):
                writer.add(Encoded(str(number), number, JPEG, 2, 3, bytes([number] * 2_001), ""))
            writer.disk.wait()
        return found

    assert [taken(2), taken(3)] == [0, 2]
    path.unlink()
    assert [taken(2), taken(4), taken(4)] == [0, 2, 4]
    for _ in range(2):
        os.truncate(path, path.stat().st_size - 5)
        assert [taken(4), taken(4)] == [3, 4]


def test_an_image_that_changes_until_it_is_written_is_refused(tmp_path, folder, write_beton):
    """JPEGs that are kept as they are, are read again when they are written."""
    (sample,) = ImageFiles(folder, ["val/bee/1.JPEG"], [0])
    record = encode(sample, PrepSettings(restart_markers=False)).for_transfer()
    with (
        changed(folder / sample.name, lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]),
        pytest.raises(InputError, match=r"val/bee/1\.JPEG: was changed while it was prepared; run the same command"),
    ):
        write_beton(tmp_path / "a.beton", [record])
