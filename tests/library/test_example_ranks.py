"""Examples that stop in the middle of an epoch on two ranks, and continue on three with the same images."""

import importlib
import importlib.util
import runpy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import widemix
from tests.forks import Forks, group_of
from tests.library.spied import Stopped, seen_batches

EXAMPLES = Path(__file__).parents[2] / "examples"
GLOBAL_BATCH, SIDE = 6, 32  # eight steps an epoch
STOP, STEPS = 11, 16  # stops after three steps of the second epoch
POLICY: dict[str, Any] = {"auto_augment": "rand-m9-mstd0.5-inc1", "re_prob": 0.25}
Train = Callable[[dict[str, Any], Path, Path, int], None]


def plain_loop(names: dict[str, Any], images: Path, folder: Path, _world: int) -> None:
    keys: dict[str, Any] = {"save_every": STOP, "batch_size": GLOBAL_BATCH, "image_size": SIDE}
    names["train"](images, folder / "state.pt", 2, **keys)


def lightning_module(names: dict[str, Any], images: Path, folder: Path, world: int) -> None:
    lightning: Any = importlib.import_module("lightning")
    save = lightning.pytorch.callbacks.ModelCheckpoint(folder, "saved", every_n_train_steps=STOP)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    ranks: dict[str, Any] = {"accelerator": "cpu", "strategy": "ddp", "devices": world}
    trainer = lightning.Trainer(max_epochs=2, callbacks=[save], **ranks, **quiet)
    saved = folder / "saved.ckpt"
    module, data = names["Classifier"](2), names["Images"](images, GLOBAL_BATCH // world, SIDE)
    trainer.fit(module, data, ckpt_path=saved if saved.exists() else None)


LOOPS: dict[str, Train] = {"plain_loop": plain_loop, "lightning_module": lightning_module}


def be_example(name: str, images: str, folder: str, world: int, stop: int) -> None:
    """One rank, which writes the training batches that it has seen; `stop` of them, if that is not 0."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    names = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    if name == "plain_loop":
        torch.distributed.init_process_group("gloo")
    with seen_batches(stop) as seen:
        try:
            LOOPS[name](names, Path(images), Path(folder), world)
        except Stopped:
            assert stop
    torch.save(seen, Path(folder) / f"seen-{world}-{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()


def batches_of(name: str, images: Path, folder: Path, world: int, stop: int) -> list[Any]:
    """The batches that the ranks have seen, put together."""
    environs = [environ | {"TORCHELASTIC_RUN_ID": "widemix"} for environ in group_of(world)]
    words = name, str(images), str(folder), world, stop
    codes, output = Forks(be_example, *words, log=folder / "log", environs=environs).wait()
    assert codes == [0] * world, output
    ranks = zip(*(torch.load(folder / f"seen-{world}-{rank}.pt") for rank in range(world)), strict=True)
    return [tuple(map(torch.cat, zip(*step, strict=True))) for step in ranks]


@pytest.mark.long
@pytest.mark.parametrize(("name", "package"), [("plain_loop", "torchvision"), ("lightning_module", "lightning")])
def test_an_epoch_begun_on_two_ranks_is_ended_on_three(name: str, package: str, images: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; pip install 'widemix[examples]' brings it")
    seen = batches_of(name, images, tmp_path, 2, STOP)
    assert len(seen) == STOP
    seen += batches_of(name, images, tmp_path, 3, 0)
    policy = POLICY | ({"auto_augment": "rand-m9-inc1"} if name == "plain_loop" else {})
    loader = widemix.Loader(images, "train", GLOBAL_BATCH, SIDE, **policy)
    unbroken = [batch for _ in range(2) for batch in loader]
    assert len(seen) == len(unbroken) == STEPS
    for step, twin in zip(seen, unbroken, strict=True):
        assert all(map(torch.equal, step, twin))
