"""Servers built on the sampling engine that training uses: one for HTTP (extra `http`) and one for JetStream's gRPC protocol (extra `jetstream`)."""
