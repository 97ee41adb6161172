"""The algorithm, in the order of the paper (DAPO, 2025), as pure functions.

| DAPO | module |
|---|---|
| groups, which are the responses to one prompt, and their verdicts | `rollouts` |
| Eq. 9, the advantage within a group | `advantages` |
| Eq. 10 and 12, the clipped objective (Clip-Higher), its token-level mean, and a KL penalty | `losses` |
| Eq. 11, Algorithm 1, dynamic sampling | `dynamic_sampling` |
| Eq. 13, the overlong penalty | `overlong` |
| importance weights of off-policy tokens | `importance` |
| log-probabilities of the sampled tokens | `logprobs`, with matrix products from `precision` |
| conversion of groups to the training examples of an update | `batching`, `microbatch` |
| metrics that can be added across microbatches | `metrics` |
"""
