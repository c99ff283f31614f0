"""Section `eval`: when a run is evaluated."""

from widemix.section import Positive, PositiveAmount, Section, key


class EvalSection(Section):
    """Evaluation during training."""

    every_epochs: Positive = key(1, "epochs between evaluations; the last epoch is always evaluated")
    every_minutes: PositiveAmount | None = key(
        None, "evaluate only at the first of these epochs that ends so many minutes after the last evaluation"
    )
    batch_size: Positive = key(128, "samples per batch and rank")
