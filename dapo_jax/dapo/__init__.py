"""The algorithm, in the order of the paper (DAPO, 2025), as pure functions.

| DAPO | module |
|---|---|
| the responses to one prompt, a group, and their verdicts | `rollouts` |
| Eq. 9, the advantage within a group | `advantages` |
| Eq. 10 and 12, the clipped objective (Clip-Higher) and its token-level mean | `losses` |
| Eq. 11, Algorithm 1, dynamic sampling | `dynamic_sampling` |
| Eq. 13, the overlong penalty | `overlong` |
| KL from log-ratios; importance weights of off-policy tokens | `log_ratios`, `importance` |
| log-probabilities of the sampled tokens | `logprobs`, with the matrix products of `precision` |
| from groups to the examples of an update | `batching`, `microbatch` |
| metrics that can be added | `metrics` |
"""
