"""Slurm's commands in the tests of this folder, and the programs that the batch script starts."""

import pytest


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Let programs of these names be found first, each a script of bash: programs(sbatch="echo 12", ...)."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=":")

    def put(**scripts: str) -> None:
        for name, text in scripts.items():
            (folder / name).write_text(f"#!/bin/bash\n{text}\n")
            (folder / name).chmod(0o755)

    return put


@pytest.fixture
def run_main(system):
    """Run a module as the batch script does, in this process: run_main(module, words...) -> its exit code."""

    def run(module, *words: object) -> int:
        system({"sys.argv": [module.__name__, *map(str, words)]})
        with pytest.raises(SystemExit) as ended:
            module.main()
        return int(ended.value.code)

    return run
