"""How to install an extra of the package."""

from pathlib import Path


def how_to_install(extra: str) -> str:
    """Returns the command that installs an extra, from the checkout or the wheel: the package is on no index."""
    checkout = Path(__file__).resolve().parents[1]
    if not (checkout / "pyproject.toml").is_file():
        return f"pip install 'WHEEL[{extra}]', with the wheel's path for WHEEL"
    where = "" if checkout == Path.cwd() else f" in {checkout}"
    return f"pip install -e '.[{extra}]'{where}"
