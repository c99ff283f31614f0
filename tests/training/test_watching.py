"""What a run shows on request: misclassified images, confusions, gradients by block, a trace; on any ranks."""

import gzip
import itertools
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import ROOT, SMALL, Fork
from tests.run.saved import ALONE
from widemix.data.grid import denormalise, grid
from widemix.data.loader import EvalLoader
from widemix.evaluation.export import load_trained
from widemix.recipe import load_recipe
from widemix.run.run_dir import default_run_dir
from widemix.training.misclassified import confusion_image, misclassified_grid
from widemix.training.profile import Profiler, torch_profiler

WATCHED = (
    *("--log.mistakes", "9", "--log.block_norms", "true", "--train.profile", "3:5", "--log.images", "0"),
    *("--train.max_steps", "6", "--log.every", "2", "--eval.batch_size", "50", "--data.workers", "1"),
    *("--train.global_batch", "448", "--eval.every_epochs", "1"),  # two evaluations, the second of which begins anew
    *("--train.ema_decay", "0.5"),  # its evaluations are of other predictions
    *("--engine.memory_layout", "plain"),  # auto may choose others for half a batch
)


@pytest.fixture(scope="module")
def watched(digits, tmp_path_factory):
    """The same run on one rank with DDP, and on two with FSDP."""
    folder = tmp_path_factory.mktemp("watched")
    runs = {"one": (0, "ddp"), "two": (2, "fsdp")}
    started = []
    for name, (world, kind) in runs.items():
        words = (ROOT / "recipes/digits/rp_mixer.yaml", "--data.path", digits, "--run-dir", folder / name, *SMALL)
        words = (*words, *WATCHED, "--engine.kind", kind)
        started.append(Fork(*(words if world else ("train", *words)), log=folder / f"{name}.log", world=world))
    for one in started:
        code, output = one.wait()
        assert code == 0, output
    return folder


def trained(run):
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["split"] == "train"]


def test_the_mistakes_do_not_depend_on_the_ranks(watched):
    assert "gpuGetDeviceCount" not in (watched / "one.log").read_text()  # an error of tracing on a CPU
    for name in ("images/mistakes.png", "confusion.json"):
        assert (watched / "one" / name).read_bytes() == (watched / "two" / name).read_bytes()


def test_confusions_and_mistakes_are_those_of_a_plain_loop(watched):
    """True classes are rows; of the mistakes the surest to a whole percent are shown, and of those the first."""
    recipe, network = load_trained(watched / "one")
    with EvalLoader(recipe.data, 360, ALONE).batches() as batches:
        (batch,) = batches
    sure, guesses = network.eval()(batch.inputs).softmax(1).detach().max(1)
    counts, names = np.zeros((10, 10), int), [str(digit) for digit in range(10)]
    np.add.at(counts, (batch.targets, guesses), 1)
    found = json.loads((watched / "one/confusion.json").read_text())
    assert found == {"step": 6, "classes": names, "counts": counts.tolist()}
    rows = zip((100 * sure).round().long().tolist(), batch.targets.tolist(), guesses.tolist(), strict=True)
    wrong = sorted((-percent, at, true, guess) for at, (percent, true, guess) in enumerate(rows) if true != guess)[:9]
    tiles = denormalise(batch.inputs[[at for _, at, _, _ in wrong]], recipe.data)
    captions = [f"sample {at}\nis {true}\nnot {guess}: {-percent} %" for percent, at, true, guess in wrong]
    shown = np.asarray(Image.open(watched / "one/images/mistakes.png"))
    assert np.array_equal(shown, grid(list(tiles), captions, columns=8))


def test_norms_of_blocks_are_parts_of_the_gradients_norm(watched):
    """The norm of a line is the mean over its steps: with two steps the last one's is not above twice that."""
    for run in ("one", "two"):
        assert [line["step"] for line in trained(watched / run)] == [2, 4, 6]
        for line, reference in zip(trained(watched / run), trained(watched / "one"), strict=True):
            norms = {name: value for name, value in line.items() if name.startswith("grad_norm/")}
            expected = {name: value for name, value in reference.items() if name.startswith("grad_norm/")}
            assert list(norms) == [f"grad_norm/{part}" for part in ("stem", "blocks.0", "blocks.1", "norm", "head")]
            assert norms == pytest.approx(expected, rel=1e-4)
            whole = sum(value**2 for value in norms.values()) ** 0.5
            assert 0.5 * line["grad_norm"] < whole < 2 * line["grad_norm"]


def test_the_image_of_confusions_has_a_cell_for_each_pair():
    image = confusion_image([[3, 1], [0, 4]], ["a", "b"])
    corners = [image[row, column] for row in (122, 158) for column in (122, 158)]  # beside the counts
    fraction = np.array([0.75, 0.25, 0, 1])[:, None]
    expected = np.array([255, 255, 255]) + fraction * (np.array([0, 90, 160]) - 255)
    assert np.abs(np.array(corners) - expected).max() <= 1
    assert confusion_image(torch.eye(1000, dtype=torch.int64).tolist(), []).shape == (1018, 1000, 3)
    widths = [confusion_image(torch.eye(number, dtype=torch.int64).tolist(), []).shape[1] for number in (40, 41)]
    assert widths == [120 + 40 * 20, 41 * 19]  # with names, and without


