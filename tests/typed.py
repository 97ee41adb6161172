"""The modules whose annotations tests enforce: all but the configuration's, which checks its values itself and says more."""

import inspect
from pathlib import Path
from typing import get_args

import jaxtyping

_PACKAGE = Path(__file__).parent.parent / "dapo_jax"

TYPED = sorted(
    f"dapo_jax.{path.stem}"
    for path in _PACKAGE.iterdir()
    if (path.suffix == ".py" or (path / "__init__.py").is_file()) and path.stem not in ("__init__", "config")
)

_jaxtyped = jaxtyping.jaxtyped


def install():
    """jaxtyping checks functions with shapes in their signatures. beartype alone checks the others, which takes 0.3 us of a call in place of 4 us. The names of dimensions
    belong to one call of a function, so a function without shapes does not change the checks of another one."""
    jaxtyping.jaxtyped = _checked
    jaxtyping.install_import_hook(TYPED, "beartype.beartype")


def _checked(*, typechecker):
    def decorated(one):
        if (
            inspect.isclass(one)
            or inspect.iscoroutinefunction(one)
            or _has_shapes([*one.__annotations__.values()])
        ):
            return _jaxtyped(one, typechecker=typechecker)
        return typechecker(one) if one.__annotations__ else one

    return decorated


def _has_shapes(hint):
    """Whether a type contains an array's shape. The name of a type may stand for one."""
    if isinstance(hint, list):
        return any(map(_has_shapes, hint))
    if isinstance(hint, str | type(jaxtyping.PyTree)) or (
        inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray)
    ):
        return True
    return _has_shapes([*get_args(hint)])
