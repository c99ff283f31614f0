"""Errors of an evaluation during training: the confusion matrix, and the images of which it was surest."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image, ImageDraw, ImageFont

from widemix.data.batches import Batch, StepPart
from widemix.data.grid import denormalise, fitted, grid
from widemix.data.loader import EvalLoader
from widemix.formats.manifest import read_manifest
from widemix.recipe.data import DataSection
from widemix.run.log import RunLog

NAMED, NUMBERED = 40, 12  # classes whose names and counts fit into the image of the matrix
_PAPER, _INK = np.array([255, 255, 255]), np.array([0, 90, 160])


class Misclassified:
    """Collects them during an evaluation, on every rank, and writes them; the same whatever the number of ranks.

    `count`: images to show, the misclassified ones whose predicted class is likeliest, to a whole percent: of equal
    ones the first in the order of the split.
    """

    def __init__(self, count: int, loader: EvalLoader, log: RunLog):
        self._count, self._loader, self._log = count, loader, log
        self._classes = loader.data.num_classes
        self._reset()

    def _reset(self) -> None:
        size, device = self._classes**2, self._loader.topology.device
        self._confusion = torch.zeros(size, dtype=torch.int64, device=device)
        self._wrong: list[tuple[int, ...]] = []  # -percent, sample, true class, predicted class

    def observe(self, logits: torch.Tensor, batch: Batch) -> None:
        """Add a batch: logits [B, classes], and its labels int64 [B]."""
        (sure, predicted), labels = logits.float().softmax(1).max(1), batch.targets
        self._confusion += torch.bincount(labels * self._classes + predicted, minlength=len(self._confusion))
        samples = torch.from_numpy(batch.samples).to(labels.device)
        rows = torch.stack([-(100 * sure).round().long(), samples, labels, predicted], 1)[predicted != labels]
        self._wrong = sorted([*self._wrong, *map(tuple, rows.tolist())])[: self._count]

    def write(self, step: int) -> None:
        """Write what was collected into the run folder and TensorBoard, and begin anew. Every rank calls it."""
        counts, wrong = self._gather()
        self._reset()
        if self._log.writer is None:
            return
        classes = list(read_manifest(Path(self._loader.data.path)).classes)
        self._log.writer.write_confusion({"step": step, "classes": classes, "counts": counts})
        self._log.writer.show("confusion", confusion_image(counts, classes), step)
        images = misclassified_grid(self._loader, wrong, classes)
        if images is not None:
            self._log.writer.add_image("mistakes", images, step)

    def _gather(self) -> tuple[list[list[int]], list[tuple[int, ...]]]:
        """Counts [true class][predicted class], and (-percent, sample, true, predicted) of the surest mistakes."""
        dist.all_reduce(self._confusion)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, self._wrong)
        wrong = sorted(row for rows in every for row in rows)[: self._count]
        return self._confusion.view(self._classes, self._classes).tolist(), wrong


def misclassified_grid(loader: EvalLoader, wrong: list[tuple[int, ...]], classes: list[str]) -> np.ndarray | None:
    """The images above their classes, uint8 [height, width, 3]; None for text, or if none is wrong."""
    section = loader.data
    if not wrong or not isinstance(section, DataSection):
        return None
    samples = np.array([sample for _, sample, _, _ in wrong])
    tiles = denormalise(loader.source.to_device(loader.source.read(StepPart(samples))), section)
    names = [*classes, *map(str, range(len(classes), max(max(row[2:]) for row in wrong) + 1))]
    captions = [
        f"sample {sample}\nis {names[true]}\nnot {names[guess]}: {-sure} %" for sure, sample, true, guess in wrong
    ]
    return grid(list(tiles), captions, columns=8)


def confusion_image(counts: list[list[int]], classes: list[str]) -> np.ndarray:
    """The matrix as fractions of each true class (a row), with names and counts where they fit: uint8 [H, W, 3]."""
    matrix, number = np.array(counts), len(counts)
    fractions = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    cell = max(1, min(36, 800 // number))
    colors = (_PAPER + fractions[..., None] * (_INK - _PAPER)).round().astype(np.uint8)
    edge = 120 if number <= NAMED else 0  # for the names
    sheet = Image.new("RGB", (edge + cell * number, edge + cell * number + 18), (255, 255, 255))
    sheet.paste(Image.fromarray(colors.repeat(cell, 0).repeat(cell, 1)), (edge, edge))
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    draw.text((edge, edge + cell * number + 2), "rows: true classes; columns: predicted", (60, 60, 60), font)
    for place in range(number if edge else 0):
        name = fitted(classes[place] if place < len(classes) else str(place), edge - 12, font)
        middle = edge + cell * (place + 0.5)
        draw.text((edge - 6, middle), name, (0, 0, 0), font, anchor="rm")
        column = Image.new("RGB", (edge - 6, cell), (255, 255, 255))
        ImageDraw.Draw(column).text((0, cell / 2), name, (0, 0, 0), font, anchor="lm")
        sheet.paste(column.rotate(90, expand=True), (edge + cell * place, 0))
    for row, column in np.ndindex(matrix.shape) if number <= NUMBERED else ():
        if matrix[row, column]:
            ink = (255, 255, 255) if fractions[row, column] > 0.5 else (0, 0, 0)
            middles = (edge + cell * (column + 0.5), edge + cell * (row + 0.5))
            draw.text(middles, str(matrix[row, column]), ink, font, anchor="mm")
    return np.asarray(sheet)
