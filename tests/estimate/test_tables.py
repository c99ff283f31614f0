"""Tables of costs: of all recipes, of a folder's rehearsals, of Mixers of equal Omega; and how numbers are shown."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import ROOT, System
from tests.forked_popen import ForkedPopen
from tests.forks import Forks
from widemix.errors import InputError
from widemix.estimate import recipe_tables
from widemix.estimate import tables as units
from widemix.estimate.hardware import Cluster
from widemix.estimate.rehearse import HEAD, rehearsal_line, rehearsal_rows
from widemix.estimate.report import IMAGENET_BYTES, IMAGES_PER_CPU, estimate
from widemix.estimate.tables import Row, pairs_rows, pairs_table, show
from widemix.recipe import load_recipe

B16 = ROOT / "recipes/imagenet/mixer_b16.yaml"


def write_rows(folder: str) -> None:
    """In a fork, whose `widemix cost` are forks too: the rows of a folder's recipes."""
    subprocess.Popen = ForkedPopen
    rows = list(rehearsal_rows(Path(folder), Cluster(128, nodes=32), [("train.epochs", "150")]))
    Path(folder, "rows.json").write_text(json.dumps(rows))


def test_a_folders_table_has_each_recipe_or_its_error(tmp_path):
    good = f"extends: {B16}\nmodel: {{depth: 1, channels: 48, channel_hidden: 96}}\n"
    (tmp_path / "good.yaml").write_text(good)
    (tmp_path / "odd.yaml").write_text(good.replace("depth", "detph"))
    codes, said = Forks(write_rows, str(tmp_path), log=tmp_path / "log").wait()
    assert codes == [0], said
    row, odd = json.loads((tmp_path / "rows.json").read_text())
    lines = [*HEAD.splitlines(), rehearsal_line(row), rehearsal_line(odd)]
    assert {line.count("|") for line in lines} == {10}
    assert "model.depth" in lines[3]
    cells = lines[2].split(" | ")
    assert cells[1] == f"{row['parameters'] / 1e6:.1f} M"
    assert cells[2] == f"{4 * row['parameters'] / 1e6:,.0f} MB"  # DDP sends every gradient once
    assert cells[5] == f"{row['step'] * (1_281_167 // 4096) * 150 / 3600:.1f}"


@pytest.mark.parametrize(("nodes", "given"), [(None, []), (1, ["--nodes", "1"]), (2, ["--nodes", "2"])])
def test_each_recipe_of_a_folder_gets_the_nodes_given(nodes, given, tmp_path, system: System):
    """Of ten GPUs the default is three nodes, which as --nodes would be refused."""
    (tmp_path / "one.yaml").touch()
    commands = []
    failed = SimpleNamespace(returncode=1, stderr="error: none")
    system({"subprocess.run": lambda command, **_: commands.append(command) or failed})
    [row] = rehearsal_rows(tmp_path, Cluster(10, nodes=nodes))
    assert row["error"] == "error: none"
    [command] = commands
    assert command[command.index("--network") + 2 : command.index("--rehearse")] == given
    failed.stderr = " \n"
    cluster = Cluster(10, "h100", nodes=nodes, network="xdr")
    [row] = rehearsal_rows(tmp_path, cluster, [("train.epochs", "150"), ("optim.lr", "0.1")])
    assert (row["name"], row["error"]) == ("one", "failed")
    command = commands[-1]
    file = str(tmp_path / "one.yaml")
    where = ["--gpus", "10", "--gpu", "h100", "--network", "xdr", *given, "--rehearse"]
    start = command.index("cost")
    assert command[start:-2] == ["cost", file, *where, "--train.epochs=150", "--optim.lr=0.1"]
    assert (command[-2], Path(command[-1]).name) == ("--json", "one.json")
    failed.stderr = "first\nerror: last\n"
    (tmp_path / "another.yaml").touch()
    assert [(row["name"], row["error"]) for row in rehearsal_rows(tmp_path, cluster)] == [
        ("another", "error: last"),
        ("one", "error: last"),
    ]


def test_a_row_of_rehearsals_has_units_and_sums():
    row = {"name": "a", "parameters": 59_880_472, "rehearsed memory": 4.179e9, "step": 0.0568, "hours": 1.46}
    row |= {"rehearsed all-reduce": 239e6, "rehearsed all-gather": 1e9, "rehearsed reduce-scatter": 2e9}
    row |= {"GPU hours": 1460.4, "seconds": 12.6, "CPU seconds": 25.4}
    line = "| `a` | 59.9 M | 3,239 MB | 4.18 GB | 57 ms | 1.5 | 1,460 | 13 s | 25 s |"
    assert rehearsal_line(row) == line
    del row["hours"]
    assert rehearsal_line(row) == line.replace("1.5 | 1,460", " | ")
    bad = {"name": "b", "error": "error: a|b", "seconds": 1.0, "CPU seconds": 2.0}
    assert rehearsal_line(bad) == "| `b` | error: a\\|b |  |  |  |  |  | 1 s | 2 s |"


