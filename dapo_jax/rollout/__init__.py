"""Rollouts: which responses start when, which groups a step trains on, and how processes share the sampling.

A step runs through these modules; read them in this order:

* `collector`: the state of one step: responses in flight, groups that are ready, and the order of calls for a round or a wave.
* `scheduler`: a virtual clock that decides when a response starts, a verdict is due and a step ends, from lengths and verdicts alone.
* `group_sampling`: makes the collector's calls in order. It samples with `response_sampler`, exchanges turns with environments, and grades.
* `exchange`: sends each process the tokens, answers and verdicts of all others, so that all collectors are equal. `checkpoint_arrays` converts these to arrays, also for checkpoints.
"""
