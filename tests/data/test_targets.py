"""Targets: numbers to predict, or any number of classes, against what was put in, a plain loop and scikit-learn."""

import csv
import json
import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

import widemix
from tests.conftest import train_lines
from tests.data.loading import read
from tests.engine.plain import plain_loop
from tests.forks import Forks, group_of
from widemix.data.batches import Batch
from widemix.data.decode import Decoder
from widemix.data.loader import EvalLoader
from widemix.data.mixup import sample_mixture
from widemix.data_prep.join import join
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.distributed.topology import process_group, read_topology
from widemix.errors import InputError
from widemix.evaluation.evaluate import evaluate
from widemix.formats.beton import open_beton
from widemix.formats.checksums import compute_checksums, open_checksums
from widemix.recipe import Recipe, load_recipe
from widemix.recipe.augment import AugmentSection

COUNT, VAL = 40, 11
NAMES = ("age", "height")
WORDS = ("ant", "bee", "cat")
KINDS = {"regression": 2, "multilabel": 3}  # and how many targets there are
KIND = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def numbers() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(COUNT + VAL, 2)).astype(np.float32)


@pytest.fixture(scope="module")
def several() -> np.ndarray:
    """Which of three classes each image has, none for some."""
    return np.random.default_rng(1).random((COUNT + VAL, 3)) < 0.4


@pytest.fixture(scope="module")
def pngs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    noise = np.random.default_rng(2).integers(0, 256, (COUNT + VAL, 8, 8, 3), np.uint8)
    for number, pixels in enumerate(noise):
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def split_of(number: int) -> str:
    return "train" if number < COUNT else "val"


@pytest.fixture(scope="module")
def table(pngs, numbers, several) -> Path:
    """One file with both kinds of targets."""
    with (pngs / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["split", "age", "path", "height", "labels"])
        for number, ((age, height), row) in enumerate(zip(numbers.tolist(), several, strict=True)):
            words = "|".join(word for word, has in zip(WORDS, row, strict=True) if has)
            writer.writerow([split_of(number), repr(age), f"{number}.png", repr(height), words])
    return pngs / "table.csv"


@pytest.fixture(scope="module")
def folders(table, tmp_path_factory) -> dict[str, Path]:
    """Of JPEGs with numbers to predict, and of pixels with any number of classes."""
    base = tmp_path_factory.mktemp("folders")
    prepare("csv", table, base / "regression", PrepSettings(targets=",".join(NAMES)))
    prepare("csv", table, base / "multilabel", PrepSettings(raw=True))
    return {kind: base / kind for kind in KINDS}


@pytest.fixture(scope="module")
def truth(numbers, several) -> dict[str, np.ndarray]:
    """The targets of all images."""
    return {"regression": numbers, "multilabel": several}


def recipe(folder: Path | str, kind: str, **train) -> Recipe:
    loss = {"regression": "mse", "multilabel": "sigmoid"}[kind]
    keys = {f"train.{name}": value for name, value in {"loss": loss, "global_batch": 8, "epochs": 2, **train}.items()}
    keys |= {
        "data.path": str(folder),
        "data.targets": kind,
        "data.eval_split": "val",
        "data.num_classes": KINDS[kind],
    }
    keys |= {
        "data.workers": 1,
        "model.depth": 2,
        "augment.smoothing": 0.0,
        "augment.mix_group": 8,
        "schedule.warmup_epochs": 0,
    }
    keys |= {"log.every": 1, "log.tensorboard": False}
    return load_recipe(Path("recipes/digits/rp_mixer.yaml"), [(name, json.dumps(keys[name])) for name in keys])


def evaluating(folder: Path, kind: str, batch: int = 4, **keys) -> EvalLoader:
    return EvalLoader(recipe(folder, kind).data.model_copy(update=keys), batch, read_topology())


@KIND
def test_files_hold_the_targets_of_the_table(folders, truth, kind):
    rows = []
    for split in ("train", "val"):
        beton = open_beton(folders[kind] / f"{split}.beton")
        size = 4 * beton.target_count
        rows += [beton.bytes[place : place + size].view("<f4") for place in beton.targets.tolist()]
        assert (beton.label == -1).all()
        samples, start = np.array([3, 10]), int(beton.offset[3]) - 3
        checksums = compute_checksums(beton, samples, beton.path.read_bytes()[start:], start)
        assert checksums.tolist() == open_checksums(beton).samples[samples].tolist()
    assert np.array_equal(np.array(rows), truth[kind])


