"""The report of `multihead cost`: by part, memory, time, and what the heads have to do with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from multihead.cli.numbers import short_count
from multihead.cli.sizes import binary_bytes, duration, short_tokens
from multihead.cli.terminal.style import QUIET, flow, plain_table, print_question, room, show
from multihead.cli.tokens import fit, visible
from multihead.cost import Remark

UNITS = (
    "A product is one multiply-add, two operations. KiB, MiB, GiB are 2^10, 2^20, 2^30 bytes; "
    "the 32 GB that textbooks give one head's scores of 128k tokens in half precision are GiB."
)

# Part, its name, and which operations it has: several parts have parameters or products alone.
_PARTS = (
    ("embeddings", "embeddings"),
    ("positions", "positions"),
    ("q", "q"),
    ("k", "k"),
    ("v", "v"),
    ("kv", "k and v"),
    ("o", "o"),
    ("biases", "their biases"),
    ("scores", "scores QKᵀ"),
    ("values", "values PV"),
    ("feed_forward", "feed-forward"),
    ("router", "router"),
    ("norms", "norms"),
    ("head", "head"),
    ("other", "other"),
)
_KINDS = {"mha": "MHA", "gqa": "GQA", "mqa": "MQA", "mla": "MLA"}
_CACHES = {
    "growing": "every token",
    "static": "every token, and lengths",
    "window": "windows drop old tokens",
    "paged": "whole pages of 64",
    "int8": "int8 and scales",
}


def print_report(console: Console, document: Mapping[str, Any], remarks: Sequence[Remark]) -> None:
    """Print what `multihead.cost.report` counted."""
    print_outline(console, document)
    print_question(console, "Where does the work go?")
    _print_parts(console, document)
    print_question(console, "How much memory?")
    _print_memory(console, document)
    print_question(console, "How long?")
    _print_times(console, document)
    print_question(console, "What does it have to do with the heads?")
    for line in _heads_lines(document):
        paragraph(console, line)
    print_question(console, "How wide should a head be? What is known, and from where:")
    for remark in remarks:
        paragraph(console, f"- {remark.text} [{remark.evidence}]")


def print_outline(console: Console, document: Mapping[str, Any]) -> None:
    """The model's sizes, how and where it is used, and the units."""
    model, setting = document["model"], document["setting"]
    width = room(console)
    title = visible(model["name"] or "model", spaces=False)
    console.print(Text(fit(title, width), style="bold"))
    for kind in model["kinds"]:
        show(console, flow(_kind_words(kind), width))
    facts = [f"width {model['embed_dim']:,}"]
    if model["vocab"]:
        facts.append(f"vocabulary {model['vocab']:,}" + (" (tied head)" if model["tied"] else ""))
    if model["trained_context"]:
        facts.append(f"made for {model['trained_context']:,} tokens")
    if not model["causal"]:
        windows = any(kind["window"] for kind in model["kinds"])
        sees = "tokens see both ways" if windows else "every token sees every other"
        facts.append(f"an encoder: {sees}")
    if model["encoder"] is not None:
        facts.append(f"reads an encoder of {model['encoder']['layers']} layers")
    show(console, flow(facts, width))
    context = setting["context"]
    short = short_tokens(context)
    use = [
        _tokens(context) + (f" ({short}, k = 1,024)" if short[-1] in "km" else ""),
        f"batch {setting['batch']:,}",
        setting["dtype"],
    ]
    if model["causal"]:
        use.append(f"{setting['cache']} cache")
    if setting["device"] is not None:
        use.append(setting["device"]["name"])
    if setting["memory"] is not None:
        use.append(f"{binary_bytes(setting['memory'])} of memory")
    show(console, flow(use, width))
    paragraph(console, UNITS)


def paragraph(console: Console, text: str) -> None:
    """A sentence or several under the common indent, broken between words."""
    show(console, Text(text))


