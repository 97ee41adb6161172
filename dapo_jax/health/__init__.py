"""The health of a run: stop requests (`stopping`), runs without progress (`stalls`), runs that learn nothing (`watchdogs`)."""