def test_names_begin_and_numbers_end_below_each_other(capsys):
    rows = [Row("step", 1, "1 s", "of a batch"), Row("parameters", 2e6, "2,000,000")]
    show(rows, "title")
    printed = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert printed == [[f" {row.name:10} ", f" {row.text:>9} ", f" {row.note:10} "] for row in rows]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (999, "999"),
        (1000, "1 k"),
        (59_880_472, "59.9 M"),
        (10**6, "1 M"),
        (2 * 10**9, "2 G"),
        (10**12, "1 T"),
        (0.5, "0.5"),
    ],
)
def test_numbers_have_three_digits_and_a_prefix(number, text):
    assert units.short(number) == text


def test_bytes_are_gib_from_one_on():
    assert units.size(2**30) == "1.00 GiB"
    assert units.size(2**30 - 2**20) == "1023.00 MiB"


def test_images_and_their_speed_are_the_benchs():
    table = (ROOT / "docs/notes/benchmarks.md").read_text()
    assert f"| **ours, restart markers** | **{IMAGES_PER_CPU:,}** |" in table  # as prep stores them
    assert f"(mean {IMAGENET_BYTES / 1000:.0f} kB)" in table


def test_pairs_end_below_one_token():
    rows = pairs_rows(2**18, 2)
    assert list(rows[0]) == ["C", "S", "width m = S C", "Omega"]
    for row in rows:
        channels, tokens = row["C"], row["S"]
        assert row["width m = S C"] == channels * tokens
        assert row["Omega"] == 2 * (channels * tokens**2 + channels**2 * tokens) / 2
    assert min(row["S"] for row in rows) in (1, 2)  # one step further there would be less than one
    assert pairs_table(2**18, 2).endswith("(Omega / gamma)^(1/3) = 50.8")


def test_pairs_have_the_omega_with_the_widest_in_the_middle():
    lines = [line.strip("| ").split(" | ") for line in pairs_table(2**18, 1).splitlines()[2:-2]]
    rows = [[float(cell.replace(",", "")) for cell in line] for line in lines]
    widths = [width for _, _, width, _ in rows]
    assert widths.index(max(widths)) == len(rows) // 2
    assert [64, 64, 4096, 262_144] in rows
    assert all(omega == pytest.approx(2**18, rel=0.05) for *_, omega in rows)  # tokens are whole


@pytest.mark.parametrize("epochs", [1, 700, 5000, 10**6])
@pytest.mark.parametrize("options", ["--samples 1437 --gpus 8", "--samples 71850 --gpus 8"])
def test_hours_are_of_one_gpu_and_the_headers_samples(tmp_path, epochs, options):
    path = tmp_path / "one.yaml"
    lines = [f"#   {name}   of {name}" for name in ("prepare", "command", "expected", "source")]
    keys = (
        f"extends: digits/mixer\nmodel: {{depth: 1}}\ntrain: {{epochs: {epochs}}}\nschedule: {{warmup_epochs: 0}}\n"
    )
    path.write_text("\n".join([*lines, f"#   cost   widemix cost {options}", keys]))
    rows = estimate(load_recipe(path), Cluster(1, "a100"), int(options.split()[1]))
    [value] = [row.value for row in rows if row.name == "hours"]
    text = recipe_tables.hours(path)
    assert text == ("under 0.01" if value < 0.01 else f"{value:.2g}" if value < 10 else f"{value:,.0f}")


def test_a_header_has_all_fields(tmp_path):
    path = tmp_path / "one.yaml"
    names = ("prepare", "command", "expected", "source", "cost")
    lines = [f"#   {name}   of {name}" for name in names]
    lines.insert(3, "#    and more")
    path.write_text("# A recipe\n" + "\n".join(lines) + "\ndata: {}\n#   measured   too late\n")
    fields = recipe_tables.header(path)
    assert fields == {name: f"of {name}" for name in names} | {"expected": "of expected and more"}
    for name in names:
        path.write_text("\n".join(line for line in lines if f"   {name} " not in line))
        with pytest.raises(InputError, match=f"one.yaml: its header has no line `#   {name}   ...`"):
            recipe_tables.header(path)


def test_recipes_that_others_extend_and_studies_are_no_rows(tmp_path):
    for name in ("b/two.yaml", "a/one.yaml", "base/c.yaml", "studies/d.yaml", "a/notes.md", "top.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert recipe_tables.shipped(tmp_path) == [tmp_path / "a/one.yaml", tmp_path / "b/two.yaml"]


@pytest.mark.parametrize("text", ["BEGIN\n", "END\n", "END\nBEGIN\n", None])
def test_a_file_without_its_lines_is_refused(tmp_path, text):
    path = tmp_path / "README.md"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=r"README\.md: needs the lines BEGIN and END, in this order"):
        recipe_tables.split_between(path, "BEGIN\n", "END\n")
    path.write_text("a\nBEGIN\nb\nEND\nc\n")
    assert recipe_tables.split_between(path, "BEGIN\n", "END\n") == ("a\nBEGIN\n", "END\nc\n")
