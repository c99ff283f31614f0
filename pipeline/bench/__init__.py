"""Benchmarks of widemix against other libraries: each in turns, in one process, on the same images."""
