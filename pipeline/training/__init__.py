"""The training loop, evaluation, handling of failed steps, learning rates, fine-tuning, and trained models."""
