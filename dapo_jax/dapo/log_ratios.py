r"""An estimate made of the log-ratio of two policies' probabilities for the same token; the weights made of it are in `importance`.

References:
    Schulman, "Approximating KL Divergence", 2020, http://joschu.net/blog/kl-approx.html
"""

import jax.numpy as jnp
from jaxtyping import Array, Float


def k3(log_ratio: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    r"""The estimate k3 of a Kullback-Leibler divergence, $e^d - 1 - d$: unbiased if the token was drawn from p, and never negative.

    Near 0 it is $d^2 / 2$, far below the rounding of $e^d$, so `expm1` takes the place of $e^d - 1$: the mean over tokens that differ by 1e-5 nats
    is right to 1e-4 in float32, where the plain formula is off by more than itself.

    Args:
        log_ratio: $d = \log q - \log p$ of a token, in nats.

    Returns:
        The estimate of KL(p || q), in nats.
    """
    return jnp.expm1(log_ratio) - log_ratio
