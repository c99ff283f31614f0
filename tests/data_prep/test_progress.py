from widemix.data_prep import progress


def test_lines_off_a_terminal(capsys, monkeypatch):
    clock = iter(range(0, 100, 4))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    assert list(progress.progress(range(5), 5, "train")) == [0, 1, 2, 3, 4]
    # The clock is 0 at the start, 4 after the first image, 8 after the second, ...
    assert capsys.readouterr().err.splitlines() == ["train: 3 of 5, 0.25 images/s, 0:00:08 left"]


def test_a_long_start_says_nothing_of_the_pace(capsys, monkeypatch):
    """The first image comes after compilation: its time is no rate. At the end no time is left."""
    clock = iter([0, 900, 911, 922])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    list(progress.progress(range(3), 3, "train"))
    assert capsys.readouterr().err.splitlines() == [
        "train: 1 of 3",
        "train: 2 of 3, 0.091 images/s, 0:00:11 left",
        "train: 3 of 3, 0.091 images/s",
    ]


def test_bar_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    assert list(progress.progress(iter("abc"), 3, "val")) == ["a", "b", "c"]
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "images/s" in shown
