"""Processes whose starter is killed, or whose terminal is closed: they save and end, as SIGTERM lets them."""

import atexit
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import psutil
import pytest

import widemix.__main__
import widemix.trainer
from tests.clone import CLONE
from tests.forks import Forks
from tests.terminal import Terminal
from widemix.distributed.requests import Stopped, StopRequest, stops_once
from widemix.processes import children_cpu_seconds, end_with_torchrun, peak_resident_bytes, stop_signals

# A rank, or a run: says that it is up, and how it ends.
CHILD = """
import os, signal, sys, time
def stop(number, _):
    os.write(1, f"got {signal.Signals(number).name} ".encode())
    os._exit(75)
for number in (signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, stop)
os.write(1, b"up ")
time.sleep(600)
"""


def python(code: str, *words: str, **options) -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(code), *words]
    return subprocess.Popen(command, cwd=CLONE, stdout=subprocess.PIPE, **options)


def test_ranks_end_with_a_launcher_that_is_killed():
    with python(
        "import sys; from widemix.launch.local import launch; launch(['-c', sys.argv[1]], 2)", CHILD
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.read(6) == b"up up "
        launcher.kill()
        # To the end of the output, which ends with the last process that can write to it.
        assert launcher.stdout.read() == b"got SIGTERM got SIGTERM "


HOSTILE = "import os; open(os.environ['RAN'], 'a').write(f'{__name__} '); os._exit(99)"
HOSTILE_STUDY = """
title: t
source: s
claim: c
seeds: [0]
set: {data.path: cut}
runs: [{label: l, recipes: {Digits: digits/s_mixer.yaml}, axes: {model.channels: [8]}}]
figure: {x: width}
"""


def test_nothing_that_a_study_starts_imports_from_the_current_folder(digits, tmp_path):
    """It starts `train`, which finds that the data are cut."""
    for name in ("widemix", "tests", "yaml", "numpy", "torch", "multiprocessing", "sitecustomize"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(HOSTILE)
    (tmp_path / "study.yaml").write_text(HOSTILE_STUDY)
    shutil.copytree(digits, tmp_path / "cut")
    os.truncate(tmp_path / "cut/train.beton", 8_600_000)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    environ |= {"RAN": str(tmp_path / "ran"), "COLUMNS": "200"}
    command = [sys.executable, "-P", "-m", "widemix", "study", "run", "study.yaml", "--to", "study"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()
    assert done.returncode == 1
    assert "train.beton: has 8600000 bytes" in done.stderr


def test_processes_that_encode_end_with_the_one_that_prepares():
    encoding = """
        import time
        from widemix.data_prep.image_processes import workers
        from widemix.data_prep.settings import PrepSettings
        with workers(2, PrepSettings()):
            print("up", flush=True)
            time.sleep(600)
    """
    with python(encoding) as prep:
        assert prep.stdout is not None
        assert prep.stdout.read(3) == b"up\n"
        prep.kill()
        assert prep.stdout.read() == b""


def test_a_process_whose_parent_died_before_ends_at_once():
    starter = """
        import os, sys
        from widemix.processes import end_with_parent
        prepare = end_with_parent()
        if os.fork() == 0:  # the parent of the next one is not the process that asked
            if os.fork() == 0:
                prepare()
                print("began", flush=True)
            os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
        sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
    """
    with python(starter) as process:
        output, _ = process.communicate(timeout=600)
    assert (process.returncode, output) == (128 + signal.SIGTERM, b"")


def test_ranks_of_torchrun_end_with_it(monkeypatch, system):
    rank = f"""
        from widemix.processes import end_with_torchrun
        end_with_torchrun()
        {textwrap.indent(CHILD, " " * 8).strip()}
    """
    starter = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    environ = os.environ | {"TORCHELASTIC_RUN_ID": "1"}
    with python(starter, textwrap.dedent(rank), env=environ) as torchrun:
        assert torchrun.stdout is not None
        assert torchrun.stdout.read(3) == b"up "
        torchrun.kill()
        assert torchrun.stdout.read() == b"got SIGTERM "
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    system({"ctypes.CDLL": None})
    end_with_torchrun()  # which has not started this one: nothing is asked of the kernel


def test_windows_has_two_signals_that_ask_to_end(system):
    system({"sys.platform": "win32"})
    assert set(stop_signals()) == {signal.SIGINT, signal.SIGTERM}


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
def test_terminals_signals_count_unless_ignored_at_the_start(number):
    terminal = (signal.SIGHUP, signal.SIGQUIT)  # which a shell may have ignored for the tests
    before = {each: signal.signal(each, signal.SIG_DFL) for each in terminal}
    try:
        every = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, *terminal}
        assert set(stop_signals()) == every
        signal.signal(number, signal.SIG_IGN)
        assert set(stop_signals()) == every - {number}
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


STOPPABLE = """
import os, signal, sys, time
from widemix.distributed.requests import StopRequest, stops_once
with stops_once():
    with StopRequest() as stop:
        os.write(1, b"up")  # in one piece: the end of a line is another, which may find the terminal closed
        while not stop.requested:
            time.sleep(0.01)
    signal.raise_signal(signal.SIGHUP)  # from the terminal and from the starter
signal.raise_signal(signal.SIGHUP)
signal.raise_signal(signal.SIGTERM)
print("nobody reads this", flush=True)
print("nor this", file=sys.stderr, flush=True)
sys.exit(75)
"""


def terminal_of(ranks: int, code: str) -> Terminal:
    """One in which so many ranks have begun to run some code."""
    starter = f"import sys; from widemix.launch.local import launch; sys.exit(launch(['-c', sys.argv[1]], {ranks}))"
    terminal = Terminal("-c", code) if ranks == 1 else Terminal("-c", starter, code)
    terminal.wait_for(b"up", ranks)
    return terminal


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_whose_terminal_is_closed_stops(ranks):
    assert terminal_of(ranks, STOPPABLE).close() == 75


@pytest.mark.parametrize(("key", "name"), [(b"\x03", "Ctrl-C"), (b"\x1c", "Ctrl-\\")])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_key_stops_after_the_step_a_second_at_once(key, name, ranks):
    """The terminal sends it to all processes; each rank hears of it twice, and takes it for one."""
    terminal = terminal_of(ranks, STOPPABLE.replace("while not stop.requested", "while True"))
    os.write(terminal.own, key)
    terminal.wait_for(f"{name}: stopping after this step, with a checkpoint; a second {name} stops at once".encode())
    os.write(terminal.own, key)
    assert terminal.process.wait(600) == -signal.SIGINT  # KeyboardInterrupt


def be_asked_to_stop(code: int, number: int, data: str) -> None:
    """`widemix train`, whose run stops for a signal and returns `code`; another comes while the process ends."""

    def train(*_) -> int:
        with StopRequest():
            if code:
                signal.raise_signal(signal.SIGTERM)
        return code

    widemix.trainer.train = train
    atexit.register(signal.raise_signal, number)
    sys.argv = ["widemix", "train", "digits/mixer", "--data.path", data]
    widemix.__main__.main()


@pytest.mark.parametrize(
    ("code", "number", "ended"),
    [(75, signal.SIGTERM, 75), (0, signal.SIGTERM, -signal.SIGTERM), (75, signal.SIGHUP, 75)],
)
def test_a_train_that_stops_ends_with_its_code(digits, tmp_path, code, number, ended):
    codes, said = Forks(be_asked_to_stop, code, number, str(digits), log=tmp_path / "log").wait()
    assert codes == [ended], said


def test_nohup_keeps_a_run_going():
    terminal = Terminal("-c", STOPPABLE, ignores=True)
    terminal.wait_for(b"up")
    os.close(terminal.own)
    terminal.process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert terminal.process.poll() is None
    terminal.process.terminate()
    assert terminal.process.wait(600) == 75


def test_the_peak_of_memory_is_in_bytes(system):
    assert 0.5 < peak_resident_bytes() / psutil.Process().memory_info().rss < 100
    system({"resource.getrusage": lambda _: SimpleNamespace(ru_maxrss=3)})  # in KiB, on macOS in bytes
    for platform, peak in (("linux", 3 * 1024), ("darwin", 3)):
        system({"sys.platform": platform})
        assert peak_resident_bytes() == peak


def test_children_take_time_of_the_user_and_the_system(system):
    system({"os.times": lambda: os.times_result((1, 2, 4, 8, 16))})
    assert children_cpu_seconds() == 12


@pytest.fixture
def signals(monkeypatch):
    """This process as it was before any signal had come, and afterwards again."""
    StopRequest.came = False
    monkeypatch.delenv("RANK", raising=False)
    before = {number: signal.getsignal(number) for number in stop_signals()}
    yield before
    StopRequest.came = False  # or this process would ignore signals
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("rank", [None, "0", "1"])
def test_a_key_counts_and_rank_0_announces_it(signals, monkeypatch, capfd, rank):
    if rank:
        monkeypatch.setenv("RANK", rank)
    said = []
    own = signal.signal(signal.SIGUSR1, lambda *_: None), signal.getsignal(signal.SIGUSR1)
    with StopRequest() as stop:
        assert not stop.requested
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
            said.append(capfd.readouterr().err)
            assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert StopRequest.came
    assert signal.getsignal(signal.SIGUSR1) is own[1]
    text = ": stopping after this step, with a checkpoint"
    expected = [f"SIGTERM{text}\n", "", f"Ctrl-C{text}; a second Ctrl-C stops at once\n", ""]
    assert said == (4 * [""] if rank == "1" else expected)


@pytest.mark.usefixtures("signals")
def test_only_waiting_for_ever_is_left_at_once():
    tidied = []

    def wait(stop):
        with stop.at_once():
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                signal.raise_signal(signal.SIGTERM)
                tidied.append(0)

    with StopRequest() as stop:
        with pytest.raises(Stopped, match=r"^SIGTERM$"):
            wait(stop)
        assert tidied
        with pytest.raises(Stopped), stop.at_once():
            tidied.clear()
        assert tidied
    with StopRequest() as stop:
        with stop.at_once():
            pass
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested


def test_signals_after_the_first_are_ignored_keys_never(signals):
    with stops_once():
        assert signal.getsignal(signal.SIGINT) == signals[signal.SIGINT]
        assert signal.getsignal(signal.SIGTERM) != signals[signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) != signal.SIG_IGN
    with stops_once():
        StopRequest.came = True
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) == signals[signal.SIGINT]


def test_of_a_closed_terminal_what_is_no_terminal_stays():
    """A pipe or a file gets what is printed, and no file stays open."""
    code = (
        "import os\nfrom widemix.processes import leave_closed_terminal\n"
        "before = os.listdir('/proc/self/fd')\nleave_closed_terminal()\n"
        "print(len(os.listdir('/proc/self/fd')) - len(before))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=CLONE, capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"
