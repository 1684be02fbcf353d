"""The tests of several processes in tests/core/test_hosts.py, again with their runs in a bucket."""

import pytest

from tests.core import test_hosts
from tests.stores.test_runs import until_step_in_scratch

pytestmark = pytest.mark.full

test_any_number = test_hosts.test_one_run_on_any_number_of_processes
test_ctrl_c = test_hosts.test_ctrl_c_in_one_process_is_answered_there_and_stops_all
test_damaged = test_hosts.test_what_one_process_cannot_read_is_damaged_for_all
test_one_fails = test_hosts.test_when_one_process_fails_all_end_and_say_so
test_not_finite = test_hosts.test_a_gradient_not_finite_in_one_process_ends_all_with_what_was_saved
test_do_not_fit = test_hosts.test_processes_that_do_not_fit_do_not_begin
test_scheduler = test_hosts.test_processes_are_found_where_a_scheduler_knows_them


class InBucket(test_hosts.Folders):
    """The runs of a test, in a bucket."""

    def __init__(self, folder, bucket):
        super().__init__(folder)
        self.bucket = bucket

    def out(self, name="run"):
        return self.bucket.run(name)

    def here(self, name="run"):
        return self.bucket.save(self.folder / name, name)

    def copy(self, name, to):
        self.bucket.load(self.here(name), to)

    def until_step(self, at, processes):
        until_step_in_scratch(self.bucket, at, processes)


@pytest.fixture
def runs(bucket, tmp_path):
    return InBucket(tmp_path, bucket)
