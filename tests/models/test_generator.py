"""torch's generator is one for the process: work in threads does not take each other's draws."""

from threading import Event, Thread

import torch

from flray.models.generator import seeded_generator


def test_threads_draw_what_each_draws_alone() -> None:
    with seeded_generator(3):
        alone = torch.rand(4)

    def disturb() -> None:
        with seeded_generator(5):
            is_drawn.wait()

    is_drawn = Event()
    other = Thread(target=disturb)
    with seeded_generator(3):
        first = torch.rand(2)
        other.start()
        other.join(0.1)  # it waits for this block to end
        second = torch.rand(2)
        is_drawn.set()
    other.join()
    assert torch.equal(torch.cat([first, second]), alone)


def test_generator_is_as_before_afterwards() -> None:
    before = torch.get_rng_state()
    with seeded_generator(3):
        torch.rand(4)
    assert torch.equal(torch.get_rng_state(), before)
