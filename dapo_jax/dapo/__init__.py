"""The algorithm, in the order of the paper (DAPO, 2025): everything here is a function of its arguments.

| DAPO | module |
|---|---|
| the responses to one prompt, a group, and their verdicts | `rollouts` |
| Eq. 9, the advantage within a group | `advantages` |
| Eq. 10 and 12, the clipped objective (Clip-Higher) and its token-level mean | `losses` |
| Eq. 11, Algorithm 1, dynamic sampling | `dynamic_sampling` |
| Eq. 13, the overlong penalty | `overlong` |
| KL from log-ratios; importance weights of tokens that another policy has drawn | `log_ratios`, `importance` |
| log-probabilities of the sampled tokens | `logprobs`, with the matrix products of `precision` |
| groups to the minibatches of an update, and their rows | `batching`, `row_packing`, `microbatch` |
| means and maxima that can be added | `metrics` |
"""