@pytest.mark.parametrize("way", ["JSON lines", "Python", "parts"])
def test_each_source_of_the_same_targets_gives_the_same_files(way, pngs, numbers, several, folders, tmp_path):
    out, kind = tmp_path / "out", "multilabel" if way == "JSON lines" else "regression"
    if way == "JSON lines":
        lines = [
            {
                "path": f"{i}.png",
                "split": split_of(i),
                "labels": [w for w, has in zip(WORDS, row, strict=True) if has],
            }
            for i, row in enumerate(several)
        ]
        (pngs / "table.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        prepare("csv", pngs / "table.jsonl", out, PrepSettings(raw=True))
    elif way == "Python":
        pairs = [(str(pngs / f"{i}.png"), row) for i, row in enumerate(numbers.tolist())]
        data = {"train": ((Path(path).read_bytes(), row) for path, row in pairs[:COUNT]), "val": pairs[COUNT:]}
        assert widemix.prepare(data, out, targets="age,height", shuffle=False).classes == NAMES
    else:
        for part in ("1/2", "2/2"):
            prepare("csv", pngs / "table.csv", tmp_path / part[0], PrepSettings(targets="age,height", part=part))
        join([tmp_path / "1", tmp_path / "2"], out)
        settings = json.loads((out / "manifest.json").read_text())["settings"]
        assert settings == PrepSettings(targets=",".join(NAMES)).as_json()
    for name in ("train.beton", "val.beton", *([] if way == "Python" else ["train.crc32c"])):
        assert (out / name).read_bytes() == (folders[kind] / name).read_bytes()


def test_targets_that_a_cut_file_does_not_hold_are_damage(folders, tmp_path):
    """While it is read; also where some of a sample's are there."""
    beton = open_beton(Path(shutil.copy(folders["regression"] / "val.beton", tmp_path)))
    decoder, samples = Decoder(beton), np.array([3, 10])
    boxes, pixels = np.array([[0, 0, 8, 8, 0]] * 2), np.empty((2, 8, 8, 3), np.uint8)
    before = decoder.targets(samples).tolist()
    found = [decoder.try_read(samples, boxes, np.zeros(2, bool), pixels, 1)]
    os.truncate(beton.path, int(beton.targets[10]) + 5)
    assert decoder.targets(samples[:1]).tolist() == before[:1]
    with pytest.raises(InputError, match=r"val\.beton: the file ends before it; it was cut short"):
        decoder.targets(samples)
    found.append(decoder.try_read(samples, boxes, np.zeros(2, bool), pixels, 1))
    assert found == [{}, dict.fromkeys((0, 1), "the file ends before it; it was cut short")]


def test_a_target_of_a_class_is_0_or_1(pngs, folders, tmp_path):
    rows = [[n % 2, n % 3 == 0, 1] for n in range(6)]
    rows[4][2], rows[5][0] = 0.5, 2.0  # the first is named
    lines = ["path,a,b,c", *(f"{n}.png,{a:g},{b:g},{c:g}" for n, (a, b, c) in enumerate(rows))]
    (pngs / "rows.csv").write_text("\n".join(lines) + "\n")
    prepare("csv", pngs / "rows.csv", tmp_path / "out", PrepSettings(targets="a,b,c", shuffle=False))
    source = evaluating(tmp_path / "out", "multilabel", eval_split="train").source
    assert source.labels(np.arange(4)).tolist() == rows[:4]
    with pytest.raises(InputError, match=r"sample 4 \(4\.png\) has 0\.5 as target 2; data\.targets multilabel"):
        source.labels(np.array([3, 4, 5]))
    words = r"sample 0 \(40\.png\) has .* as target 0; data\.targets multilabel takes 0 and 1"
    with pytest.raises(InputError, match=words):
        read(evaluating(folders["regression"], "multilabel", num_classes=2))


def test_the_loader_gives_each_image_its_targets(folders, numbers):
    folder = folders["regression"]
    seen = torch.cat([targets for _, targets in widemix.Loader(folder, "train", 8, 8)]).numpy()
    assert sorted(map(tuple, seen)) == sorted(map(tuple, numbers[:COUNT]))
    for keys, words in (
        ({"smoothing": 0.1}, "smoothing 0.1: is for"),
        ({"sampling": "sqrt"}, "sampling sqrt: is by"),
    ):
        with pytest.raises(InputError, match=words):
            widemix.Loader(folder, "train", 8, 8, **keys)
    mixed = [*widemix.Loader(folder, "train", 8, 8, mixup=1.0, mix_group=8)]
    assert not np.isin(mixed[0][1].numpy(), numbers).any()
    images = torch.arange(8.0)[:, None, None, None].expand(8, 3, 2, 2).clone()
    mixture = sample_mixture(8, 2, AugmentSection(mixup=1.0, mix_group=8), 0, 0, 0)
    mixture.mix(images)
    found, ones = mixture.mix_targets(torch.arange(8.0)[:, None] * torch.tensor([1, -10])), images[:, 0, 0, 0]
    torch.testing.assert_close(found, torch.stack([ones, -10 * ones], dim=1))


@KIND
def test_training_is_that_of_a_plain_loop(kind, folders, tmp_path):
    """Without augmentation; batches by the loader, the rest of torch alone."""
    section = recipe(folders[kind], kind, epochs=1, ema_decay=None)
    optim = section.optim.model_copy(update={"name": "sgd", "weight_decay": 0.0})
    schedule = section.schedule.model_copy(update={"name": "constant"})
    plain = AugmentSection(crop="padded", padding=0, hflip=0.0)
    section = section.model_copy(update={"augment": plain, "optim": optim, "schedule": schedule})
    torch.manual_seed(section.train.seed)
    model = widemix.build_model(section)
    widemix.train(section, tmp_path / "run")
    lines = train_lines(tmp_path / "run")
    whole = {"scale": (1, 1), "ratio": (1, 1), "hflip": 0, "mean": section.data.mean, "std": section.data.std}
    loader = widemix.Loader(folders[kind], "train", 8, 8, seed=section.train.seed, **whole)
    expected = plain_loop(model, [*loader], [line["lr"] for line in lines], optim=optim, loss=section.train.loss)
    assert [line["loss"] for line in lines] == pytest.approx(expected, rel=1e-5)


def linear(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, KINDS[kind]))


