"""Writes what is made from the library into the pages where it stands: `python docs/renew.py`, after a change of keys or commands."""

from _made.pages import made, pages


def main() -> None:
    """Says which pages it changed."""
    for page in pages():
        before = page.read_text(encoding="utf-8")
        if (after := made(before)) != before:
            page.write_text(after, encoding="utf-8")
            print(f"renewed {page}")


if __name__ == "__main__":
    main()
