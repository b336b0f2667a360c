"""Tests of axcore-new-callback."""

from axcore_new_callback.patience import Patience


def test_a_run_ends_after_two_evaluations_without_improvement():
    callback = Patience.Config(evaluations=2).build()
    requests = [callback.evaluation(step, {"validation/loss": loss}) for step, loss in enumerate((3.0, 2.0, 2.5, 2.1))]
    assert requests[:3] == [None, None, None] and requests[3].stop
    resumed = Patience.Config(evaluations=3).build()
    resumed.set_state(callback.state())
    assert resumed.evaluation(4, {"validation/loss": 2.2}).stop
