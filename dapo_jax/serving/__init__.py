"""Servers on the engine that training samples from: HTTP (extra `http`), and JetStream's protocol over gRPC (extra `jetstream`)."""
