"""The examples, each with the real package; those whose package is not installed are skipped.

`pip install 'widemix[examples]'` brings the packages, and TIMM_TRAIN=path/to/train.py names timm's script.
"""

import importlib
import importlib.util
import json
import os
import runpy
import sys
import warnings
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import widemix
from tests.forks import Forks, group_of
from tests.library.spied import Stopped, same, seen_batches

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.filterwarnings("ignore")  # those of the other packages

POLICY: dict[str, Any] = {"auto_augment": "rand-m9-mstd0.5-inc1", "re_prob": 0.25}


def example(name: str, *packages: str) -> dict[str, Any]:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; pip install 'widemix[examples]' brings it")
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 40


INLINE = "%matplotlib inline\n"  # without it IPython 7, which Colab has, prints a figure as text


def test_the_notebook_runs_and_its_numbers_are_right() -> None:
    """Its code cells, one after the other; what they compute is checked against numpy here."""
    cells = json.loads((EXAMPLES / "look_inside.ipynb").read_text())["cells"]
    space: dict[str, Any] = {}
    assert INLINE in cells[1]["source"]
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"]
            lines = [line for line in cell["source"] if line != INLINE]
            exec(compile("".join(lines), "look_inside.ipynb", "exec"), space)
    assert space["result"]["top1"] > 50
    names, before, after = space["names"], space["before"], space["after"]
    x, y = (side[names[0]].reshape(360, -1).astype(float) for side in (before, after))
    x, y = x - x.mean(0), y - y.mean(0)
    biased = np.sum((x.T @ y) ** 2) / np.linalg.norm(x.T @ x) / np.linalg.norm(y.T @ y)
    assert abs(space["similarity"][0, 0] - biased) < 0.05
    weight = space["weight"]
    np.testing.assert_allclose(space["singular_values"](weight), np.linalg.svd(weight, compute_uv=False), rtol=1e-4)


SMALL = (
    "extends: {root}/recipes/digits/mixer.yaml\ndata: {{path: {data}}}\ntrain: {{max_steps: 3}}\nlog: {{every: 1}}\n"
)


@pytest.fixture
def recipe(digits: Path, tmp_path: Path) -> str:
    """A recipe of three steps."""
    (tmp_path / "small.yaml").write_text(SMALL.format(root=EXAMPLES.parent, data=digits))
    return str(tmp_path / "small.yaml")


def test_submitit_starts_two_ranks(recipe: str, tmp_path: Path) -> None:
    metrics = example("submitit_job", "submitit")["run"](recipe, str(tmp_path / "run"), ranks=2)
    assert metrics == json.loads((tmp_path / "run/done.json").read_text())
    assert json.loads((tmp_path / "run/environment.json").read_text())["ranks"] == 2


def test_ray_starts_two_ranks(recipe: str, tmp_path: Path) -> None:
    example("ray_train", "ray")["run"](recipe, str(tmp_path / "run"), 2)
    assert json.loads((tmp_path / "run/done.json").read_text())["step"] == 3
    assert json.loads((tmp_path / "run/environment.json").read_text())["ranks"] == 2


def test_skypilot_accepts_the_task() -> None:
    sky = pytest.importorskip("sky", reason="SkyPilot is not installed: pip install skypilot")
    task = sky.Task.from_yaml(str(EXAMPLES / "skypilot.yaml"))
    assert (task.name, task.num_nodes) == ("widemix", 4)
    assert len((EXAMPLES / "skypilot.yaml").read_text().splitlines()) <= 40


def epochs(folder: Path, count: int, batch_size: int = 8, image_size: int = 224, **keys: Any) -> list[Any]:
    loader = widemix.Loader(folder, "train", batch_size, image_size, **keys)
    return [batch for _ in range(count) for batch in loader]


def test_plain_loop(images: Path, tmp_path: Path) -> None:
    """Stopped in the second epoch and continued, it has seen the images of an unbroken run."""
    train = partial(example("plain_loop", "torchvision")["train"], images, tmp_path / "state.pt", 2)
    with seen_batches(stop_after=5) as seen:
        with pytest.raises(Stopped):
            train(save_every=5, batch_size=16, image_size=32)
        assert len(seen) == 5
        assert 0 <= train(batch_size=16, image_size=32) <= 100
    assert same(seen, epochs(images, 2, 16, 32, auto_augment="rand-m9-inc1", re_prob=0.25))


