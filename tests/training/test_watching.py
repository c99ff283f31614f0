"""What a run shows on request: misclassified images, confusions, gradients by block, a trace; on any ranks."""

import gzip
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.conftest import ROOT, SMALL, Fork
from widemix.errors import InputError
from widemix.estimate.utilisation import find_gpu, fraction_of_peak
from widemix.models.cost import model_cost
from widemix.recipe import load_recipe
from widemix.run.run_dir import default_run_dir
from widemix.training import mistakes, profile
from widemix.training.mistakes import confusion_image

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


def test_a_trace_on_a_cpu_prints_no_error(watched):
    assert "gpuGetDeviceCount" not in (watched / "one.log").read_text()


def lines(run):
    return [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_confusions_are_those_of_the_evaluation(watched):
    found = json.loads((watched / "one/confusion.json").read_text())
    counts = np.array(found["counts"])
    assert counts.sum() == 360
    assert 100 * counts.trace() / 360 == pytest.approx(lines(watched / "one")[-1]["top1"])
    assert found["step"] == 6
    assert found["classes"] == [str(digit) for digit in range(10)]


def test_the_mistakes_do_not_depend_on_the_ranks(watched):
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


def test_the_trace_is_of_the_asked_steps(watched):
    (trace,) = (watched / "one/profile").iterdir()
    assert trace.name == "steps-3-5.pt.trace.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    optimizer = [event for event in events if str(event.get("name", "")).startswith("Optimizer.step")]
    steps = {event["name"]: event for event in events if str(event.get("name", "")).startswith("ProfilerStep#")}
    assert list(steps) == ["ProfilerStep#3", "ProfilerStep#4"]
    for event, step in zip(optimizer, steps.values(), strict=True):
        assert step["ts"] <= event["ts"] <= event["ts"] + event["dur"] <= step["ts"] + step["dur"]
    assert len(list((watched / "two/profile").iterdir())) == 1  # of rank 0


REGRESSION = [("data.targets", "regression"), ("train.loss", "mse"), ("augment.smoothing", "0")]


@pytest.mark.parametrize(
    ("overrides", "error_message"),
    [
        ([("train.profile", "30:20")], "should be FIRST:STOP, two step numbers such as 20:30"),
        ([("train.profile", "20")], "train.profile '20': "),
        ([("log.mistakes", "8"), ("data.num_classes", "2001")], "too many for a confusion matrix"),
        ([("log.mistakes", "8"), *REGRESSION], "log.mistakes is for data.targets class, not regression; set it to 0"),
        ([("log.block_norms", "true"), ("engine.kind", "deepspeed")], "take engine.kind ddp or fsdp"),
    ],
)
def test_what_cannot_be_watched(overrides, error_message):
    with pytest.raises(InputError, match=error_message):
        load_recipe("digits/mixer", overrides)


def test_what_can_be_watched():
    for overrides in (
        [("log.mistakes", "8"), ("data.num_classes", "2000")],
        [("log.mistakes", "0"), ("data.num_classes", "2001")],
        [("log.mistakes", "0"), *REGRESSION],
        [("log.block_norms", "true"), ("engine.kind", "fsdp")],
        [("engine.kind", "deepspeed")],
    ):
        assert load_recipe("digits/mixer", overrides).log.images


def test_utilisation_is_flops_over_the_peak():
    assert find_gpu("NVIDIA A100-SXM4-80GB").half == 312e12
    assert find_gpu("NVIDIA H200").half == 989e12
    assert find_gpu("NVIDIA GeForce RTX 3090").half == 71e12
    assert find_gpu("Tesla V100-SXM2-32GB").single == 15.7e12
    assert find_gpu("NVIDIA A100-PCIE-40GB") is None
    assert find_gpu("NVIDIA H100 PCIe") is None
    for name in ("NVIDIA H100 NVL", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA A100-SXM4-40GB MIG 3g.20gb"):
        assert find_gpu(name) is None
    for name in ("NVIDIA L4", "NVIDIA B200", "NVIDIA GH200 480GB"):
        assert find_gpu(name) is None
    recipe = load_recipe("imagenet/mixer_b16", [("train.precision", "bf16")])
    flops = model_cost(recipe.model, 224, 1000).training_flops
    # 1,000 images/s on 4 GPUs, each of 12.6 GFLOPs forward and twice as many backward
    assert 1000 * fraction_of_peak(recipe, "NVIDIA A100-SXM4-80GB", 4) == pytest.approx(1000 * flops / (4 * 312e12))
    fp32 = load_recipe("imagenet/mixer_b16", [("train.precision", "fp32"), ("train.matmul_precision", "high")])
    assert fraction_of_peak(fp32, "NVIDIA A100-SXM4-80GB", 4) is None
    fp8 = load_recipe("imagenet/mixer_b16", [("train.precision", "bf16"), ("train.fp8", "true")])
    assert fraction_of_peak(fp8, "NVIDIA H100 80GB HBM3", 4) is None  # of which the peak is twice as high
    probe = load_recipe("imagenet/mixer_b16", [("train.precision", "bf16"), ("train.freeze", "[body]")])
    assert fraction_of_peak(probe, "NVIDIA A100-SXM4-80GB", 4) is None  # most of the backward pass is left out


def test_the_image_of_confusions_has_a_cell_for_each_pair():
    image = confusion_image([[3, 1], [0, 4]], ["a", "b"])
    corners = [image[2, 122], image[2, 158], image[38, 122], image[38, 158]]  # beside the counts
    fraction = np.array([0.75, 0.25, 0, 1])[:, None]
    expected = np.array([255, 255, 255]) + fraction * (np.array([0, 90, 160]) - 255)
    assert np.abs(np.array(corners) - expected).max() <= 1
    assert confusion_image(torch.eye(1000, dtype=torch.int64).tolist(), []).shape == (1018, 1000, 3)
    widths = [confusion_image(torch.eye(number, dtype=torch.int64).tolist(), []).shape[1] for number in (40, 41)]
    assert widths == [120 + 40 * 20, 41 * 19]  # with names, and without


def cells(counts: list[list[int]], left: int = 120) -> list[list[set[tuple[int, ...]]]]:
    """The colours within each cell of 36 x 36 points."""
    image, number = confusion_image(counts, []), len(counts)
    return [
        [
            {tuple(color) for color in image[36 * row :, left + 36 * column :][:36, :36].reshape(-1, 3).tolist()}
            for column in range(number)
        ]
        for row in range(number)
    ]


def ink(colors: set[tuple[int, ...]], fraction: float) -> str | None:
    """Of the count in a cell, by the brightest and the darkest point."""
    paper, points = sum(255 - fraction * (255 - part) for part in (0, 90, 160)), [sum(color) for color in colors]
    return "white" if max(points) > paper + 30 else "black" if min(points) < paper - 30 else None


def test_counts_stand_in_their_cells_in_a_colour_that_can_be_read():
    """White where most of a true class is, black elsewhere; and none in the cell of a pair that never came."""
    (a, b), (c, d) = cells([[3, 1], [0, 0]])
    assert [ink(a, 0.75), ink(b, 0.25), ink(c, 0), ink(d, 0)] == ["white", "black", None, None]
    (a, b), (c, d) = cells([[6, 4], [5, 0]])
    assert [ink(a, 0.6), ink(b, 0.4), ink(c, 1), ink(d, 0)] == ["white", "black", "white", None]
    diagonal = cells(torch.eye(12, dtype=torch.int64).tolist())[11]
    assert [ink(diagonal[column], column == 11) for column in (10, 11)] == [None, "white"]
    assert ink(cells(torch.eye(13, dtype=torch.int64).tolist())[12][12], 1) is None


def test_a_class_without_a_name_is_shown_by_its_number():
    counts = [[3, 1], [0, 4]]
    one, two, three = (confusion_image(counts, names) for names in (["a"], ["a", "1"], ["a", "b"]))
    assert np.array_equal(one, two)
    assert not np.array_equal(two, three)


def test_a_run_without_a_folder_is_named_by_what_is_changed():
    overrides = [("data.path", "/x"), ("optim.lr", "1e-3"), ("data.mean", "[0, 1]"), ("log.every", "5")]

    assert str(default_run_dir(Path("recipes/digits/mixer.yaml"), overrides)).startswith(
        "runs/mixer-lr-1e-3-mean-0_1-2"
    )
    long = default_run_dir(Path("r.yaml"), [("train.freeze", "[stem.*]"), ("model.name", 200 * "x")])
    assert re.fullmatch(r"runs/r-freeze-stem-name-x{81}-\d{8}-\d{6}", str(long))


class Trace:
    """A profiler that notes when it began and ended."""

    def __init__(self, log):
        self.start, self.stop = (lambda: log.append("start")), (lambda: log.append("stop"))
        self.export_chrome_trace = lambda path: log.append(Path(path).name)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (range(8), ["start", "stop", "steps-3-6.pt.trace.json.gz"]),
        (range(4, 8), ["start", "stop", "steps-4-6.pt.trace.json.gz"]),  # of a run that begins within them
        (range(5), ["start", "stop", "steps-3-5.pt.trace.json.gz"]),  # of one that ends within them
        (range(3), []),
        (range(6, 8), []),
    ],
)
def test_a_trace_has_those_of_the_steps_that_the_run_makes(tmp_path, monkeypatch, steps, expected):
    log: list[str] = []
    monkeypatch.setattr(profile, "torch_profiler", lambda record_shapes: Trace(log))
    with profile.Profiler(tmp_path, 3, 6) as profiler:
        for step in steps:
            profiler.before(step)
    assert log == expected


