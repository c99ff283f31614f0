"""Training a recipe: when to step, log, evaluate, save, roll back and stop; evaluation and fine-tuning."""
