"""Runs environments from other libraries without changes. A library is imported only if the prefix of `environment.source` names it."""
