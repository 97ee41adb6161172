"""Run health: stop requests (`stopping`), runs that make no progress (`stalls`), and runs that do not learn (`watchdogs`)."""
