"""widemix study plan, run, search, baselines, report."""

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from widemix.cli.commands import check_least
from widemix.cli.study_pages import add_bounds, add_results
from widemix.errors import Exit, InputError
from widemix.recipe import key_names, suggest
from widemix.recipe.files import find_study
from widemix.terminal import print

if TYPE_CHECKING:
    from widemix.studies.plan import Plan, Run
    from widemix.studies.protocol import Search
    from widemix.studies.study_run import StudyRun


def add_study(commands) -> None:
    """Add `widemix study plan`, `run`, `search`, `baselines`, `report`, `results` and `bounds`."""
    parser = commands.add_parser(
        "study",
        help="train recipes that differ in a few keys, and compare them",
        description="Plan, train and plot the runs of a study file, such as figure7. "
        "`widemix submit STUDY.yaml` trains them as a Slurm job array.",
    )
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for name, command, example, text in (
        ("plan", _plan, " --gpu a100", "print each run, its state and, with --gpu, its hours and disk space"),
        (
            "run",
            _run,
            " --only 'rp-*' --at-once 2",
            "run the study's search, if it has one, then train the runs that have no row in its table and are not "
            "being trained by another process; the same command continues, and may run on several machines at once "
            "if they share the folder",
        ),
        (
            "search",
            _search,
            " --key optim.lr --low 1e-4 --high 1e-2",
            "search the value of a key, such as the learning rate, with the best top-1 on a held-out split at each "
            "point of the study; the same command continues, with more --trials too",
        ),
        (
            "baselines",
            _baselines,
            "",
            "fit what knows nothing of networks to the study's data, the most frequent class and logistic regression "
            "on pixels or counts of words, and add its accuracy to baselines.jsonl, which reports show",
        ),
        ("report", _report, "", "write a CSV table, the figure (PNG, SVG) and a Markdown page about the results"),
    ):
        verb = verbs.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            examples=f"widemix study {name} figure7{example}",
        )
        verb.add_argument(
            "recipe", type=find_study, metavar="STUDY.yaml", help="study file, or a shipped study's name: figure7"
        )
        verb.add_argument("--to", type=Path, metavar="DIR", help="folder of the run folders (default: runs/<study>)")
        table = (
            "folder of the study's table STUDY.jsonl and of its report, such as recipes/studies/results (default: "
            "that of the run folders); a run that ends is added to the table, and not trained again"
        )
        verb.add_argument("--report", type=Path, metavar="DIR", help=table)
        verb.add_argument(
            "--only", default="*", metavar="PATTERN", help="only runs whose name matches, such as 'cifar10-*'"
        )
        verb.epilog = "Recipe keys as --section.key VALUE apply to all runs; give the same ones to all commands."
        verb.set_defaults(command=command)
        _add_options(name, verb)
    add_results(verbs)
    add_bounds(verbs)


def _add_options(name: str, verb: argparse.ArgumentParser) -> None:
    if name == "plan":
        from widemix.estimate.hardware import GPUS

        gpu = "also print hours on one GPU of this kind, by a roofline, and the size of the checkpoints"
        verb.add_argument("--gpu", choices=tuple(GPUS), help=gpu)
    if name == "search":
        add = verb.add_argument
        add(
            "--key",
            metavar="KEY",
            help="key to search, of a study without a section search (default: optim.lr)",
        )
        add("--low", type=float, metavar="X", help="least value")
        add("--high", type=float, metavar="X", help="greatest value")
        add("--linear", action="store_true", help="not on a logarithmic axis")
        add("--split", default="holdout", help="split that chooses (default: holdout)")
        add("--trials", type=int, metavar="N", help="values at each point (default: the study's, or 7)")
    if name in ("run", "search"):
        at_once = "runs to train at the same time; they share this machine's CPUs and GPUs (default: 1)"
        verb.add_argument("--at-once", type=int, default=1, metavar="N", help=at_once)
        verb.add_argument("--ranks", type=int, default=1, metavar="N", help="processes of each run (default: 1)")


