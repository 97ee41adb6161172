"""The batch that is transferred from the host to the device. It contains rollouts that are packed into rows of the same length.

The fields are annotated `... | Any` because they are numpy arrays on the host, and because JAX also builds this dataclass with shapes or shardings as fields.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dapo_jax.dapo.tokens import VALUES, Shapes


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Arrays for one forward and backward pass: rollouts packed into rows of one static length.

    A row may contain several rollouts, which `segment_ids` distinguishes, and several responses may share one prompt. Column `t` of `old_logprobs`,
    `mask`, `advantages` and `weights` belongs to the token *at* `t`. The log-probability of this token comes from the logits at `previous[t]`.
    """

    tokens: Int[Array, "rows seq"] | Any
    segment_ids: Int[Array, "rows seq"] | Any
    """1, 2, ... for the rollouts of a row, and 0 for padding. A prompt that several responses share is a separate segment."""
    prefix_ids: Int[Array, "rows seq"] | Any
    """Segment id of the token's prompt. The token may attend to this segment and its own. Equals `segment_ids` if prompt and response are one segment."""
    previous: Int[Array, "rows seq"] | Any
    """The column whose logits predict the token. This is the previous column or, for the first token of a response, the last column of its prompt."""
    positions: Int[Array, "rows seq"] | Any
    """Position of each token in its rollout, starting at 0."""
    mask: Bool[Array, "rows seq"] | Any
    """True on response tokens that enter the loss."""
    advantages: Float[Array, "rows seq"] | Any
    weights: Float[Array, "rows seq"] | Any
    """Weight of each token in the loss of the whole minibatch. The losses of the microbatches add up to the loss of the minibatch."""
    sampler_logprobs: Float[Array, "rows seq"] | Any
    """Log-probabilities recorded during sampling."""
    old_logprobs: Float[Array, "rows seq"] | Any
    """Log-probabilities in the denominator of the objective's ratio. They are zeros until `Updater.prepare` fills them in."""
    ref_logprobs: Float[Array, "rows seq"] | Any
    """Log-probabilities under the reference policy, or zeros if there is no reference policy."""
    old_head_logprobs: Float[Array, "rows seq heads"] | Any = None
    """Log-probabilities of the recorded `head_ids` under the old policy. None until `Updater.prepare` fills it in, and always if the sampler records no heads."""
    teacher_logprobs: Float[Array, "rows seq"] | Any = None
    """Log-probabilities under the teacher, or None if there is no teacher."""
    noise: Float[Array, "rows seq"] | Any = None
    """A random number from 0 to 1 for each token, or None unless a selection requires it."""
    selected: Bool[Array, "rows seq"] | Any = None
    """True on the tokens that `loss.select` selects. None until `Updater.prepare` fills it in, and always with `loss.select=all`."""
    recorded: Mapping[str, Any] | Any
    """The other values that the sampler recorded for each token, by their names in `VALUES`, as arrays `[rows, seq, *shape]`. For example, the decoder uses `routes`
    instead of its own choice of experts."""

    @property
    def arrays(self) -> dict[str, Any]:
        """All arrays by name, also the recorded values."""
        arrays = {**vars(self), **self.recorded, "recorded": None}
        return {name: array for name, array in arrays.items() if array is not None}


def blank_microbatch(shape: tuple[int, ...], *also: str, recorded: Shapes = ()) -> Microbatch:
    """Returns a microbatch of zeros as numpy arrays of shape `shape`: [rows, seq], optionally with leading dimensions. `also` names optional fields to include, and
    `recorded` the optional values of tokens, which are blank."""
    integers = ("tokens", "segment_ids", "prefix_ids", "previous", "positions")
    kinds = {"mask": np.bool_, "selected": np.bool_, **dict.fromkeys(integers, np.int32)}
    names = [field.name for field in fields(Microbatch) if field.default is MISSING or field.name in also]
    arrays: dict[str, Any] = {name: np.zeros(shape, kinds.get(name, np.float32)) for name in names}
    arrays["recorded"] = {
        name: np.full((*shape, *of_token), VALUES[name].blank_as(dtype)) for name, of_token, dtype in recorded
    }
    return Microbatch(**arrays)
