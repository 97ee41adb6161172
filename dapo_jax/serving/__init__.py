"""The engine behind servers: JetStream's, with an `Engine` of its interface, its orchestrator and gRPC server, and one of our own over HTTP.

The first needs the extra `jetstream`, the second `http`; neither needs the other's.
"""

import os

# JetStream imports TensorFlow, for tokenizers that are not used here; it would tell about its GPU libraries.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
