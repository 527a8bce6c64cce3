"""What tests that fork share."""

import os
import threading

PATIENT_S = 20


def ended_in_time(child):
    """Exit status of a child, which is killed if it hangs."""
    timer = threading.Timer(PATIENT_S, os.kill, (child, 9))
    timer.start()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    timer.cancel()
    return status
