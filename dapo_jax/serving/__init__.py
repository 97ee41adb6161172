"""Servers built on the sampling engine that training uses: one for HTTP (`http` extra) and one for JetStream's gRPC protocol (`jetstream` extra)."""
