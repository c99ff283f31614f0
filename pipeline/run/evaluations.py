"""evaluations.jsonl: what `widemix eval` measured of a run's checkpoints after training.

It is a file of its own, since only the process that trains writes metrics.jsonl.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from widemix.files import open_to_write

NAME = "evaluations.jsonl"


def record_evaluation(checkpoint: Path, line: Mapping[str, Any]) -> str | None:
    """Append a line to the file of the checkpoint's run; return why, if it cannot be written.

    Nothing is written for a checkpoint that has been copied out of its run.
    """
    run = checkpoint.resolve().parent.parent
    if checkpoint.parent.is_symlink():
        return f"{checkpoint.parent}: is a link, to a folder of which {NAME} is left alone"
    if not (run / "recipe.yaml").is_file():
        return None
    finite = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in line.items()}
    try:
        with open_to_write(run / NAME, "a") as file:
            file.write(json.dumps(finite) + "\n")
    except OSError as error:
        return f"{run / NAME}: cannot be written to ({error.strerror})"
    return None
