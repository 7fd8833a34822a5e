"""Who takes the places for groups, and why no further group starts: the state of a producer.

    places      |<------------------------- capacity ------------------------->|
                | in flight ... | waiting ... | in training ... |    free      |
    a group     starts ->         ends ->       taken ->          trained, and its weights went out

Nothing decides by these numbers; they are read for the status of a run.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

Blocker: TypeAlias = Literal["", "capacity", "window", "buffer", "update", "batch", "filter", "end"]
"""Why no group starts. "": groups start wherever a place is free. capacity: all places are taken. window: the
staleness window begins at a group that is still in flight. buffer: async_buffer_size complete groups wait.
update: new weights are on their way to the engine, and nothing starts until they serve. batch: a synchronous
producer starts groups when the next batch is asked for. filter: max_num_gen_batches were played, and dropped.
end: no further group
is needed: the batches up to the last one have been started, or the producer is closed."""


class Occupancy(NamedTuple):
    """The places for groups of a producer, at one moment.

    capacity: places (groups). in_flight: groups that are being played, or scored. waiting: complete groups
    that no batch has taken. in_training: groups of a batch that was taken, until it was trained and its
    weights went out. blocked_by: why no further group starts.
    """

    capacity: int
    in_flight: int
    waiting: int
    blocked_by: Blocker
    in_training: int = 0

    @property
    def taken(self) -> int:
        """Places that are taken (groups); above `capacity` never."""
        return self.in_flight + self.waiting + self.in_training