def evaluate_as_a_rank(folder: str, kind: str, out: str) -> None:
    topology = read_topology()
    with process_group(topology, 60):
        loader = EvalLoader(recipe(Path(folder), kind).data, 2, topology)
        found = evaluate(linear(kind), nullcontext(), loader, KINDS[kind])
    Path(out, f"{topology.rank}.json").write_text(json.dumps(found))


@KIND
def test_evaluation_is_exact_on_four_ranks(kind, folders, truth, tmp_path):
    """4 ranks have 3, 3, 3 and 2 samples in batches of 2: one rank's last batch is empty."""
    from sklearn.metrics import average_precision_score, mean_absolute_error, r2_score  # which the ranks do not need

    [batch] = read(evaluating(folders[kind], kind, 64))
    outputs, wanted = linear(kind)(batch.inputs).detach(), truth[kind][COUNT:]
    targets = torch.from_numpy(wanted).float()
    if kind == "regression":
        expected = {"loss": mse_loss(outputs, targets).item(), "mae": mean_absolute_error(wanted, outputs.numpy())}
        expected["r2"] = r2_score(wanted, outputs.numpy())
    else:
        expected = {"loss": 3 * binary_cross_entropy_with_logits(outputs, targets).item()}
        expected["map"] = 100 * average_precision_score(wanted, outputs.numpy(), average="macro")
    words = str(folders[kind]), kind, str(tmp_path)
    codes, said = Forks(evaluate_as_a_rank, *words, log=tmp_path / "log", environs=group_of(4)).wait()
    assert not any(codes), said
    for rank in range(4):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == pytest.approx(expected, rel=1e-5)


class Pairs:
    """A loader of one batch: random images and these targets."""

    topology = read_topology()

    def __init__(self, section, targets: list[list[int]]):
        self.data, self.targets = section, torch.tensor(targets, dtype=torch.float32)

    def __len__(self):
        return len(self.targets)

    def batches(self):
        return nullcontext([Batch(torch.rand(len(self), 192), self.targets, np.arange(len(self)))])


@pytest.mark.parametrize(
    ("kind", "targets", "line"),
    [
        ("multilabel", [[1, 0, 1], [0, 0, 1]], "mAP is the mean over the 2 of 3 classes that occur, without bee"),
        ("multilabel", [[0, 0, 0], [0, 0, 0]], "no class occurs: it has no mAP"),
        ("regression", [[1, 5], [2, 5]], "R2 is the mean over the 1 of 2 targets that vary, without height"),
        ("regression", [[1, 5], [1, 5]], "no target varies: it has no R2"),
    ],
)
def test_a_line_names_what_a_mean_is_without(kind, targets, line, folders, capsys):
    folder = folders[kind]
    loader, number = Pairs(recipe(folder, kind).data, targets), len(targets[0])
    for _ in range(2):
        found = evaluate(torch.nn.Linear(192, number), nullcontext(), loader, number)
    metric = {"regression": "r2", "multilabel": "map"}[kind]
    assert (metric in found) == ("mean" in line)
    assert not any(np.isnan(value) for value in found.values())
    assert capsys.readouterr().err == f"{folder}: split 'val': {line}\n"  # once


@pytest.mark.parametrize(
    ("folder", "targets", "count", "words"),
    [
        ("single", "class", 1, "holds the targets age, not classes"),
        ("digits", "regression", 10, "holds classes"),
        ("digits", "multilabel", 10, "data.targets multilabel: .* holds classes"),
        ("multilabel", "class", 3, "holds the targets ant, bee, cat, not classes"),
        ("regression", "class", 2, "holds the targets age, height, not classes"),
        ("regression", "regression", 3, "has 2 targets"),
    ],
)
def test_folders_of_other_targets_are_refused(table, folders, digits, tmp_path, folder, targets, count, words):
    if folder == "single":
        prepare("csv", table, tmp_path / "single", PrepSettings(targets="age"))
    path = str((folders | {"single": tmp_path / "single", "digits": digits})[folder])
    with pytest.raises(InputError, match=words):
        evaluating(path, "regression", targets=targets, num_classes=count, eval_split="train")
