"""The DAPO algorithm (2025) as pure functions, listed in the order of the paper.

| DAPO | module |
|---|---|
| prompts, responses, verdicts and groups (all responses to one prompt) | `rollouts` |
| Eq. 9, the advantage within a group | `advantages` |
| Eq. 10 and 12, the clipped objective (Clip-Higher), its token-level mean, and a KL penalty | `losses` |
| objectives of other algorithms, and sums along a response for them | `objectives`, `responses` |
| Eq. 11, Algorithm 1, dynamic sampling | `dynamic_sampling` |
| Eq. 13, the overlong penalty | `overlong` |
| importance weights for off-policy tokens | `importance` |
| log-probabilities of the sampled tokens | `logprobs`, which uses the matrix products in `precision` and the 8-bit arrays in `quantization` |
| conversion of groups to training examples | `batching`, `microbatch` |
| metrics that can be summed across microbatches | `metrics` |
"""
