"""Our parts against their peers: each in paired runs, in one process, on the same pictures."""
