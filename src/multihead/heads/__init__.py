"""What every head of a model does."""

from .statistics import MAXIMA, MEANS, STATISTICS
from .watch import Heads, watch

__all__ = ["MAXIMA", "MEANS", "STATISTICS", "Heads", "watch"]
