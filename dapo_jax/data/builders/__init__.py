"""Dataset builders. Each module has a TFDS builder class named `Builder`, whose rows have at least `prompt` and `answer`."""
