"""Dataset builders. Each module defines a TFDS builder class named `Builder`. Its rows have at least the fields `prompt` and `answer`."""
