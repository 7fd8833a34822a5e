"""The copies of a trainer's state: whole while they are written, and in memory that is used again."""

from __future__ import annotations

from threading import Event

import torch

from agentrl.trainer.saved import StateWriter


def test_a_copy_is_made_in_the_memory_of_the_one_before():
    writer, weight = StateWriter(), torch.arange(6.0).reshape(2, 3).T
    first = writer.copy_of("old")(weight)
    assert first.equal(weight)
    assert first.data_ptr() != weight.data_ptr()
    weight += 1
    second = writer.copy_of("old")(weight)
    assert second.equal(weight)
    assert second.data_ptr() == first.data_ptr()


def test_a_copy_that_is_being_written_stays_as_it_is():
    writer, weight, release = StateWriter(), torch.zeros(4), Event()
    first = writer.copy_of("old")(weight)
    writer.start(lambda: release.wait() and None)
    weight += 1
    assert writer.copy_of("old")(weight).equal(torch.ones(4))
    assert first.equal(torch.zeros(4))
    release.set()


def test_tensors_that_share_memory_share_their_copy_and_no_others_do():
    writer, weight = StateWriter(), torch.ones(4)
    copy = writer.copy_of("old")
    assert copy(weight) is copy(weight.detach())
    assert copy(weight[:2]) is not copy(weight)
    assert copy(torch.empty(0)) is not copy(torch.empty(0))
    # A network that is offloaded may leave its memory to the next one.
    assert writer.copy_of("values")(weight) is not copy(weight)


def test_the_copy_of_a_parameter_needs_no_gradient():
    copy = StateWriter().copy_of("old")(torch.nn.Parameter(torch.ones(2)))
    assert not copy.requires_grad
