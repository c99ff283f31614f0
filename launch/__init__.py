"""Ways to start a run: on this machine, and on clusters."""
