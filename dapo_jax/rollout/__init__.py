"""Rollouts: when responses start, which groups a step trains on, and how processes share the work of sampling.

A step uses the following modules, in recommended reading order:

* `collector`: keeps the state of one step (responses in flight, groups that are ready) and defines the order of calls for a round or a wave.
* `virtual_clock`: a clock that decides when responses start, when verdicts are due, and when a step ends. It uses only lengths and verdicts.
* `group_sampling`: calls the collector's methods in the order that it defines. It samples with `response_sampler`, exchanges turns with environments, and grades.
* `exchange`: sends each process the tokens, answers and verdicts of all others, so that all make the same decisions. `checkpoint_arrays` converts data to arrays for exchanges and checkpoints.
"""
