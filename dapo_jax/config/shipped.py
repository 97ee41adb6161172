"""The configurations that come with the package: found by name, wherever one stands."""

from pathlib import Path

_PACKAGE = Path(__file__).parent.parent


def shipped_configs() -> dict[str, Path]:
    """Name -> file of each, as in `dapo-jax train NAME`: the files of `configs/`, without their ending (`study/dapo`).

    An installed package has them inside, a checkout beside the package.
    """
    inside = _PACKAGE / "configs"
    folder = inside if inside.is_dir() else _PACKAGE.parent / "configs"
    files = sorted(folder.rglob("*.yaml"))
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in files}
