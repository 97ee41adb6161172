"""The decoder, its presets, and model folders in and out."""