def intensity(value: float) -> str:
    """Operations a byte in three digits, or all digits of a whole number."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def _tokens(count: int) -> str:
    return f"{count:,} token" + ("" if count == 1 else "s")


def _share(part: int, whole: int) -> str:
    if not part or not whole:
        return ""
    share = part / whole
    return f"{share:.1%}" if share >= 0.0005 else "<0.1%"


def _kind_words(kind: Mapping[str, Any]) -> list[str]:
    layers = f"{kind['layers']} layer{'s' if kind['layers'] > 1 else ''}"
    heads = f"{kind['heads']} heads of {kind['head_dim']}"
    if kind["attention"] == "mla":
        heads += f" on latents of {kind['latent_dim']} + {kind['rope_dim']}"
    elif kind["attention"] != "mha":
        heads += f" on {kind['kv_heads']} KV head{'s' if kind['kv_heads'] > 1 else ''}"
    words = [f"{layers}: {heads} ({_KINDS[kind['attention']]})"]
    if kind["window"]:
        ahead = f" and {kind['window_ahead']:,} ahead" if kind["window_ahead"] else ""
        words.append(f"window {kind['window']:,}{ahead}")
    if kind["head_windows"]:
        words.append("a window for each head")
    if kind["cross_attention"]:
        words.append("cross-attention")
    ffn = f"{'gated ' if kind['gated'] else ''}feed-forward {kind['ffn_dim']:,}"
    if kind["experts"]:
        ffn = f"{kind['experts']} experts, {kind['active_experts']} active: {ffn}"
    return [*words, ffn]


def _print_parts(console: Console, document: Mapping[str, Any]) -> None:
    parameters, prefill = document["parameters"], document["prefill"]["operations"]
    decode = document["decode"]
    step = None if decode is None else decode["operations"]
    table = plain_table()
    table.add_column("", no_wrap=True)
    table.add_column("parameters", justify="right", no_wrap=True)
    table.add_column("prefill products", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    if step is not None:
        table.add_column("one token more", justify="right", no_wrap=True)

    def row(name: str, key: str, *, style: str = "") -> None:
        held, products = parameters.get(key, 0), prefill.get(key, 0)
        more = 0 if step is None else step.get(key, 0)
        if not (held or products or more):
            return
        cells = [
            f"{held:,}" if held else "",
            short_count(products) if products else "",
            _share(products, prefill["total"]),
        ]
        if step is not None:
            cells.append(short_count(more) if more else "")
        table.add_row(name, *cells, style=style)

    for key, name in _PARTS:
        row(name, key)
    row("together", "total", style="bold")
    exponentials = ["", short_count(prefill["exponentials"]), ""]
    if step is not None:
        exponentials.append(short_count(step["exponentials"]))
    table.add_row("exponentials", *exponentials, style=QUIET)
    show(console, table)
    active = document["active_parameters"]["total"]
    if active != parameters["total"]:
        paragraph(console, f"A token visits {active:,} of the parameters.")
    dense = document["prefill"]["dense_operations"]
    seen, every = prefill["scores"] + prefill["values"], dense["scores"] + dense["values"]
    if seen != every:
        paragraph(
            console,
            f"Counted are the pairs that masks show: {short_count(seen)} products of attention; "
            f"over all pairs, as counters without masks say, {short_count(every)}.",
        )
    if prefill["head"]:
        paragraph(console, "Prefill gives the logits of the last token alone.")
    training = document["training"]
    if training is not None:
        paragraph(console, _training_words(training["forward"], training["backward"]))


def _training_words(ahead: Mapping[str, int], behind: Mapping[str, int]) -> str:
    attention = (behind["scores"] + behind["values"]) / (ahead["scores"] + ahead["values"])
    logits = " with all logits" if ahead["head"] else ""
    return (
        f"A step of training: {short_count(ahead['total'])} products forward{logits}, "
        f"{short_count(behind['total'])} backward ({behind['total'] / ahead['total']:.2f} times; "
        f"matrices twice, attention {attention:.3g} times, as it makes its weights again)."
    )


def _print_memory(console: Console, document: Mapping[str, Any]) -> None:
    memory, setting = document["memory"], document["setting"]
    table = plain_table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True, style=QUIET)
    table.add_column(style=QUIET)

    def row(name: str, value: int | None, remark: str = "") -> None:
        if value is None:
            table.add_row(name, "-", "", remark)
        else:
            table.add_row(name, binary_bytes(value), f"{value:,}", remark)

    row("weights", memory["weights"], setting["dtype"])
    if memory["caches"] is not None:
        for kind, value in memory["caches"].items():
            row(f"KV cache, {kind}", value, _CACHES[kind] if value is not None else "no latents")
        row("KV cache, a token", memory["cache_token"], setting["dtype"])
    for part, remark in (("head", "one head"), ("layer", "a layer"), ("model", "all layers")):
        row(f"N x N, {remark}", memory["score_tables"][part], "not built")
    training = document["training"]
    if training is not None:
        _training_rows(row, training)
    show(console, table)
    if memory["fit"] is not None:
        for line in _fit_lines(setting, memory):
            paragraph(console, line)


def _training_rows(row: Any, training: Mapping[str, Any]) -> None:
    kept = training["memory"]
    states = kept["optimizer"] + kept["master"]
    row("AdamW: gradients", kept["gradients"])
    row("AdamW: its state", states, "2 moments" + (", float32 copy" if kept["master"] else ""))
    row("activations", kept["activations"], "kept for backward")
    row("  checkpointed", training["memory_checkpointed"]["activations"], "a layer at a time")
    row("training, together", kept["total"], "with weights")


def _fit_lines(setting: Mapping[str, Any], memory: Mapping[str, Any]) -> list[str]:
    fit, weights = memory["fit"], memory["weights"]

    def most(value: int | None, unit: str) -> str:
        if value is None:
            return f"any number of {unit}s"
        return f"{value:,} {unit}" + ("" if value == 1 else "s")

    room_for = binary_bytes(setting["memory"])
    if weights > setting["memory"]:
        return [f"Not even the weights, {binary_bytes(weights)}, fit into {room_for}."]
    if memory["cache"] is None:
        lines = [
            f"The weights, {binary_bytes(weights)}, fit into {room_for}, and an encoder keeps no "
            "cache; what a pass needs while it runs is not counted."
        ]
    else:
        lines = [
            f"Into {room_for} fit, beside the weights, {most(fit['context'], 'token')} at batch "
            f"{setting['batch']}, or {most(fit['batch'], 'row')} of "
            f"{_tokens(setting['context'])}; what a pass needs while it runs is not counted."
        ]
    tokens = f"of {_tokens(setting['context'])}"
    if fit["training_batch"]:
        lines.append(f"In training fit {most(fit['training_batch'], 'row')} {tokens}.")
    elif fit["training_batch"] == 0:
        lines.append(f"No row {tokens} fits in training.")
    return lines


def _print_times(console: Console, document: Mapping[str, Any]) -> None:
    device = document["setting"]["device"]
    passes = [("prefill", document["prefill"]["estimate"])]
    if document["decode"] is not None:
        passes.append(("one more", document["decode"]["estimate"]))
    table = plain_table()
    table.add_column("", no_wrap=True)
    for name, _ in passes:
        table.add_column(f"{name}:\nbytes", justify="right", no_wrap=True)
        table.add_column("flop/\nbyte", justify="right", no_wrap=True)
        if device is not None:
            table.add_column("\ntime", justify="right", no_wrap=True)
    used = [
        name
        for name in passes[0][1]["parts"]
        if any(found["parts"][name]["bytes"] for _, found in passes)
    ]
    for name in (*used, None):
        cells: list[str] = []
        for _, found in passes:
            part = found if name is None else found["parts"][name]
            cells += [binary_bytes(part["bytes"]), intensity(part["intensity"])]
            if device is not None:
                bound = {"compute": " C", "memory": " M"}.get(part.get("bound"), "  ")
                cells.append(duration(part["seconds"]) + bound)
        label = "together" if name is None else name.replace("feed_forward", "feed-forward")
        table.add_row(label, *cells, style="bold" if name is None else "")
    show(console, table)
    if device is None:
        paragraph(
            console,
            "Each byte is moved once: a lower bound. --device h100, --measure (this machine), or "
            "--peak-tflops with --bandwidth turn this into times.",
        )
        return
    paragraph(
        console,
        f"At the limits of {device['name']}: {device['flops'] / 1e12:,.4g} TFLOP/s, "
        f"{device['bandwidth'] / 1e9:,.4g} GB/s ({device['source']}). Above {device['ridge']:.3g} "
        "flop/byte products bound (C), below it memory (M). A lower bound: each byte is moved "
        "once, exponentials are not timed, and nothing is lost between kernels.",
    )


def _heads_lines(document: Mapping[str, Any]) -> list[str]:
    kind = document["model"]["kinds"][0]
    heads, dim, kv_heads = kind["heads"], kind["head_dim"], kind["kv_heads"]
    if kind["attention"] == "mla":
        entry = kind["latent_dim"] + kind["rope_dim"]
        lines = [
            f"The cache keeps {kind['latent_dim']} + {kind['rope_dim']} = {entry} numbers a token "
            f"and layer for all {heads} heads together; keys and values of each would be "
            f"{heads * (dim + kind['value_dim']):,}. Products, exponentials and the N x N tables "
            "grow with the heads."
        ]
        return lines + _crossover_lines(document["crossover"])
    lines = [
        "At one total width, parameters and products are the same for any number of heads. "
        "Exponentials and the N x N tables grow with it: twice the heads, twice both."
    ]
    if document["model"]["causal"]:
        plain = (
            ""
            if kv_heads == heads
            else (
                f" Here that is {kv_heads} x {dim} = {kv_heads * dim:,}; a KV head for each of the "
                f"{heads} heads would make it {heads * dim:,}."
            )
        )
        lines.append(
            "The KV cache depends on KV heads x their width, not on the heads: plain MHA's is the "
            f"same whether it has 1 or {max(heads, 2)} heads.{plain}"
        )
    return lines + _crossover_lines(document["crossover"])


def _crossover_lines(over: Mapping[str, int | None]) -> list[str]:
    if over["projections"] is None:
        return []
    rest = (
        "" if over["rest"] is None else (f", and all the rest of the layers from {over['rest']:,}")
    )
    return [
        f"QKᵀ and PV cost more than the projections from a prefill of {over['projections']:,} "
        f"tokens on{rest}."
    ]
