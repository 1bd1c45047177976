"""An actor of a user's own."""

from monarch.actor import Actor, current_rank, endpoint


class Adder(Actor):
    """Adds its rank."""

    @endpoint
    def add(self, value: int) -> int:
        return value + current_rank().rank
