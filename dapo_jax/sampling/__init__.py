"""The engine (prefill, insert, generate), the sampling of a token, and the continuous-batching sampler."""