def ink(counts: list[list[int]], row: int, column: int) -> str | None:
    """The colour of the count in a cell of 36 x 36 points, by its brightest and darkest point."""
    cell = confusion_image(counts, [])[120 + 36 * row :, 120 + 36 * column :][:36, :36].sum(2, dtype=int)
    paper = sum(255 - counts[row][column] / max(1, sum(counts[row])) * (255 - part) for part in (0, 90, 160))
    return "white" if cell.max() > paper + 30 else "black" if cell.min() < paper - 30 else None


def test_counts_are_in_their_cells_and_can_be_read():
    """White where most of a true class is, black elsewhere; and none in the cell of a pair that never came."""
    places = [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [ink([[3, 1], [0, 0]], *place) for place in places] == ["white", "black", None, None]
    assert [ink([[6, 4], [5, 0]], *place) for place in places] == ["white", "black", "white", None]
    of_12, of_13 = (torch.eye(number, dtype=torch.int64).tolist() for number in (12, 13))
    assert [ink(of_12, 11, 10), ink(of_12, 11, 11), ink(of_13, 12, 12)] == [None, "white", None]


def test_a_run_folder_is_named_by_what_is_changed():
    overrides = [("data.path", "/x"), ("optim.lr", "1e-3"), ("data.mean", "[0, 1]"), ("log.every", "5")]

    assert str(default_run_dir(Path("recipes/digits/mixer.yaml"), overrides)).startswith(
        "runs/mixer-lr-1e-3-mean-0_1-2"
    )
    long = default_run_dir(Path("r.yaml"), [("train.freeze", "[stem.*]"), ("model.name", 200 * "x")])
    assert re.fullmatch(r"runs/r-freeze-stem-name-x{81}-\d{8}-\d{6}", str(long))


@pytest.mark.parametrize(
    ("steps", "traced"),
    [
        (range(8), [3, 4, 5]),
        (range(4, 5), [4]),  # of a run that begins and ends within them
        (range(3), []),
        (range(6, 8), []),
    ],
)
def test_a_trace_has_the_steps_that_the_run_makes(tmp_path, steps, traced):
    """Each is a slice of its own; also of a second run of the folder."""
    for _ in range(2):
        with Profiler(tmp_path, 3, 6) as profiler:
            for step in steps:
                profiler.before(step)
        names = [f"steps-{traced[0]}-{traced[-1] + 1}.pt.trace.json.gz"] if traced else []
        assert [path.name for path in tmp_path.glob("profile/*")] == names
    for path in tmp_path.glob("profile/*"):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        slices = [event for event in events if str(event.get("name", "")).startswith("ProfilerStep#")]
        assert [event["name"] for event in slices] == [f"ProfilerStep#{step}" for step in traced]
        for one, other in itertools.pairwise(slices):
            assert one["ts"] + one["dur"] <= other["ts"]


@pytest.mark.parametrize(("gpu", "given", "level"), [(False, None, "9"), (False, "3", "3"), (True, None, None)])
def test_a_trace_is_of_the_devices_that_are_there(system, gpu, given, level):
    environ = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    environ |= {"KINETO_LOG_LEVEL": given} if given else {}
    system({"torch.cuda.is_available": lambda: gpu, "os.environ": environ})
    made = torch_profiler(record_shapes=True)
    assert {activity.name for activity in made.activities} == ({"CPU", "CUDA"} if gpu else {"CPU"})
    assert made.record_shapes
    assert environ.get("KINETO_LOG_LEVEL") == level


def test_a_class_without_a_name_is_shown_by_number():
    section, images = load_recipe("digits/mixer").data, torch.zeros(9, 3, 8, 8)
    source = SimpleNamespace(read=lambda part: part.view_ids, to_device=lambda samples: images[samples])
    loader, wrong = SimpleNamespace(data=section, source=source), [(-9, 7, 0, 1), (-8, 4, 3, 0), (-7, 5, 0, 6)]
    captions = ["sample 7\nis cat\nnot dog: 9 %", "sample 4\nis 3\nnot cat: 8 %", "sample 5\nis cat\nnot 6: 7 %"]
    expected = grid(list(denormalise(images[:3], section)), captions, columns=8)
    assert np.array_equal(misclassified_grid(loader, wrong, ["cat", "dog"]), expected)
    assert misclassified_grid(loader, [], ["cat"]) is None
    one, two, three = (confusion_image([[3, 1], [0, 4]], names) for names in (["a"], ["a", "1"], ["a", "b"]))
    assert np.array_equal(one, two)
    assert not np.array_equal(two, three)
