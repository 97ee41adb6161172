"""The decoder, its presets, and reading and writing of model folders."""