def _read(arguments: argparse.Namespace) -> "tuple[Plan, Path]":
    """The study with its table, and the folder of its runs."""
    from widemix.studies.plan import make_plan
    from widemix.studies.rows import Table
    from widemix.studies.study import read_study

    study = read_study(arguments.recipe)
    folder = arguments.to or Path("runs") / arguments.recipe.stem
    table = Table((arguments.report or folder) / f"{arguments.recipe.stem}.jsonl")
    return make_plan(arguments.recipe, study, table, arguments.overrides, arguments.only), folder


def _trained(arguments: argparse.Namespace) -> "tuple[Plan, Path]":
    """The same of a study that needs runs."""
    plan, folder = _read(arguments)
    if not plan.study.measured:
        raise InputError(f"{arguments.recipe}: shows sizes of networks alone; `widemix study report` plots it")
    return plan, folder


def _plan(arguments: argparse.Namespace) -> Exit:
    from widemix.lease import Leases
    from widemix.studies.plan import state
    from widemix.studies.study_run import unique

    plan, folder = _trained(arguments)
    leases = Leases(folder)
    plan.add_finished(folder)
    trials, study_runs = plan.trials_to_run(), unique(plan.runs())
    states = {study_run.name: state(study_run, folder, leases, plan.table) for study_run in (*trials, *study_runs)}
    needs = {}
    if arguments.gpu:
        from widemix.studies.plan import requirements

        needs = requirements([*trials, *study_runs], arguments.gpu)
    for study_run in (*trials, *study_runs):
        need = needs.get(study_run.name)
        hours = f"{need.hours:8.2f} h  " if need and need.hours is not None else "       ? h  " if need else ""
        note = "trial  " if study_run in trials else "run    " if trials else ""
        print(f"{states[study_run.name]:8}  {hours}{note}{study_run.name}")
    ended = [study_run for study_run in study_runs if states[study_run.name] in ("done", "diverged")]
    print(f"{folder}: {len(ended)} of {len(study_runs)} runs have ended")
    if trials:
        print(f"{len(trials)} trials of the search come first; what widens it, and the values of the runs, follow")
    if needs:
        rest = [needs[study_run.name] for study_run in (*trials, *study_runs) if study_run not in ended]
        total = sum(need.hours or 0 for need in rest)
        size = sum(need.bytes for need in rest)
        print(f"the others take {total:.1f} hours on one {arguments.gpu}, {size / 1e9:.2f} GB of checkpoints")
    return Exit.DONE


def _run(arguments: argparse.Namespace) -> Exit:
    from widemix.studies.study_run import unique

    plan, folder = _trained(arguments)
    run = _runner(arguments, plan, folder)
    ended = plan.search(run)
    return run(unique(plan.runs())) if ended == Exit.DONE else ended


def _search(arguments: argparse.Namespace) -> Exit:
    from widemix.files import atomic_write
    from widemix.studies.search import as_csv, best

    plan, folder = _trained(arguments)
    search = _search_section(arguments, plan)
    ended = plan.search(_runner(arguments, plan, folder, search), search)
    searched = plan.searched(search)
    for arm, trials in searched:
        winner = best(trials)
        values = ", ".join(f"{name} {value:g}" for name, value in winner.values.items()) if winner else "all diverged"
        edge = ", at the edge of what was tried" if arm.at_edge(trials) else ""
        print(f"{arm.name}: {values}" + (f", top-1 {winner.top1:.2f} % on {search.split}{edge}" if winner else ""))
    table = plan.table.path.with_name(f"{plan.path.stem}_search.csv")
    atomic_write(table, as_csv(searched))
    print(f"all {sum(len(trials) for _, trials in searched)} trials are in {table}")
    return ended


