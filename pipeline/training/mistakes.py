"""What an evaluation during training gets wrong: the confusion matrix, and the first misclassified images."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image, ImageDraw, ImageFont

from widemix.data.batches import Batch
from widemix.data.grid import denormalise, grid
from widemix.data.loader import EvalLoader
from widemix.formats.manifest import read_manifest
from widemix.recipe.data import DataSection
from widemix.run.log import RunLog

NAMED, NUMBERED = 40, 12  # classes whose names and counts fit into the image of the matrix
_PAPER, _INK = np.array([255, 255, 255]), np.array([0, 90, 160])


class Mistakes:
    """Collects them during an evaluation, on every rank, and writes them; the same whatever the number of ranks.

    `count`: images to show, the first misclassified ones in the order of the split.
    """

    def __init__(self, count: int, loader: EvalLoader, log: RunLog):
        self._count, self._loader, self._log = count, loader, log
        self._classes = loader.data.num_classes
        self._reset()

    def _reset(self) -> None:
        size, device = self._classes**2, self._loader.topology.device
        self._confusion = torch.zeros(size, dtype=torch.int64, device=device)
        self._wrong: list[tuple[int, ...]] = []  # sample, true class, predicted class

    def observe(self, logits: torch.Tensor, batch: Batch) -> None:
        """Add a batch: logits [B, classes], and its labels int64 [B]."""
        predicted, labels = logits.argmax(1), batch.targets
        self._confusion += torch.bincount(labels * self._classes + predicted, minlength=len(self._confusion))
        if len(self._wrong) < self._count:  # a rank has its samples in the order of the split
            rows = torch.stack([torch.from_numpy(batch.samples).to(labels.device), labels, predicted], 1)
            self._wrong += [tuple(row) for row in rows[predicted != labels].tolist()]

    def write(self, step: int) -> None:
        """Write what was collected into the run folder and TensorBoard, and begin anew. Every rank calls it."""
        counts, wrong = self._gather()
        self._reset()
        if self._log.writer is None:
            return
        classes = list(read_manifest(Path(self._loader.data.path)).classes)
        self._log.writer.write_confusion({"step": step, "classes": classes, "counts": counts})
        self._log.writer.show("confusion", confusion_image(counts, classes), step)
        images = mistakes_grid(self._loader, wrong, classes)
        if images is not None:
            self._log.writer.add_image("mistakes", images, step)

    def _gather(self) -> tuple[list[list[int]], list[tuple[int, ...]]]:
        """Counts [true class][predicted class], and (sample, true, predicted) of the first `count` mistakes."""
        dist.all_reduce(self._confusion)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, self._wrong[: self._count])
        wrong = sorted(row for rows in every for row in rows)[: self._count]
        return self._confusion.view(self._classes, self._classes).tolist(), wrong


def mistakes_grid(loader: EvalLoader, wrong: list[tuple[int, ...]], classes: list[str]) -> np.ndarray | None:
    """The images above their classes, uint8 [height, width, 3]; None for text, or if none is wrong."""
    section = loader.data
    if not wrong or not isinstance(section, DataSection):
        return None
    samples = np.array([sample for sample, _, _ in wrong])
    host, _ = loader.source.read(samples, samples, 0)
    tiles = denormalise(loader.source.finish(host, samples, 0), section)
    names = [*classes, *map(str, range(len(classes), max(max(row[1:]) for row in wrong) + 1))]
    return grid(list(tiles), [f"is {names[true]}\nnot {names[guess]}" for _, true, guess in wrong], columns=8)


def confusion_image(counts: list[list[int]], classes: list[str]) -> np.ndarray:
    """The matrix as fractions of each true class (a row), with names and counts where they fit: uint8 [H, W, 3]."""
    matrix, number = np.array(counts), len(counts)
    fractions = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    cell = max(1, min(36, 800 // number))
    colors = (_PAPER + fractions[..., None] * (_INK - _PAPER)).round().astype(np.uint8)
    left = 120 if number <= NAMED else 0
    sheet = Image.new("RGB", (left + cell * number, cell * number + 18), (255, 255, 255))
    sheet.paste(Image.fromarray(colors.repeat(cell, 0).repeat(cell, 1)), (left, 0))
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    draw.text((left, cell * number + 2), "rows: true classes; columns: predicted, same order", (60, 60, 60), font)
    for row in range(number if left else 0):
        name = classes[row] if row < len(classes) else str(row)
        draw.text((left - 6, cell * (row + 0.5)), name[:18], (0, 0, 0), font, anchor="rm")
    for row, column in np.ndindex(matrix.shape) if number <= NUMBERED else ():
        if matrix[row, column]:
            ink = (255, 255, 255) if fractions[row, column] > 0.5 else (0, 0, 0)
            place = (left + cell * (column + 0.5), cell * (row + 0.5))
            draw.text(place, str(matrix[row, column]), ink, font, anchor="mm")
    return np.asarray(sheet)
