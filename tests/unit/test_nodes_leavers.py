"""What is said of nodes that have left a job that goes on."""

import pytest

from rankwatch.monitor.nodes import leavers

SIGNAL = "SIGTERM to the launcher"


@pytest.mark.parametrize(
    ("leaving", "before", "now", "said"),
    [
        ([("worker-2", SIGNAL)], 3, 2, "worker-2 has left: SIGTERM to its launcher; the job goes on with 4 ranks on 2 nodes"),
        ([], 3, 2, "1 node has left; the job goes on with 4 ranks on 2 nodes"),
        ([("worker-0", "")], 2, 1, "worker-0 has left; the job goes on with 4 ranks on 1 node"),
        ([("worker-2", SIGNAL)], 4, 2, "worker-2 has left: SIGTERM to its launcher, 1 more node has left; the job goes on with 4 ranks on 2 nodes"),
        ([("worker-1", "torchrun stops the workers after rank 1 failed")], 3, 2, "1 node has left; the job goes on with 4 ranks on 2 nodes"),
        ([("worker-2", SIGNAL)], 3, 3, ""),
        ([], 2, 3, ""),
    ],
)
def test_a_node_that_leaves_is_named_with_what_goes_on(leaving, before, now, said):
    assert leavers.words(leaving, before, 4, now) == said
