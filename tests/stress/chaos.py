"""`python -m tests.stress.chaos DATA FOLDER [--minutes N] [--seed N]`: runs disturbed in every way, in turns.

After each disturbance the run is started again on another number of ranks, in the end left in peace. It must then be
complete, and its curve that of a run which nothing ever disturbed: each step once, each loss the same. DATA are the
prepared digits. First, ranks that torchrun starts again are killed 20 times. Without --minutes it does what the tests
check: the same round with DDP and with ZeRO 1, a run that hangs, one whose images are not numbers, one whose loader
fails and one whose ranks are killed twice under torchrun, each in a folder of its own.
"""

import argparse
import random
import sys
import time
from pathlib import Path

from tests.conftest import train_lines
from tests.faults.elastic import killed_ranks
from tests.faults.ranks import ranks
from widemix.run import checkpoint

LAST, SAVE_EVERY, TOLERANCE = 36, 4, 1e-4
OPTIONS = ("--train.max_steps", f"{LAST}", "--train.save_every_steps", f"{SAVE_EVERY}", "--train.keep_last", "3")
ENGINES = {
    "ddp": ("--engine.kind", "ddp"),
    "ZeRO 1": ("--engine.kind", "deepspeed", "--engine.zero_stage", "1"),
    "ZeRO 2": ("--engine.kind", "deepspeed", "--engine.zero_stage", "2"),
    "ZeRO 3": ("--engine.kind", "deepspeed", "--engine.zero_stage", "3"),
    "FSDP2": ("--engine.kind", "fsdp"),
}


class Disturbed:
    """One run folder, and what is done to it."""

    def __init__(self, data: Path, run: Path):
        self.data, self.run = data, run
        self.missing = "none"  # the fault that leaves the data out which this run has had to

    def start(self, world: int, engine: str, fault: str = "none", *options: str) -> tuple[list[int], str]:
        """Run `world` ranks until they end; return their exit codes and output."""
        sound = checkpoint.newest(self.run)
        codes, said = ranks(world, fault, self.data, self.run, *OPTIONS, *ENGINES[engine], *options).wait()
        if sound and "damaged" not in said:
            assert f"{sound.path.name} at step {sound.position.step} to" in said, f"not from the newest:\n{said}"
        return codes, said

    def kill_one(self, world: int, engine: str, step: int, rank: int, fault: str = "") -> None:
        codes, said = self.start(world, engine, f"{fault}die@{step}:{rank}")
        assert codes == [-9 if r == rank else 1 for r in range(world)], f"{codes}\n{said}"

    def kill_all(self, world: int, engine: str, step: int, fault: str = "") -> None:
        codes, said = self.start(world, engine, fault + ",".join(f"die@{step}:{rank}" for rank in range(world)))
        assert set(codes) <= {-9, 1}, f"{codes}\n{said}"  # the last to die may have seen the others go
        assert -9 in codes

    def poison(self, world: int, engine: str, step: int, rank: int) -> None:
        """The images of four steps are not numbers: the run goes back and leaves them out. Then a rank dies."""
        self.missing = f"skipped_ranges@{step}-{step + 3}"
        codes, said = self.start(world, engine, f"nan@{step}-{step + 3},die@{step + 2 * SAVE_EVERY}:{rank}")
        assert codes == [-9 if r == rank else 1 for r in range(world)], f"{codes}\n{said}"
        assert "rolled back from step" in said, said

    def corrupt(self) -> None:
        newest = checkpoint.newest(self.run).path
        path = newest / random.choice(["model.safetensors", "optimizer.safetensors"])
        content = bytearray(path.read_bytes())
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        path.write_bytes(content)

    def stop_in_a_save(self, world: int, engine: str, step: int) -> None:
        codes, said = self.start(world, engine, f"term@{-(-step // SAVE_EVERY) * SAVE_EVERY}")
        assert codes == [75] * world, f"{codes}\n{said}"

    def fill_the_disk(self, world: int, engine: str, step: int) -> None:
        """And kill a rank before there is space again: nothing may be loaded that was written meanwhile."""
        codes, said = self.start(world, engine, f"full@{step}-99,die@{step + 2 * SAVE_EVERY}:{world - 1}")
        assert codes[-1] == -9, f"{codes}\n{said}"
        assert "no checkpoint was saved at step" in said, said

    def hang(self, world: int, engine: str, step: int, rank: int) -> None:
        kind = random.choice(["loader", "stuck"])
        codes, said = self.start(world, engine, f"{kind}@{step}:{rank}", "--faults.hang_timeout_s", "40")
        assert set(codes) == {1}, f"{codes}\n{said}"
        for number in range(world):
            stacks = (self.run / f"stacks/rank-{number}.txt").read_text()
            assert "no step or batch was finished in 40 s" in stacks
            assert "in advance" in stacks

    def fall_silent(self, world: int, engine: str, step: int, rank: int) -> None:
        """One rank can't even say that it ends; the others must, within a minute, and say which it was."""
        group = ranks(world, f"silent@{step}:{rank}", self.data, self.run, *OPTIONS, *ENGINES[engine])
        began = time.monotonic()
        while len(group.running) > 1:
            group.reap()
            assert time.monotonic() < began + 120, group.said()
            time.sleep(0.1)
        group.kill()
        codes, said = group.wait()
        assert set(codes) == {1, -9}, f"{codes}\n{said}"
        assert f"rank {rank} has sent no heartbeat" in said, said

    def finish(self, world: int, engine: str, clean: Path) -> None:
        codes, said = self.start(world, engine)
        assert codes == [0] * world, f"{codes}\n{said}"
        if self.missing != "none":
            clean = undisturbed(self.data, self.run.with_name(f"{self.run.name}-clean"), self.missing)
        assert_same_steps(self.run, clean, LAST, TOLERANCE)


