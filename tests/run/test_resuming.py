from __future__ import annotations

from agentrl.run.resuming import run_until_signal


class Unprintable:
    """As good as unprintable: a run's result may hold every token of it."""

    def __repr__(self) -> str:
        raise AssertionError("it is printed")


def test_the_result_of_a_run_is_not_made_a_text() -> None:
    result = Unprintable()

    async def main() -> Unprintable:
        return result

    assert run_until_signal(main()) is result