def test_dino_views(images: Path) -> None:
    names = example("dino_views")
    crops, labels = next(iter(names["open_loader"](images, 8, 32, 16)))
    assert [tuple(each.shape) for each in crops] == [(8, 2, 3, 32, 32), (8, 8, 3, 16, 16)]
    means = names["features"](lambda batch: batch.mean((2, 3)), crops)
    assert torch.allclose(means[1], crops[1].mean((3, 4)), atol=1e-5)
    assert len(labels) == 8


def test_stateful_dataloader(images: Path) -> None:
    open_loader = example("stateful_dataloader", "torchdata")["open_loader"]
    keys = {"batch_size": 8, "image_size": 24}
    first, after = open_loader(images, **keys), open_loader(images, **keys)
    before = list(islice(first, 2))
    after.load_state_dict(first.state_dict())
    assert same(before + list(after), epochs(images, 1, **keys))


def test_lightning(images: Path, tmp_path: Path) -> None:
    """Saved after four of the second epoch's six steps, it resumes with the fifth."""
    names = example("lightning_module", "lightning")
    lightning: Any = importlib.import_module("lightning")
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}

    def fit(steps: int, **options: Any) -> Any:
        save = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, "saved", every_n_train_steps=10)
        trainer = lightning.Trainer(max_epochs=2, max_steps=steps, accelerator="cpu", callbacks=[save], **quiet)
        trainer.fit(names["Classifier"](2), names["Images"](images, 8, 32), **options)
        return trainer.global_step

    with seen_batches() as seen:
        assert fit(10) == 10
        assert fit(12, ckpt_path=tmp_path / "saved.ckpt") == 12
    assert same(seen, epochs(images, 2, 8, 32, **POLICY))


def test_accelerate(images: Path, tmp_path: Path) -> None:
    train = example("accelerate_loop", "accelerate")["train"]
    with seen_batches() as seen:
        for last in (1, 2):
            train(images, tmp_path / "state", last, batch_size=8, image_size=32)
    assert same(seen, epochs(images, 2, 8, 32))


def test_hugging_face_trainer(images: Path, tmp_path: Path) -> None:
    names, transformers = example("hugging_face", "transformers", "accelerate"), sys.modules["transformers"]
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.ViTConfig(num_labels=2, image_size=32, patch_size=8, **small)

    def train(steps: int, **options: Any) -> Any:
        batches = names["Images"](widemix.Loader(images, "train", 8, 32, device="cpu"))
        quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True}
        arguments = transformers.TrainingArguments(str(tmp_path), max_steps=steps, save_steps=10, **quiet)
        model, callbacks = transformers.ViTForImageClassification(config), [names["SetEpoch"]()]
        trainer = names["ImagesTrainer"](model, arguments, train_dataset=batches, callbacks=callbacks)
        with seen_batches() as seen:
            trainer.train(**options)
        assert trainer.state.global_step == steps
        return seen

    first, then = train(10), train(12, resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    expected = epochs(images, 2, 8, 32)
    assert same(first[:10], expected[:10])
    assert same(then[-2:], expected[10:])


def test_timms_own_train_script(images: Path, tmp_path: Path, system) -> None:
    script = os.environ.get("TIMM_TRAIN")
    if not script:
        pytest.skip("TIMM_TRAIN is not set; it names train.py of a timm checkout")
    words = f"{script} {images} --val-split val --model resnet18 --num-classes 5 --epochs 2 --img-size 32 -b 8"
    words += f" --aa rand-m9-mstd0.5-inc1 --reprob 0.25 --workers 1 --output {tmp_path} --device cpu"
    words += " --warmup-epochs 0 --cooldown-epochs 0 --train-interpolation bilinear --mixup 0.2"
    data = importlib.import_module("timm.data")
    system({f"timm.data.{name}": getattr(data, name) for name in ("create_dataset", "create_loader")})  # restored
    system({"sys.argv": ["timm_train.py", *words.split()]})
    with seen_batches() as seen:
        runpy.run_path(str(EXAMPLES / "timm_train.py"), run_name="__main__")
    mixed = {"mixup": 0.2, "mix_group": 8, "smoothing": 0.1, "num_classes": 5}  # of which the folder has two
    assert same(seen, epochs(images, 2, 8, 32, **POLICY, **mixed))


GLOBAL_BATCH, SIDE = 6, 32  # eight steps an epoch
STOP, STEPS = 11, 16  # stops after three steps of the second epoch
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
