"""Models side by side: what is compared, swept or asked about, in columns of the same measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from multihead import cost
from multihead.cli.sizes import parse_count, short_tokens
from multihead.errors import InputError

Sweep = Literal["heads", "context", "head-dim"]

_SHORTEST = 1024


@dataclass(frozen=True)
class Column:
    """One model in one setting, and its measures."""

    name: str
    model: cost.Model
    setting: cost.Setting
    measures: Mapping[str, int | float | None]

    @classmethod
    def of(cls, name: str, model: cost.Model, setting: cost.Setting) -> Column:
        """Measure a model."""
        return cls(name, model, setting, cost.measures(model, setting))

    def to_json(self) -> dict[str, Any]:
        """Its name, its heads, its context and its measures, flat."""
        attention = self.model.layers[0].attention
        return {
            "name": self.name,
            "attention": attention.kind,
            "heads": attention.heads,
            "kv_heads": None if attention.kind == "mla" else attention.kv_heads,
            "head_dim": attention.head_dim,
            "context": self.setting.context,
            "batch": self.setting.batch,
            **self.measures,
        }


def compared(model: cost.Model, setting: cost.Setting, kinds: str) -> list[Column]:
    """A column for each kind of attention in a list such as "mha,gqa:8,mqa,mla"."""
    names = [name.strip() for name in kinds.split(",") if name.strip()]
    if not names:
        raise InputError(f"--compare {kinds!r} names no kind; write {', '.join(cost.KINDS)}.")
    return [Column.of(name, cost.with_kind(model, name), setting) for name in names]


def swept(model: cost.Model, setting: cost.Setting, what: Sweep) -> list[Column]:
    """A column for each number of heads, width of a head, or context up to the setting's."""
    if what == "context":
        return [
            Column.of(short_tokens(context), model, replace(setting, context=context))
            for context in _contexts(setting.context)
        ]
    sweep = cost.sweep_heads if what == "heads" else cost.sweep_head_dims
    if model.layers[0].attention.kind == "mla" and what == "head-dim":
        raise InputError(
            "--sweep head-dim does not size latent attention, which has several widths; sweep "
            "heads or context."
        )
    return [Column.of(str(value), changed, setting) for value, changed in sweep(model)]


def asked(model: cost.Model, setting: cost.Setting, questions: Sequence[str]) -> list[Column]:
    """Two columns: before, and after all changes such as "heads=16" or "context=64k"."""
    sizes: dict[str, int] = {}
    changes: dict[str, Any] = {}
    for question in questions:
        for part in question.split(","):
            name, equals, value = part.strip().partition("=")
            name = name.strip().replace("-", "_")
            if not equals or not value.strip():
                raise InputError(
                    f"--what-if {part!r} is no change. Write what becomes what: heads=16."
                )
            if name in sizes or name in changes:
                raise InputError(f"--what-if gives {name} twice. Give it once.")
            if name in cost.SIZES:
                sizes[name] = _size(name, value)
            else:
                changes[name] = _use(name, value)
    after = replace(setting, **changes)
    return [
        Column.of("before", model, setting),
        Column.of("after", cost.what_if(model, sizes), after),
    ]


def _size(name: str, value: str) -> int:
    if name == "window" and value.strip() == "0":
        return 0
    return parse_count(value, f"--what-if {name}=")


def _use(name: str, value: str) -> Any:
    if name in ("context", "batch"):
        return parse_count(value, f"--what-if {name}=")
    if name == "dtype":
        return parse_dtype(value, "--what-if dtype=")
    if name == "cache":
        return parse_cache(value, "--what-if cache=")
    known = ", ".join((*cost.SIZES, "context", "batch", "dtype", "cache"))
    raise InputError(f"--what-if {name}=...: there is no size {name!r}; there are {known}.")


_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "fp64": "float64",
}


def parse_dtype(text: str, option: str = "--dtype ") -> str:
    """A dtype by its name or its short one. Raises InputError, naming the option, for another."""
    name = _DTYPES.get(text.strip().lower(), text.strip().lower())
    if name not in _DTYPES.values():
        raise InputError(
            f"{option}{text!r} is not known; there are bf16, fp16, fp32 and fp64, or in full "
            f"{', '.join(dict.fromkeys(_DTYPES.values()))}."
        )
    return name


def parse_cache(text: str, option: str = "--cache ") -> cost.CacheKind:
    """A kind of cache. Raises InputError, naming the option, for another."""
    for kind in get_args(cost.CacheKind):
        if kind == text.strip().lower():
            return kind  # type: ignore[no-any-return]
    raise InputError(
        f"{option}{text!r} is not known; there are {', '.join(get_args(cost.CacheKind))}."
    )


def _contexts(longest: int) -> list[int]:
    contexts = [longest]
    power = 1 << (longest.bit_length() - 1)
    while power >= min(_SHORTEST, longest):
        contexts.append(power)
        power //= 2
    return sorted(set(contexts))
