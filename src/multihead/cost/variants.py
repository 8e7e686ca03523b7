"""The same model with another attention or other sizes: to compare, to ask what if, to sweep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from multihead.cost.checks import check_sizes
from multihead.cost.latent import AnyAttention, LatentAttention
from multihead.cost.model import AnyFeedForward, Experts, Layer, Model
from multihead.cost.parts import Attention
from multihead.errors import ArgumentError

SIZES = ("heads", "kv_heads", "head_dim", "d_model", "ffn", "layers", "vocab", "window")
"""What `what_if` changes."""

KINDS = ("mha", "gqa:N", "mqa", "mla", "mla:LATENT+ROPE")
"""What `with_kind` takes."""


def with_kind(model: Model, kind: str) -> Model:
    """The model with self-attention of another kind, its heads and their width as they are.

    Args:
        kind: "mha"; "gqa:8" for 8 KV heads; "mqa"; "mla", whose latent has 4 x head_dim lanes and
            whose rotated key has head_dim / 2, as in DeepSeek-V2; or both given, "mla:512+64".

    Raises:
        ArgumentError: another word, KV heads that do not divide the heads, or "mla" for heads with
            windows of their own or ahead, which latent attention has not.
    """
    name, _, given = kind.strip().lower().partition(":")
    if name in ("mha", "mqa") and not given:
        return _with_attention(model, lambda a: _grouped(a, a.heads if name == "mha" else 1))
    if name == "gqa" and given.isdecimal():
        return _with_attention(model, lambda a: _grouped(a, int(given)))
    if name == "mla":
        sizes = given.split("+") if given else []
        if len(sizes) in (0, 2) and all(size.isdecimal() for size in sizes):
            latent, rope = (int(size) for size in sizes) if sizes else (None, None)
            return _with_attention(model, lambda a: _latent(a, latent, rope))
    raise ArgumentError(
        f"{kind!r} is no kind of attention; write {', '.join(KINDS)}, such as gqa:8 or mla:512+64."
    )


def what_if(model: Model, changes: Mapping[str, int]) -> Model:
    """The model with other sizes.

    * heads: as many heads of the same width together, so each is wider or narrower, unless head_dim
      is given too. Each KV head keeps serving as many heads, unless kv_heads is given too, so that
      neither parameters nor the KV cache change. MQA keeps its one KV head, which is as wide as a
      head, and latent attention its widths: there both change.
    * kv_heads, head_dim, ffn, vocab: that size alone.
    * d_model: the width of the stream; of heads too, where they fill it.
    * layers: the first so many, or the same ones again in order.
    * window: of every layer's self-attention, its own key included; 0 for none. In an encoder it
      reaches as far ahead.

    In an encoder-decoder both stacks change.

    Raises:
        ArgumentError: a size that there is not, or sizes that do not fit together.
    """
    for name, value in changes.items():
        if name not in SIZES:
            raise ArgumentError(f"{name!r} is no size of a model; there are {', '.join(SIZES)}.")
        if name != "window" or value != 0:
            check_sizes(**{name: value})
    layers = tuple(_changed_layer(layer, changes, model.causal) for layer in model.layers)
    count = changes.get("layers", len(layers))
    layers = tuple(layers[index % len(layers)] for index in range(count))
    changed = replace(model, layers=layers, vocab=changes.get("vocab", model.vocab))
    return (
        changed if model.source is None else replace(changed, source=what_if(model.source, changes))
    )


def with_head_windows(
    model: Model, windows: Sequence[Sequence[int | None] | None], keep_first: int = 0
) -> Model:
    """The model with a window for each head of each layer's self-attention.

    Args:
        windows: for each layer one window a query head, None for a head that sees all keys; None
            for a layer that stays as it is.
        keep_first: how many of the first keys the heads with windows see beside them.

    Raises:
        ArgumentError: another number of layers or heads, a window below 1, or latent attention,
            whose heads share what they would drop.
    """
    if len(windows) != len(model.layers):
        raise ArgumentError(
            f"windows must be one sequence, or None, for each layer, {len(model.layers)} in all; "
            f"got {len(windows)}."
        )
    layers = []
    for layer, given in zip(model.layers, windows, strict=True):
        if given is None:
            layers.append(layer)
            continue
        if isinstance(layer.attention, LatentAttention):
            raise ArgumentError(
                "heads of latent attention share one latent a token, so windows of single heads "
                "drop nothing; give all of them one: what_if(model, {'window': 256})."
            )
        attention = replace(
            layer.attention, window=None, head_windows=tuple(given), keep_first=keep_first
        )
        layers.append(replace(layer, attention=attention))
    return replace(model, layers=tuple(layers))


def sweep_heads(model: Model) -> list[tuple[int, Model]]:
    """Numbers of heads that the same width can be cut into: doubled each time, and its own.

    They begin with one, or with as many as share a KV head. Layers that cannot be cut alike leave a
    number out.
    """
    first = model.layers[0].attention
    width = first.heads * first.head_dim
    group = first.heads // first.kv_heads if first.kind == "gqa" else 1
    counts = {first.heads} | {group * 2**k for k in range(width.bit_length())}
    found = []
    for heads in sorted(count for count in counts if width % count == 0):
        try:
            found.append((heads, what_if(model, {"heads": heads})))
        except ArgumentError:
            continue
    return found


def sweep_head_dims(model: Model) -> list[tuple[int, Model]]:
    """Widths of a head from 16 to 256, and its own, at the same number of heads."""
    own = model.layers[0].attention.head_dim
    return [(dim, what_if(model, {"head_dim": dim})) for dim in sorted({16, 32, 64, 128, 256, own})]


def _with_attention(model: Model, change: Callable[[AnyAttention], AnyAttention]) -> Model:
    layers = tuple(replace(layer, attention=change(layer.attention)) for layer in model.layers)
    source = None if model.source is None else _with_attention(model.source, change)
    return replace(model, layers=layers, source=source)


def _grouped(attention: AnyAttention, kv_heads: int) -> Attention:
    if isinstance(attention, LatentAttention):
        return Attention(
            attention.embed_dim,
            attention.heads,
            kv_heads,
            attention.nope_dim,
            attention.value_dim,
            o_bias=attention.o_bias,
            window=attention.window,
            rotary_dim=attention.nope_dim,
        )
    return replace(
        attention,
        kv_heads=kv_heads,
        qk_norm=_qk_norm(attention, attention.heads, kv_heads, attention.head_dim),
    )


def _latent(attention: AnyAttention, latent: int | None, rope: int | None) -> LatentAttention:
    if isinstance(attention, LatentAttention) and latent is None:
        return attention
    if attention.window_ahead or (isinstance(attention, Attention) and attention.head_windows):
        raise ArgumentError(
            "latent attention has one window for all heads, and none ahead; leave mla out, or give "
            "all heads one window first: what_if(model, {'window': 256}), 0 for none."
        )
    nope = attention.nope_dim if isinstance(attention, LatentAttention) else attention.head_dim
    return LatentAttention(
        attention.embed_dim,
        attention.heads,
        latent_dim=4 * nope if latent is None else latent,
        nope_dim=nope,
        rope_dim=max(1, nope // 2) if rope is None else rope,
        value_dim=attention.value_dim,
        o_bias=attention.o_bias,
        window=attention.window,
    )


def _changed_layer(layer: Layer, changes: Mapping[str, int], causal: bool) -> Layer:
    cross = layer.cross
    if cross is not None:
        sizes = {name: value for name, value in changes.items() if name != "window"}
        cross = _resized(cross, sizes)
        cross = replace(cross, context_dim=changes.get("d_model", cross.context_dim))
    attention = layer.attention
    if isinstance(attention, LatentAttention):
        resized: AnyAttention = _resized_latent(attention, changes)
    else:
        resized = _resized(attention, changes)
        if "window" in changes:
            ahead = 0 if causal else max(0, changes["window"] - 1)
            resized = replace(resized, window_ahead=ahead)
    return replace(
        layer,
        attention=resized,
        cross=cross,
        feed_forward=_resized_ffn(layer.feed_forward, changes),
    )


def _resized(attention: Attention, changes: Mapping[str, int]) -> Attention:
    embed_dim = changes.get("d_model", attention.embed_dim)
    heads = changes.get("heads", attention.heads)
    kv_heads = changes.get("kv_heads") or _kept_groups(attention, heads)
    head_dim, value_dim = attention.head_dim, attention.value_dim
    if "head_dim" in changes:
        value_dim = changes["head_dim"] if value_dim == head_dim else value_dim
        head_dim = changes["head_dim"]
    else:
        fills = head_dim == value_dim and attention.heads * head_dim == attention.embed_dim
        head_dim = _shared_out(embed_dim if fills else attention.heads * head_dim, heads)
        value_dim = _shared_out(embed_dim if fills else attention.heads * value_dim, heads)
    return replace(
        attention,
        embed_dim=embed_dim,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        qk_norm=_qk_norm(attention, heads, kv_heads, head_dim),
        bias_table=attention.bias_table // attention.heads * heads,
        rotary_dim=head_dim if attention.rotary_dim else 0,
        window=_window(attention, changes),
        head_windows=_head_windows(attention, heads, changes),
    )


def _resized_latent(attention: LatentAttention, changes: Mapping[str, int]) -> LatentAttention:
    for name in ("kv_heads", "head_dim"):
        if name in changes:
            raise ArgumentError(
                f"{name} does not size latent attention, which has a latent in place of KV heads; "
                "compare it with --compare mla:LATENT+ROPE, or change heads."
            )
    return replace(
        attention,
        embed_dim=changes.get("d_model", attention.embed_dim),
        heads=changes.get("heads", attention.heads),
        window=_window(attention, changes),
    )


def _window(attention: AnyAttention, changes: Mapping[str, int]) -> int | None:
    return (changes["window"] or None) if "window" in changes else attention.window


def _head_windows(
    attention: Attention, heads: int, changes: Mapping[str, int]
) -> tuple[int | None, ...] | None:
    if attention.head_windows is None or "window" in changes:
        return None
    if heads != attention.heads:
        raise ArgumentError(
            f"each of the {attention.heads} heads has a window of its own, so {heads} heads have "
            "none; give window too, 0 for no windows."
        )
    return attention.head_windows


def _kept_groups(attention: Attention, heads: int) -> int:
    if attention.kind != "gqa":
        return 1 if attention.kind == "mqa" else heads
    group = attention.heads // attention.kv_heads
    if heads % group:
        raise ArgumentError(
            f"heads={heads} cannot keep {group} heads to each KV head, as the model has; give "
            "kv_heads too."
        )
    return heads // group


def _shared_out(width: int, heads: int) -> int:
    if width % heads:
        raise ArgumentError(
            f"heads={heads} does not divide {width}, the width of all heads together; give "
            "head_dim too, or another number of heads."
        )
    return width // heads


def _qk_norm(attention: Attention, heads: int, kv_heads: int, head_dim: int) -> int:
    """The norms' parameters for other heads: they span one head, or all of them."""
    if not attention.qk_norm:
        return 0
    whole = (attention.heads + attention.kv_heads) * attention.head_dim
    if attention.qk_norm % whole == 0 and attention.qk_norm != 2 * attention.head_dim:
        return attention.qk_norm // whole * (heads + kv_heads) * head_dim
    return attention.qk_norm // attention.head_dim * head_dim


def _resized_ffn(described: AnyFeedForward, changes: Mapping[str, int]) -> AnyFeedForward:
    width = changes.get("d_model", described.embed_dim)
    if isinstance(described, Experts):
        expert = described.expert
        shared = described.shared
        return replace(
            described,
            expert=replace(expert, embed_dim=width, ffn_dim=changes.get("ffn", expert.ffn_dim)),
            shared=None if shared is None else replace(shared, embed_dim=width),
        )
    return replace(described, embed_dim=width, ffn_dim=changes.get("ffn", described.ffn_dim))
