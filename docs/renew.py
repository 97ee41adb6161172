"""Regenerates the parts of pages that come from the library, and wraps the prose of all pages: `python docs/renew.py`, after a change of keys, commands or pages."""

from _made.pages import made, pages, sources
from _made.wrapping import wrapped


def main() -> None:
    """Prints the pages that it changed."""
    with_parts = set(pages())
    for page in sources():
        before = page.read_text(encoding="utf-8")
        after = wrapped(made(before) if page in with_parts else before)
        if after != before:
            page.write_text(after, encoding="utf-8")
            print(f"renewed {page}")


if __name__ == "__main__":
    main()
