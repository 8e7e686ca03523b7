"""`multihead cost`: what a model costs: parameters, operations, bytes and time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from multihead.cli.app import CacheKind, Json, app


@app.command(short_help="What a model costs: parameters, operations, bytes and time.")
def cost(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL_OR_CONFIG",
            help="'smollm2', a config.json of transformers or a folder with one, or a .gguf file; "
            "weights are not read. Without it, give sizes.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(
            help="Tokens of each row: 4096, 128k (131,072) or 1m (1,048,576).",
            show_default="what the model was made for, else 2k",
        ),
    ] = None,
    batch: Annotated[str, typer.Option(help="Rows.")] = "1",
    dtype: Annotated[
        str, typer.Option(help="Of weights, activations and cache: bf16, fp16, fp32, fp64.")
    ] = "bfloat16",
    cache: Annotated[CacheKind, typer.Option(help="What keeps keys and values.")] = "growing",
    memory: Annotated[
        str | None,
        typer.Option(help="What must it fit into? Such as 24GiB or 80GB.", show_default=False),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Times at the limits of a100, h100, h200, l4, rtx4090 or mi300x.",
            show_default=False,
        ),
    ] = None,
    peak_tflops: Annotated[
        float | None,
        typer.Option(help="Times at this peak, in 10^12 operations a second.", show_default=False),
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(help="Times at this bandwidth of memory, in GB/s.", show_default=False),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Times at this machine's limits, measured now.")
    ] = False,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="KINDS",
            help="Side by side: mha,gqa:8,mqa,mla or mla:512+64 (latent + rotated key).",
            show_default=False,
        ),
    ] = None,
    sweep: Annotated[
        Literal["heads", "context", "head-dim"] | None,
        typer.Option(help="One row for each value.", show_default=False),
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Before and after, such as heads=16; may be given again. Takes heads, kv_heads, "
            "head_dim, d_model, ffn, layers, vocab, window, context, batch, dtype, cache.",
            show_default=False,
        ),
    ] = None,
    d_model: Annotated[
        int | None, typer.Option(min=1, help="Width of the model.", show_default=False)
    ] = None,
    heads: Annotated[
        int | None, typer.Option(min=1, help="Query heads.", show_default=False)
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, help="KV heads.", show_default="as many as heads")
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(min=1, help="Width of a head.", show_default="d-model / heads")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers.", show_default="1")] = None,
    ffn: Annotated[
        int | None,
        typer.Option(min=1, help="Width of the feed-forward.", show_default="4 x d-model"),
    ] = None,
    gated: Annotated[
        bool, typer.Option("--gated", help="A gate in the feed-forward: three matrices, not two.")
    ] = False,
    vocab: Annotated[
        int | None,
        typer.Option(min=1, help="Vocabulary.", show_default="none, layers alone"),
    ] = None,
    untied: Annotated[
        bool, typer.Option("--untied", help="The head has a matrix of its own.")
    ] = False,
    window: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Newest keys that a query sees; with --encoder as far ahead.",
            show_default="all",
        ),
    ] = None,
    encoder: Annotated[
        bool, typer.Option("--encoder", help="Tokens see both ways, and no cache is kept.")
    ] = False,
    csv: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write a table to FILE.", show_default=False),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Also draw to FILE: .png, .svg or .pdf.", show_default=False
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Count what a model costs, before anything is built: exact integers, and times at limits.

    Sizes alone mean a model with RMSNorm and rotary positions, without biases.

    multihead cost smollm2 --context 128k --batch 8

    multihead cost --d-model 4096 --heads 32 --layers 32 --compare mha,gqa:8,mqa,mla
    """
    from multihead.cli.cost import Options, run
    from multihead.cli.cost_model import PlainSizes

    run(
        model,
        PlainSizes(
            d_model, heads, kv_heads, head_dim, layers, ffn, vocab, window, gated, untied, encoder
        ),
        Options(
            context=context,
            batch=batch,
            dtype=dtype,
            cache=cache,
            memory=memory,
            device=device,
            peak_tflops=peak_tflops,
            bandwidth=bandwidth,
            measure=measure,
            compare=compare,
            sweep=sweep,
            what_if=what_if or (),
            as_json=json,
            csv=csv,
            plot=plot,
        ),
    )
