"""What every configuration class stands on: its error, and its check."""


class ConfigError(ValueError):
    """A configuration that cannot be run; the message names the key, the value and the remedy."""


def due(step: int, every: int) -> bool:
    """True if what happens `every` so many steps happens after the step, counted from 1; 0: never."""
    return every > 0 and step % every == 0


def checked(config: object) -> None:
    """Refuses what cannot be run as soon as an object is built, from a file or in Python."""
    from dapo_jax.config.checks import check  # which imports the classes that call this

    check(config)
