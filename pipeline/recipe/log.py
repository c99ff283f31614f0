"""Section `log`: what a run logs, and where to."""

from typing import Annotated

from pydantic import Field

from widemix.section import Positive, Section, key


class LogSection(Section):
    """What a run logs."""

    every: Positive = key(50, "steps between lines of metrics.jsonl")
    tensorboard: bool = key(True, "also write the metrics for TensorBoard, into the run folder")
    wandb: bool = key(
        False, "also send the metrics to Weights & Biases; WANDB_PROJECT and WANDB_MODE (offline) say where"
    )
    mlflow: bool = key(
        False, "also send the metrics to MLflow; MLFLOW_TRACKING_URI says where (default: sqlite:///mlflow.db)"
    )
    block_norms: bool = key(False, "also log the gradient norm of each block, of the last step before a line")
    mistakes: Annotated[int, Field(ge=0, le=256)] | None = key(
        None,
        "misclassified images to show after each evaluation, the surest first, with the confusion matrix; 0 is off; "
        "null: 32 where there are at most 50 classes",
    )
    images: Annotated[int, Field(ge=0, lt=2**31)] = key(32, "images in the grid of the first step; 0 is off")

    def shown_mistakes(self, targets: str, classes: int) -> int:
        """Return how many misclassified images are shown of a run with so many classes."""
        if self.mistakes is not None:
            return self.mistakes
        return 32 if targets == "class" and classes <= 50 else 0