def test_each_step_of_a_trace_is_a_slice_of_its_own_also_of_a_second_run_of_a_folder(tmp_path, monkeypatch):
    log: list[str] = []

    class Slice:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            log.append(f"begin {self.name}")

        def __exit__(self, *_):
            log.append(f"end {self.name}")

    monkeypatch.setattr(profile, "torch_profiler", lambda record_shapes: Trace(log))
    monkeypatch.setattr(profile, "record_function", Slice)
    for steps in (range(6), range(4)):
        with profile.Profiler(tmp_path, 3, 5) as profiler:
            for step in steps:
                profiler.before(step)
        slices = [f"{what} ProfilerStep#{step}" for step in (3, 4) if step in steps for what in ("begin", "end")]
        assert log == ["start", *slices, "stop", f"steps-3-{min(5, len(steps))}.pt.trace.json.gz"]
        log.clear()


@pytest.mark.parametrize(("gpu", "given", "level"), [(False, None, "9"), (False, "3", "3"), (True, None, None)])
def test_a_trace_is_of_the_devices_that_are_there(monkeypatch, gpu, given, level):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(profile, "profile", lambda **options: options)
    monkeypatch.setattr(os, "environ", {"KINETO_LOG_LEVEL": given} if given else {})
    options = profile.torch_profiler(record_shapes=True)
    assert [activity.name for activity in options["activities"]] == ["CPU", "CUDA"][: 1 + gpu]
    assert options["record_shapes"]
    assert os.environ.get("KINETO_LOG_LEVEL") == level


