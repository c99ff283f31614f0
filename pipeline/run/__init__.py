"""The run folder: its lock, checkpoints and metrics, and what a run prints."""
