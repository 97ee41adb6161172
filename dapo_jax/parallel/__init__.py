"""The mesh, where arrays lie on it, and how weights get from the trainer to the sampler."""
