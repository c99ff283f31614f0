"""The lines that a run prints."""

from pipeline.run.progress import Progress


def test_the_remaining_time_is_counted_from_where_a_rollback_leads(capsys):
    """Also to before the step at which this process began."""
    progress, line = Progress(True, first_step=40, last_step=100), {"split": "train", "loss": 1.0, "epoch": 1.0}
    line |= {"images_per_s": 100.0, "data_wait": 0.0}
    progress.rewind(20)
    progress.show(line | {"step": 40})
    progress.show(line | {"step": 100})
    said = capsys.readouterr().err
    assert "step 100/100" in said
    assert "-" not in said
