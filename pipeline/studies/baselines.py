"""Baselines without a network: the most frequent class, and logistic regression on pixels or counts of words.

Their rows stand next to every table, one for each data set, since a network below a linear baseline is no result.
"""

import json
import math
import os
import statistics
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from widemix.errors import InputError
from widemix.files import open_to_write, parse_json, read_regular
from widemix.studies.points import Result
from widemix.studies.study_run import StudyRun

FILE = "baselines.jsonl"
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # C of scikit-learn, of which a fifth of the training split chooses
_BATCH = 512
_MOST = 8  # points that a page names


@dataclass(frozen=True)
class Baseline:
    """Top-1, %, of both on the evaluation split of a prepared folder.

    data: its name. samples: of the training split.
    """

    data: str
    split: str
    samples: int
    features: str  # pixels, or counts of words
    majority: float
    linear: float
    penalty: float  # C
    seconds: float
    date: str

    @property
    def text(self) -> str:
        """Both in words."""
        data = f"`{self.data}`" + (f", {self.split}," if self.split != "test" else "")
        return (
            f"on {data} the most frequent class has {self.majority:.2f} % top-1, logistic regression on "
            f"{self.features} {self.linear:.2f} % ({self.seconds:,.0f} s)"
        )


def read_baselines(folder: Path) -> dict[tuple[str, str], Baseline]:
    """The rows of a folder of results, by data and split."""
    path = folder / FILE
    rows = [Baseline(**parse_json(line)) for line in read_regular(path).splitlines()] if path.exists() else []
    return {(row.data, row.split): row for row in rows}


def add_baselines(study_runs: Iterable[StudyRun], folder: Path) -> list[Baseline]:
    """Compute the rows of the runs' data that the folder does not have yet, and append them; returns them."""
    known, new = read_baselines(folder), []
    for study_run in study_runs:
        key = _key(study_run)
        if key not in known:
            known[key] = measure(study_run)
            new.append(known[key])
            folder.mkdir(parents=True, exist_ok=True)
            with open_to_write(folder / FILE, "a") as file:
                file.write(json.dumps(asdict(known[key]), separators=(",", ":")) + "\n")
                file.flush()
                os.fsync(file.fileno())
    return new


def baseline_lines(results: Sequence[Result], folder: Path) -> list[str]:
    """Return the lines of a study's page on them: their top-1, and the points below the linear one."""
    known = read_baselines(folder)
    keys = dict.fromkeys(_key(result.study_run) for result in results)
    lines = []
    if missing := [f"`{data}`, {split}" for data, split in keys if (data, split) not in known]:
        lines.append(
            f"No linear baseline is known of {'; '.join(missing)}: `widemix study baselines STUDY.yaml` computes it."
        )
    if own := [known[key] for key in keys if key in known]:
        lines.append(f"Without a network: {'; '.join(row.text for row in own)}.")
    points = _points(results, known)
    if below := [text for text, is_below in points.values() if is_below]:
        names = "; ".join(below) if len(below) <= _MOST else f"{len(below)} of {len(points)} points"
        lines.append(f"Below logistic regression, and so no result of a network: {names}.")
    return lines


def points_below(results: Sequence[Result], folder: Path) -> set[tuple]:
    """The points (`StudyRun.point`) whose mean top-1 is below the linear baseline of their data."""
    return {point for point, (_, is_below) in _points(results, read_baselines(folder)).items() if is_below}


def _points(results: Sequence[Result], known: Mapping[tuple[str, str], Baseline]) -> dict[tuple, tuple[str, bool]]:
    """Each point whose data has a baseline: in words, and whether its mean top-1 is below the linear one."""
    points: dict[tuple, list[Result]] = {}
    for result in results:
        if math.isfinite(result.y.get("top1", math.nan)):
            points.setdefault(result.study_run.point, []).append(result)
    found = {}
    for point, own in points.items():
        run, mean = own[0].study_run, statistics.fmean(result.y["top1"] for result in own)
        baseline = known.get(_key(run))
        if baseline is not None:
            values = (f"{name} {value}" for name, value in run.varied if not name.startswith("data."))
            text = f"{', '.join([f'{run.line} on `{baseline.data}`', *values])} ({mean:.2f} %)"
            found[point] = (text, mean < baseline.linear)
    return found


def measure(study_run: StudyRun) -> Baseline:
    """Fit and evaluate both on the splits of a run; raises `InputError` for data without classes."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import train_test_split

    start, data = time.perf_counter(), study_run.recipe.data
    (x, y), (x_test, y_test) = (_split(study_run, split) for split in (data.train_split, data.eval_split))

    def fit(penalty: float, x, y) -> LogisticRegression:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # 200 steps are enough for a baseline, converged or not
            return LogisticRegression(C=penalty, max_iter=200).fit(x, y)

    parts = train_test_split(x, y, test_size=0.2, stratify=y, random_state=0)
    scores = [fit(penalty, parts[0], parts[2]).score(parts[1], parts[3]) for penalty in PENALTIES]
    penalty = PENALTIES[int(np.argmax(scores))]
    majority = np.bincount(y).argmax()
    return Baseline(
        data=Path(data.path).name,
        split=data.eval_split,
        samples=len(y),
        features="pixels" if isinstance(x, np.ndarray) else "counts of words",
        majority=round(100 * float((y_test == majority).mean()), 2),
        linear=round(100 * float(fit(penalty, x, y).score(x_test, y_test)), 2),
        penalty=penalty,
        seconds=round(time.perf_counter() - start, 1),
        date=time.strftime("%Y-%m-%d"),
    )


def _split(study_run: StudyRun, split: str):
    """Features [n, pixels], or counts [n, words] as a sparse matrix, and classes [n] of a split."""
    import scipy.sparse
    import torch

    from widemix.data.loader import EvalLoader
    from widemix.data.tokens import Tokens
    from widemix.distributed.topology import Topology

    section = study_run.recipe.data.model_copy(update={"eval_split": split})
    loader = EvalLoader(section, _BATCH, Topology(0, 1, 0, 1, torch.device("cpu")))
    features, classes = [], []
    with loader.batches() as batches:
        for batch in batches:
            inputs = batch.inputs
            if isinstance(loader.source, Tokens):  # 0 is padding
                rows = torch.arange(len(inputs))[:, None].expand_as(inputs)[inputs > 0].numpy()
                words = inputs[inputs > 0].numpy()
                shape = (len(inputs), loader.source.vocabulary)
                features.append(scipy.sparse.csr_array((np.ones(len(words)), (rows, words)), shape=shape))
            else:
                features.append(inputs.flatten(1).numpy().copy())
            classes.append(batch.targets.numpy().copy())
    if classes[0].ndim > 1:
        raise InputError(f"{section.path}: has no classes, so no baseline")
    stacked = np.concatenate(features) if isinstance(features[0], np.ndarray) else scipy.sparse.vstack(features)
    return stacked, np.concatenate(classes)


def _key(study_run: StudyRun) -> tuple[str, str]:
    data = study_run.recipe.data
    return Path(data.path).name, data.eval_split
