"""`multihead cost`: what a model costs, before anything is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from multihead import cost
from multihead.cli.cost_files import flattened, write_csv
from multihead.cli.cost_model import PlainSizes, read_model
from multihead.cli.cost_views import (
    Column,
    Sweep,
    asked,
    compared,
    parse_cache,
    parse_dtype,
    swept,
)
from multihead.cli.output import print_json, print_note, stdout_console
from multihead.cli.sizes import parse_bytes, parse_count
from multihead.errors import ArgumentError, InputError
from multihead.files import check_writable

_DEFAULT_CONTEXT = 2048


@dataclass(frozen=True)
class Options:
    """How the model is used, what is asked, and where the answer goes, as the options say it."""

    context: str | None = None
    batch: str = "1"
    dtype: str = "bfloat16"
    cache: str = "growing"
    memory: str | None = None
    device: str | None = None
    peak_tflops: float | None = None
    bandwidth: float | None = None
    measure: bool = False
    compare: str | None = None
    sweep: Sweep | None = None
    what_if: Sequence[str] = ()
    as_json: bool = False
    csv: Path | None = None
    plot: Path | None = None


def run(model: str | None, sizes: PlainSizes, options: Options) -> None:
    """Count a model and print the result.

    Raises:
        InputError: options that contradict one another or cannot be read, or a file that cannot be
            written.
        ModelError: a model that is not here or cannot be counted.
        MissingExtraError: gguf, or matplotlib for a plot, is not installed.
    """
    _check_views(options)
    for option, path in (("--csv", options.csv), ("--plot", options.plot)):
        if path is not None:
            check_writable(path, option, f"cost.{'csv' if option == '--csv' else 'svg'}")
    described = read_model(model, sizes)
    try:
        _answer(described, _setting(described, options), options)
    except ArgumentError as error:
        raise InputError(str(error)) from error


def _check_views(options: Options) -> None:
    asked_for = {
        "--compare": options.compare is not None,
        "--sweep": options.sweep is not None,
        "--what-if": bool(options.what_if),
    }
    given = [name for name, wanted in asked_for.items() if wanted]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} are different questions. Ask one at a time.")
    if options.measure and (options.device or options.peak_tflops or options.bandwidth):
        raise InputError(
            "--measure takes this machine's limits; leave out --device, --peak-tflops and "
            "--bandwidth."
        )


def _setting(model: cost.Model, options: Options) -> cost.Setting:
    context = model.trained_context or _DEFAULT_CONTEXT
    if options.context is not None:
        context = parse_count(options.context, "--context")
    if model.positions and model.trained_context and context > model.trained_context:
        raise InputError(
            f"--context {context}: the model has a table of {model.trained_context} positions, and "
            "cannot read more tokens than that."
        )
    cache = parse_cache(options.cache)
    if not (model.causal or cache == "growing"):
        raise InputError(f"--cache {cache}: the model is an encoder, which keeps no cache.")
    dtype = parse_dtype(options.dtype)
    device = _device(options, dtype)
    memory = None if options.memory is None else parse_bytes(options.memory, "--memory")
    if memory is None and device is not None and options.sweep is None:
        memory = device.memory
    return cost.Setting(
        context=context,
        batch=parse_count(options.batch, "--batch"),
        dtype=dtype,
        cache=cache,
        device=device,
        memory=memory,
    )


def _device(options: Options, dtype: str) -> cost.Device | None:
    if options.measure:
        return _this_machine(dtype)
    for option, value in (
        ("--peak-tflops", options.peak_tflops),
        ("--bandwidth", options.bandwidth),
    ):
        if value is not None and not 0 < value < float("inf"):
            raise InputError(f"{option} must be a finite number above 0; got {value}.")
    flops = None if options.peak_tflops is None else options.peak_tflops * 1e12
    bandwidth = None if options.bandwidth is None else options.bandwidth * 1e9
    if options.device is not None:
        preset = cost.device(options.device)
        if flops is not None:
            preset = replace(preset, flops=flops, dtypes=(), source=f"{preset.source}; given")
        return preset if bandwidth is None else replace(preset, bandwidth=bandwidth)
    if flops is None and bandwidth is None:
        return None
    if flops is None or bandwidth is None:
        raise InputError(
            "a time needs both --peak-tflops and --bandwidth (GB/s); give the other too, or a "
            f"preset: --device {', '.join(cost.DEVICES)}."
        )
    return cost.Device("the given device", flops, bandwidth, source="--peak-tflops, --bandwidth")


def _this_machine(dtype: str) -> cost.Device:
    import torch

    from multihead.bench.limits import Limits, read_bandwidth
    from multihead.machine import processor_name

    threads = torch.get_num_threads()
    instruction, gigaflops = Limits.measure(threads).of(getattr(torch, dtype))
    return cost.Device(
        processor_name(),
        gigaflops * 1e9,
        read_bandwidth() * 1e9,
        source=f"measured now: {instruction} chains and reads of memory on {threads} "
        f"thread{'' if threads == 1 else 's'}",
    )


def _answer(model: cost.Model, setting: cost.Setting, options: Options) -> None:
    columns = _columns(model, setting, options)
    if columns is None:
        document = cost.report(model, setting)
    else:
        document = _side_by_side(model, setting, options, columns)
    if options.plot is not None:
        from multihead.cli.cost_plot import draw

        draw(options.plot, model, setting, columns, options.sweep)
    if options.csv is not None:
        rows = flattened(document) if columns is None else [column.to_json() for column in columns]
        write_csv(options.csv, rows)
    if options.as_json:
        print_json(document)
    else:
        _print(model, setting, options, document, columns)
    for name, path in (("Table", options.csv), ("Plot", options.plot)):
        if path is not None:
            print_note(f"{name}: {path}", aside=options.as_json)


def _columns(model: cost.Model, setting: cost.Setting, options: Options) -> list[Column] | None:
    if options.compare is not None:
        return compared(model, setting, options.compare)
    if options.sweep is not None:
        return swept(model, setting, options.sweep)
    return asked(model, setting, options.what_if) if options.what_if else None


def _side_by_side(
    model: cost.Model, setting: cost.Setting, options: Options, columns: Sequence[Column]
) -> dict[str, Any]:
    kind = (
        "compare" if options.compare else f"sweep {options.sweep}" if options.sweep else "what-if"
    )
    return {
        "model": cost.outline(model),
        "question": kind,
        "setting": cost.setting_document(setting),
        "columns": [column.to_json() for column in columns],
    }


def _print(
    model: cost.Model,
    setting: cost.Setting,
    options: Options,
    document: dict[str, Any],
    columns: Sequence[Column] | None,
) -> None:
    from multihead.cli.terminal.cost import print_report
    from multihead.cli.terminal.cost_columns import print_columns, print_sweep

    console = stdout_console()
    if columns is None:
        print_report(console, document, cost.head_size_remarks(model))
    elif options.sweep is not None:
        print_sweep(console, document, columns, options.sweep)
    else:
        print_columns(console, document, columns, difference=bool(options.what_if))
