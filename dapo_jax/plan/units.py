"""Numbers as people read them.

A file of its own: tables and messages share it.
"""


def size(count: int | float) -> str:
    """Bytes in a unit in which they are at least 1.

    >>> size(3 * 2**29), size(2048), size(7)
    ('1.50 GiB', '2.0 KiB', '7 B')
    """
    for unit, power, digits in (("GiB", 30, 2), ("MiB", 20, 1), ("KiB", 10, 1)):
        if count >= 2**power:
            return f"{count / 2**power:,.{digits}f} {unit}"
    return f"{count:,.0f} B"
