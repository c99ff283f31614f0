"""Real processes: a worker killed, the parent interrupted or killed, the disk full."""

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from widemix.data_prep import image_processes
from widemix.data_prep.prepare import prepare
from widemix.data_prep.samples import ImageFiles, PixelArrays
from widemix.data_prep.settings import PrepSettings
from widemix.errors import InputError, RunError

WRITES = ("1", "64")  # the number of write(2) on x86-64 and on 64-bit Arm
ROOT = Path(__file__).parents[2]
RAW = PrepSettings(raw=True)
PREPARE = """
    import os
    import signal
    import sys
    from pathlib import Path
    import psutil
    from widemix.data_prep import beton_writer, image_processes, unfinished
    from widemix.data_prep.prepare import prepare
    from widemix.data_prep.settings import PrepSettings

    append = unfinished.Journal.append

    def append_and_wait(self, entry):
        append(self, entry)
        if len(psutil.Process().children()) == 2:
            unfinished.Journal.append = append
            os.kill(os.getpid(), signal.SIGSTOP)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it from the start
    beton_writer.SHARD = 20_000
    image_processes.MIN_SECONDS_PER_PROCESS, image_processes.TIMED = 1e-9, 1
    unfinished.Journal.append = append_and_wait
    try:
        settings = PrepSettings(max_size=0)
        prepare("image-folder", Path(sys.argv[1]), Path(sys.argv[2]), settings, processes=3)
    except RuntimeError as error:
        sys.exit(str(error))
"""


@pytest.fixture
def stopped(tmp_path, image):
    """A preparation of three processes, stopped (SIGSTOP) after a line of its journal, and the two that encode.

    Of images of which 16 are more than a pipe holds.
    """
    (tmp_path / "images/train/a").mkdir(parents=True)
    image(0, 1000, 750).save(tmp_path / "medium.jpg", quality=95)
    for i in range(300):
        os.link(tmp_path / "medium.jpg", tmp_path / f"images/train/a/{i:04}.jpg")
    (tmp_path / "script.py").write_text(textwrap.dedent(PREPARE))
    words = [sys.executable, tmp_path / "script.py", tmp_path / "images", tmp_path / "new/out"]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(words, env=environ, stderr=subprocess.PIPE, text=True, start_new_session=True)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    assert (tmp_path / "new/out/train.journal.unfinished").exists()
    children = psutil.Process(process.pid).children()
    workers = [child for child in children if any("import work; work(" in word for word in child.cmdline())]
    assert len(workers) == 2
    return process, workers


def assert_gone(processes):
    _, alive = psutil.wait_procs(processes, timeout=120)
    assert alive == []


def test_after_a_killed_worker_the_same_command_resumes(tmp_path, stopped):
    """To the bytes of an uninterrupted run; it was killed within an answer, whose rest is not waited for."""
    process, workers = stopped
    deadline, writing = time.monotonic() + 300, []
    while not writing:  # the other may wait for images
        assert time.monotonic() < deadline
        time.sleep(0.05)
        writing = [one for one in workers if Path(f"/proc/{one.pid}/syscall").read_text().split()[0] in WRITES]
    writing[0].kill()
    process.send_signal(signal.SIGCONT)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 1, errors
    expected = "a process that encodes images was killed (out of memory?); start again"
    assert errors.splitlines()[-1] == expected
    assert "the same command resumes from them" in errors
    assert_gone(workers)
    settings = PrepSettings(max_size=0)
    prepare("image-folder", tmp_path / "images", tmp_path / "new/out", settings, processes=2)
    prepare("image-folder", tmp_path / "images", tmp_path / "uninterrupted", settings, processes=1)
    for file in (tmp_path / "uninterrupted").iterdir():
        assert (tmp_path / "new/out" / file.name).read_bytes() == file.read_bytes()


def test_tasks_larger_than_a_pipe_are_sent(limits):
    """While their process answers: images of STL-10's size, 432 KiB a task, and a pipe of Linux has room for 208."""
    pixels = np.random.default_rng(0).integers(0, 256, (200, 96, 96, 3), np.uint8)
    samples = PixelArrays("large", pixels, np.arange(200))
    encoded: list[image_processes.Encoded] = []
    limits({"widemix.data_prep.image_processes.MIN_SECONDS_PER_PROCESS": 1e-9})
    reading = threading.Thread(
        target=lambda: encoded.extend(image_processes.encode_all(samples, 0, RAW, 2)), daemon=True
    )
    reading.start()
    reading.join(timeout=600)
    assert encoded == list(image_processes.encode_all(samples, 0, RAW, 1))


@pytest.fixture
def forty(tmp_path, jpeg):
    """Samples of three tasks, of which number 20 is no image, and the settings that refuse it."""
    for number in range(40):
        (tmp_path / f"{number}.jpg").write_bytes(b"no image" if number == 20 else jpeg(number))
    names = [f"{number}.jpg" for number in range(40)]
    return ImageFiles(tmp_path, names, range(40)), PrepSettings(on_corrupt="error", restart_markers=False)


def test_an_image_that_stops_it_comes_after_those_before_it(forty):
    """Where several processes share the work, of which one has encoded what follows."""
    samples, settings = forty
    found = []
    with pytest.raises(InputError, match=r"20\.jpg: is no image"):
        found.extend(image_processes.in_order(samples, 3, settings, []))
    assert found == [image_processes.encode(samples[number], settings) for number in range(3, 20)]
    assert [record.label for record in image_processes.in_order(samples, 21, settings, [])] == list(range(21, 40))


class Watched(PixelArrays):
    """Tiny images, and the last that was asked for."""

    last = -1

    def __getitem__(self, index):
        type(self).last = max(self.last, index)
        return super().__getitem__(index)


