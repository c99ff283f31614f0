"""Sections of a study file: what is searched before the runs, what they are to show, the figure, published numbers.

docs/explanation/protocol.md has the rules and their reasons.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from widemix.recipe import key_names, suggest
from widemix.section import Positive, Section, key
from widemix.studies.quantity import COMPUTED, CURVES, MEASURED


class Range(Section):
    """The values of a key that are searched: from `low` to `high`."""

    low: float = key(..., "least value")
    high: float = key(..., "greatest value")
    log: bool = key(True, "evenly on a logarithmic axis; false: evenly")

    @model_validator(mode="after")
    def is_a_range(self):
        """The ends are in order and have a logarithm where one is taken."""
        if not self.low < self.high:
            raise ValueError(f"low {self.low:g}, high {self.high:g}: the first must be smaller than the second")
        if self.log and self.low <= 0:
            raise ValueError(f"low {self.low:g}: must be above 0 on a logarithmic axis; or set log to false")
        return self

    def at(self, fraction: float) -> float:
        """The value at a fraction of the way from `low` to `high`, which may be beyond both ends; three digits."""
        if self.log:
            value = self.low * (self.high / self.low) ** fraction
        else:
            value = self.low + (self.high - self.low) * fraction
        return float(f"{value:.3g}")

    def fraction(self, value: float) -> float:
        """How far a value is on the way from `low` to `high`."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


class Search(Section):
    """The search before the runs of each point of the figure, for the values with the best top-1 on a split that
    is held out of the training set.

    The test split takes no part in it. Every point has the same space and the same number of trials; trials that
    widen the space come on top where the best value is the least or the greatest that was tried.
    """

    keys: Annotated[dict[str, Range], Field(min_length=1)] = key(..., "section.key names with their ranges")
    trials: Positive = key(
        ..., "values of a point: those of a Halton sequence, evenly spaced where there are 3, 7, 15 ... of one key"
    )
    widen: Annotated[int, Field(ge=0)] = key(4, "most trials of a point beyond these")
    split: str = key("holdout", "split that chooses: `widemix prep --holdout 10%` makes one")
    ties: Annotated[float, Field(ge=0)] = key(
        0.0, "trials whose top-1 is up to this below the best count as equal; of equals the least values are chosen"
    )
    set: dict[str, Any] = key({}, "section.key names with the values that trials have, such as fewer train.epochs")
    seed: Annotated[int, Field(ge=0)] = key(1000, "train.seed of the trials, which no run of the study has")


class Place(Section):
    """Points of the figure whose results a claim compares: their mean, for each seed."""

    line: str = key(..., "label of the line")
    at: dict[str, Any] = key({}, "section.key names with the values that its points have; empty: all points")


class Condition(Place):
    """A condition on the mean over a line's points and seeds, without which a claim is not tried at all."""

    y: str = key(..., "result that is compared")
    minus: str = key("", "result that is subtracted from it, such as train_loss from loss; empty: none")
    above: float | None = key(None, "number that it must exceed; null: none")
    below: float | None = key(None, "number that it must be below; null: none")

    @model_validator(mode="after")
    def compares(self):
        """Something can be unmet."""
        if self.above is None and self.below is None:
            raise ValueError("give above, below or both")
        return self


class Statement(Section):
    """A claim that is written before the runs, and decided by them: see `widemix.studies.claims`."""

    text: str = key(..., "what is claimed, in words; the same text of the same place is one statement")
    source: str = key("", "where it is printed; empty, or begins with ours: in no paper")
    place: str = key("", "file of the paper's text and line where it is, such as hayase-karakida-2024.txt:701")
    words: str = key("", "its words there, fifteen at most")
    after_runs: list[Literal["statement", "condition"]] = key(
        [], "what of it was written, or changed, when its runs were known"
    )
    expect: Literal["greater", "less", "equal", "not greater", "not less"] = key(
        ..., "what the difference or slope is, if the claim holds; equal, not greater and not less: within the margin"
    )
    margin: Annotated[float, Field(ge=0)] = key(
        0.0, "differences up to this count as equal, in units of y; of a slope: up to this by a unit of x or a decade"
    )
    panel: str = key("", "panel of the figure; empty: each panel, by itself")

    @property
    def ours(self) -> bool:
        """Whether no paper states it."""
        return not self.source or self.source.startswith("ours")

    @model_validator(mode="after")
    def equality_has_a_margin(self):
        """Two means are never the same."""
        if self.expect not in ("greater", "less") and self.margin == 0:
            raise ValueError("margin: nothing is equal without one; give the difference that counts as none")
        return self

    @model_validator(mode="after")
    def place_has_words(self):
        """Who looks a place up can see whether it is the right one."""
        if bool(self.place) != bool(self.words) or len(self.words.split()) > 15:
            raise ValueError("place and words: give both, of at most fifteen words, or neither")
        if self.place and not self.place.rpartition(":")[2].isdigit():
            raise ValueError(f"place: {self.place} is not FILE:LINE")
        return self


class Claim(Statement):
    """A comparison of points of a figure.

    Either `left` and `right`, whose difference is left - right, or `slope`, the least-squares slope of the points of
    a line by x (by log10 x on a logarithmic axis).
    """

    left: Place | None = key(None, "points whose mean is compared")
    right: Place | None = key(None, "points whose mean is subtracted")
    slope: Place | None = key(None, "points whose slope is compared with 0")
    y: str = key("", "result that is compared; empty: the figure's first y")
    regime: list[Condition] = key(
        [], "conditions without which the runs are not where the paper's were, and decide nothing"
    )

    @model_validator(mode="after")
    def compares(self):
        """There is one comparison."""
        two = self.left is not None and self.right is not None
        if two == (self.slope is not None) or (self.left is None) != (self.right is None):
            raise ValueError("give left and right, or slope")
        return self

    @property
    def places(self) -> list[Place]:
        """The points that it compares, by line."""
        return [place for place in (self.left, self.right, self.slope) if place is not None]


class Figure(Section):
    """The figure: y over x, a panel for each name of `recipes`, a row of panels for each y."""

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
