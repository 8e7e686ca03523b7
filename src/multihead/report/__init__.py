"""One HTML file that shows what every head does: no network, no N x N matrix."""

from multihead.report.render import page, render

__all__ = ["page", "render"]
