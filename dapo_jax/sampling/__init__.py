"""The engine (prefill, insert, generate), how a token is drawn, and the continuous-batching sampler."""
