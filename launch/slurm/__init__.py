"""Slurm: the command `widemix submit`, what runs on each node, and how a job's end is judged."""
