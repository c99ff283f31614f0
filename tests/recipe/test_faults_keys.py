"""Every key of section `faults` does what its help says, with a value that is not its default."""

import re
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from tests.recipe.small_runs import Row, SmallRun
from widemix.data.loader import TrainLoader
from widemix.distributed import watchdog
from widemix.distributed.watchdog import Watchdog
from widemix.recipe.sections import FaultsSection
from widemix.training.loop import Loop


def nan_at_6_and_7(monkeypatch: pytest.MonkeyPatch) -> None:
    """The images of the sixth and the seventh step are NaN."""
    to_device = TrainLoader._to_device

    def faulty(self, host):
        batch = to_device(self, host)
        for epoch, step in (divmod(step, self.steps) for step in (5, 6)):
            if host.epoch == epoch and host.view_ids[0] in self.order.step(epoch, step):
                batch.inputs.fill_(float("nan"))
        return batch

    monkeypatch.setattr(TrainLoader, "_to_device", faulty)


def stuck_at_3(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third step takes 10 s by the watchdog's clock; it looks at it twice in each 2.5 s, and ends nothing."""
    train_step, clock, looks = Loop._train_step, [0.0], threading.Semaphore(0)

    def stuck(self, iterator):
        train_step(self, iterator)
        if self.step == 3:
            for _ in range(4):
                clock[0] += 2.5
                while looks.acquire(blocking=False):  # those from before
                    pass
                for _ in range(2):
                    assert looks.acquire(timeout=60)
            self._watchdog.beat()

    monkeypatch.setattr(watchdog._Countdown, "begin", lambda *_: looks.release())
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(Watchdog, "_exit_with_stacks", lambda self, reason: self._stacks.write(reason))
    monkeypatch.setattr(Loop, "_train_step", stuck)


def hung(run: SmallRun) -> set[str]:
    path = run.folder / "stacks/rank-0.txt"
    return set(re.findall(r"finished in \d+ s", path.read_text())) if path.exists() else set()


def spikes(run: SmallRun) -> list[int]:
    return [step for event, step in run.events() if event == "loss_spike"]


def losses_above(run: SmallRun) -> list[int]:
    """The steps whose loss is half a standard deviation above the mean of those before, of which there are 20."""
    losses = np.array(run.losses)
    found = [step + 1 for step in range(20, 40) if losses[step] > losses[:step].mean() + 0.5 * losses[:step].std()]
    assert 0 < len(found) < 20
    return found


ROLLS_BACK = ("faults.max_skipped_steps", "0")
FAULTS = {
    "max_skipped_steps": Row("1", SmallRun.events, [("rollback", 4)], patch=nan_at_6_and_7),
    "max_rollbacks": Row(
        "0",
        lambda run: (run.events(), run.error[:25]),
        ([("diverged", 6)], "the loss is nan at step 6"),
        (ROLLS_BACK,),
        patch=nan_at_6_and_7,
    ),
    "loss_spike_std": Row(
        "0.5", spikes, losses_above, (("train.epochs", "10"), ("schedule.name", "constant"), ("optim.lr", "0.1"))
    ),
    "hang_timeout_s": Row("5", hung, {"finished in 5 s"}, patch=stuck_at_3),
}


@pytest.mark.parametrize("key", FAULTS)
def test_a_key_does_what_it_is_for(key, runs):
    FAULTS[key].check(f"faults.{key}", runs)


def test_the_table_has_every_key():
    assert set(FAULTS) == set(FaultsSection.model_fields)
