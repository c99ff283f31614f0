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

from tests.conftest import ROOT, SMALL, Fork
from widemix.data.grid import denormalise, grid
from widemix.estimate.hardware import find_gpu, fraction_of_peak
from widemix.models.cost import model_cost
from widemix.recipe import load_recipe
from widemix.run.run_dir import default_run_dir
from widemix.training.misclassified import Misclassified, confusion_image, misclassified_grid
from widemix.training.profile import Profiler, torch_profiler

WATCHED = (
    *("--log.mistakes", "9", "--log.block_norms", "true", "--train.profile", "3:5", "--log.images", "0"),
    *("--train.max_steps", "6", "--log.every", "2", "--eval.batch_size", "50", "--data.workers", "1"),
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


def lines(run):
    return [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_mistakes_do_not_depend_on_the_ranks(watched):
    assert "gpuGetDeviceCount" not in (watched / "one.log").read_text()  # an error of tracing on a CPU
    for name in ("images/mistakes.png", "confusion.json"):
        assert (watched / "one" / name).read_bytes() == (watched / "two" / name).read_bytes()


def test_norms_of_blocks_are_parts_of_the_gradients_norm(watched):
    """The norm of a line is the mean over its steps: with two steps the last one's is not above twice that."""
    for run in ("one", "two"):
        trained = [line for line in lines(watched / run) if line["split"] == "train"]
        assert [line["step"] for line in trained] == [2, 4, 6]
        for line, reference in zip(trained, lines(watched / "one"), strict=False):
            norms = {name: value for name, value in line.items() if name.startswith("grad_norm/")}
            expected = {name: value for name, value in reference.items() if name.startswith("grad_norm/")}
            assert list(norms) == [f"grad_norm/{part}" for part in ("stem", "blocks.0", "blocks.1", "norm", "head")]
            assert norms == pytest.approx(expected, rel=1e-4)
            whole = sum(value**2 for value in norms.values()) ** 0.5
            assert 0.5 * line["grad_norm"] < whole < 2 * line["grad_norm"]


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GeForce RTX 3090", 71e12),
        *((f"NVIDIA {name}", None) for name in ("A100-PCIE-40GB", "H100 PCIe", "H100 NVL", "GeForce RTX 3090 Ti")),
        *((f"NVIDIA {name}", None) for name in ("A100-SXM4-40GB MIG 3g.20gb", "L4", "B200", "GH200 480GB")),
    ],
)
def test_peaks_are_of_gpus_by_their_whole_names(name, peak):
    found = find_gpu(name)
    assert (found and found.half) == peak
    assert find_gpu("Tesla V100-SXM2-32GB").single == 15.7e12


@pytest.mark.parametrize(
    ("keys", "gpu", "known"),
    [
        ({"train.precision": "bf16"}, "NVIDIA A100-SXM4-80GB", True),
        ({"train.precision": "fp32", "train.matmul_precision": "high"}, "NVIDIA A100-SXM4-80GB", False),
        # Of which the peak is twice as high, and most of the backward pass is left out.
        ({"train.precision": "bf16", "train.fp8": "true"}, "NVIDIA H100 80GB HBM3", False),
        ({"train.precision": "bf16", "train.freeze": "[body]"}, "NVIDIA A100-SXM4-80GB", False),
    ],
)
def test_utilisation_is_flops_over_the_peak(keys, gpu, known):
    recipe = load_recipe("imagenet/mixer_b16", list(keys.items()))
    flops = model_cost(recipe.model, 224, 1000).training_flops
    # 1,000 images/s on 4 GPUs, each of 12.6 GFLOPs forward and twice as many backward
    assert fraction_of_peak(recipe, gpu, 4) == (pytest.approx(flops / (4 * 312e12)) if known else None)


def test_the_image_of_confusions_has_a_cell_for_each_pair():
    image = confusion_image([[3, 1], [0, 4]], ["a", "b"])
    corners = [image[row, column] for row in (122, 158) for column in (122, 158)]  # beside the counts
    fraction = np.array([0.75, 0.25, 0, 1])[:, None]
    expected = np.array([255, 255, 255]) + fraction * (np.array([0, 90, 160]) - 255)
    assert np.abs(np.array(corners) - expected).max() <= 1
    assert confusion_image(torch.eye(1000, dtype=torch.int64).tolist(), []).shape == (1018, 1000, 3)
    widths = [confusion_image(torch.eye(number, dtype=torch.int64).tolist(), []).shape[1] for number in (40, 41)]
    assert widths == [120 + 40 * 20, 41 * 19]  # with names, and without


def cells(counts: list[list[int]], edge: int = 120) -> list[list[set[tuple[int, ...]]]]:
    """The colours within each cell of 36 x 36 points."""
    image, number = confusion_image(counts, []), len(counts)
    return [
        [
            {
                tuple(color)
                for color in image[edge + 36 * row :, edge + 36 * column :][:36, :36].reshape(-1, 3).tolist()
            }
            for column in range(number)
        ]
        for row in range(number)
    ]


def ink(colors: set[tuple[int, ...]], fraction: float) -> str | None:
    """Of the count in a cell, by the brightest and the darkest point."""
    paper, points = sum(255 - fraction * (255 - part) for part in (0, 90, 160)), [sum(color) for color in colors]
    return "white" if max(points) > paper + 30 else "black" if min(points) < paper - 30 else None


