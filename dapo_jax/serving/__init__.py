"""The engine behind JetStream: an `Engine` of its interface, and its orchestrator and gRPC server.

Needs the extra `jetstream`; no other room imports it but `run`.
"""

import os

# JetStream imports TensorFlow, for tokenizers that are not used here; it would tell about its GPU libraries.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
