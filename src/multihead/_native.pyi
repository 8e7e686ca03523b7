"""The compiled kernels, seen from Python: plain functions of addresses, sizes and strides."""

from enum import Enum

BUILD: str
SETS: str  # instruction sets in this build, with commas between
SETS_LEFT_OUT: str  # those of the architecture that the compiler did not know

class Dtype(Enum):
    float32 = 0
    bfloat16 = 1
    float16 = 2
    float64 = 3

class Mask:
    """A lowered mask; holds addresses, not the tensors."""

    def __init__(
        self,
        *,
        start: tuple[int, int],
        first: tuple[int, int],
        left: tuple[int, int] | None,
        right: tuple[int, int] | None,
        keep_first: tuple[int, int],
        prefix: tuple[int, int],
        key_lengths: int,
        query_lengths: int,
        key_visible: tuple[int, int] | None,
        query_ids: tuple[int, int] | None,
        key_ids: tuple[int, int] | None,
        query_positions: tuple[int, int] | None,
        key_positions: tuple[int, int] | None,
        ranges: tuple[int, int, int, int] | None,
        dense: tuple[int, ...] | None,
    ) -> None: ...

def forward(
    dtype: Dtype,
    sizes: tuple[int, int, int, int, int, int, int],
    query: int,
    query_strides: tuple[int, ...],
    key: int,
    key_strides: tuple[int, ...],
    value: int,
    value_strides: tuple[int, ...],
    out: int,
    out_strides: tuple[int, ...],
    scale: float,
    softcap: float,
    sinks: int,
    slopes: int,
    bias: tuple[int, ...] | None,
    bias_dtype: Dtype,
    mask: Mask,
    statistics: tuple[int, ...],
    map: tuple[int, ...],
    threads: int,
) -> None: ...
def sweep(
    *,
    dtype: Dtype,
    sizes: tuple[int, int, int, int, int, int],
    query: tuple[int, ...],
    key: tuple[int, ...],
    scale: float,
    softcap: float,
    slopes: int,
    bias: tuple[int, ...] | None,
    bias_dtype: Dtype,
    mask: Mask,
    lse: int,
    edges: list[int],
    sums: int,
    peaks: int,
    mask_shape: tuple[int, int],
    viewers: int,
    seeing: int,
    threads: int,
) -> None: ...
def rotate(
    dtype: Dtype,
    sizes: tuple[int, int, int, int, int],
    x: int,
    x_strides: tuple[int, ...],
    out: int,
    out_strides: tuple[int, ...],
    cos: int,
    sin: int,
    angles_batch_stride: int,
    threads: int,
) -> None: ...
def instruction_sets() -> list[str]: ...
def use_instruction_set(name: str) -> None: ...
def decodes(dtype: Dtype, heads: int, kv_heads: int, query_length: int) -> bool: ...
def use_decoder(on: bool) -> None: ...
def instruction_set_for(dtype: Dtype) -> str: ...
def peak(kind: str, threads: int) -> float: ...
