"""How a metric is named and written wherever one is shown."""

import pytest

from widemix.errors import InputError
from widemix.metrics import (
    MEASURED,
    METRICS,
    Metric,
    all_metrics,
    main_metric,
    metric_cell,
    metric_heading,
    register_metric,
)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"loss": 2.3, "top5": 50.0, "top1": 0.0}, "top-1 0.00 %"),
        ({"loss": 2.3, "top5": 50.0, "top1": None}, "top-5 50.00 %"),
        ({"loss": 0.0, "map": 0.0}, "mAP 0.00 %"),
        ({"loss": 1.5, "r2": 0.5, "mae": 0.0}, "MAE 0"),
        ({"loss": 0.25}, "loss 0.2500"),
        ({"top1": None, "loss": None}, "no finite metric"),
    ],
)
def test_the_most_telling_metric_may_be_zero(values, words):
    assert main_metric(values) == words


def test_all_metrics_have_their_titles_the_loss_last():
    assert all_metrics({"loss": 1.25, "top5": 99.0, "top1": 0.0}) == "top-1 0.00 %, top-5 99.00 %, loss 1.2500"
    assert (metric_heading("top1"), metric_heading("r2")) == ("top-1 %", "R2")
    assert (metric_cell("top1", 12.345), metric_cell("mae", 0.0123456)) == ("12.35", "0.01235")


def test_a_registered_metric_is_measured_with_its_targets():
    """And the loss is named last."""
    before, named = dict(MEASURED), dict(METRICS)
    try:
        register_metric("mse", Metric("MSE", "{:.3f}", False, lambda outputs: None), "regression")
        assert dict(MEASURED) == before | {"regression": ("mae", "r2", "mse")}
        assert [*METRICS][-2:] == ["mse", "loss"]
        with pytest.raises(InputError, match=r"^metric mse is already registered$"):
            register_metric("mse", METRICS["mse"])
    finally:
        MEASURED.update(before)
        METRICS.clear()
        METRICS.update(named)
