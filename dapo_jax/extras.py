"""How what an extra of the package brings is installed: one place that says it."""

from pathlib import Path


def how_to_install(extra: str) -> str:
    """The command that installs an extra.

    The package is on no index: it is installed from its checkout, or as a wheel.
    """
    checkout = Path(__file__).resolve().parents[1]
    if not (checkout / "pyproject.toml").is_file():
        return f"pip install 'WHEEL[{extra}]', with the wheel's path for WHEEL"
    where = "" if checkout == Path.cwd() else f" in {checkout}"
    return f"pip install -e '.[{extra}]'{where}"
