"""Follow the pages with the installed package alone, away from any checkout: `python -P tests/installed.py ROOT`.

All in this process: every name and import of the pages is looked up, every command is parsed, with its recipe, and
those of `FOLLOWED` and notebooks are run. It prints a line for each that is wrong, and ends with 1 if there
are any.
"""

import contextlib
import io
import json
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# What a checkout has at its top, and what is optional.
sys.modules.update(dict.fromkeys(("pipeline", "data_prep", "launch", "tests", "ffcv", "cv2")))

SMALL = "--train.max_steps 2 --train.global_batch 32 --log.tensorboard false --model.depth 1 --data.workers 1"
FOLLOWED = (
    "prep digits --to datasets/digits --per-class 16",
    f"train digits/rp_mixer --run-dir runs/a {SMALL}",
    "eval runs/a",
    "export runs/a --to exported",
    "report runs/a --to a.html",
    "predict exported images --to predictions.csv",
)
CODE = re.compile(r"^    (?!-)([^\n]+)$|^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(widemix [a-z][^`\n]*)`")
COMMAND = re.compile(r"(?:^|[;|] |-m )widemix ((?:[a-z]+)(?: .*)?)$")


def pages(root: Path) -> Iterator[Path]:
    """The Markdown pages of a checkout that are for users."""
    yield root / "README.md"
    for folder in ("docs", "pipeline", "data_prep", "launch", "recipes", "examples"):
        yield from sorted((root / folder).rglob("*.md"))


def run_cells(notebook: Path) -> None:
    """Run the code cells of a notebook, one after the other, without IPython's commands."""
    space: dict[str, object] = {}
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["cell_type"] == "code":
            lines = [line for line in cell["source"] if not line.startswith("%")]
            exec(compile("".join(lines), notebook.name, "exec"), space)


def commands_in(page: Path) -> Iterator[list[str]]:
    """The words after `widemix` of each command of a page; of one in the text, which may lack some, with `--help`."""
    text = re.sub(r"\\\n\s*", "", page.read_text())
    lines = [line for code in CODE.findall(text) for line in "".join(code).splitlines()]
    for line in lines:
        if match := COMMAND.search(line.strip()):
            said = re.sub(r" \[.*\]", "", match[1])
            said = said.replace("RECIPE.yaml", "digits/rp_mixer").replace("SOURCE", "digits")
            yield shlex.split(said, comments=True)
    for said in INLINE.findall(text):
        yield [*shlex.split(re.split(r" [-\[A-Z.]", said)[0])[1:], "--help"]


def attempt(wrong: list[str], where: str, action: Callable[[], object]) -> None:
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = action()
    except SystemExit as end:
        code = end.code
    except Exception as error:
        code = repr(error)
    if code not in (None, 0):
        wrong.append(f"{where}: ends with {code} {said.getvalue().strip()}")


def main(root: Path) -> int:
    """Follow the pages of the checkout at `root` in the working folder; returns the exit code."""
    import numpy as np
    import timm
    from PIL import Image

    import widemix
    from widemix.cli.commands import run_command
    from widemix.cli.parser import make_parser

    assert not Path(widemix.__file__).resolve().is_relative_to(root)
    assert timm.is_model("rp_mixer_b16_224")  # with `import widemix` alone
    wrong: list[str] = []
    helpers = runpy.run_path(str(root / "tests/pages.py"), run_name="pages")
    blocks, check, look_up = helpers["blocks"], helpers["check"], helpers["look_up"]
    Path("images").mkdir()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save("images/black.png")
    for words in FOLLOWED:
        attempt(wrong, f"widemix {words}", lambda words=words: run_command(make_parser(), argv=words.split()))
    attempt(wrong, "timm", lambda: timm.create_model("local-dir:exported", pretrained=True) is None)
    sys.path.insert(0, "")  # the plug-ins of the pages
    for page in pages(root):
        where = page.relative_to(root)
        for name in sorted(helpers["names_on"](page)):
            attempt(wrong, f"{where}: {name}", lambda name=name: look_up(name))
        for block in blocks(page):
            if match := re.match(r"# (\w+\.(?:py|yaml))\n", block.text):
                Path(match[1]).write_text(block.text)
        for words in commands_in(page):
            attempt(wrong, f"{where}: {words}", lambda words=words: run_command(make_parser(), check, words))
    for path in sorted((root / "examples").glob("*.py")):
        for name in helpers["names_in"](path.read_text()):
            attempt(wrong, f"{path.name}: {name}", lambda name=name: look_up(name))
    for path in sorted((root / "examples").glob("*.ipynb")):
        attempt(wrong, path.name, lambda path=path: run_cells(path))
    print(*wrong, sep="\n", end="")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
