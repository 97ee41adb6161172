"""The engine (prefill, insert, generate), token sampling, and the continuous-batching sampler."""
