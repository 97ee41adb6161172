"""Text and tokens: tokenizers, chat templates, prompt templates and stop strings."""
