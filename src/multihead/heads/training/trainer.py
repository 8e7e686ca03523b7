"""Stability and QK-clip in transformers' Trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ...errors import ArgumentError
from ...integrations.extras import import_extra
from .diagnosis import StabilityReport
from .qk_clip import checked_tau, qk_clip
from .stability import StabilityMonitor

OnReport = Callable[[StabilityReport], Any]

_log = logging.getLogger("multihead")


def trainer_callback(
    monitor: StabilityMonitor, *, on_report: OnReport | None = None, clip: float | None = None
) -> Any:
    """A callback for `transformers.Trainer(callbacks=[...])` that ends the monitor's steps.

    Args:
        monitor: `stability(model)` of the model that trains; closed at the end of training.
        on_report: called with each report. By default reports with findings are logged as warnings
            of the logger "multihead".
        clip: tau of `qk_clip`, which then follows each step of the optimizer that was looked at:
            give the monitor `every=1`.

    Training begins with an ArgumentError where clipping is asked for and several processes train:
    each would clip by the maxima of its own samples.

    Raises:
        MissingExtraError: transformers is absent.
        ArgumentError: a tau that is not above 0.
    """
    base = import_extra("transformers").TrainerCallback
    if clip is not None:
        checked_tau(clip)

    class StabilityCallback(base):  # type: ignore[misc, valid-type]
        """Ends a step of the monitor after each of the optimizer's."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if clip is not None and args.world_size > 1:
                raise ArgumentError(
                    f"clip={clip:g} goes by the maxima of one process, but {args.world_size} "
                    "processes train. Leave clip out, and call qk_clip(model, all_reduced(report)) "
                    "in a callback of your own."
                )

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            report = monitor.step()
            if report is None:
                return
            if on_report is not None:
                on_report(report)
            elif report.findings:
                _log.warning("%s", report)
            if clip is not None:
                qk_clip(monitor.model, report, tau=clip)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            monitor.close()

    return StabilityCallback()