def assert_same_steps(run: Path, clean: Path, last: int, tolerance: float) -> None:
    """Each step up to the last is there once, with the metrics of the undisturbed run."""
    found, expected = train_lines(run), train_lines(clean)
    assert [line["step"] for line in found] == [line["step"] for line in expected] == list(range(1, last + 1))
    for ours, theirs in zip(found, expected, strict=True):
        for name in ("loss", "grad_norm", "lr"):
            difference = abs(ours[name] - theirs[name])
            assert difference <= tolerance * theirs[name], f"{name} at step {ours['step']}: {ours} {theirs}"


def undisturbed(data: Path, run: Path, missing: str = "none") -> Path:
    codes, said = Disturbed(data, run).start(1, "ddp", missing)
    assert codes == [0], said
    return run


def elastic(disturbed: Disturbed, engine: str, clean: Path) -> None:
    """The round of the test command: 2, 4, 1 and 3 ranks across a kill, another, a damaged checkpoint and a stop."""
    disturbed.kill_one(2, engine, step=10, rank=1, fault="saved@10:1,")
    disturbed.kill_all(4, engine, step=19, fault="".join(f"saved@19:{rank}," for rank in range(4)))
    disturbed.corrupt()
    disturbed.stop_in_a_save(1, engine, step=22)
    disturbed.fill_the_disk(3, engine, step=26)
    disturbed.finish(3, engine, clean)


def kill_often(data: Path, run: Path, kills: int) -> None:
    """Two ranks under one torchrun, which starts them again after each of the kills."""
    last = 2 * kills + 10  # a start saves two steps, and is killed after the third
    options = ("--train.max_steps", f"{last}", "--train.save_every_steps", "2")
    codes, said = killed_ranks(2, kills, data, run, *options).wait()
    assert codes == [0], said
    assert run.with_suffix(".kills").stat().st_size == kills, said
    assert "no checkpoint was saved" not in said, said
    clean = run.with_name(f"{run.name}-clean")
    codes, said = ranks(1, "none", data, clean, *options).wait()
    assert codes == [0], said
    assert_same_steps(run, clean, last, TOLERANCE)


def short(data: Path, folder: Path, clean: Path) -> None:
    """A round for each engine, while one run hangs; and the runs that tests/stress/test_chaos.py checks."""
    hangs = ranks(2, "loader@5:1", data, folder / "hangs", *OPTIONS, "--faults.hang_timeout_s", "30")
    for engine in ("ddp", "ZeRO 1"):
        elastic(Disturbed(data, folder / engine.replace(" ", "-")), engine, clean)
    Disturbed(data, folder / "nan").start(2, "ZeRO 1", "nan@6-7,nan@13-18")
    Disturbed(data, folder / "raises").start(2, "FSDP2", "raise@5:1")
    kill_often(data, folder / "killed", kills=2)
    hangs.wait()


def at_random(disturbed: Disturbed, clean: Path) -> str:
    """A round of the hour: what is done comes at random, on random ranks and engines; return what was done."""
    done = []
    for _ in range(random.randint(2, 5)):
        newest = checkpoint.newest(disturbed.run)
        world, engine = random.randint(1, 4), random.choice(list(ENGINES))
        step, rank = (newest.position.step if newest else 0) + random.randint(2, 9), random.randrange(world)
        what = random.choice(
            ["kill_one", "kill_all", "corrupt", "stop_in_a_save", "fill_the_disk", "hang", "fall_silent", "poison"]
        )
        if step + 3 * SAVE_EVERY > LAST or (what in ("corrupt", "poison") and newest is None):
            continue
        if what == "poison" and disturbed.missing != "none":
            continue  # once is enough: from then on steps and the data's order differ
        if what == "fall_silent" and (world == 1 or rank == 0):
            continue  # nobody is left to notice; rank 0 keeps the store, whose loss the others notice in another way
        done.append(f"{what} at {step} on {world} of {engine}")
        if what == "corrupt":
            disturbed.corrupt()
        elif what in ("kill_one", "hang", "fall_silent", "poison"):
            getattr(disturbed, what)(world, engine, step, rank)
        else:
            getattr(disturbed, what)(world, engine, step)
    world, engine = random.randint(1, 4), random.choice(list(ENGINES))
    disturbed.finish(world, engine, clean)
    return "; ".join([*done, f"finished on {world} of {engine}"])


def parse_arguments(description: str | None) -> argparse.Namespace:
    """The arguments `DATA FOLDER [--minutes N] [--seed N]`, after which the random numbers are those of the seed."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("data", type=lambda path: Path(path).absolute())
    parser.add_argument("folder", type=lambda path: Path(path).absolute())
    parser.add_argument("--minutes", type=float, default=0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    return arguments


def main() -> None:
    arguments = parse_arguments(__doc__)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    clean = undisturbed(arguments.data, arguments.folder / "clean")
    if not arguments.minutes:
        short(arguments.data, arguments.folder, clean)
        return
    kill_often(arguments.data, arguments.folder / "killed", kills=20)
    print("20 kills under one torchrun, and complete with the undisturbed curve", flush=True)
    began, rounds = time.monotonic(), 0
    while time.monotonic() - began < 60 * arguments.minutes:
        rounds += 1
        description = at_random(Disturbed(arguments.data, arguments.folder / f"round-{rounds}"), clean)
        print(f"{(time.monotonic() - began) / 60:.1f} min  round {rounds}: {description}", flush=True)
    print(f"{rounds} rounds, each complete with the undisturbed curve", file=sys.stderr)


if __name__ == "__main__":
    main()