def _search_section(arguments: argparse.Namespace, plan: "Plan") -> "Search":
    """Return the search of the study, or that of the options."""
    from widemix.studies.plan import check_top1
    from widemix.studies.protocol import Range, Search

    check_least(arguments, 1, "trials")
    name, low, high = arguments.key or "optim.lr", arguments.low, arguments.high
    given = [option for option in ("key", "low", "high") if getattr(arguments, option) is not None]
    if plan.study.search is not None:
        if given:
            raise InputError(f"--{given[0]}: {plan.path} has a section search, which says what is searched")
        more = {} if arguments.trials is None else {"trials": arguments.trials}
        return plan.study.search.model_copy(update=more)
    if low is None or high is None:
        raise InputError(f"{plan.path} has no section search: give --low and --high")
    if name not in key_names():
        raise InputError(f"--key {name}: no such key{suggest(name, key_names())}")
    if not low < high:
        raise InputError(f"--low {low:g}, --high {high:g}: the first must be smaller than the second")
    if low <= 0 and not arguments.linear:
        raise InputError(f"--low {low:g}: must be above 0 on a logarithmic axis; or add --linear")
    check_top1(plan.path, plan.study_runs)
    span = Range(low=low, high=high, log=not arguments.linear)
    held = {"eval.every_epochs": max(study_run.recipe.train.epochs for study_run in plan.study_runs)}
    return Search(keys={name: span}, trials=arguments.trials or 7, split=arguments.split, set=held)


def _runner(arguments: argparse.Namespace, plan: "Plan", folder: Path, search: "Search | None" = None) -> "Run":
    """Check what the runs need, and the data of those that are missing; returns what trains runs."""
    from widemix.formats.manifest import read_manifest
    from widemix.recipe import check_world
    from widemix.studies.runner import Runner

    check_least(arguments, 1, "at_once", "ranks")
    for study_run in plan.study_runs:
        check_world(study_run.recipe, arguments.ranks)
    known = plan.table.missing([*plan.trials_to_run(search), *plan.runs()])
    for path, split in dict.fromkeys(
        (study_run.recipe.data.path, study_run.recipe.data.eval_split) for study_run in known
    ):
        splits = read_manifest(Path(path)).splits
        if split not in splits:
            hint = "; `widemix prep --holdout 10%` makes one" if split == "holdout" else ""
            raise InputError(f"{path}: has no split {split}, it has {', '.join(splits)}{hint}")
    folder.mkdir(parents=True, exist_ok=True)

    def run(study_runs: "Sequence[StudyRun]") -> Exit:
        plan.table.add_finished(study_runs, folder)
        missing = plan.table.missing(study_runs)
        print(f"{plan.table.path}: {len(study_runs) - len(missing)} of {len(study_runs)} runs have ended", flush=True)
        if not missing:
            return Exit.DONE

        def ended(study_run: "StudyRun") -> None:
            plan.table.add_finished([study_run], folder)

        return Runner(folder, arguments.at_once, arguments.ranks, _gpus(), ended=ended).run(missing)

    return run


def _gpus() -> list[str]:
    """The GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def _baselines(arguments: argparse.Namespace) -> Exit:
    from widemix.studies.baselines import add_baselines

    plan, folder = _trained(arguments)
    for row in add_baselines(plan.study_runs, arguments.report or folder):
        print(row.text)
    return Exit.DONE


def _report(arguments: argparse.Namespace) -> Exit:
    plan, folder = _read(arguments)
    if plan.study.measured:
        plan.add_finished(folder)
    results = plan.results()
    ended = sum(result.row is not None for result in results)
    if plan.study.measured and not ended:
        raise InputError(
            f"{plan.table.path}: has none of the study's {len(results)} runs, and {folder} neither; "
            "`widemix study run` first"
        )
    from widemix.studies.study_page import write_report  # and matplotlib, which takes a second

    study, options = plan.study, [f"--{name}={text}" for name, text in arguments.overrides]
    if arguments.only != "*":
        study = study.model_copy(update={"claims": []})  # which are decided together, by all runs
        options += ["--only", arguments.only]
    files = write_report(results, study, plan.path, arguments.report or folder, plan.searched(), shlex.join(options))
    done = f"{ended} of {len(results)} runs have ended: " if plan.study.measured else ""
    print(f"{done}{', '.join(map(str, files))}")
    return Exit.DONE
