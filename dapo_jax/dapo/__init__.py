"""The DAPO algorithm (2025) as pure functions, listed in the order of the paper.

| DAPO | module |
|---|---|
| tokens with their recorded values; prompts, responses, verdicts and groups (all responses to one prompt) | `tokens`, `rollouts` |
| Eq. 9, the advantage within a group | `advantages` |
| Eq. 10 and 12, the clipped objective (Clip-Higher), its token-level mean, and a KL penalty | `losses`, `aggregation` |
| objectives of other algorithms, and sums along a response for them | `objectives`, `responses` |
| Eq. 11, Algorithm 1, dynamic sampling | `dynamic_sampling` |
| Eq. 13, the overlong penalty | `overlong` |
| distillation from a teacher | `teacher` |
| selections of the tokens that enter the loss | `selections` |
| importance weights for off-policy tokens | `corrections` |
| log-probabilities of the sampled tokens | `logprobs` |
| conversion of groups to training examples | `batching`, `microbatch` |
| metrics that can be summed across microbatches | `metrics` |
"""
