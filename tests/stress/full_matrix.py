"""The whole product of the matrix, by hand: `python -m tests.stress.full_matrix --to cells.jsonl [--cells 1000]`.

It runs the cells in a random order, the same each time, on two ranks that are started anew after a fault, and
appends a line for each to the file. The same command goes on where it was interrupted. It ends with the counts, and
with what failed. `--only "network plain, engine fsdp" --only timm:` keeps cells whose line has all these words:
each optimizer of timm with FSDP2.
"""

import argparse
import faulthandler
import itertools
import json
import os
import random
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from timm.optim import list_optimizers

from tests.engine.matrix import ENGINES, FACTORS, NOT_TRIED, OPTIMIZERS, run_cell, said
from tests.forks import Forks, group_of
from widemix.optim.section import TIMM

TIMM_NETWORKS = (
    "coat_tiny",
    "test_byobnet",
    "test_convnext",
    "test_efficientnet",
    "test_mambaout",
    "test_nfnet",
    "test_resnet",
    "test_vit",
    "test_vit4",
)
LONGEST = 300  # seconds of a cell; a rank that takes longer writes its stack to the log, and ends
RESTART = 200  # cells after which the ranks are started anew, as DeepSpeed keeps memory of each engine


def product() -> list[dict[str, str]]:
    """Toys with every option and our optimizers; timm's optimizers, whether recipes take them or not, on four toys;
    timm's networks."""
    cells = [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())]
    names = tuple(f"{TIMM}{name}" for name in list_optimizers())
    of = {"engine": ENGINES, "precision": FACTORS["precision"]}
    for networks, optimizers in (
        (("plain", "scalar", "channels_last", "batch_norm"), names),
        (tuple(f"timm:{name}" for name in TIMM_NETWORKS), OPTIMIZERS),
    ):
        factors = {"network": networks, "optimizer": optimizers, **of, "ema": ("", "0.9")}
        cells += [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]
    cells = [cell for cell in cells if not cell.items() >= NOT_TRIED]
    random.Random(0).shuffle(cells)
    return cells


def run_rank(cells: Path, to: Path) -> None:
    """One of two ranks, which run the cells in a file and append what became of each to another."""
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(cells.with_suffix(".store")), world)
    dist.init_process_group("gloo", store=store, timeout=timedelta(seconds=90), rank=rank, world_size=world)
    for cell in json.loads(cells.read_text()):
        began = time.perf_counter()
        faulthandler.dump_traceback_later(LONGEST, exit=True)
        try:
            result = run_cell(cell)
        except Exception as error:
            result = f"failed: {type(error).__name__}: {error}"
        if rank == 0 or result.startswith("failed"):
            line = {"cell": cell, "result": result[:1000], "seconds": round(time.perf_counter() - began, 2)}
            with to.open("a") as file:
                file.write(json.dumps(line) + "\n")
        if result.startswith("failed"):
            os._exit(1)
    dist.barrier()
    os._exit(0)


def results(to: Path) -> dict[str, str]:
    """By cell, what became of it; where one rank of two failed, that."""
    found: dict[str, str] = {}
    for line in to.read_text().splitlines() if to.exists() else ():
        values = json.loads(line)
        name = json.dumps(values["cell"])
        found[name] = max(found.get(name, ""), values["result"], key=lambda text: text.startswith("failed"))
    return found


def main() -> None:
    """Run what is left of the product, or of its first cells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--cells", type=int, help="how many of them, in the random order; default: all")
    parser.add_argument(
        "--only", action="append", default=[], help="words in a cell's line, such as 'optimizer timm:'"
    )
    arguments = parser.parse_args()
    to = arguments.to.absolute()
    cells = [cell for cell in product() if all(words in said(cell) for words in arguments.only)]
    print(f"{len(cells)} cells", flush=True)
    cells = cells[: arguments.cells]
    while left := [cell for cell in cells if json.dumps(cell) not in results(to)]:
        part, store = to.with_suffix(".part.json"), to.with_suffix(".part.store")
        store.unlink(missing_ok=True)
        part.write_text(json.dumps(left[:RESTART]))
        before = len(results(to))
        codes, _ = Forks(run_rank, part, to, log=to.with_suffix(".log"), environs=group_of(2)).wait(7200)
        if len(results(to)) == before:
            line = {"cell": left[0], "result": f"failed: the ranks ended with {codes}"}
            with to.open("a") as file:
                file.write(json.dumps(line) + "\n")
        print(Counter(result.partition(":")[0] for result in results(to).values()), flush=True)
    for result, number in Counter(r[:300] for r in results(to).values() if r.startswith("failed")).most_common():
        print(number, result)


if __name__ == "__main__":
    main()
