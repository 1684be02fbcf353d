"""The formulas of lesson 9, against compiled programs on meshes that no page shows."""

import runpy

import pytest

from learn import lesson

MESHES = [
    "data=4,fsdp=2", "data=2,fsdp=4", "data=2,tensor=4", "fsdp=2,tensor=4", "fsdp=4,tensor=2",
    "data=4,seq=2", "fsdp=2,seq=4", "seq=4,tensor=2", "fsdp=2,seq=2,tensor=2",
    "data=4,fsdp=2 --accumulate 4", "fsdp=4,tensor=2 --accumulate 2", "seq=8 --accumulate 2",
    "data=4,pipe=2 --microbatches 4", "pipe=4,tensor=2 --microbatches 4",
    "fsdp=2,pipe=4 --microbatches 2", "pipe=8 --microbatches 16",
    "data=2,expert=4 --experts 4", "expert=8 --experts 8", "expert=2,fsdp=4 --experts 4",
    "expert=2,fsdp=2,tensor=2 --experts 2", "data=2,tensor=4 --remat full",
    "data=4,seq=2 --remat full", "data=2,expert=4 --experts 4 --remat full"]


@pytest.fixture(scope="module")
def by_program():
    """The lesson's function that predicts by hand, compiles, and refuses more than 2%."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lesson, "begin", lambda devices: None)
        return runpy.run_path(str(lesson.LESSONS["9"]))["by_program"]


@pytest.mark.full
@pytest.mark.parametrize("flags", MESHES)
def test_bytes_by_hand(by_program, flags):
    """A line of the lesson's table that holds for its examples alone."""
    by_program("--mesh", *flags.split())
