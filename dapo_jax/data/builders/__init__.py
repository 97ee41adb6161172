"""Dataset builders. Each module defines a TFDS builder class named `Builder`. The rows of each dataset have at least the fields `prompt` and `answer`."""
