"""Start a run: on this machine, by Slurm, on Kubernetes or in a container."""