def test_counts_are_in_their_cells_and_can_be_read():
    """White where most of a true class is, black elsewhere; and none in the cell of a pair that never came."""
    (a, b), (c, d) = cells([[3, 1], [0, 0]])
    assert [ink(a, 0.75), ink(b, 0.25), ink(c, 0), ink(d, 0)] == ["white", "black", None, None]
    (a, b), (c, d) = cells([[6, 4], [5, 0]])
    assert [ink(a, 0.6), ink(b, 0.4), ink(c, 1), ink(d, 0)] == ["white", "black", "white", None]
    diagonal = cells(torch.eye(12, dtype=torch.int64).tolist())[11]
    assert [ink(diagonal[column], column == 11) for column in (10, 11)] == [None, "white"]
    assert ink(cells(torch.eye(13, dtype=torch.int64).tolist())[12][12], 1) is None


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
        (range(4, 8), [4, 5]),  # of a run that begins within them
        (range(5), [3, 4]),  # of one that ends within them
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


@pytest.mark.parametrize("main", [True, False])
def test_confusions_and_mistakes_are_of_all_ranks(digits, system, main):
    """True classes are rows, of mistakes the surest are shown; the second evaluation begins anew, on each rank."""
    section = load_recipe("digits/mixer", [("data.path", str(digits)), ("data.num_classes", "12")]).data
    images = torch.linspace(-1, 1, 360 * 3 * 64).view(360, 3, 8, 8)
    source = SimpleNamespace(read=lambda part: part, to_device=lambda part: images[part.view_ids] + part.epoch)
    loader = SimpleNamespace(data=section, source=source, topology=SimpleNamespace(device=torch.device("cpu")))
    other, sums, shown = [(-60, 1, 0, 2), (-20, 8, 2, 11)], [], {}  # of another rank

    def gather(every, own):
        every[:] = [own, other]

    ranks = {
        "get_world_size": lambda: 2,
        "all_gather_object": gather,
        "all_reduce": lambda t: sums.append(t.tolist()),
    }
    system({f"torch.distributed.{name}": answer for name, answer in ranks.items()})
    writer = SimpleNamespace(
        write_confusion=lambda confusion: shown.update(counts=confusion),
        show=lambda name, image, step: shown.update({name: (image, step)}),
        add_image=lambda name, image, step: shown.update({name: (image, step)}),
    )
    watched = Misclassified(3, loader, SimpleNamespace(writer=writer if main else None))
    names = [str(digit) for digit in range(10)]
    for step in (5, 9):
        for predicted, samples, targets in (([1, 1, 2, 0], [0, 2, 4, 6], [0, 1, 0, 2]), ([0, 2], [10, 12], [0, 0])):
            batch = SimpleNamespace(samples=np.array(samples), targets=torch.tensor(targets))
            watched.observe(
                torch.eye(12)[predicted] * torch.tensor([4.0, 3.0, 2.0, 1.0])[: len(samples), None], batch
            )
        watched.write(step)
        counts = np.zeros((12, 12), int)
        counts[:3, :3] = [[1, 1, 2], [0, 1, 0], [1, 0, 0]]
        assert sums.pop() == counts.reshape(-1).tolist()
        if main:
            assert shown["counts"] == {"step": step, "classes": names, "counts": counts.tolist()}
            tiles = list(denormalise(images[[0, 12, 1]], section))
            captions = ["sample 0\nis 0\nnot 1: 83 %", "sample 12\nis 0\nnot 2: 65 %", "sample 1\nis 0\nnot 2: 60 %"]
            wrong = grid(tiles, captions, columns=8)
            for name, image in (("confusion", confusion_image(counts.tolist(), names)), ("mistakes", wrong)):
                assert np.array_equal(shown[name][0], image)
                assert shown[name][1] == step
        else:
            assert not shown
        shown.clear()


def test_a_class_without_a_name_is_shown_by_number(digits):
    section = load_recipe("digits/mixer", [("data.path", str(digits))]).data
    images = torch.zeros(9, 3, 8, 8)
    source = SimpleNamespace(read=lambda part: part.view_ids, to_device=lambda samples: images[samples])
    loader, wrong = SimpleNamespace(data=section, source=source), [(-9, 7, 0, 1), (-8, 4, 3, 0), (-7, 5, 0, 6)]
    captions = ["sample 7\nis cat\nnot dog: 9 %", "sample 4\nis 3\nnot cat: 8 %", "sample 5\nis cat\nnot 6: 7 %"]
    expected = grid(list(denormalise(images[:3], section)), captions, columns=8)
    assert np.array_equal(misclassified_grid(loader, wrong, ["cat", "dog"]), expected)
    assert misclassified_grid(loader, [], ["cat"]) is None
    assert misclassified_grid(SimpleNamespace(data="of texts", source=source), wrong, ["cat"]) is None
    one, two, three = (confusion_image([[3, 1], [0, 4]], names) for names in (["a"], ["a", "1"], ["a", "b"]))
    assert np.array_equal(one, two)
    assert not np.array_equal(two, three)
