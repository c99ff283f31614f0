"""The page of a run, or of several: one HTML file that needs nothing else."""
