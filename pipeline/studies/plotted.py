"""What a study file says of its figure, and of what was published."""

from typing import Annotated

from pydantic import Field, model_validator

from widemix.recipe import key_names, suggest
from widemix.section import Section, key
from widemix.studies.quantity import COMPUTED, CURVES, MEASURED


class Figure(Section):
    """What is plotted: y over x, a panel for each name of `recipes`, a row of panels for each y."""

    x: str = key(..., f"x axis: a recipe key, epoch (learning curves), or one of {', '.join(COMPUTED)}")
    y: Annotated[list[str], Field(min_length=1)] = key(
        ["error"], f"y axes: {', '.join(MEASURED)}, or what x may be; the mean over seeds with standard deviation"
    )
    log_x: bool = key(False, "logarithmic x axis")
    log_y: bool = key(False, "logarithmic y axis")
    joined: bool = key(True, "join the points of a line; false where x does not order them, as the width of shapes")
    pareto_hull: bool = key(False, "show in grey the convex hull of all points from below, down to the lowest")
    x_label: str = key("", "text of the x axis; empty: that of x")
    names: dict[str, str] = key({}, "what values of x that are no numbers are called, by value")
    max_std: float | None = key(
        None, "leave out points whose top-1 has this standard deviation or more, in percentage points; null: none"
    )

    @model_validator(mode="after")
    def quantities_exist(self):
        """Each axis is a recipe key or a known quantity."""
        known = [*key_names(), *COMPUTED, *MEASURED, "epoch"]
        for name in (self.x, *self.y):
            if name not in known:
                raise ValueError(f"{name}: no such quantity{suggest(name, known)}")
        if self.x in MEASURED:
            raise ValueError(f"x: {self.x} is a result; x is a key of the recipe, epoch or a size of the network")
        if "epoch" in self.y:
            raise ValueError("y: epoch is an x axis, of learning curves")
        if self.x == "epoch" and (others := [name for name in self.y if name not in CURVES]):
            raise ValueError(
                f"y: {others[0]} has no value for each epoch; of learning curves y is {', '.join(CURVES)}"
            )
        if self.x == "epoch" and self.max_std is not None:
            raise ValueError("max_std leaves out points, and learning curves have none; set it to null")
        return self


class Published(Section):
    """A published number, curve or statement that the results are compared with."""

    source: str = key(..., "where it is printed")
    panel: str = key("", "panel that it belongs to; empty: all")
    line: str = key("", "line that it belongs to; empty: none")
    points: list[Annotated[list[float], Field(min_length=2, max_length=3)]] = key(
        [], "x, y and, if it is printed, the standard deviation; y in the units of the figure's first y"
    )
    digitised: bool = key(False, "whether the points were read off a figure")
    text: str = key("", "what is printed, in words")