def tiny(count, kind=PixelArrays):
    return kind("tiny", np.zeros((count, 2, 2, 3), np.uint8), np.arange(count))


def test_slow_processes_do_not_let_images_pile_up():
    """Each is given two tasks at a time, and this process stops when four of each are ahead."""
    samples, ends = tiny(1000, Watched), [multiprocessing.Pipe() for _ in range(2)]
    records = []
    consumer = threading.Thread(
        target=lambda: records.extend(image_processes.in_order(samples, 7, RAW, [ours for ours, _ in ends])),
        daemon=True,
    )
    consumer.start()
    deadline = time.monotonic() + 300
    while samples.last < 7 + 3 * 4 * 16 - 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.3)  # in which it would go on
    assert samples.last == 7 + 3 * 4 * 16 - 1
    tasks = [[theirs.recv() for _ in range(2)] for _, theirs in ends]
    assert not any(theirs.poll() for _, theirs in ends)
    assert sorted(number for two in tasks for number, _ in two) == [7, 23, 39, 55]
    assert records == []

    def answer(theirs, given):
        while given or consumer.is_alive():
            if given or theirs.poll(0.1):
                number, images = given.pop(0) if given else theirs.recv()
                theirs.send((number, ([image_processes.encode(sample, RAW) for sample in images], None)))

    workers = [
        threading.Thread(target=answer, args=(theirs, given)) for (_, theirs), given in zip(ends, tasks, strict=True)
    ]
    for thread in (*workers, consumer):
        thread.join(300) if thread is consumer else thread.start()
    assert [record.label for record in records] == list(range(7, 1000))
    for thread in workers:
        thread.join()
    for end in (end for pipe in ends for end in pipe):
        end.close()


def test_what_a_process_answers(forty):
    """Its tasks one by one, by number; the bytes of files that are kept are read by the process that writes them."""
    samples, settings = forty
    ours, theirs = multiprocessing.Pipe()
    worker = threading.Thread(target=image_processes.work, args=(os.dup(theirs.fileno()),), daemon=True)
    worker.start()
    theirs.close()
    ours.send(settings)
    for first, count in ((0, 2), (18, 4)):
        ours.send((first, [samples[first + number] for number in range(count)]))
    answers = [ours.recv() for _ in range(2)]
    ours.close()
    worker.join(60)
    assert not worker.is_alive()
    assert [number for number, _ in answers] == [0, 18]
    (whole, none), (part, error) = (answer for _, answer in answers)
    assert whole == [image_processes.encode(samples[number], settings)._replace(data=b"") for number in (0, 1)]
    assert none is None
    assert [record.name for record in part] == ["18.jpg", "19.jpg"]
    assert str(error).startswith("20.jpg: is no image")


class InThread:
    """In place of a process that encodes."""

    returncode = None

    def __init__(self, words, pass_fds, **_):
        threading.Thread(target=image_processes.work, args=(os.dup(*pass_fds),), daemon=True).start()

    def terminate(self):
        pass

    wait = poll = terminate


@pytest.mark.parametrize(
    ("count", "processes", "others"), [(132, 4, 3), (132, 16, 5), (52, 4, 1), (51, 4, 0), (132, 1, 0), (20, 9, 0)]
)
def test_as_many_processes_as_the_work_justifies(system, count, processes, others):
    """Of images that take 50 ms each but the first, after 32 that are timed; a process is worth a second of work."""
    started, clock = [], itertools.chain([0.0], itertools.count(10.0, 0.05))
    system({"time.perf_counter": lambda: next(clock)})
    system({"subprocess.Popen": lambda *words, **more: started.append(words) or InThread(*words, **more)})
    records = list(image_processes.encode_all(tiny(count), 0, RAW, processes))
    assert [record.label for record in records] == list(range(count))
    assert len(started) == others


@pytest.fixture
def started(system, limits):
    """`started(start)`: encode with a process that `start`, given what `subprocess.Popen` is, makes."""
    limits({"widemix.data_prep.image_processes.MIN_SECONDS_PER_PROCESS": 1e-9})

    def run(start):
        system({"subprocess.Popen": start})
        return list(image_processes.encode_all(tiny(2000), 0, RAW, 2))

    return run


def test_signals_are_heeded_again_where_no_process_starts(started):
    def masked():
        return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])

    def fail(*_, **__):
        assert masked()
        raise BlockingIOError("Resource temporarily unavailable")

    with pytest.raises(BlockingIOError):
        started(fail)
    assert not masked()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os.kill(os.getpid(), 9)", r"was killed \(out of memory\?\)"),
        ("import os; os.kill(os.getpid(), 15)", r"was killed \(out of memory\?\)"),
        ("raise SystemExit(3)", "ended with exit code 3, by the error above"),
        ("", "ended with exit code 0, by the error above"),
    ],
)
def test_how_a_process_ended_is_told(started, code, words):
    start = subprocess.Popen
    with pytest.raises(RunError, match=f"^a process that encodes images {words}; start again$"):
        started(lambda given, **more: start([sys.executable, "-c", code], **more))


def test_ctrl_c_ends_all_processes_and_keeps_what_is_finished(stopped):
    process, workers = stopped
    os.killpg(process.pid, signal.SIGINT)  # the terminal signals the whole group
    process.send_signal(signal.SIGCONT)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == -signal.SIGINT, errors
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    assert errors.count("Traceback") == 1
    assert "the same command resumes from them" in errors
    assert_gone(workers)


def test_workers_leave_with_a_killed_parent(tmp_path, stopped):
    process, workers = stopped
    process.kill()
    assert_gone(workers)
    process.communicate()
    assert not (tmp_path / "new/out/manifest.json").exists()
