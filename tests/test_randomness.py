"""Named random streams."""

import numpy
import torch

from feddg.randomness import derive_seed, numpy_stream, stream


def test_seeds_never_change_between_versions_or_machines():
    assert derive_seed(0, "a", 1) == 4332523998341121174
    assert derive_seed(0) != derive_seed(1)


def test_streams_with_different_names_differ_and_ids_are_not_glued_together():
    names = [("client", 1, 23), ("client", 12, 3), ("client", 123), ("sample", 1, 23)]
    assert len({derive_seed(7, *name) for name in names}) == len(names)


def test_a_stream_repeats_itself_and_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    draws = [torch.rand(3, generator=stream(5, "x")) for _ in range(2)]
    assert torch.equal(*draws)
    assert torch.equal(torch.get_rng_state(), before)
    assert numpy.array_equal(numpy_stream(5, "x").random(3), numpy_stream(5, "x").random(3))
