"""The statistics of a head that a person can choose, and how each is shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from multihead.cli.numbers import measure, weight

StatisticName = Literal[
    "entropy_share",
    "max_weight",
    "first_key",
    "previous_token",
    "mean_distance",
    "participation",
    "max_logit",
    "entropy",
    "sink_mass",
    "max_qk",
]

Scale = Literal["unit", "linear", "log"]


@dataclass(frozen=True, slots=True)
class Statistic:
    """How one per-head number is titled, explained, printed and colored."""

    title: tuple[str, str]
    meaning: str
    scale: Scale
    show: Callable[[float], str]

    @property
    def name(self) -> str:
        """The title on one line."""
        return " ".join(word for word in self.title if word)


STATISTICS: dict[StatisticName, Statistic] = {
    "entropy_share": Statistic(
        ("entropy", "share"), "0 reads one key, 1 reads all visible keys alike", "unit", weight
    ),
    "max_weight": Statistic(
        ("max", "weight"), "mean over queries of the largest weight", "unit", weight
    ),
    "first_key": Statistic(
        ("first", "token"), "mean weight on the text's first token", "unit", weight
    ),
    "previous_token": Statistic(
        ("previous", "token"), "mean weight on the token just before the query", "unit", weight
    ),
    "mean_distance": Statistic(
        ("mean", "distance"), "mean tokens between a query and what it reads", "log", measure
    ),
    "participation": Statistic(
        ("keys", "read"),
        "1 / sum of squared weights: how many keys share the reading",
        "log",
        measure,
    ),
    "max_logit": Statistic(
        ("max", "logit"), "largest attention logit of any query", "linear", measure
    ),
    "entropy": Statistic(("entropy", ""), "mean entropy in nats", "linear", measure),
    "sink_mass": Statistic(
        ("sink", "mass"), "mean weight on the row's first visible key", "unit", weight
    ),
    "max_qk": Statistic(
        ("max", "QK"), "largest scaled query-key product, before cap and bias", "linear", measure
    ),
}

DEFAULT: StatisticName = "entropy_share"
RANKED: tuple[StatisticName, ...] = (
    "entropy_share",
    "max_weight",
    "first_key",
    "previous_token",
    "mean_distance",
    "participation",
    "max_logit",
)
