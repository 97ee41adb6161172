"""The modules whose annotations tests enforce: all but the configuration's, which checks its values itself and says more."""

from pathlib import Path

_PACKAGE = Path(__file__).parent.parent / "dapo_jax"

TYPED = sorted(
    f"dapo_jax.{path.stem}"
    for path in _PACKAGE.iterdir()
    if (path.suffix == ".py" or (path / "__init__.py").is_file()) and path.stem not in ("__init__", "config")
)
