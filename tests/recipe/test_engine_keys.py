"""What section `engine` does in a whole run; tests/engine/test_section_keys.py has every key."""

from tests.recipe.small_runs import Row


def test_collectives_of_a_run_wait_as_long_as_it_says(runs):
    Row("2345", lambda run: run.settings["timeout_s"], 2345.0).check("engine.timeout_s", runs)


def test_the_blocks_compute_in_the_asked_memory_layout(runs):
    def layouts(run):
        return [block.batch_last for block in run.loop.engine.module.blocks]

    Row("batch_last", layouts, [True, True]).check("engine.memory_layout", runs)
