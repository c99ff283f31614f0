"""Trained networks: finding and loading them, evaluation, prediction, model cards."""