def batch_of(samples, targets) -> SimpleNamespace:
    return SimpleNamespace(samples=np.array(samples), targets=torch.tensor(targets))


def test_confusions_have_true_classes_in_rows_and_mistakes_are_the_first_of_the_split(tmp_path, monkeypatch):
    data, shown = SimpleNamespace(num_classes=3, path=str(tmp_path)), []
    writer = SimpleNamespace(
        write_confusion=lambda confusion: shown.append(confusion),
        show=lambda name, image, step: shown.append((name, step)),
        add_image=lambda name, image, step: shown.append((name, image, step)),
    )
    loader = SimpleNamespace(data=data, topology=SimpleNamespace(device=torch.device("cpu")))
    monkeypatch.setattr(mistakes.dist, "all_reduce", lambda tensor: None)
    monkeypatch.setattr(mistakes.dist, "get_world_size", lambda: 2)
    other = [(1, 0, 2), (8, 2, 1)]  # of another rank

    def gather(every, own):
        every[:] = [own, other]

    monkeypatch.setattr(mistakes.dist, "all_gather_object", gather)
    monkeypatch.setattr(mistakes, "read_manifest", lambda folder: SimpleNamespace(classes=("a", "b", "c")))
    monkeypatch.setattr(mistakes, "mistakes_grid", lambda loader, wrong, classes: (wrong, classes))
    watched = mistakes.Mistakes(3, loader, SimpleNamespace(writer=writer))
    for step in (5, 9):  # the second begins anew
        watched.observe(torch.eye(3)[[1, 1, 2, 0]], batch_of([0, 2, 4, 6], [0, 1, 0, 2]))
        watched.observe(torch.eye(3)[[0, 2]], batch_of([10, 12], [0, 0]))
        watched.write(step)
        confusion, matrix, grid = shown
        assert confusion == {"step": step, "classes": ["a", "b", "c"], "counts": [[1, 1, 2], [0, 1, 0], [1, 0, 0]]}
        assert matrix == ("confusion", step)
        assert grid == ("mistakes", ([(0, 0, 1), (1, 0, 2), (4, 0, 2)], ["a", "b", "c"]), step)
        shown.clear()


def test_ranks_that_write_nothing_begin_anew_too(monkeypatch):
    loader = SimpleNamespace(
        data=SimpleNamespace(num_classes=2), topology=SimpleNamespace(device=torch.device("cpu"))
    )
    counted = []
    monkeypatch.setattr(mistakes.dist, "all_reduce", lambda tensor: counted.append(tensor.tolist()))
    monkeypatch.setattr(mistakes.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(mistakes.dist, "all_gather_object", lambda every, own: every.__setitem__(0, own))
    watched = mistakes.Mistakes(3, loader, SimpleNamespace(writer=None))
    for step in (1, 2):
        watched.observe(torch.eye(2), batch_of([3, 4], [0, 0]))
        watched.write(step)
    assert counted == [[1, 1, 0, 0]] * 2


def test_mistakes_are_shown_with_their_classes_and_those_without_a_name_by_their_number(monkeypatch):
    section = load_recipe("digits/mixer").data
    source = SimpleNamespace(
        read=lambda samples, views, epoch: (("images of", samples.tolist(), (views - samples).tolist(), epoch), None),
        finish=lambda host, samples, epoch: host,
    )
    monkeypatch.setattr(mistakes, "denormalise", lambda images, own: images[:3] if own is section else None)
    monkeypatch.setattr(mistakes, "grid", lambda tiles, texts, columns: (tiles, texts, columns))
    wrong = [(7, 0, 1), (4, 3, 0), (5, 0, 6)]
    found = mistakes.mistakes_grid(SimpleNamespace(data=section, source=source), wrong, ["cat", "dog"])
    assert found == (["images of", [7, 4, 5], 3 * [0]], ["is cat\nnot dog", "is 3\nnot cat", "is cat\nnot 6"], 8)
    assert mistakes.mistakes_grid(SimpleNamespace(data=section, source=source), [], ["cat"]) is None
    assert mistakes.mistakes_grid(SimpleNamespace(data="of texts", source=source), wrong, ["cat"]) is None
