"""Servers that use the same engine as sampling in training: HTTP (extra `http`), and JetStream's protocol over gRPC (extra `jetstream`)."""
