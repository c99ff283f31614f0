from widemix.data_prep import progress


def test_lines_off_a_terminal(capsys, monkeypatch):
    clock = iter(range(0, 100, 4))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    assert list(progress.progress(range(5), 5, "train")) == [0, 1, 2, 3, 4]
    # The clock is 0 at the start, 4 after the first image, 8 after the second, ...
    assert capsys.readouterr().err.splitlines() == ["train: 3 of 5, 0 images/s, 8 s left"]


def test_bar_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    assert list(progress.progress(iter("abc"), 3, "val")) == ["a", "b", "c"]
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "images/s" in shown
