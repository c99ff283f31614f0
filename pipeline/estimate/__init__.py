"""`widemix cost`: the memory, traffic, time and storage of a recipe, computed, or counted on fake ranks."""

from widemix.estimate.hardware import GPUS, NETWORKS
from widemix.estimate.tables import named_rows, named_table, pairs_rows, pairs_table

__all__ = ["GPUS", "NETWORKS", "named_rows", "named_table", "pairs_rows", "pairs_table"]
