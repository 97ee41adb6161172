"""The modules whose annotations tests enforce: those that say shapes of arrays, which no static check can see. Other types are pyrefly's to check."""

from pathlib import Path

_ROOT = Path(__file__).parent.parent

TYPED = sorted(
    ".".join(path.relative_to(_ROOT).with_suffix("").parts)
    for path in (_ROOT / "dapo_jax").rglob("*.py")
    if path.name != "__init__.py" and "from jaxtyping import" in path.read_text()
)
