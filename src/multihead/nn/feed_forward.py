"""The other half of a transformer block: what each token does on its own.

Shape suffixes: b batch, l length, c width, f hidden width.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import DtypeError
from .checks import check_sequence, check_share, check_sizes
from .inference import watched

Activation = Callable[[Tensor], Tensor]
"""A function of each number, or a module: `torch.nn.functional.silu`, `torch.nn.GELU("tanh")`."""


class FeedForward(nn.Module):
    """A hidden layer of each token by itself: `down(activation(up(x)))`.

    Args:
        embed_dim: width of the input and of the output.
        hidden_dim: width of the hidden layer.
        activation: what each hidden number passes.
        bias: add a bias in both projections.
        dropout: share of the hidden numbers that training drops out.

    Raises:
        ArgumentError: a size below 1, or a share that is none.
        DtypeError: a size that is no integer, or an activation that can't be called.

    Source: Vaswani et al. 2017, section 3.3.
    """

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        *,
        activation: Activation = F.gelu,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_sizes(embed_dim=embed_dim, hidden_dim=hidden_dim)
        _check_activation(activation)
        self.embed_dim = embed_dim
        self.up_proj = nn.Linear(embed_dim, hidden_dim, bias=bias)
        self.activation = activation
        self.dropout = build_dropout(dropout)
        self.down_proj = nn.Linear(hidden_dim, embed_dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, embed_dim] to [B, L, embed_dim]; raises ArgumentError for another shape."""
        check_sequence("x", x, "embed_dim", self.embed_dim)
        hidden_blf = self.activation(self.up_proj(x))
        return self.down_proj(dropped(hidden_blf, self.dropout))  # type: ignore[no-any-return]


class GatedFeedForward(nn.Module):
    """A hidden layer that a second one gates: `down(activation(gate(x)) * up(x))`.

    With the default activation it is SwiGLU; with GELU, GEGLU. One matrix product makes gate and
    up, in this order.

    Args:
        embed_dim: width of the input and of the output.
        hidden_dim: width of the hidden layer.
        activation: what the gate passes.
        bias: add a bias in all projections.
        dropout: share of the hidden numbers that training drops out.

    Raises:
        As `FeedForward`.

    Source: Shazeer 2020, "GLU variants improve transformer".
    """

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        *,
        activation: Activation = F.silu,
        bias: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_sizes(embed_dim=embed_dim, hidden_dim=hidden_dim)
        _check_activation(activation)
        self.embed_dim = embed_dim
        self.gate_up_proj = nn.Linear(embed_dim, 2 * hidden_dim, bias=bias)
        self.activation = activation
        self.dropout = build_dropout(dropout)
        self.down_proj = nn.Linear(hidden_dim, embed_dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, embed_dim] to [B, L, embed_dim]; raises ArgumentError for another shape."""
        check_sequence("x", x, "embed_dim", self.embed_dim)
        gate_blf, up_blf = self.gate_up_proj(x).chunk(2, dim=-1)
        if self.activation is F.silu and not (watched() or gate_blf.requires_grad):
            # Into silu's own result: taking as much memory again costs as much as the product.
            hidden_blf = F.silu(gate_blf).mul_(up_blf)
        else:
            hidden_blf = self.activation(gate_blf) * up_blf
        return self.down_proj(dropped(hidden_blf, self.dropout))  # type: ignore[no-any-return]


def build_dropout(share: float) -> nn.Dropout:
    """torch's dropout; raises DtypeError or ArgumentError for what is no share."""
    check_share("dropout", share)
    return nn.Dropout(share)


def dropped(x: Tensor, dropout: nn.Dropout) -> Tensor:
    """What dropout leaves of `x`; its module is not called where it leaves everything.

    Calling it costs microseconds, as much as the products of a narrow layer at one row.
    """
    return dropout(x) if dropout.training and dropout.p else x


def _check_activation(activation: Activation) -> None:
    if not callable(activation):
        raise DtypeError(
            f"activation must be a function or a module; got {activation!r}. Write, for example, "
            "activation=torch.nn.functional.relu."
        )
    if isinstance(activation, type):
        raise DtypeError(
            f"activation must be a function or a module; got the class {activation.__name__}. "
            f"Write activation={activation.__name__}()."
        )
