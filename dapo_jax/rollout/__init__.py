"""Rollouts: which responses start when, which groups a step trains on, and how processes share the sampling.

A step walks through these modules; read them in this order:

* `collector`: the state of one step: responses in flight, groups that are ready, and the order of calls for a round or a wave.
* `scheduler`: a virtual clock, which decides from lengths and verdicts alone when a response starts, a verdict is due and a step ends.
* `group_sampling`: follows the collector's order of calls. It samples with `response_sampler`, talks with environments, and grades.
* `exchange`: gives every process the tokens, answers and verdicts of all others, so that all collectors are equal. `checkpoint_arrays` turns these into arrays, as for checkpoints.
"""
