"""The health of a run: told to stop (`stopping`), without progress (`stalls`), going on without learning (`watchdogs`)."""
