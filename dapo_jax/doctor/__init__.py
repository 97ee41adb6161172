"""Whether this machine, with this configuration, can train: what `dapo-jax doctor` finds out, before a run does.

`machine` looks at the machine, `configured` at what a configuration names, `asked` at its prompts and graders; `tiny_step` runs
every phase of a step once, small. Nothing is written into the run's folder, and what is written elsewhere is removed again.
"""
