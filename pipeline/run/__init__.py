"""The run folder: checkpoints, metrics, progress, and who may write there."""
