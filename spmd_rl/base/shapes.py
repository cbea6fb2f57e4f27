"""The words of the embedded diffusion model: one to four squares of a colour."""

COUNTS = ("one", "two", "three", "four")
COLOURS = ("red", "green", "blue")


def words_of(count: int, colour: str) -> str:
    """Return the prompt of a picture with these squares."""
    return f"{COUNTS[count - 1]} {colour} square{'s' * (count > 1)}"
