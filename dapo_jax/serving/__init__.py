"""Servers on the engine that training samples from: JetStream's over gRPC (extra `jetstream`), and an HTTP server (extra `http`)."""

import os

# JetStream imports TensorFlow, which would log messages about GPU libraries.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
